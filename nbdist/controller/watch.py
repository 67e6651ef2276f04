"""Who waits for whom: looks at the ranks of a running cell now and then, and compares.

After 5 s of unequal progress it says who waits where; when a rank has failed it names those that wait for it in vain.
Costs nothing before that but a timer. Knows ranks only by what their control threads answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbdist.ranks import describe_ranks

_LOOK_AFTER = 4.0  # seconds from the cell's start to the first look; the second, a second later, can say something
_LOOK_AGAIN = 1.0
_REPEAT = 5.0  # seconds between looks when nothing has changed
_SAMPLE = 0.3  # seconds between the two looks that show that a rank does not move
_BUSY = 0.2  # of a core: a rank that uses more is computing, not waiting


class Watch:
    """Watches one running cell.

    Args:
        serial: The cell.
        ranks: Where it runs.
        grace: Seconds that ranks may wait for one that has failed.
        ask: Sends a question to control threads; answers come by `answered`.
        say: Shows a line below the cell, in place of the last one.
        free: Frees ranks that wait in vain.

    Attributes:
        due: When `tick` wants to be called.
    """

    def __init__(
        self,
        serial: int,
        ranks: Sequence[int],
        grace: float,
        ask: Callable[[Sequence[int], str, dict[str, Any]], None],
        say: Callable[[str], None],
        free: Callable[[Sequence[int]], None],
        now: float,
    ) -> None:
        self.serial = serial
        self.due = now + _LOOK_AFTER
        self._ranks = list(ranks)
        self._left = set(ranks)
        self._failed: set[int] = set()
        self._grace = grace
        self._ask = ask
        self._say = say
        self._free = free
        self._began = now
        self._asked = 0.0
        self._looks: dict[int, dict[str, Any]] = {}
        self._before: dict[int, dict[str, Any]] = {}
        self._before_at = 0.0
        self._said = ""

    def ended(self, rank: int, failed: bool, now: float) -> None:
        """A rank has left the cell."""
        self._left.discard(rank)
        if failed and not self._failed:
            self.due = now + max(0.0, self._grace - _SAMPLE)
            self._before = {}
        if failed:
            self._failed.add(rank)

    def answered(self, rank: int, data: dict[str, Any], now: float) -> None:
        """A rank has said what it does."""
        self._looks[rank] = data
        if len(self._looks) == len(self._ranks):
            self._compare(now)

    def tick(self, now: float) -> None:
        """Time has passed: look."""
        if now < self.due:
            return
        self._looks = {}
        self._asked = now
        self.due = now + (_SAMPLE if self._failed else _LOOK_AGAIN if not self._before else _REPEAT)
        self._ask(self._ranks, "progress", {"serial": self.serial})

    def _compare(self, now: float) -> None:
        waiting = self._waiting()
        before, self._before, self._before_at = self._before, dict(self._looks), self._asked
        if not before or not waiting:
            self._withdraw()
            return
        if self._failed:
            self._free(waiting)
        elif set(waiting) != set(self._ranks) or self._mutual(waiting):
            self._explain(waiting, now)
        else:
            self._withdraw()

    def _waiting(self) -> list[int]:
        """Ranks that have not moved since the last look, in a collective that others are not in."""
        elapsed = max(1e-3, self._asked - self._before_at)
        found = []
        for rank in sorted(self._left):
            look, before = self._looks.get(rank, {}), self._before.get(rank, {})
            if not look.get("position") or look["position"] != before.get("position"):
                continue
            idle = (look["cpu"] - before["cpu"]) / elapsed < _BUSY
            if idle and (look["collective"] or self._is_ahead(rank)):
                found.append(rank)
        return found

    def _is_ahead(self, rank: int) -> bool:
        """Whether it has entered a collective that another member of the group has not."""
        for name, (members, entered, _) in self._looks[rank].get("groups", {}).items():
            others = [self._looks.get(other, {}).get("groups", {}).get(name) for other in members if other != rank]
            if any(other is not None and sum(other[1]) < sum(entered) for other in others):
                return True
        return False

    def _mutual(self, waiting: Sequence[int]) -> bool:
        """Whether all wait, but not for the same thing: then none will ever move."""
        places = {self._looks[rank].get("collective") for rank in waiting}
        return len(places) > 1 or any(self._is_ahead(rank) for rank in waiting)

    def _explain(self, waiting: Sequence[int], now: float) -> None:
        lines = _by_words({rank: self._describe(rank, rank in waiting) for rank in self._ranks})
        text = "; ".join(f"{describe_ranks(ranks)} {words}" for words, ranks in lines.items())
        if text != self._said:
            self._said = text
            self._say(f"{text}. Interrupt the kernel to stop them.")

    def _withdraw(self) -> None:
        if self._said:
            self._said = ""
            self._say("")

    def _describe(self, rank: int, waiting: bool) -> str:
        look = self._looks[rank]
        if rank not in self._left or not look.get("running"):
            return "finished the cell"
        where = look.get("line") or "a call that does not let Python answer"
        if not waiting:
            return f"at {where}"
        return f"waiting in {look['collective'] or 'a collective'}, {where}"


def _by_words(words: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in words.items():
        groups.setdefault(text, []).append(rank)
    return groups
