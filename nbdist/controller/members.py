"""The ranks of one epoch, on the nodes where they are: how they come up, take cells, and end.

Owns which rank is where, and who lives. Knows neither who joins as a node nor what cells do.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from nbdist.controller.bring_up import BringUp
from nbdist.controller.cell_cargo import CellCargo
from nbdist.controller.cell_history import CellHistory
from nbdist.controller.inquiries import AskRanks
from nbdist.controller.node_table import KnownNode, NodeTable
from nbdist.controller.rank_order import Rank
from nbdist.controller.recovery import Recovery
from nbdist.controller.replacement import Healing
from nbdist.controller.running_cells import Cells
from nbdist.controller.switchboard import Switchboard
from nbdist.processes import describe_exit
from nbdist.ranks import RankNames, describe_ranks
from nbdist.wire.cells import Execute, Failure, FailureKind, InOrder, Interrupt, Outcome, Reply
from nbdist.wire.frames import encode
from nbdist.wire.healing import Heal, HealFailed
from nbdist.wire.lanes import AGENT_FREIGHT, RANK_CELL, RANK_CONTROL, RANK_LANES, lane
from nbdist.wire.life import (
    Died,
    Obstacle,
    Progress,
    RankInfo,
    Started,
    StartFailed,
    StartOptions,
)
from nbdist.wire.message import Message
from nbdist.wire.output import Notice, Output
from nbdist.wire.questions import Answer, RankStatus, Status
from nbdist.wire.rank_processes import (
    Exited,
    Kill,
    Quit,
    Ready,
    Spawn,
    Spawned,
    SpawnFailed,
    Spawning,
    StoreAddress,
    StoreOpened,
)
from nbdist.wire.visitor_messages import RunningCell

_TICK_PAUSE = 1.0  # seconds, after an error
_NO_STORE = "the rendezvous store of this session has ended, so groups can't be rebuilt: `%distributed restart`"


@dataclass(frozen=True)
class Standing:
    """What is to be said of ranks to somebody from outside; the fields are those of a Description."""

    ranks: int = 0
    gpus: int = 0
    running: list[RunningCell] = field(default_factory=list)
    since: float = 0.0


class Members:
    """The ranks.

    Args:
        epoch: Their number among all sets of ranks that this controller starts.
        shares: By node, what is to be started there.
        address: Where their store is to listen.
        interface: The network between the nodes; "": the one that leads to the store.
        nodes: To send to agents by.
        switchboard: To send to ranks by.
        tell: Gives the notebook a message.
        keep: Writes output to the log, as of `Rank`.
        first_serial: Where the notebook's count of cells begins.

    Attributes:
        ranks: By number.
        up: Whether all are ready.
        ending: Whether they are to end.
        cells: What they run.
        backend: Of their process group; "none" without one.
        cargo: What these take along to other nodes, and bring back.
        names: How to name them.
    """

    def __init__(
        self,
        epoch: int,
        shares: Mapping[int, StartOptions],
        address: str,
        interface: str,
        nodes: NodeTable,
        switchboard: Switchboard,
        tell: Callable[[Message], None],
        keep: Callable[[int, int, int, int, bytes], None],
        first_serial: int,
    ) -> None:
        self.epoch = epoch
        self._shares = shares
        self._address = address
        self._interface = interface
        self._nodes = nodes
        self._switchboard = switchboard
        self._tell = tell
        self.cargo = CellCargo(lambda node, message: nodes.send(node, message, AGENT_FREIGHT))
        self._first_serial = first_serial
        self._node_of = {rank: node for node, options in shares.items() for rank in options.ranks}
        self.ranks = {number: Rank(number, tell, keep, self._part_ended) for number in self._node_of}
        hosts = {node: nodes[node].host for node in shares if len(shares) > 1 and node in nodes}
        self.names = RankNames({host: shares[node].ranks for node, host in hosts.items()})
        self.up = False
        self._up_at = 0.0
        self.ending = False
        self.cells = Cells(self, self.execute)
        self._patience = shares[0].patience
        self._bring_up = BringUp(shares, self._patience)
        self.backend = ""
        self._left: set[int] = set()  # nodes on which no process of it is left
        self._ticks_from = 0.0  # when cells may be called again because of the time
        self._late: set[int] = set()  # ranks whose displays have not come at the end of their cell
        self._keep = keep
        self._lives: Counter[int] = Counter()  # processes that a rank's place has had beside its first
        self._store_lost = False
        self._healing: Healing | None = None
        self._held: dict[int, Execute] = {}  # cells that begin when it is over
        self._history = CellHistory()

    # --- messages to ranks

    def to_rank(self, name: str, rank: int, message: Message) -> None:
        """Send to a rank, if it lives."""
        present = self.present(rank)
        if present is not None and not present.dead:
            self._switchboard.send(lane(name, self.epoch, rank, present.life), message)

    def present(self, rank: int) -> Rank | None:
        """Return the newest process in a rank's place; None if there is no such rank."""
        newcomers = self._healing.newcomers if self._healing is not None else {}
        return newcomers.get(rank) or self.ranks.get(rank)

    def to_ranks(self, name: str, ranks: Sequence[int], message: Message) -> None:
        """Send the same to ranks, as far as they live; once to each node."""
        present = [found for rank in ranks if (found := self.present(rank)) is not None and not found.dead]
        lanes = [lane(name, self.epoch, found.rank, found.life) for found in present]
        self._switchboard.forward_to_all(lanes, encode(message))

    def to_notebook(self, message: Message) -> None:
        """Send to the notebook. What a value of another node lies in is brought here first."""
        parcel = message.parcel if isinstance(message, Reply) else None
        node = self._node_of[message.rank] if isinstance(message, Reply) else 0
        if not isinstance(message, Reply) or parcel is None or not parcel.segments or not node:
            self._tell(message)
        else:
            self.cargo.collect(message, parcel, node, self._tell)

    @property
    def slack(self) -> float:
        """Seconds that answers take longer than on one machine."""
        return self._nodes.round_trip

    def to_agent_of(self, rank: int, message: Message) -> None:
        """Send to the agent of the node that a rank is on."""
        if rank in self._node_of:
            self._nodes.send(self._node_of[rank], message)

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

    def describe(self) -> Standing:
        """Return what is to be said of them to somebody from outside."""
        gpus = {(self._node_of[rank.rank], rank.device) for rank in self.ranks.values() if rank.device != "cpu"}
        running = self.cells.running(time.monotonic())
        return Standing(len(self.ranks) - len(self.dead()), len(gpus - {(0, "")}), running, self._up_at)

    def status(self, request: int) -> Status:
        """Return what is known of each rank, as the answer to a request."""
        ranks = [
            RankStatus(r.rank, r.pid, r.device, r.serial, describe_exit(r.dead.code) if r.dead is not None else "")
            for r in self.ranks.values()
        ]
        return Status(request, ranks, self.setup_cells())

    def setup_cells(self) -> list[int]:
        """Return the numbers of the cells that were marked for newcomers."""
        return [cell.number for cell in self._history.cells if cell.marked]

    def infos(self) -> list[RankInfo]:
        """Return the ranks as the notebook sees them."""
        return [self._info(rank) for rank in self.ranks.values()]

    # --- cells

    def begin(self, message: Execute) -> None:
        """Run something on ranks, once all of them can reach what it takes along."""
        if not self.up:
            return
        if self._healing is not None and not self._healing.lets(message.ranks):
            self._held[message.serial] = message
            return
        if self._healing is None:
            self._history.add(message)
        if not message.ranks or not self.ranks.keys() >= set(message.ranks):
            raise ValueError(f"there are no ranks {message.ranks}")
        elsewhere = {self._node_of[rank] for rank in message.ranks if not self.ranks[rank].dead} - {0}
        if message.parcel is None or not message.parcel.segments or not elsewhere:
            self.execute(message)
        else:
            self.cargo.deliver(message, elsewhere, self._delivered)

    def _delivered(self, message: Execute, why: str) -> None:
        """Begin a cell, as what it takes along is there."""
        if why:
            self._refuse(message, "error", "TransferError", why)
        else:
            self.execute(message)

    def _refuse(self, message: Execute, status: Outcome, name: str, text: str) -> None:
        """Report for all ranks of a cell that it has not begun."""
        self.cargo.drop(message.serial)
        kind: FailureKind = "interrupted" if status == "interrupted" else "raised"
        failure = Failure(name, text, "", time.monotonic(), kind=kind)
        for rank in message.ranks:
            self._tell(Reply(message.serial, rank, status, failure))

    def stop(self, message: Interrupt) -> None:
        """Stop a cell."""
        waiting = self.cargo.withdraw(message.serial) or self._held.pop(message.serial, None)
        if waiting is not None:
            self._refuse(waiting, "interrupted", "KeyboardInterrupt", "it was interrupted before it began")
        else:
            self.cells.stop(message, time.monotonic())

    def execute(self, message: Execute) -> None:
        """Run something on ranks. To be called again when they are in order, if they are not."""
        now = time.monotonic()
        if not self.cells.begin(message, now):
            return
        living = []
        for number in message.ranks:
            rank = self.ranks[number]
            if rank.dead:  # the notebook did not know yet
                self.cells.died(msgspec.structs.replace(rank.dead, serial=message.serial), now)
                continue
            rank.begin(message.serial, message.number)
            living.append(number)
        self._send_out(message, living)

    def _send_out(self, message: Execute, ranks: Sequence[int]) -> None:
        """Send a cell to its ranks, with the parcel as each node has it."""
        parcels = self.cargo.parcels(message.serial)
        for node, parcel in parcels.items():
            there = [rank for rank in ranks if self._node_of[rank] == node]
            self.to_ranks(RANK_CELL, there, msgspec.structs.replace(message, parcel=parcel))
        self.to_ranks(RANK_CELL, [rank for rank in ranks if self._node_of[rank] not in parcels], message)

    # --- start

    def spawn(self) -> None:
        """Have the store opened and the ranks of this machine forked; the others follow when it is open."""
        self._nodes.send(0, Spawn(self.epoch, self._shares[0], StoreAddress(self._address), self._interface))

    def _spawn_others(self, message: StoreOpened) -> None:
        if self.ending:
            return
        for node, options in self._shares.items():
            if node:
                self._nodes.send(node, Spawn(self.epoch, options, message.store, self._interface))

    def ready(self, rank: Rank, message: Ready) -> None:
        """Note that a rank is ready, or why it is not."""
        if self._healing is not None and self._healing.newcomers.get(rank.rank) is rank:
            self._healing.ready(rank, message, time.monotonic())
            return
        if self.up:
            raise ValueError(f"rank {rank.rank} is ready already")
        if message.failure:
            self.fail(
                f"rank {rank.rank} could not join the process group: {message.failure}\n"
                "Type `%distributed start` to try again, `--backend gloo` for another backend, "
                "or `--no-init` to call init_process_group yourself."
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
            self.up, self._up_at = True, time.time()
            notes = self._bring_up.notes
            self.to_notebook(Started(self.epoch, self.infos(), self.backend, notes, self._first_serial, self.slack))
        elif now > self._bring_up.due:
            self.fail(self._bring_up.describe_stuck(self.names.describe(missing)))

    def _info(self, rank: Rank) -> RankInfo:
        number = self._node_of[rank.rank]
        host = self._nodes[number].host if len(self._shares) > 1 and number in self._nodes else ""
        return RankInfo(rank.rank, rank.pid, rank.device, number, host)

    # --- as time passes

    def due(self) -> float | None:
        """Return when `tick` should be called."""
        dues = [due for number in self._late if (due := self.ranks[number].due) is not None]
        if not self.up and not self.ending:
            dues.append(self._bring_up.due)
        if self.up and (due := self._cells_due()) is not None:
            dues.append(due)
        if self._healing is not None and self._healing.due is not None:
            dues.append(self._healing.due)
        return min(dues, default=None)

    def tick(self, now: float) -> None:
        """Act on what is due."""
        if not self.up and not self.ending:
            self._check_start(now)
        self._check_cells(now)
        self._check_healing(now)
        self._check_displays(now)

    def _check_cells(self, now: float) -> None:
        due = self._cells_due() if self.up else None
        if due is None or now < due:
            return
        try:
            self.cells.tick(now)
        except Exception:  # what a rank has answered makes no sense; the others' cells go on
            traceback.print_exc()
            self._ticks_from = now + _TICK_PAUSE

    def _cells_due(self) -> float | None:
        due = self.cells.due()
        return None if due is None else max(due, self._ticks_from)

    def _check_displays(self, now: float) -> None:
        for number in list(self._late):
            rank = self.ranks[number]
            if rank.due is not None and now >= rank.due:
                rank.give_up()
            if rank.due is None:
                self._late.discard(number)

    # --- from agents

    def handle_agent(self, node: int, message: Message) -> None:
        """Handle an agent's report of processes that start, end or print."""
        if isinstance(message, Output):
            rank = self._rank_on(node, message.rank)
            rank.print(message)
            if rank.due is not None:
                self._late.add(rank.rank)
        elif isinstance(message, Progress):
            self._get_on(message)
        elif isinstance(message, StoreOpened):
            self._check_ours(node, message)
            self._spawn_others(message)
        elif isinstance(message, Spawned):
            self._rank_on(node, message.rank).pid = message.pid
            self._bring_up.move()
        elif isinstance(message, Spawning):
            self._bring_up.note_forked(node, [self._of_node(node, note) for note in message.notes])
            if self._bring_up.forked:
                self._get_on(Progress("join", "ranks join their group"))
        elif isinstance(message, SpawnFailed):
            if self._healing is not None:
                self._healing.fail(self._of_node(node, message.text))
            elif self.up:
                raise ValueError(f"node {node} speaks of a start that is over: {message}")
            else:
                self.fail(self._of_node(node, message.text), message.obstacle)
        elif isinstance(message, Exited):
            self._exited(node, message)
        elif isinstance(message, Answer):
            self._rank_on(node, message.rank)
            if message.asker == "controller":
                self.cells.answered(message, time.monotonic())
            else:
                self.to_notebook(message)

    def _rank_on(self, node: int, number: int) -> Rank:
        if self._node_of[number] != node:
            raise ValueError(f"node {node} speaks for rank {number}, which is on node {self._node_of[number]}")
        return self.present(number) or self.ranks[number]

    def _check_ours(self, node: int, message: Message) -> None:
        """Refuse what only the agent of this machine may say."""
        if node:
            raise ValueError(f"node {node} has no store to speak of: {message}")

    def _of_node(self, node: int, text: str) -> str:
        if len(self._shares) == 1 or node not in self._nodes:
            return text
        return f"node {node} ({self._nodes[node].host}): {text}"

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
        when = message.when - (self._nodes[node].offset if node in self._nodes else 0.0)
        cause = message.cause or (self._healing.cause(rank.rank) if self._healing is not None else "")
        died = Died(rank.rank, message.pid, message.code, message.stderr, rank.serial, when, cause)
        rank.die(died)
        if not self.up:
            what = message.cause or describe_exit(message.code)
            text = f"rank {message.rank} (pid {message.pid}) ended while it started: {what}.\n{message.stderr}"
            self.fail(f"{self._of_node(node, text).rstrip()}\nType `%distributed start` to try again.")
            return
        if rank is self.ranks[rank.rank]:  # else a newcomer that has not taken its place
            self.cells.died(died, time.monotonic())
        if self._healing is not None:
            self._healing.ended(rank.rank, f"{cause or describe_exit(message.code)}\n{message.stderr}".rstrip())

    def _store_died(self, message: Exited) -> None:
        self._store_lost = True
        what = message.cause or describe_exit(message.code)
        if not self.up:
            self.fail(
                f"the rendezvous store (pid {message.pid}) ended while ranks started: {what}. "
                "Type `%distributed start` to try again."
            )
            return
        if message.cause:  # the ranks ended with it, which says all
            return
        if self._healing is not None:
            self._healing.fail(f"{_NO_STORE} ({what})")
        self.to_notebook(
            Notice(
                f"the rendezvous store of this session (pid {message.pid}) has ended, {what}: "
                "groups that exist go on, but no new group can be made. "
                "`%distributed restart` starts fresh ranks."
            )
        )

    def lose(self, node: KnownNode, why: str) -> None:
        """Note that a node is gone, and its ranks with it."""
        cause = f"node {node.number} ({node.host}) is lost: {why}"
        self._left.add(node.number)
        self.cargo.lose(node.number)
        if self.ending:
            return
        if not self.up:
            self.fail(f"{cause}. Type `%distributed start` to try again.")
            return
        now = time.monotonic()
        for rank in self.on_node(node.number):
            if self._healing is not None:
                self._healing.ended(rank.rank, cause)
            if rank.dead is None:
                died = Died(rank.rank, rank.pid, -9, "", rank.serial, now, cause)
                rank.die(died)
                self.cells.died(died, now)

    def on_node(self, node: int) -> Iterable[Rank]:
        """Return the ranks of a node."""
        return [self.ranks[number] for number, where in self._node_of.items() if where == node]

    # --- from ranks

    def offset(self, rank: int) -> float:
        """Return how far the clock of a rank's node is ahead of ours, in seconds."""
        node = self._node_of[rank]
        return self._nodes[node].offset if node in self._nodes else 0.0

    def is_on(self, rank: int, node: int) -> bool:
        """Return whether a rank is on a node."""
        return self._node_of.get(rank) == node

    def _part_ended(self, reply: Reply) -> None:
        """Note that a cell is over on a rank."""
        self.cells.ended(reply, time.monotonic())
        if self.cargo.holds(reply.serial) and all(rank.serial != reply.serial for rank in self.ranks.values()):
            self.cargo.drop(reply.serial)

    # --- newcomers in the places of dead ranks

    def heal(self, message: Heal) -> None:
        """Replace ranks."""
        now = time.monotonic()
        alive = [rank for rank in message.ranks if not self.ranks[rank].dead]
        if why := self._hindrance(message, alive):
            self._tell(HealFailed(why))
            return
        self._healing = Healing(self, message.ranks, alive, self._patience, self._history.cells, now)
        self._check_healing(now)

    def _hindrance(self, message: Heal, alive: Sequence[int]) -> str:
        """Return why ranks can't be replaced; "" if they can."""
        gone = [rank for rank in message.ranks if self._node_of[rank] not in self._nodes]
        if self._healing is not None:
            return "ranks are being replaced already: wait for that to end"
        if not self.up or self.ending:
            return "the ranks are about to start or end. Type `%distributed heal` again afterwards"
        if alive and not message.kill:
            return f"{describe_ranks(alive)} lives: `%distributed heal --kill` ends a rank before it is replaced"
        if not set(self.ranks) - set(message.ranks) - set(self.dead()):
            return "no other rank lives, from which process groups could be taken: `%distributed restart`"
        if gone:
            return f"the node is lost that {describe_ranks(gone)} ran on: `%distributed restart`"
        if self._store_lost:
            return _NO_STORE
        return ""

    def give_up_heal(self) -> None:
        """Stop replacing ranks, at the user's request."""
        if self._healing is not None:
            self._healing.fail("it was interrupted")

    def _check_healing(self, now: float) -> None:
        if self._healing is None:
            return
        self._healing.go_on(now)
        if self._healing.over:
            self._healing = None
            held, self._held = self._held, {}
            for message in held.values():
                self.begin(message)

    def newcomer(self, rank: int) -> Rank:
        """Make place for a new process of a dead rank."""
        old = self.ranks[rank]
        self._switchboard.drop(lane(name, self.epoch, rank, old.life) for name in RANK_LANES)
        self._lives[rank] += 1
        return Rank(rank, self._tell, self._keep, self._part_ended, self._lives[rank])

    def settle(self, rank: Rank) -> RankInfo:
        """Have a newcomer take the dead rank's place."""
        self.ranks[rank.rank] = rank
        return self._info(rank)

    def in_order(self, rank: int, report: InOrder) -> None:
        """Note that a rank has carried out its orders."""
        if self._healing is None or not self._healing.in_order(rank, report):
            self.cells.in_order(rank, report, time.monotonic())

    def rejoin(self) -> None:
        """Bring newcomers into their groups."""
        if self._healing is not None:
            self._healing.rejoin(time.monotonic())

    def ask(self) -> AskRanks:
        """Return what asks control threads."""
        return self.cells.ask

    def admit(self, newcomers: Sequence[int], over: Callable[[Recovery], None], now: float) -> None:
        """Bring newcomers into the groups."""
        self.cells.admit(newcomers, over, now)

    def quiet(self) -> bool:
        """Return whether nothing runs on the living, and nothing is being repaired."""
        return self.cells.quiet and not self.cargo.moving

    # --- end

    def end(self, grace: float = 1.0) -> None:
        """Have them end: after `grace` seconds by force. `gone` says when they have."""
        if self.ending:
            return
        self.ending = True
        if self._healing is not None:
            self._healing.fail("the ranks are ending")
        for rank in self.ranks.values():
            if rank.serial:
                self.to_rank(RANK_CONTROL, rank.rank, Interrupt(rank.serial, [rank.rank]))
            if rank.ready:
                self.to_rank(RANK_CELL, rank.rank, Quit())
        for node in self._shares:
            self._nodes.send(node, Kill(self.epoch, grace if self.up else 0.0))

    def gone(self, node: int) -> None:
        """Note that none of its processes is left on a node."""
        self._left.add(node)
        if self.all_gone:
            self.cargo.close()

    @property
    def all_gone(self) -> bool:
        """Whether no process of it is left anywhere."""
        return self._left >= self._shares.keys()
