"""Which ranks a rank waits for, seen from one look at all of them.

Ranks that wait for the same thing are compared with the others once. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.questions.stopping import Position


class AwaitedRanks:
    """For whom each rank waits.

    Args:
        looks: What each rank has answered.
        everyone: The ranks that a collective of all needs.
    """

    def __init__(self, looks: Mapping[int, Position], everyone: Collection[int]) -> None:
        self._looks = looks
        self._everyone = RankSpans.of(everyone)
        self._absent: dict[Hashable, frozenset[int]] = {}  # who is missing, by what is waited for
        self._slower: dict[Hashable, frozenset[int]] = {}  # who has entered fewer collectives of a group

    def of(self, rank: int) -> frozenset[int]:
        """Return the ranks that this one can't proceed without, and that are not where it waits for them."""
        look = self._looks.get(rank)
        if look is None or not look.running or not look.collective:
            return frozenset()
        members = self._everyone if look.members is None else look.members
        if all(member == rank for member in members):
            return self._behind(look)
        if look.collective.startswith(("send", "recv")):
            others = frozenset(members) - {rank}
            opposite = "recv" if look.collective.startswith("send") else "send"
            met = any(self._collective(other).startswith(opposite) for other in others)
            return frozenset() if met else others
        what = look.collective, look.group, look.sequence, look.tensors, members
        if what not in self._absent:
            self._absent[what] = frozenset(member for member in members if not self._takes_part(member, look))
        return self._absent[what]

    def _behind(self, look: Position) -> frozenset[int]:
        """Return members of its groups that have entered fewer collectives."""
        found: frozenset[int] = frozenset()
        for name, group in look.groups.items():
            entered = sum(group.entered)
            if (name, entered) not in self._slower:
                self._slower[name, entered] = frozenset(
                    member for member in group.members if self._entered(member, name, entered) < entered
                )
            found |= self._slower[name, entered]
        return found

    def _entered(self, rank: int, group: str, unknown: int) -> int:
        there = self._looks[rank].groups.get(group) if rank in self._looks else None
        return sum(there.entered) if there is not None else unknown

    def _collective(self, rank: int) -> str:
        look = self._looks.get(rank)
        return look.collective if look is not None and look.running else ""

    def _takes_part(self, rank: int, in_what: Position) -> bool:
        look = self._looks.get(rank)
        return (
            look is not None
            and bool(look.running)
            and (look.collective, look.group) == (in_what.collective, in_what.group)
            and not differ(look, in_what)
        )


def differ(look: Position, other: Position) -> bool:
    """Return whether two ranks that are in the same function of the same group can't be in the same collective."""
    if look.sequence and other.sequence and look.sequence != other.sequence:
        return True
    return bool(look.tensors and other.tensors) and look.tensors != other.tensors
