"""The ranks of one incarnation, on the nodes where they are: how they come up, take cells, and end.

Handles what ranks and agents report. Independent of who joins as a node, and of what cells do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from nbdist.base.processes import describe_exit
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.cells.cell_entry import CellEntry
from nbdist.controller.cells.cell_transfers import CellTransfers
from nbdist.controller.cells.running_cells import Cells
from nbdist.controller.cells.waiting_cells import WaitingCells
from nbdist.controller.nodes.node_table import KnownNode, NodeTable
from nbdist.controller.nodes.roster import Roster
from nbdist.controller.ranks.bring_up import BringUp
from nbdist.controller.ranks.membership import Membership
from nbdist.controller.ranks.messenger import Messenger
from nbdist.controller.ranks.newcomers import Newcomers
from nbdist.wire.base.message import Handlers, Message
from nbdist.wire.lanes import AGENT_TRANSFERS, RANK_CELL, RANK_CONTROL
from nbdist.wire.messages.announcements import EndAnnounced
from nbdist.wire.messages.cells import Execute, InOrder, Interrupt, Reply, Returned
from nbdist.wire.messages.healing import GiveUpHeal, Grow, Heal, JoinGroups, Shrink
from nbdist.wire.messages.life import Died, Obstacle, Progress, Started, StartFailed, StartOptions
from nbdist.wire.messages.output import Display, Output, Prompt, WidgetMessage
from nbdist.wire.messages.rank_processes import Exited, Kill, Quit, Ready, Spawned, SpawnFailed, Spawning, StoreOpened
from nbdist.wire.questions.questions import Answer


class Members:
    """A set of ranks.

    Args:
        incarnation: Its number among all that this controller starts.
        shares: By node, what is to be started there.
        address: Where their store is to listen.
        interface: The network between the nodes; "": the one that leads to the store.
        nodes: To send to agents by.
        router: To send to ranks by.
        tell: Gives the notebook a message.
        keep: Writes output to the log, as of `Rank`.
        first_serial: Where the notebook's count of cells begins.

    Attributes:
        roster: The ranks.
        outbox: Sends to them.
        cells: What they run.
        transfers: What these take along to other nodes, and bring back.
        newcomers: Processes that take the places of dead ranks.
        history: What has run on them.
    """

    def __init__(
        self,
        incarnation: int,
        shares: Mapping[int, StartOptions],
        address: str,
        interface: str,
        nodes: NodeTable,
        router: MessageRouter,
        tell: Callable[[Message], None],
        keep: Callable[[int, int, int, int, bytes], None],
        first_serial: int,
    ) -> None:
        def make(number: int, slot: int, life: int, names: set[int]) -> Rank:
            return Rank(number, tell, keep, self._part_ended, slot, life, names)

        self._nodes = nodes
        self._first_serial = first_serial
        self._late: dict[tuple[int, int], Rank] = {}  # those whose displays have not come at the end of their cell
        self.roster = Roster(incarnation, shares, nodes, make, lambda: nodes.round_trip)
        self.transfers = CellTransfers(lambda node, message: nodes.send(node, message, AGENT_TRANSFERS))
        self.outbox = messenger = Messenger(self.roster, self.transfers, nodes, router, tell)
        waiting = WaitingCells()
        self.cells = Cells(self.roster, self.outbox, waiting, self._retry)
        self._bring_up = BringUp(incarnation, shares, address, interface, nodes.send)
        membership = Membership(self.roster, self.outbox, self.cells, self._bring_up.take_in, messenger.forget_lanes)
        self.history = membership.history
        self.newcomers = Newcomers(membership, nodes, shares[0].patience)
        self._membership = membership
        self._entry = CellEntry(self.roster, self.outbox, waiting, self.transfers, self.cells, self.newcomers.holds)
        self._from_client = self._handlers_of_client()
        self._from_agent = self._handlers_of_agents()
        self._from_rank = self._handlers_of_ranks()

    # --- start

    def spawn(self) -> None:
        """Have the ranks started, node by node."""
        self._bring_up.begin()

    def _ready(self, message: Ready, rank: Rank) -> None:
        """Note that a rank is ready, or why it is not."""
        if self.newcomers.ready(rank, message, time.monotonic()):
            return
        if self.roster.up:
            raise ValueError(f"rank {rank.rank} is ready already")
        if message.failure:
            self.fail(
                f"rank {rank.rank} could not join the process group: {message.failure}\n"
                "Type `%distributed start` to try again, `--backend gloo` for another backend, or `--no-init` to call "
                "init_process_group yourself."
            )
            return
        rank.ready, rank.device, self.roster.backend = True, message.device, message.backend
        self._bring_up.move()

    def fail(self, text: str, obstacle: Obstacle = "other") -> None:
        """Report that the ranks can't be started, and end them."""
        if not self.roster.ending:
            self.outbox.to_notebook(StartFailed(text, obstacle))
            self.end()

    def _get_on(self, progress: Progress) -> None:
        """Note that the start made progress. `progress` is what it does now."""
        if self._bring_up.move(progress):
            self.outbox.to_notebook(progress)

    def _check_start(self, now: float) -> None:
        missing = [rank.rank for rank in self.roster.ranks.values() if not rank.ready]
        if not missing and self._bring_up.forked:
            self.roster.up, self.roster.up_at = True, time.time()
            notes = self._bring_up.notes
            self.outbox.to_notebook(
                Started(
                    self.roster.incarnation,
                    self.roster.infos(),
                    self.roster.backend,
                    notes,
                    self._first_serial,
                    self.roster.slack.answers,
                    self._nodes.first_end,
                )
            )
        elif now > self._bring_up.due:
            self.fail(self._bring_up.describe_stuck(self.roster.names.describe(missing)))

    def due(self) -> float | None:
        """Return when `tick` should be called."""
        dues = [self.newcomers.due, *(rank.due for rank in self._late.values())]
        if self.roster.up:
            dues += [self.cells.due(), self._entry.due()]
        elif not self.roster.ending:
            dues.append(self._bring_up.due)
        return min((due for due in dues if due is not None), default=None)

    def tick(self, now: float) -> None:
        """Act on what is due."""
        if not self.roster.up and not self.roster.ending:
            self._check_start(now)
        if self.roster.up:
            self.cells.tick(now)
            self._entry.tick(now)
        self.newcomers.tick(now)
        self._entry.admit_held()
        self._check_displays(now)

    def _check_displays(self, now: float) -> None:
        for process, rank in list(self._late.items()):
            if rank.due is not None and now >= rank.due:
                rank.give_up()
            if rank.due is None:
                del self._late[process]

    # --- from the notebook

    def _handlers_of_client(self) -> Handlers[[]]:
        return (
            Handlers[[]]()
            .on(Execute, self._begin)
            .on(Interrupt, self.stop)
            .on(Returned, lambda message: self.cells.returned_elsewhere(message, time.monotonic()))
            .on(WidgetMessage, lambda message: self.outbox.to_rank(RANK_CELL, message.rank, message))
            .on(Heal, lambda message: self.newcomers.heal(message, time.monotonic()))
            .on(Shrink, lambda message: self.newcomers.shrink(message, time.monotonic()))
            .on(Grow, lambda message: self.newcomers.grow(message, time.monotonic()))
            .on(JoinGroups, lambda message: self.newcomers.join_groups(time.monotonic()))
            .on(GiveUpHeal, lambda message: self.newcomers.give_up())
        )

    def handle_client(self, message: Message) -> None:
        """Handle what the notebook wants of the ranks."""
        self._from_client(message)

    def _begin(self, message: Execute) -> None:
        if self.roster.up:
            self._entry.begin(message)

    def _retry(self) -> None:
        self._entry.retry()

    def stop(self, message: Interrupt) -> None:
        """Stop a cell."""
        if not self._entry.stop(message):
            self.cells.stop(message, time.monotonic())

    # --- from agents

    def _handlers_of_agents(self) -> Handlers[[int]]:
        return (
            Handlers[[int]]()
            .on(Output, self._printed)
            .on(Progress, self._progressed)
            .on(StoreOpened, self._store_opened)
            .on(Spawned, self._spawned)
            .on(Spawning, self._spawning)
            .on(SpawnFailed, self._spawn_failed)
            .on(Exited, self._exited)
            .on(Answer, self._agent_answered)
        )

    def handle_agent(self, node: int, message: Message) -> None:
        """Handle an agent's report of processes that start, end or print; it knows ranks by their slots."""
        where = self.roster.where
        if node not in where.shares:  # last words of one that is lost: another machine is in its place
            return
        if isinstance(message, (Output, Spawned, Exited, Answer)) and message.rank is not None:
            if (number := where.rank_in(message.rank)) is None:  # the last words of one that has been given up
                return
            message = msgspec.structs.replace(message, rank=number) if number != message.rank else message
        self._from_agent(message, node)

    def _printed(self, message: Output, node: int) -> None:
        rank = self.roster.on_node(node, message.rank)
        rank.print(message)
        if rank.due is not None:
            self._late[rank.slot, rank.life] = rank

    def _progressed(self, message: Progress, node: int) -> None:
        self._get_on(message)
        self.newcomers.get_on(time.monotonic())

    def _store_opened(self, message: StoreOpened, node: int) -> None:
        self._check_ours(node, message)
        if not self.roster.ending:
            self._bring_up.go_on(message.store)

    def _spawned(self, message: Spawned, node: int) -> None:
        self.roster.on_node(node, message.rank).pid = message.pid
        self._bring_up.move()

    def _spawning(self, message: Spawning, node: int) -> None:
        notes = [self.roster.where.name_node(node, note) for note in message.notes]
        if self.roster.up:  # a machine that has come since
            for note in notes:
                self.outbox.to_notebook(Progress("nodes", note))
            return
        self._bring_up.note_forked(node, notes)
        if self._bring_up.forked:
            self._get_on(Progress("join", "ranks are joining their process group"))

    def _spawn_failed(self, message: SpawnFailed, node: int) -> None:
        text = self.roster.where.name_node(node, message.text)
        if self.roster.up:
            self.newcomers.fail(text)
        else:
            self.fail(text, message.obstacle)

    def _agent_answered(self, message: Answer, node: int) -> None:
        self.roster.on_node(node, message.rank)
        if message.asker == "controller":
            self.cells.answered(message, time.monotonic())
        else:
            self.outbox.to_notebook(message)

    def _check_ours(self, node: int, message: Message) -> None:
        """Refuse what only the agent of this machine may say."""
        if node:
            raise ValueError(f"node {node} has no store to speak of: {message}")

    def _exited(self, message: Exited, node: int) -> None:
        if self.roster.ending:
            return
        if message.rank is None:
            self._check_ours(node, message)
            self._store_died(message)
            return
        rank = self.roster.on_node(node, message.rank)
        if rank.dead is not None:  # a newcomer that was given up
            return
        when = message.when - self.roster.where.offset_of(node)
        cause = message.cause or self.newcomers.cause(rank.rank)
        died = Died(rank.rank, message.pid, message.code, message.stderr, rank.serial, when, cause)
        rank.die(died)
        if not self.roster.up:
            what = message.cause or describe_exit(message.code)
            text = f"rank {message.rank} (pid {message.pid}) ended while it started: {what}.\n{message.stderr}"
            self.fail(f"{self.roster.where.name_node(node, text).rstrip()}\nType `%distributed start` to try again.")
            return
        if rank is self.roster.ranks.get(rank.rank):  # else a newcomer that has not taken its place
            self.cells.died(died, time.monotonic())
        self.newcomers.ended(rank.rank, f"{cause or describe_exit(message.code)}\n{message.stderr}".rstrip())

    def _store_died(self, message: Exited) -> None:
        what = message.cause or describe_exit(message.code)
        if not self.roster.up:
            self.fail(
                f"the rendezvous store (pid {message.pid}) ended while ranks started: {what}. "
                "Type `%distributed start` to try again."
            )
            return
        if message.cause:  # the ranks ended with it, which says all
            return
        self.newcomers.lose_store(message.pid, what)

    def lose(self, node: KnownNode, why: str) -> None:
        """Note that a node is gone, and its ranks with it."""
        cause = f"node {node.number} ({node.host}) is lost: {why}"
        self.roster.vacant.add(node.number)
        self.transfers.lose(node.number)
        if self.roster.ending:
            return
        if not self.roster.up:
            self.fail(f"{cause}. Type `%distributed start` to try again.")
            return
        now = time.monotonic()
        for number in self.roster.where.on_node(node.number):
            self.newcomers.ended(number, cause)
            rank = self.roster.ranks.get(number)
            if rank is not None and rank.dead is None:
                died = Died(rank.rank, rank.pid, -9, "", rank.serial, now, cause, machine_lost=True)
                rank.die(died)
                self.cells.died(died, now)
        self.newcomers.machine_lost()

    # --- from ranks

    def _handlers_of_ranks(self) -> Handlers[[Rank]]:
        return (
            Handlers[[Rank]]()
            .on(Reply, self._replied)
            .on(Display, lambda message, rank: rank.display(message))
            .on(Prompt, self._prompted)
            .on(Answer, self._answered)
            .on(WidgetMessage, lambda message, rank: self.outbox.to_notebook(message))
            .on(InOrder, self._in_order)
            .on(Ready, self._ready)
            .on(EndAnnounced, self._end_announced)
        )

    def handle_rank(self, rank: Rank, message: Message) -> None:
        """Handle what a rank sends.

        Raises:
            ValueError: It speaks for another rank.
        """
        named = getattr(message, "rank", rank.rank)
        if named != rank.rank:
            if named not in rank.names:
                raise ValueError(f"rank {rank.rank} speaks for another: {message}")
            message = msgspec.structs.replace(message, rank=rank.rank)
        self._from_rank(message, rank)

    def _replied(self, message: Reply, rank: Rank) -> None:
        if message.serial == rank.serial:
            rank.answer(self.roster.where.reply_on_our_clock(message))

    def _prompted(self, message: Prompt, rank: Rank) -> None:
        self.cells.asked(message, rank.serial)
        rank.display(message)

    def _answered(self, message: Answer, rank: Rank) -> None:
        if message.asker == "controller":
            self.cells.answered(message, time.monotonic())
        else:
            self.outbox.to_notebook(self.roster.where.answer_on_our_clock(message))

    def _in_order(self, message: InOrder, rank: Rank) -> None:
        if not self.newcomers.in_order(rank.rank, message):
            self.cells.in_order(rank.rank, message, time.monotonic())

    def _end_announced(self, message: EndAnnounced, rank: Rank) -> None:
        info = next(each for each in self.roster.infos() if each.rank == rank.rank)
        self.outbox.to_notebook(msgspec.structs.replace(message, rank=rank.rank, host=info.host))

    def _part_ended(self, reply: Reply) -> None:
        """Note that a cell is over on a rank."""
        self.cells.ended(reply, time.monotonic())
        ranks = self.roster.ranks.values()
        if self.transfers.holds(reply.serial) and all(rank.serial != reply.serial for rank in ranks):
            self.transfers.drop(reply.serial)

    # --- machines

    def machine_came(self) -> None:
        """Have machines that have come take the places of lost ones."""
        for lost in [node for node in self.roster.where.shares if node not in self._nodes]:
            if (heir := self._nodes.heir(lost)) is not None:
                self._membership.move(lost, heir)
        self.newcomers.machine_came(time.monotonic())

    # --- end

    def end(self, grace: float = 1.0) -> None:
        """Have them end: after `grace` seconds by force. `gone` says when they have."""
        if self.roster.ending:
            return
        self.roster.ending = True
        self.newcomers.fail("the ranks are ending")
        for rank in self.roster.ranks.values():
            if rank.serial:
                self.outbox.to_rank(RANK_CONTROL, rank.rank, Interrupt(rank.serial, [rank.rank], now=True))
            if rank.ready:
                self.outbox.to_rank(RANK_CELL, rank.rank, Quit())
        for node in self.roster.where.shares:
            self._nodes.send(node, Kill(self.roster.incarnation, grace if self.roster.up else 0.0))

    def gone(self, node: int) -> None:
        """Note that none of its processes is left on a node."""
        self.roster.vacant.add(node)
        if self.roster.all_gone:
            self.transfers.close()
