"""The ranks of one incarnation, on the nodes where they are: how they come up, take cells, and end.

Owns which rank is where, and who lives. Independent of who joins as a node, and of what cells do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from nbdist.base.limits import Slack
from nbdist.base.processes import describe_exit
from nbdist.base.ranks import RankNames
from nbdist.controller.base.inquiries import AskRanks
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.cells.cell_entry import CellEntry
from nbdist.controller.cells.cell_transfers import CellTransfers
from nbdist.controller.cells.recovery import Recovery
from nbdist.controller.cells.running_cells import Cells
from nbdist.controller.nodes.node_table import KnownNode, NodeTable
from nbdist.controller.nodes.placement import Placement
from nbdist.controller.ranks.bring_up import BringUp
from nbdist.controller.ranks.newcomers import Newcomers
from nbdist.wire.base.message import Message
from nbdist.wire.frames import encode
from nbdist.wire.lanes import AGENT_TRANSFERS, RANK_CELL, RANK_CONTROL, RANK_LANES, lane
from nbdist.wire.messages.cells import Execute, InOrder, Interrupt, Reply
from nbdist.wire.messages.healing import EndRanks, Renumbered, Resize, Respawn
from nbdist.wire.messages.life import Died, Obstacle, Progress, RankInfo, Started, StartFailed, StartOptions
from nbdist.wire.messages.output import Credit, Output
from nbdist.wire.messages.rank_processes import Exited, Kill, Quit, Ready, Spawned, SpawnFailed, Spawning, StoreOpened
from nbdist.wire.questions.questions import Answer, Ask


class Members:
    """The ranks.

    Args:
        incarnation: Their number among all sets of ranks that this controller starts.
        shares: By node, what is to be started there.
        address: Where their store is to listen.
        interface: The network between the nodes; "": the one that leads to the store.
        nodes: To send to agents by.
        router: To send to ranks by.
        tell: Gives the notebook a message.
        keep: Writes output to the log, as of `Rank`.
        first_serial: Where the notebook's count of cells begins.

    Attributes:
        ranks: By number.
        up, up_at: Whether all are ready, and since when, in seconds since the incarnation.
        ending: Whether they are to end.
        cells: What they run.
        backend: Of their process group; "none" without one.
        transfers: What these take along to other nodes, and bring back.
        where: Which node each is on.
        newcomers: Processes that take the places of dead ranks.
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
        self.incarnation = incarnation
        self.where = Placement(shares, nodes)
        self._nodes = nodes
        self._router = router
        self._tell = tell
        self._keep = keep
        self.transfers = CellTransfers(lambda node, message: nodes.send(node, message, AGENT_TRANSFERS))
        self._first_serial = first_serial
        self.ranks = {number: self._new_rank(number, 0) for number in self.where.ranks}
        self.up, self.up_at, self.ending = False, 0.0, False
        self._entry = CellEntry(self)
        self.cells = Cells(self, self._entry.execute)
        self._bring_up = BringUp(incarnation, shares, address, interface, nodes.send)
        self.backend = ""
        self._left: set[int] = set()  # nodes on which no process of it is left
        self._late: set[int] = set()  # ranks whose displays have not come at the end of their cell
        self._answer_slack = shares[0].slack
        self.newcomers = Newcomers(self, nodes, tell, shares[0].patience)

    # --- messages to ranks

    def to_rank(self, name: str, rank: int, message: Message) -> None:
        """Send to a rank, if it lives."""
        present = self.present(rank)
        if present is not None and not present.dead:
            self._router.send(lane(name, self.incarnation, present.slot, present.life), message)

    def present(self, rank: int) -> Rank | None:
        """Return the newest process in a rank's place; None if there is no such rank."""
        return self.newcomers.get(rank) or self.ranks.get(rank)

    def sender(self, slot: int, life: int) -> Rank | None:
        """Return the rank whose lanes have these numbers; None if that process has ended, and its place was taken."""
        rank = self.where.rank_in(slot)
        present = self.present(rank) if rank is not None else None
        return present if present is not None and present.life == life else None

    def to_ranks(self, name: str, ranks: Sequence[int], message: Message) -> None:
        """Send the same to ranks, as far as they live; once to each node."""
        present = [found for rank in ranks if (found := self.present(rank)) is not None and not found.dead]
        lanes = [lane(name, self.incarnation, found.slot, found.life) for found in present]
        self._router.forward_to_all(lanes, encode(message))

    def to_notebook(self, message: Message) -> None:
        """Send to the notebook. What a value of another node lies in is brought here first."""
        if isinstance(message, Reply):
            self.transfers.collect(message, self.where.node_of(message.rank), self._tell)
        else:
            self._tell(message)

    @property
    def names(self) -> RankNames:
        """How to name ranks."""
        return self.where.names

    @property
    def slack(self) -> Slack:
        """What waits for these ranks are longer by."""
        travel = self._nodes.round_trip
        return Slack(travel, max(travel, self._answer_slack))

    def to_agent_of(self, rank: int, message: Message) -> None:
        """Send to the agent of the node that a rank is on, which knows it by its slot."""
        if rank not in self.where.ranks:
            return
        slot = self.where.slot_of(rank)
        if isinstance(message, Credit):
            message = msgspec.structs.replace(message, rank=slot)
        elif isinstance(message, Ask):
            message = msgspec.structs.replace(message, ranks=[slot])
        self._nodes.send(self.where.node_of(rank), message)

    def idle(self) -> list[int]:
        """Living ranks that run nothing."""
        return [rank.rank for rank in self.ranks.values() if not rank.dead and not rank.serial]

    def busy(self) -> set[int]:
        """Living ranks that run something."""
        return {rank.rank for rank in self.ranks.values() if not rank.dead and rank.serial}

    def lives(self, rank: int) -> bool:
        """Return whether there is such a rank, and it lives."""
        return rank in self.ranks and self.ranks[rank].dead is None

    def dead(self) -> list[int]:
        """Return the ranks that have died."""
        return [rank.rank for rank in self.ranks.values() if rank.dead]

    def everyone(self) -> list[int]:
        """Return all ranks, including dead ones."""
        return list(self.ranks)

    def apart(self, ranks: Sequence[int]) -> bool:
        """Return whether these are newcomers that share no group with others yet."""
        return self.newcomers.lets(ranks)

    def in_order(self, rank: int, report: InOrder) -> None:
        """Note that a rank has carried out its orders."""
        if not self.newcomers.in_order(rank, report):
            self.cells.in_order(rank, report, time.monotonic())

    def infos(self) -> list[RankInfo]:
        """Return the ranks as the notebook sees them."""
        return [self.where.info(rank) for rank in self.ranks.values()]

    # --- cells

    def begin(self, message: Execute) -> None:
        """Run something on ranks, once all of them can reach what it takes along."""
        if self.up and not self.newcomers.holds(message):
            self._entry.begin(message)

    def stop(self, message: Interrupt) -> None:
        """Stop a cell."""
        if (waiting := self.newcomers.withdraw(message.serial)) is not None:
            self._entry.call_off(waiting)
        elif not self._entry.withdraw(message.serial):
            self.cells.stop(message, time.monotonic())

    # --- start

    def spawn(self) -> None:
        """Have the ranks started, node by node."""
        self._bring_up.begin()

    def ready(self, rank: Rank, message: Ready) -> None:
        """Note that a rank is ready, or why it is not."""
        if self.newcomers.ready(rank, message, time.monotonic()):
            return
        if self.up:
            raise ValueError(f"rank {rank.rank} is ready already")
        if message.failure:
            self.fail(
                f"rank {rank.rank} could not join the process group: {message.failure}\n"
                "Type `%distributed start` to try again, `--backend gloo` for another backend, or `--no-init` to call "
                "init_process_group yourself."
            )
            return
        rank.ready, rank.device, self.backend = True, message.device, message.backend
        self._bring_up.move()

    def fail(self, text: str, obstacle: Obstacle = "other") -> None:
        """Report that the ranks can't be started, and end them."""
        if not self.ending:
            self.to_notebook(StartFailed(text, obstacle))
            self.end()

    def _get_on(self, progress: Progress) -> None:
        """Note that the start made progress. `progress` is what it does now."""
        if self._bring_up.move(progress):
            self.to_notebook(progress)

    def _check_start(self, now: float) -> None:
        missing = [rank.rank for rank in self.ranks.values() if not rank.ready]
        if not missing and self._bring_up.forked:
            self.up, self.up_at = True, time.time()
            notes = self._bring_up.notes
            self.to_notebook(
                Started(self.incarnation, self.infos(), self.backend, notes, self._first_serial, self.slack.answers)
            )
        elif now > self._bring_up.due:
            self.fail(self._bring_up.describe_stuck(self.names.describe(missing)))

    def due(self) -> float | None:
        """Return when `tick` should be called."""
        dues = [self.newcomers.due, *(self.ranks[number].due for number in self._late)]
        if self.up:
            dues.append(self.cells.due())
        elif not self.ending:
            dues.append(self._bring_up.due)
        return min((due for due in dues if due is not None), default=None)

    def tick(self, now: float) -> None:
        """Act on what is due."""
        if not self.up and not self.ending:
            self._check_start(now)
        if self.up:
            self.cells.tick(now)
        self.newcomers.tick(now)
        self._check_displays(now)

    def _check_displays(self, now: float) -> None:
        for number in list(self._late):
            rank = self.ranks[number]
            if rank.due is not None and now >= rank.due:
                rank.give_up()
            if rank.due is None:
                self._late.discard(number)

    # --- from agents

    def handle_agent(self, node: int, message: Message) -> None:
        """Handle an agent's report of processes that start, end or print; it knows ranks by their slots."""
        if node not in self.where.shares:  # last words of one that is lost: another machine is in its place
            return
        if isinstance(message, (Output, Spawned, Exited, Answer)) and message.rank is not None:
            if (number := self.where.rank_in(message.rank)) is None:  # the last words of one that has been given up
                return
            message = msgspec.structs.replace(message, rank=number) if number != message.rank else message
        if isinstance(message, Output):
            rank = self._rank_on(node, message.rank)
            rank.print(message)
            if rank.due is not None:
                self._late.add(rank.rank)
        elif isinstance(message, Progress):
            self._get_on(message)
            self.newcomers.get_on(time.monotonic())
        elif isinstance(message, StoreOpened):
            self._check_ours(node, message)
            if not self.ending:
                self._bring_up.go_on(message.store)
        elif isinstance(message, Spawned):
            self._rank_on(node, message.rank).pid = message.pid
            self._bring_up.move()
        elif isinstance(message, Spawning):
            notes = [self.where.name_node(node, note) for note in message.notes]
            if self.up:  # a machine that has come since
                for note in notes:
                    self.to_notebook(Progress("nodes", note))
                return
            self._bring_up.note_forked(node, notes)
            if self._bring_up.forked:
                self._get_on(Progress("join", "ranks are joining their process group"))
        elif isinstance(message, SpawnFailed):
            if self.up:
                self.newcomers.fail(self.where.name_node(node, message.text))
            else:
                self.fail(self.where.name_node(node, message.text), message.obstacle)
        elif isinstance(message, Exited):
            self._exited(node, message)
        elif isinstance(message, Answer):
            self._rank_on(node, message.rank)
            if message.asker == "controller":
                self.cells.answered(message, time.monotonic())
            else:
                self.to_notebook(message)

    def _rank_on(self, node: int, number: int) -> Rank:
        if not self.where.is_on(number, node):
            raise ValueError(f"node {node} speaks for rank {number}, which is on another")
        found = self.present(number)
        if found is None:
            raise ValueError(f"rank {number} has no process")
        return found

    def _check_ours(self, node: int, message: Message) -> None:
        """Refuse what only the agent of this machine may say."""
        if node:
            raise ValueError(f"node {node} has no store to speak of: {message}")

    def _exited(self, node: int, message: Exited) -> None:
        if self.ending:
            return
        if message.rank is None:
            self._check_ours(node, message)
            self._store_died(message)
            return
        rank = self._rank_on(node, message.rank)
        if rank.dead is not None:  # a newcomer that was given up
            return
        when = message.when - self.where.offset_of(node)
        cause = message.cause or self.newcomers.cause(rank.rank)
        died = Died(rank.rank, message.pid, message.code, message.stderr, rank.serial, when, cause)
        rank.die(died)
        if not self.up:
            what = message.cause or describe_exit(message.code)
            text = f"rank {message.rank} (pid {message.pid}) ended while it started: {what}.\n{message.stderr}"
            self.fail(f"{self.where.name_node(node, text).rstrip()}\nType `%distributed start` to try again.")
            return
        if rank is self.ranks.get(rank.rank):  # else a newcomer that has not taken its place
            self.cells.died(died, time.monotonic())
        self.newcomers.ended(rank.rank, f"{cause or describe_exit(message.code)}\n{message.stderr}".rstrip())

    def _store_died(self, message: Exited) -> None:
        what = message.cause or describe_exit(message.code)
        if not self.up:
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
        self._left.add(node.number)
        self.transfers.lose(node.number)
        if self.ending:
            return
        if not self.up:
            self.fail(f"{cause}. Type `%distributed start` to try again.")
            return
        now = time.monotonic()
        for number in self.where.on_node(node.number):
            self.newcomers.ended(number, cause)
            rank = self.ranks.get(number)
            if rank is not None and rank.dead is None:
                died = Died(rank.rank, rank.pid, -9, "", rank.serial, now, cause, machine_lost=True)
                rank.die(died)
                self.cells.died(died, now)
        self.newcomers.machine_lost()

    # --- from ranks

    def _part_ended(self, reply: Reply) -> None:
        """Note that a cell is over on a rank."""
        self.cells.ended(reply, time.monotonic())
        if self.transfers.holds(reply.serial) and all(rank.serial != reply.serial for rank in self.ranks.values()):
            self.transfers.drop(reply.serial)

    # --- for newcomers

    def machine_came(self) -> None:
        """Have machines that have come take the places of lost ones."""
        for lost in [node for node in self.where.shares if node not in self._nodes]:
            if (heir := self._nodes.heir(lost)) is not None:
                self.where.move(lost, heir)
                self._left.add(heir)  # until newcomers are forked there
        self.newcomers.machine_came(time.monotonic())

    def open(self, node: int) -> None:
        """Make ready for ranks on a machine that has just come."""
        self.where.open(node, self.backend)
        self._left.add(node)

    def newcomer(self, rank: int) -> Rank:
        """Make place for a new process of a dead rank."""
        if rank in self.ranks:
            self._forget_lanes(self.ranks[rank])
        return self._new_rank(rank, self.where.next_life(rank))

    def _new_rank(self, number: int, life: int) -> Rank:
        slot, names = self.where.slot_of(number), {self.where.post(number).rank}
        return Rank(number, self._tell, self._keep, self._part_ended, slot, life, names)

    def _forget_lanes(self, rank: Rank) -> None:
        self._router.drop(lane(name, self.incarnation, rank.slot, rank.life) for name in RANK_LANES)

    def respawn(self, rank: Rank) -> None:
        """Have a newcomer forked."""
        node = self.where.node_of(rank.rank)
        if node in self._left:
            self._left.discard(node)
            self._bring_up.take_in(node, self.where.share_of(node))
        self.to_agent_of(rank.rank, Respawn(self.incarnation, rank.slot, rank.life, self.where.post(rank.rank)))

    def end_rank(self, rank: int) -> None:
        """End the process of a rank by force."""
        self.to_agent_of(rank, EndRanks(self.incarnation, [self.where.slot_of(rank)]))

    def dismiss(self, ranks: Sequence[int]) -> None:
        """Forget ranks that were to be more, and could not be."""
        for rank in ranks:
            if (found := self.ranks.pop(rank, None)) is not None:
                self._forget_lanes(found)
        as_before = {rank: number for number, rank in enumerate(sorted(self.ranks))}
        self.where.renumber(as_before)
        self._take_numbers(as_before)

    def resize(self, numbers: Mapping[int, int], group: str) -> None:
        """Have the ranks that stay take their numbers, which are given by their old ones, and another default group."""
        for rank in [rank for rank in self.ranks.values() if rank.rank not in numbers and rank.dead is not None]:
            self._forget_lanes(rank)
        if any(rank.dead is not None for rank in self.ranks.values()):
            self.where.renumber(numbers)
            self.cells.forget_dead()
            self._take_numbers(numbers)
        for number in numbers.values():
            self.to_rank(RANK_CELL, number, Resize(self.where.post(number), dict(numbers), group))

    def _take_numbers(self, numbers: Mapping[int, int]) -> None:
        """Know ranks by other numbers; those without one are gone."""
        self.ranks = {number: self.ranks[rank] for rank, number in sorted(numbers.items(), key=lambda pair: pair[1])}
        for number, rank in self.ranks.items():
            rank.renumber(number)
        self._late = {numbers[rank] for rank in self._late if rank in numbers}
        self.cells.renumber(numbers)
        self.newcomers.history.renumber(numbers)
        self._tell(Renumbered(dict(numbers), self.infos()))

    def settle(self, newcomers: Sequence[Rank]) -> list[RankInfo]:
        """Have newcomers take their places; if they are more ranks, all have their new numbers then."""
        self.ranks |= {rank.rank: rank for rank in newcomers}
        if self.where.growing:
            self.where.take_in()
            self._take_numbers(self.where.numbers)
        return [self.where.info(rank) for rank in newcomers]

    def ask(self) -> AskRanks:
        """Return what asks control threads."""
        return self.cells.ask

    def admit(self, newcomers: Sequence[int], over: Callable[[Recovery], None], now: float) -> None:
        """Bring newcomers into the groups."""
        self.cells.admit(newcomers, over, now)

    def quiet(self) -> bool:
        """Return whether nothing runs on the living, and nothing is being repaired."""
        return self.cells.quiet and not self.transfers.moving

    # --- end

    def end(self, grace: float = 1.0) -> None:
        """Have them end: after `grace` seconds by force. `gone` says when they have."""
        if self.ending:
            return
        self.ending = True
        self.newcomers.fail("the ranks are ending")
        for rank in self.ranks.values():
            if rank.serial:
                self.to_rank(RANK_CONTROL, rank.rank, Interrupt(rank.serial, [rank.rank], now=True))
            if rank.ready:
                self.to_rank(RANK_CELL, rank.rank, Quit())
        for node in self.where.shares:
            self._nodes.send(node, Kill(self.incarnation, grace if self.up else 0.0))

    def gone(self, node: int) -> None:
        """Note that none of its processes is left on a node."""
        self._left.add(node)
        if self.all_gone:
            self.transfers.close()

    @property
    def all_gone(self) -> bool:
        """Whether no process of it is left anywhere."""
        return self._left >= self.where.shares.keys()
