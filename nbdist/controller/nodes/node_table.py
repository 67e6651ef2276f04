"""The nodes of a session: who has come, who is silent, who is lost, and how their clocks differ from ours.

Owns the address where other nodes come in. Independent of ranks.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from nbdist.base import limits
from nbdist.base.network import endpoint
from nbdist.base.processes import describe_owner
from nbdist.base.text import counted
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.nodes.node_starters import NodeStarters
from nbdist.wire.base.message import VERSION, Message
from nbdist.wire.frames import encode
from nbdist.wire.lanes import AGENT_CONTROL, node_lane
from nbdist.wire.messages.life import Progress, Shutdown
from nbdist.wire.messages.output import Notice
from nbdist.wire.processes.nodes import (
    Invited,
    Join,
    NodesWanted,
    Ping,
    Pong,
    Refused,
    Token,
    Versions,
    Welcome,
)
from nbdist.wire.processes.starter_lines import Invitation, Seat, StarterFailed, StarterProgress, StarterSetup

_FIRST_PINGS = 8


class NoEntrance(Exception):
    """Other nodes can't come in at the address that was named."""


@dataclass
class KnownNode:
    """A node.

    Attributes:
        number: 0: the controller's own.
        host: What it calls itself; of two nodes with one name the second is "name#2".
        gpus: That it could use; 0 for node 0, whose GPUs the notebook counts.
        seat: Which of the nodes that are wanted it is; ranks are numbered in this order.
        offset: Seconds that its monotonic clock is ahead of ours.
        round_trip: Seconds, the shortest seen.
        heard: When it was last heard of.
        silent: Whether that has been reported.
        cut_off: Whether its connection has ended. The reason may be on its way, by another connection.
        answers: How many pings it has answered.
        ends_at: When its job ends, by `time.time`; None: that is not known.
    """

    number: int
    host: str
    gpus: int = 0
    seat: int = 0
    offset: float = 0.0
    round_trip: float = field(default=float("inf"))
    heard: float = 0.0
    silent: bool = False
    cut_off: bool = False
    answers: int = 0
    ends_at: float | None = None


class NodeTable:
    """The nodes.

    Args:
        router: To send by.
        tell: Gives the notebook a message.
        lost: Called with a node that has gone, and in what way, in words.
    """

    def __init__(
        self, router: MessageRouter, tell: Callable[[Message], None], lost: Callable[[KnownNode, str], None]
    ) -> None:
        self._router = router
        self._tell = tell
        self._lost = lost
        self._nodes = {0: KnownNode(0, socket.gethostname())}
        self._url = ""
        self._wanted: NodesWanted | None = None
        self._guests: dict[bytes, int] = {}  # by public key, the seats of those who are invited
        self._gone: dict[int, KnownNode] = {}  # nodes that were lost
        self._needed: dict[int, int] = {}  # by seat, GPUs that whoever comes there must have
        self.starters = NodeStarters()
        self._starter_of: dict[int, int] = {}  # by seat, which of these has started its node last
        self._called: list[int] = []  # seats of those that were called for
        self._wanted_before: NodesWanted | None = None  # without them
        self._next = 1
        self._ping_at = float("inf")
        self.due_to_come = float("inf")  # when those who are missing are waited for no longer

    def __iter__(self) -> Iterator[KnownNode]:
        return iter(self._nodes.values())

    def __getitem__(self, number: int) -> KnownNode:
        return self._nodes[number]

    def __contains__(self, number: int) -> bool:
        return number in self._nodes

    @property
    def hosts(self) -> list[str]:
        """Their names."""
        return [node.host for node in self]

    @property
    def round_trip(self) -> float:
        """The longest to any node, in seconds: of each the shortest seen; 0 without other nodes."""
        return max((node.round_trip for node in self if node.answers), default=0.0)

    @property
    def _timeout(self) -> float:
        return self._wanted.timeout if self._wanted is not None else limits.NODE_TIMEOUT

    @property
    def _ping_period(self) -> float:
        return limits.ping_period(self._timeout)

    @property
    def missing(self) -> int:
        """How many nodes have not come yet."""
        return self._wanted.count - len(self._nodes) if self._wanted is not None else 0

    # --- who is to come

    def want(self, wanted: NodesWanted | None) -> None:
        """Have these nodes; those that there are already stay, unless they came to another place.

        Raises:
            NoEntrance: Nodes can't come in there.
        """
        before, self._wanted = self._wanted, wanted
        if before is not None and (wanted is None or not wanted.same_nodes(before)):
            self.dismiss()
            self._wanted = wanted
        if wanted is None:
            return
        if not self._url:
            self._url = self._open(wanted)
        self._needed.clear()
        self._invite(range(1, wanted.count))
        self.due_to_come = time.monotonic() + wanted.patience if self.missing > 0 else float("inf")

    def _open(self, wanted: NodesWanted) -> str:
        try:
            return self._router.open_to(wanted.listen or wanted.address, wanted.port)
        except zmq.ZMQError as error:
            where = endpoint(wanted.address, wanted.port)
            if error.errno == zmq.EADDRINUSE:
                raise NoEntrance(
                    f"port {wanted.port} of {wanted.address} is taken{describe_owner(wanted.port)}: choose another "
                    "for --master-port, or leave it out"
                ) from None
            raise NoEntrance(
                f"this machine can't listen at {where}: {error.strerror}. --master-addr must be an address of the "
                "machine that the notebook runs on; `ip -brief address` shows them"
            ) from None

    def _invite(self, wanted: Iterable[int], instead_of: Sequence[str] = ()) -> None:
        """Make a token for each of these seats that nobody has, and nobody is invited to.

        Args:
            wanted: The seats.
            instead_of: The names of the nodes that had them.
        """
        assert self._wanted is not None
        taken = {*self._guests.values(), *(node.seat for node in self)}
        seats = []
        for seat in wanted:
            if seat not in taken:
                keys = self._router.invite(self._url)
                self._guests[keys.public_key] = seat
                seats.append(Seat(seat, str(Token(keys.server_key, keys.secret_key))))
        if not seats:
            return
        address = self._url.removeprefix("tcp://")
        if self._wanted.engine:
            invitation = Invitation(address, seats, self._wanted.timeout)
            starter = self.starters.begin(StarterSetup(self._wanted.engine, self._wanted.engine_options, invitation))
            self._starter_of |= dict.fromkeys((seat.number for seat in seats), starter)
            if instead_of:
                self._tell(self._waits_for(f"a node to replace {', '.join(instead_of)}"))
        else:
            self._tell(Invited(address, [seat.token for seat in seats], list(instead_of)))

    def _waits_for(self, what: str) -> Progress:
        assert self._wanted is not None
        return Progress("nodes", f"waiting for {self._wanted.engine_title} to start {what} (Ctrl-C cancels)")

    def recall(self, counts: Mapping[int, int]) -> None:
        """Have other machines come in place of lost nodes.

        Args:
            counts: By the number of a lost node, how many ranks it had.
        """
        assert self._wanted is not None
        lost = {self._gone[number].seat: self._gone[number] for number in counts}
        self._needed |= {seat: min(node.gpus, counts[node.number]) for seat, node in lost.items()}
        self.due_to_come = time.monotonic() + self._wanted.patience
        self._invite(sorted(lost), [lost[seat].host for seat in sorted(lost)])

    def call_for(self, count: int, ranks: int) -> None:
        """Have more machines come than there are.

        Args:
            count: How many.
            ranks: How many each of them is to have.
        """
        assert self._wanted is not None
        free = (seat for seat in itertools.count(1) if self._in_seat(seat) is None)
        self._called, self._wanted_before = list(itertools.islice(free, count)), self._wanted
        for seat in self._called:
            self._needed.pop(seat, None)
        seats = range(max(self._wanted.count, self._called[-1] + 1))
        shares = [ranks if seat in self._called else self._wanted.ranks_of(seat) for seat in seats]
        self._wanted = msgspec.structs.replace(self._wanted, count=len(shares), shares=shares)
        self.call_again()

    def call_again(self) -> None:
        """Invite those of the machines that were called for which are not there and not invited: one may be lost."""
        assert self._wanted is not None
        missing = [seat for seat in self._called if self._in_seat(seat) is None]
        self.due_to_come = time.monotonic() + self._wanted.patience
        self._invite(missing)
        if self._wanted.engine:
            self._tell(self._waits_for(counted(len(missing), "more node")))

    @property
    def came(self) -> list[int]:
        """The machines that were called for and have come; empty as long as one of them is missing."""
        found = [node.number for node in self if node.seat in self._called]
        return found if len(found) == len(self._called) else []

    def let_go(self) -> None:
        """Do without the machines that were called for, if any were."""
        if not self._called:
            return
        self.uninvite()
        for node in [node for node in self if node.seat in self._called]:
            self.lose(node, "the session no longer waits for it")
            if node.seat in self._starter_of:
                self.starters.end(self._starter_of[node.seat])
        self._called, self._wanted = [], self._wanted_before

    def keep(self) -> None:
        """Count the machines that were called for among the others."""
        self._called = []

    def heir(self, number: int) -> int | None:
        """Return the node that has come in place of a lost one."""
        gone = self._gone.get(number)
        heir = self._in_seat(gone.seat) if gone is not None else None
        return heir.number if heir is not None else None

    def uninvite(self) -> None:
        """Let nobody in any more who is invited and has not come."""
        waiting = {self._starter_of[seat] for seat in self._guests.values() if seat in self._starter_of}
        for starter in waiting - {self._starter_of.get(node.seat) for node in self}:
            self.starters.end(starter)
        for key in self._guests:
            self._router.dismiss(key)
        self._guests.clear()
        self.due_to_come = float("inf")

    def heed_starters(self) -> str:
        """Take what those who start nodes have reported.

        Returns:
            Why nodes that are missing won't come; "": nothing is known of that.
        """
        why = ""
        for starter, report in self.starters.received():
            if starter not in self._starter_of.values():  # its nodes are lost, and were started again
                continue
            if isinstance(report, StarterProgress):
                if report.text:
                    self._tell(Progress("nodes", report.text))
                if report.patience is not None and self.missing > 0:
                    self.due_to_come = time.monotonic() + report.patience
            elif isinstance(report, StarterFailed):
                why = why or (report.text if self.missing > 0 else "")
            elif self._starter_of.get(report.seat) != starter:
                continue
            elif (node := self._in_seat(report.seat)) is not None:
                self.lose(node, report.text)
            elif report.seat in self._guests.values():
                why = why or report.text
        return why

    def _in_seat(self, seat: int) -> KnownNode | None:
        return next((node for node in self if node.seat == seat), None)

    def join(self, guest: bytes, key: bytes, message: Join) -> bool:
        """Let a guest become a node. Return whether it is one now.

        Args:
            guest: Its lane.
            key: Its public key.
            message: Who it is.
        """
        self._router.connect(guest)
        if why := self._objection(key, message):
            self._router.send(guest, Refused(why, used=key not in self._guests))
            self._tell(Progress("nodes", f"{message.host} could not join: {why}"))
            self._router.disconnect(guest)
            return False
        number, self._next = self._next, self._next + 1
        seat = self._guests.pop(key)
        keys = self._router.welcome(key, number, self._url)
        assert self._wanted is not None
        self._router.send(guest, Welcome(number, socket.gethostname(), keys, self._wanted.timeout))
        self._router.disconnect(guest)
        names = {node.host for node in self}
        host = message.host if message.host not in names else f"{message.host}#{number}"
        now = time.monotonic()
        self._nodes[number] = KnownNode(number, host, message.gpus, seat, heard=now, ends_at=message.ends_at)
        self._ping_at = min(self._ping_at, now + self._ping_period)
        self.due_to_come = now + self._wanted.patience if self.missing else float("inf")
        head = self._wanted.ranks_of(0) != 0  # else it is none of the nodes that count
        there = f"{len(self._nodes) - (not head)} of {counted(self._wanted.count - (not head), 'node')}"
        self._tell(Progress("nodes", f"{host} has joined as node {number} ({there})"))
        return True

    @property
    def first_end(self) -> float | None:
        """When the first job of a node ends."""
        return min((node.ends_at for node in self if node.ends_at is not None), default=None)

    def _objection(self, key: bytes, message: Join) -> str:
        """Return why a guest can't be a node; "" if it can."""
        if key not in self._guests:
            return "another node has used this token; each node needs its own"
        if message.version != VERSION:
            return f"it speaks version {message.version} of nbdist's protocol, and this session {VERSION}"
        ours, theirs = (msgspec.structs.asdict(versions) for versions in (Versions.here(), message.versions))
        different = [
            f"{name} {theirs[name]} there and {ours[name]} here" for name in ours if theirs[name] != ours[name]
        ]
        if different:
            return f"all nodes need the same versions, and it has {', '.join(different)}"
        if message.gpus < (needed := self._needed.get(self._guests[key], 0)):
            has = counted(message.gpus, "GPU") if message.gpus else "none"
            return f"the node that it would replace had ranks on {counted(needed, 'GPU')}, but it has {has}"
        return ""

    def dismiss(self) -> None:
        """Let go of all other nodes, and let nobody in any more."""
        self.broadcast(Shutdown(), others=True)
        self.starters.end()
        for number in [node.number for node in self if node.number]:
            del self._nodes[number]
            self._router.lose(number)
        self.uninvite()
        self._gone.clear()
        self._starter_of.clear()
        if self._url:
            self._router.close_to_others(self._url)
        self._url, self._wanted = "", None
        self._ping_at = float("inf")

    # --- messages

    def send(self, node: int, message: Message | bytes, lane: str = AGENT_CONTROL) -> None:
        """Send a message, or one that is encoded, to a node's agent."""
        if node in self._nodes:
            frame = message if isinstance(message, bytes) else encode(message)
            self._router.forward(node_lane(lane, node), frame)

    def broadcast(self, message: Message, others: bool = False) -> None:
        """Send to all agents; `others`: but not to ours."""
        for number in self._nodes:
            if number or not others:
                self.send(number, message)

    # --- signs of life

    def due(self) -> float:
        """Return when `tick` should be called."""
        return min(self._ping_at, self.due_to_come)

    def tick(self, now: float) -> None:
        """Act on what is due."""
        if now < self._ping_at:
            return
        stood_still = now > self._ping_at + self._ping_period  # this process itself, so nobody was asked meanwhile
        self._ping_at = now + self._ping_period if len(self._nodes) > 1 else float("inf")
        for node in [node for node in self if node.number]:
            lane, was_cut_off = node_lane(AGENT_CONTROL, node.number), node.cut_off
            node.cut_off = not self._router.reach(lane, Ping(now))
            quiet = now - node.heard
            timeout = self._timeout if node.answers else max(self._timeout, limits.NODE_TIMEOUT)  # its agent starts
            if was_cut_off and node.cut_off:
                self.lose(node, "its connection has ended")
            elif stood_still:
                continue
            elif quiet > timeout:
                self.lose(node, f"it has not answered for {quiet:.0f} s")
            elif quiet > limits.silence(timeout) and not node.silent:
                node.silent = True
                self._tell(
                    Notice(
                        f"node {node.number} ({node.host}) has not answered for {quiet:.0f} s: the network or the "
                        f"machine may have failed. Its ranks count as lost after {timeout:g} s"
                    )
                )

    def lose(self, node: KnownNode, why: str) -> None:
        """Remove a lost node."""
        self.send(node.number, Shutdown())  # should it hear that, it need not find out by itself
        if self._nodes.pop(node.number, None) is not None:
            self._gone[node.number] = node
            self._router.lose(node.number)
            self._lost(node, why)

    def connected(self, number: int) -> None:
        """Note that a node's agent listens: it is asked several times at once, so that its clock is known soon."""
        if number:
            self.send(number, Ping(time.monotonic()))

    def heard(self, number: int, message: Pong, now: float) -> None:
        """Note that a node has answered."""
        node = self._nodes.get(number)
        if node is None:
            return
        if node.silent:
            self._tell(Notice(f"node {number} ({node.host}) answers again, after {now - node.heard:.0f} s"))
        node.heard, node.silent = now, False
        node.answers += 1
        if node.answers < _FIRST_PINGS:
            self.send(number, Ping(now))
        if (took := now - message.sent) <= node.round_trip:
            node.round_trip, node.offset = took, message.at - (message.sent + now) / 2
