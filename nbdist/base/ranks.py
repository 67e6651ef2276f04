"""How sets of ranks are written: "0,2-3", "all", "@node-b". Numbers and text only; independent of sessions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nbdist.errors import UsageError

_NO_NODES: Mapping[str, Sequence[int]] = {}
_PIECE = re.compile(r"(?P<first>[0-9]+)(?:\s*-\s*(?P<last>[0-9]+))?")


def parse_ranks(
    text: str, world_size: int, nodes: Mapping[str, Sequence[int]] = _NO_NODES, *, of: str = "session"
) -> tuple[int, ...]:
    """Read a set of ranks.

    Args:
        text: Ranks, ranges and nodes (with an "@") separated by commas, such as "0,2-3" or "@node-b", or "all". Blanks
            don't matter.
        world_size: Number of ranks in the session, at least 1.
        nodes: The ranks of each node, by its name; empty with one node.
        of: What has these ranks, for error messages.

    Returns:
        The ranks, each once, in ascending order.

    Raises:
        UsageError: A piece is not a rank, range or node, or not in the session. The message says what is allowed.
    """
    if text.strip().lower() == "all":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for piece in map(str.strip, text.split(",")):
        if not piece:
            raise UsageError(f"a rank is missing in {text!r}: the {of} {_allowed(world_size)}")
        ranks.update(_ranks_of(piece[1:], nodes) if piece[:1] == "@" else _parse_piece(piece, world_size, of))
    return tuple(sorted(ranks))


def _ranks_of(node: str, nodes: Mapping[str, Sequence[int]]) -> Sequence[int]:
    if node in nodes:
        return nodes[node]
    if not nodes:
        raise UsageError(f"'@{node}' names a machine, and this session has only this one: leave it out")
    raise UsageError(f"'@{node}' is not a machine of this session: it has {', '.join(f'@{name}' for name in nodes)}")


def _parse_piece(piece: str, world_size: int, of: str) -> range:
    match = _PIECE.fullmatch(piece)
    if match is None:
        raise UsageError(f"'{piece}' isn't a rank or a range of ranks: the {of} {_allowed(world_size)}")
    first = match["first"]
    last = match["last"] or first
    for number in (first, last):
        # The length first: int() refuses thousands of digits with advice that is not for our users.
        if len(number.lstrip("0")) > len(str(world_size)) or int(number) >= world_size:
            raise UsageError(f"rank {number} isn't in this {of}: it {_allowed(world_size)}")
    if int(last) < int(first):
        raise UsageError(f"'{piece}' counts down: write {last}-{first}; the {of} {_allowed(world_size)}")
    return range(int(first), int(last) + 1)


def _allowed(world_size: int) -> str:
    if world_size == 1:
        return "has rank 0 only; for example -r 0"
    example = "0,2-3" if world_size > 3 else "0-1"
    return f"has ranks 0-{world_size - 1}; for example -r {example}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return the shortest text that `parse_ranks` reads as these ranks: "0,2-3"."""
    return ",".join(_spans(ranks))


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return a set of ranks for a sentence: "rank 2", "ranks 0, 2-3", "no ranks"."""
    numbers = set(ranks)
    if not numbers:
        return "no ranks"
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(_spans(numbers))


@dataclass(frozen=True)
class RankNames:
    """How ranks are named where some are on other machines: with their node, if all are on one.

    Attributes:
        nodes: The ranks of each node, by its name; empty with one node.
    """

    nodes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def describe(self, ranks: Iterable[int]) -> str:
        """Return a set of ranks for a sentence: "rank 9 (node-b)", "ranks 6-9"."""
        numbers = set(ranks)
        there = {self._node_of[rank] for rank in numbers if rank in self._node_of}
        return describe_ranks(numbers) + (f" ({there.pop()})" if len(there) == 1 else "")

    def label(self, ranks: Sequence[int]) -> str:
        """Return the label of what ranks print: "[9] ", and for the whole of a node "[8-15] (node-b) "."""
        node = self._node_of.get(ranks[0], "") if ranks else ""
        whole = f" ({node})" if node and set(ranks) == set(self.nodes[node]) else ""
        return f"[{format_ranks(ranks)}]{whole} "

    @cached_property
    def _node_of(self) -> dict[int, str]:
        return {rank: node for node, ranks in self.nodes.items() for rank in ranks}


ONE_NODE = RankNames()


def _spans(ranks: Iterable[int]) -> list[str]:
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]
