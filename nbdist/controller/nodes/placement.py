"""Which rank is on which node, in which slot there; what the node is called; which node starts which ranks. Pure.

A slot is the number by which a rank's lanes and its agent know it: its rank at the start. Ranks can get other numbers;
slots stay, and no two processes have had the same slot and life.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from nbdist.base.ranks import RankNames
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.nodes.node_table import KnownNode, NoEntrance
from nbdist.wire.messages.cells import Reply
from nbdist.wire.messages.healing import Post
from nbdist.wire.messages.life import Place, RankInfo, StartOptions
from nbdist.wire.processes.nodes import NodesWanted
from nbdist.wire.questions.knowing import KnownFailure
from nbdist.wire.questions.questions import Answer


def shared_out(
    options: StartOptions, wanted: NodesWanted | None, nodes: Iterable[KnownNode]
) -> dict[int, StartOptions]:
    """Return what each node has to start. Ranks are numbered node by node.

    Args:
        options: What the notebook asks for, on its own machine.
        wanted: Which nodes; None: only that machine.
        nodes: Those that have come.

    Raises:
        NoEntrance: A node has no GPU, and no number of ranks was given.
    """
    if wanted is None or wanted.count == 1:
        return {0: options}
    ordered = sorted(nodes, key=lambda node: node.seat)
    counts = {node.number: _count(options, wanted, node) for node in ordered}
    working = [number for number, count in counts.items() if count]
    world, gpus = sum(counts.values()), {node.number: node.gpus for node in nodes}
    gpus[0] = len(options.gpus or [])
    each_has_its_own = all(gpus[number] >= count for number, count in counts.items())
    shares, first = {}, 0
    for number, count in counts.items():
        shares[number] = msgspec.structs.replace(
            options if number == 0 else without_surroundings(options),
            count=count,
            backend=options.backend or ("cpu:gloo,cuda:nccl" if each_has_its_own else "gloo"),
            place=Place(first, world, working.index(number) if count else 0, len(working)),
        )
        first += count
    return shares


def _count(options: StartOptions, wanted: NodesWanted, node: KnownNode) -> int:
    count = wanted.ranks_of(node.seat)
    if node.number == 0:
        return 0 if count == 0 else options.count
    if not (count := count or node.gpus):
        raise NoEntrance(f"node {node.number} ({node.host}) has no GPU, so pass the number of ranks per node: `-n 8`")
    return count


def without_surroundings(options: StartOptions) -> StartOptions:
    """Remove what belongs to the notebook's machine; other nodes have their own."""
    return msgspec.structs.replace(options, environment={}, sys_path=[], gpus=None, open_files=0, umask=0)


@dataclass(frozen=True)
class _Seat:
    """Where a rank is. gpu: as of Post."""

    node: int
    slot: int
    gpu: int


class Machines(Protocol):
    """The nodes that have not been lost."""

    def __getitem__(self, number: int, /) -> KnownNode: ...

    def __contains__(self, number: int, /) -> bool: ...


class Placement:
    """Where ranks are.

    Args:
        shares: By node, what is started there.
        nodes: As of Machines.

    Attributes:
        names: How to name ranks.
        shares: By node, what is there: how many ranks, and their place among all.
        numbers: The numbers that all ranks will have once those are taken in that are to come, by the ones of now.
    """

    def __init__(self, shares: Mapping[int, StartOptions], nodes: Machines) -> None:
        self.shares = dict(shares)
        self._nodes = nodes
        self._seats = {
            rank: _Seat(node, rank, rank - options.ranks.start)
            for node, options in shares.items()
            for rank in options.ranks
        }
        self.numbers: dict[int, int] = {}
        self._next = max(self._seats, default=-1) + 1  # slot
        self._processes = Counter(self._seats.keys())  # that each slot has had
        self._coming = range(0)  # ranks that are to come, by the numbers that they have until then
        self._then: Placement | None = None  # how it will be then
        self._note()

    def _note(self) -> None:
        self._rank_in = {seat.slot: rank for rank, seat in self._seats.items()}
        hosts = {node: self._nodes[node].host for node in self.shares if len(self.shares) > 1 and node in self._nodes}
        self.names = RankNames({host: self.shares[node].ranks for node, host in hosts.items()})

    @property
    def ranks(self) -> Collection[int]:
        """All ranks."""
        return self._seats.keys()

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return self._seats[rank].node

    def slot_of(self, rank: int) -> int:
        """Return a rank's slot."""
        return self._seats[rank].slot

    def rank_in(self, slot: int) -> int | None:
        """Return the rank in a slot; None if there is none any more."""
        return self._rank_in.get(slot)

    def next_life(self, rank: int) -> int:
        """Return the life of a rank's next process: how many its slot has had before."""
        slot = self.slot_of(rank)
        self._processes[slot] += 1
        return self._processes[slot] - 1

    def is_on(self, rank: int, node: int) -> bool:
        """Return whether a rank is on a node."""
        return rank in self._seats and self._seats[rank].node == node

    def on_node(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        return [rank for rank, seat in self._seats.items() if seat.node == node]

    def offset_of(self, node: int) -> float:
        """Return how far the clock of a node is ahead of ours, in seconds."""
        return self._nodes[node].offset if node in self._nodes else 0.0

    def answer_on_our_clock(self, answer: Answer) -> Answer:
        """Return the answer of a rank with the time of the failure that it reports, if it does, on our clock."""
        offset = self.offset_of(self._seats[answer.rank].node)
        if not isinstance(answer.body, KnownFailure) or not offset:
            return answer
        body = msgspec.structs.replace(answer.body, when=answer.body.when - offset)
        return msgspec.structs.replace(answer, body=body)

    def reply_on_our_clock(self, reply: Reply) -> Reply:
        """Return the reply of a rank with its failure's time on our clock: what failed first is first on all nodes."""
        offset = self.offset_of(self._seats[reply.rank].node)
        if reply.failure is None or not offset:
            return reply
        failure = msgspec.structs.replace(reply.failure, when=reply.failure.when - offset)
        return msgspec.structs.replace(reply, failure=failure)

    def has_node(self, rank: int) -> bool:
        """Return whether a rank's node has not been lost."""
        return self._seats[rank].node in self._nodes

    def name_node(self, node: int, text: str) -> str:
        """Return a text with the node's name before it, if there are several."""
        if len(self.shares) == 1 or node not in self._nodes:
            return text
        return f"node {node} ({self._nodes[node].host}): {text}"

    def info(self, rank: Rank) -> RankInfo:
        """Return a rank as the notebook sees it."""
        number = self._seats[rank.rank].node
        host = self._nodes[number].host if len(self.shares) > 1 and number in self._nodes else ""
        return RankInfo(rank.rank, rank.pid, rank.device, number, host)

    def post(self, rank: int) -> Post:
        """Return what a rank is among all, or will be once it has been taken in."""
        if self._then is not None and rank in self._coming:
            return self._then.post(self.numbers[rank])
        seat = self._seats[rank]
        share = self.shares[seat.node]
        place = share.place or Place(world_size=share.count)
        return Post(rank, share.count, place, seat.gpu, share.gpus)

    # --- changes

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give ranks other numbers, node by node; those without one are gone.

        Args:
            numbers: The new numbers, by the old ones.
        """
        self._seats = {number: self._seats[rank] for rank, number in sorted(numbers.items(), key=lambda pair: pair[1])}
        self.shares = {node: share for node, share in self.shares.items() if node in self._nodes or self.on_node(node)}
        self._coming, self._then = range(0), None
        self._share_out()

    def move(self, lost: int, node: int) -> None:
        """Note that a node has come in place of a lost one: the places of its ranks are there now."""
        self.shares = {node if number == lost else number: share for number, share in self.shares.items()}
        for gpu, rank in enumerate(self.on_node(lost)):
            self._seats[rank] = _Seat(node, self._seats[rank].slot, gpu)
        self._note()

    def open(self, node: int, backend: str) -> None:
        """Note that a machine has come that is to have ranks.

        Args:
            backend: Of the default group that there is.
        """
        options = without_surroundings(self.shares[0])
        self.shares[node] = msgspec.structs.replace(options, count=0, backend=options.backend or backend)
        self._share_out()

    def working(self) -> list[int]:
        """Return the machines that ranks can be added to. The notebook's counts if it has ranks."""
        return [node for node in self.shares if node in self._nodes and (node or self.on_node(0))]

    def gpus_of(self, node: int) -> int:
        """Return how many GPUs another machine has."""
        return self._nodes[node].gpus

    def host_of(self, node: int) -> str:
        """Return what a machine calls itself."""
        return self._nodes[node].host

    def expect(self, counts: Mapping[int, int], gpus: list[str] | None) -> list[int]:
        """Have more ranks come, to the GPUs of their machines that have the fewest.

        Args:
            counts: How many, by node.
            gpus: The GPUs that ranks of this machine may use from now on.

        Returns:
            The numbers that they have until `take_in`, after those of all others.
        """
        first = len(self._seats)
        for node, count in counts.items():
            for _ in range(count):
                of_node = len(gpus or [0]) if node == 0 else max(1, self.gpus_of(node))
                self._seats[len(self._seats)] = _Seat(node, self._next, self._free_gpu(node, of_node))
                self._next += 1
        nodes = list(self.shares)
        ordered = sorted(self._seats, key=lambda rank: (nodes.index(self._seats[rank].node), rank))
        self.numbers = {rank: number for number, rank in enumerate(ordered)}
        then = copy.copy(self)
        if 0 in counts:
            then.shares = self.shares | {0: msgspec.structs.replace(self.shares[0], gpus=gpus)}
        then.renumber(self.numbers)
        self._coming, self._then = range(first, len(self._seats)), then
        self._note()
        return list(self._coming)

    def _free_gpu(self, node: int, count: int) -> int:
        users = [seat.gpu % count for seat in self._seats.values() if seat.node == node]
        return min(range(count), key=lambda gpu: (users.count(gpu), gpu))

    def share_of(self, node: int) -> StartOptions:
        """Return what is on a node, or will be."""
        return (self._then or self).shares[node]

    @property
    def growing(self) -> bool:
        """Whether ranks are to come."""
        return self._then is not None

    def take_in(self) -> None:
        """Note that those have come that were to come: all ranks have their `numbers` now."""
        assert self._then is not None
        self._seats, self.shares = self._then._seats, self._then.shares
        self._coming, self._then = range(0), None
        self._note()

    def _share_out(self) -> None:
        """Note how many ranks are on each node, and where these begin."""
        counts = {node: len(self.on_node(node)) for node in self.shares}
        working = [node for node, count in counts.items() if count]
        first = 0
        for node, count in counts.items():
            place = msgspec.structs.replace(
                self.shares[node].place or Place(),
                first_rank=first,
                world_size=len(self._seats),
                node_rank=working.index(node) if count else 0,
                num_nodes=max(1, len(working)),
            )
            self.shares[node] = msgspec.structs.replace(self.shares[node], count=count, place=place)
            first += count
        self._note()
