"""After a cell that failed: are all ranks' process groups in step, and if not, how they get there again.

Compares what ranks answer, decides, tells each rank what to do, and puts into words what was done. Knows nothing of
torch, sockets or the notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.protocol import InOrder, Recover
from nbdist.ranks import describe_ranks

_COMPARE_LIMIT = 1.0  # seconds that idle ranks have to say where they stand
_RENEW_LIMIT = 15.0


@dataclass
class Plan:
    """What has to be done, by group name."""

    renew: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    count: int = 0
    uneven: bool = False  # ranks have numbered groups differently
    reset: bool = False

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.renew or self.stale or self.lost or self.uneven or self.reset)


def plan(states: Mapping[int, Mapping[str, Any]], dead: Sequence[int], known_lost: Sequence[str] = ()) -> Plan:
    """Compare where ranks stand.

    Args:
        states: What idle ranks answered to "state", by rank. Groups with a member that is neither here nor dead are
            left alone: that rank is busy.
        dead: Ranks that have died.
        known_lost: Groups that were lost before.
    """
    found = Plan()
    groups: dict[str, list[int]] = {}
    for state in states.values():
        for name, (members, _, _) in state["groups"].items():
            groups.setdefault(name, members)
    for name, members in groups.items():
        if set(members) & set(dead):
            if name not in known_lost:
                found.lost.append(name)
        elif set(members) <= states.keys():
            _judge(found, name, [states[rank]["groups"].get(name) for rank in members])
    counts = {state["count"] for state in states.values()}
    found.count, found.uneven = max(counts, default=0), len(counts) > 1
    found.reset = bool(found.renew) or any(state["caught"] for state in states.values())
    return found


def _judge(found: Plan, name: str, members: Sequence[list[Any] | None]) -> None:
    present = [member for member in members if member is not None]
    if len(present) < len(members):
        found.stale.append(name)
    elif any(cut for _, _, cut in present) or len({tuple(entered) for _, entered, _ in present}) > 1:
        found.renew.append(name)


class Recovery:
    """The recovery after one cell.

    Args:
        serial: The cell.
        ranks: Where it ran.
        idle: Living ranks that run nothing.
        dead: Ranks that have died.
        generation: Of the process groups at present.
        lost: Groups that were lost before.

    Attributes:
        began: When it began.
        done: Whether all is over; then `text`, `generation` and `step` are final.
        lost: Groups that are lost for good.
    """

    def __init__(
        self,
        serial: int,
        ranks: Sequence[int],
        idle: Sequence[int],
        dead: Sequence[int],
        generation: int,
        lost: Sequence[str],
        now: float,
    ) -> None:
        self.serial = serial
        self.generation = generation
        self.text = ""
        self.step = 0
        self.done = not idle
        self.lost = list(lost)
        self.began = now
        self.due = now + _COMPARE_LIMIT
        self._ranks = [rank for rank in ranks if rank in idle]
        self._idle = list(idle)
        self._dead = list(dead)
        self._states: dict[int, dict[str, Any]] = {}
        self._plan: Plan | None = None
        self._reports: dict[int, InOrder] = {}

    def begin(
        self,
        ask: Callable[[Sequence[int], str, dict[str, Any]], None],
        tell: Callable[[Sequence[int], Recover], None],
    ) -> None:
        """Ask the ranks where they stand.

        Args:
            ask: Sends a question to control threads; answers come by `answered`.
            tell: Sends a Recover to ranks' main threads; what they did comes by `in_order`.
        """
        self._tell = tell
        if self._idle:
            ask(list(self._idle), "state", {"serial": self.serial})

    def answered(self, rank: int, data: dict[str, Any], now: float) -> None:
        """A rank has said where it stands."""
        if self._plan is not None or rank not in self._idle:
            return
        if "error" in data:
            self._idle.remove(rank)
        else:
            self._states[rank] = data
        if set(self._idle) <= self._states.keys():
            self._decide(now)

    def in_order(self, rank: int, report: InOrder) -> None:
        """A rank has done what it was told."""
        self._reports[rank] = report
        if set(self._idle) <= self._reports.keys():
            self._conclude()

    def died(self, rank: int, now: float) -> None:
        """A rank has died meanwhile."""
        if rank in self._idle:
            self._idle.remove(rank)
            self._states.pop(rank, None)
            if self._plan is None and set(self._idle) <= self._states.keys():
                self._decide(now)
            elif self._plan is not None and set(self._idle) <= self._reports.keys():
                self._conclude()

    def tick(self, now: float) -> None:
        """Time has passed: go on without those that do not answer."""
        if self.done or now < self.due:
            return
        if self._plan is None:
            self._idle = sorted(self._states)
            self._decide(now)
        else:
            missing = sorted(set(self._idle) - self._reports.keys())
            self.text = f"{describe_ranks(missing)} did not come to renew the process groups; `%distributed restart`"
            self.done = True

    def _decide(self, now: float) -> None:
        stopped = {self._states[rank]["stopped"] for rank in self._ranks if rank in self._states}
        self._plan = plan(self._states, self._dead, self.lost)
        if not self._plan.renew and len(stopped) == 1:
            self.step = next(iter(stopped)) or 0
        if not self._plan.needed or not self._idle:
            self._conclude()
            return
        found = self._plan
        if found.renew:
            self.generation += 1
        self.lost += found.lost
        self.due = now + _RENEW_LIMIT
        self._tell(
            self._idle,
            Recover(
                self.serial,
                self.generation,
                found.renew,
                found.stale,
                found.lost,
                self._dead,
                found.count,
                found.reset,
                list(self._idle),
            ),
        )

    def _conclude(self) -> None:
        self.done = True
        parts = []
        failures = sorted({report.failure for report in self._reports.values() if report.failure})
        if failures:
            parts.append(f"process groups could not be renewed ({failures[0]}): `%distributed restart`")
        elif self._plan is not None and self._plan.renew:
            parts.append(f"process groups rebuilt (generation {self.generation})")
        if any(report.gradients for report in self._reports.values()):
            parts.append("gradients of the interrupted step dropped")
        for note in dict.fromkeys(note for report in self._reports.values() for note in report.notes):
            parts.append(note)
        if self._plan is not None and self._plan.stale:
            parts.append("groups that not all of their ranks had were dropped: make them again")
        apart = self._apart()
        if apart:
            parts.append(apart)
        self.text = "; ".join(parts)

    def _apart(self) -> str:
        """Which ranks have made more steps than others in this cell, and what to type."""
        steps = {rank: self._states[rank]["steps"] for rank in self._ranks if rank in self._states}
        if len(set(steps.values())) < 2:
            return ""
        by_count: dict[int, list[int]] = {}
        for rank, count in steps.items():
            by_count.setdefault(count, []).append(rank)
        words = "; ".join(f"{describe_ranks(by_count[count])}: {count:,}" for count in sorted(by_count, reverse=True))
        ahead = by_count[max(by_count)][0]
        return (
            f"ranks have made different numbers of steps ({words}): "
            f"`nbdist.sync(model, optimizer, src={ahead})` on all ranks brings them together"
        )
