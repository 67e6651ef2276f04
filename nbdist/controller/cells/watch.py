"""Which rank waits for which: samples the ranks of a running cell now and then, and compares.

After 5 s of unequal progress it reports which rank waits where, and for which others. For a launch it also reports
which ranks still run when others have finished, and after 10 s gives up on ranks that wait for finished ones. For a
cell on some of the ranks it reports within a second that one waits for ranks that are not in it. After a rank has
failed, it names those that wait for it in vain. Until then it costs only a timer. It knows ranks only by their answers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from nbdist.base import limits
from nbdist.base.limits import Slack
from nbdist.base.ranks import ONE_NODE, RankNames
from nbdist.controller.base.inquiries import AskRanks
from nbdist.controller.cells.awaited_ranks import AwaitedRanks, differ
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.stopping import GetPosition, GetProcess, Position, ProcessState

_BUSY = 0.2  # of a core: a rank that uses more is computing, not waiting
_WORTH_SAYING = 5.0  # seconds: less is not certain, because a rank may have waited since before the first look
_STRANDED = 10.0  # seconds that a rank may wait for one that will not come
_CLAUSES = 5  # per line
Waits = Mapping[int, frozenset[int]]  # by waiting rank, for whom
_PLURAL = {"waits": "wait", "is": "are", "has": "have"}


@dataclass(frozen=True)
class Pauses:
    """When to look, in seconds.

    Attributes:
        absent: From the start of a cell on some of the ranks to a look for ranks that wait for others; also to a second
            one, if there are any.
        first: From the cell's start to the first look.
        confirm: To the second, if ranks seem to wait then.
        repeat: Between looks from then on.
        answer: Time for ranks to answer; one that does not is in a call that blocks Python.
        sample: Between the two looks that show whether a rank waits for one that has failed.
        failed: Between later looks, if those two were inconclusive.
    """

    absent: float = 0.4
    first: float = 4.0
    confirm: float = 1.0
    repeat: float = 5.0
    answer: float = 1.0
    sample: float = 0.3
    failed: float = 1.0

    def slower(self, slack: Slack) -> Pauses:
        """Return the pauses for answers that take longer."""
        between = {name: getattr(self, name) + slack.travel for name in ("confirm", "repeat", "sample", "failed")}
        return replace(self, answer=self.answer + slack.answers, **between)


class Watch:
    """Watches one running cell.

    Args:
        serial: The cell.
        ranks: Where it runs.
        grace: Seconds that ranks may wait for one that has failed.
        ask: Asks control threads.
        say: Shows a line below the cell, in place of the last one. Further arguments: whether only the time in it has
                changed; whether ranks are stuck.
        free: Frees ranks that wait in vain.
        now: The time in seconds, like all times here.
        pauses: When to look.
        launch: Whether the ranks exist only for this work, so that those that have finished wait for the others.
        part: Whether the session has ranks that the cell does not run on.
        strand: Ends what a rank waits in, because it can't happen any more. Further argument: the reason.
        names: How to name ranks.

    Attributes:
        waits: What ranks that have not moved wait in, and for which ranks, as last reported.
    """

    def __init__(
        self,
        serial: int,
        ranks: Sequence[int],
        grace: float,
        ask: AskRanks,
        say: Callable[[str, bool, bool], None],
        free: Callable[[Sequence[int]], None],
        now: float,
        pauses: Pauses | None = None,
        *,
        launch: bool = False,
        part: bool = False,
        strand: Callable[[int, str], None] = lambda rank, why: None,
        names: RankNames = ONE_NODE,
    ) -> None:
        self._pauses = pauses or Pauses()
        self.serial = serial
        self._began = now
        self._early = part  # look only for ranks that wait for ranks outside the cell
        self._due = now + (self._pauses.absent if part else self._pauses.first)
        self.waits: dict[int, str] = {}
        self._ranks = dict.fromkeys(ranks)  # in order, and quick to look up
        self._left = set(ranks)
        self._failed: set[int] = set()
        self._dead: set[int] = set()
        self._grace = grace
        self._launch = launch
        self._strand = strand
        self._names = names
        self._stranded: set[int] = set()
        self._returned: dict[int, float] = {}  # when ranks returned; in a launch, also those of other nodes
        self._finished_at: float | None = None  # when the first rank finished
        self._ask = ask
        self._say = say
        self._free = free
        self._asked = now
        self._answered = -math.inf  # when the last answer came
        self._looking = False  # a look has begun, and some ranks have not answered
        self._silent: set[int] = set()  # have not answered yet
        self._states: dict[int, ProcessState] = {}  # of processes that did not answer
        self._looks: dict[int, Position] = {}
        self._before: dict[int, Position] = {}
        self._earlier: dict[int, Position] = {}  # the look before the one that is compared
        self._since: dict[int, float] = {}  # when waiting ranks were first seen waiting
        self._told: tuple[dict[int, str], Set[int], bool] | None = None  # last report: waits, for whom, forever
        self._waited_since = 0.0

    @property
    def due(self) -> float:
        """The time of the next `tick`: not so soon that two looks show a record of torch's that is late."""
        return self._due if self._looking else max(self._due, self._answered + limits.PROOF)

    def ended(self, rank: int, failed: bool, now: float) -> None:
        """Note that a rank has left the cell."""
        self._left.discard(rank)
        if failed and not self._failed:
            self._looking = self._early = False
            self._before = {}
            self._due = now + max(0.0, self._grace - self._pauses.sample)
        if failed:
            self._failed.add(rank)
        else:
            self._returned[rank] = now
        if not failed and self._launch and self._finished_at is None:
            self._finished_at = now
            self._hasten(now)
        if not self._left:
            self._close(now, "" if self._failed else ", then went on")

    def returned(self, ranks: Sequence[int], now: float) -> None:
        """Note that ranks on a launch's other nodes have returned."""
        for rank in ranks:
            self._returned.setdefault(rank, now)

    def forget(self, rank: int) -> None:
        """Handle the death of a rank, which will not answer any more."""
        self._dead.add(rank)
        self._left.discard(rank)
        self._silent.discard(rank)
        self._looks.pop(rank, None)
        if rank in self._ranks:
            del self._ranks[rank]

    def answered(self, rank: int, look: Position | NoAnswer, now: float) -> None:
        """Handle a rank's report of what it does, or why it can't report."""
        self._answered = now
        self._silent.discard(rank)
        self._states.pop(rank, None)
        if isinstance(look, Position) and rank in self._ranks:
            self._looks[rank] = look
        if self._looking and not self._silent:
            self._compare(now)

    def tick(self, now: float) -> None:
        """Do what is due at this time."""
        if now < self.due:
            return
        if self._looking:
            self._compare(now)
        else:
            self._look(now)

    # --- looking

    def _look(self, now: float) -> None:
        # A rank that has not answered the last question is not asked again: its answer will be just as fresh.
        asked = [rank for rank in self._ranks if rank not in self._silent]
        self._silent.update(asked)
        self._looks = {}
        self._looking = True
        self._asked = now
        self._due = now + self._pauses.answer
        self._ask(asked, GetPosition(self.serial), self.answered)

    def _compare(self, now: float) -> None:
        self._looking = False
        if any(look.asking for look in self._looks.values()) and not self._failed:
            self._rest(now)
            return
        before, self._before = self._before, self._looks
        self._earlier = before
        if silent := sorted(self._silent & self._left):
            self._ask(silent, GetProcess(), self._found)
        compared = AwaitedRanks(self._looks, [*self._ranks, *(self._returned.keys() - self._ranks.keys())])
        awaited = {rank: who for rank in sorted(self._left) if (who := compared.of(rank))}
        if self._early:
            within = {*self._ranks, *self._dead}
            awaited = {rank: who for rank, who in awaited.items() if not who <= within}
        self._since = {
            rank: self._since.get(rank, before[rank].at)
            for rank in awaited
            if _is_same(self._looks[rank], before.get(rank))
        }
        self._due = max(now, self._next(bool(before), bool(awaited or self._stopped)))
        self._early = self._early and not before and bool(awaited)
        lost = self._in_vain(awaited) if self._failed else []
        if lost:
            self._free(lost)
        elif stranded := self._find_stranded(awaited, now):
            for rank, gone in stranded.items():
                self._strand(rank, f"{self._wait(rank)}, for {self._gone(gone)}")
            self._stranded |= stranded.keys()
        elif self._since:
            self._explain(awaited, now)
        elif self._stopped:
            self._explain_stopped(now)
        elif self._is_late(now):
            self._explain_late(now)
        else:
            self._hasten(now)
            self._close(now, ", then went on")

    def _found(self, rank: int, state: ProcessState | NoAnswer, now: float) -> None:
        """Note the state of a process that did not answer."""
        if isinstance(state, ProcessState) and rank in self._silent:
            self._states[rank] = state
            if rank in self._stopped and not self._looking:
                self._due = min(self._due, max(now, self._asked + self._pauses.confirm))

    @property
    def _stopped(self) -> list[int]:
        """Ranks whose processes are stopped, by a signal or a debugger."""
        return [
            rank for rank, found in sorted(self._states.items()) if found.state in ("T", "t") and rank in self._left
        ]

    def _rest(self, now: float) -> None:
        """Say nothing and end no waiting, as the user types: from then on all times are counted again."""
        self._before, self._since, self._early = {}, {}, False
        self._due = self._asked + self._pauses.repeat
        self._close(now, ", then went on")

    def _is_late(self, now: float) -> bool:
        """Return whether ranks of a launch still run seconds after another has finished."""
        return self._finished_at is not None and not self._failed and now >= self._finished_at + _WORTH_SAYING

    def _hasten(self, now: float) -> None:
        """Look again as soon as the ranks that still run are late."""
        if self._finished_at is not None and not self._failed and not self._looking:
            self._due = min(self._due, max(now, self._finished_at + _WORTH_SAYING))

    def _next(self, again: bool, suspicious: bool) -> float:
        """Return when to look again."""
        if self._failed:
            return self._asked + (self._pauses.failed if again else self._pauses.sample)
        if self._early and suspicious and not again:
            return self._asked + self._pauses.absent
        if self._early and not self._since:
            self._before = {}
            return self._began + self._pauses.first
        return self._asked + (self._pauses.confirm if suspicious and not again else self._pauses.repeat)

    # --- comparing

    def _in_vain(self, awaited: Waits) -> list[int]:
        """Return ranks that wait, directly or not, for one that has failed, or that all wait for each other."""
        if self._since.keys() == self._left:
            return sorted(self._left)
        lost = self._failed | self._dead
        found: set[int] = set()
        while more := {rank for rank in self._since if awaited[rank] & (lost | found)} - found:
            found |= more
        return sorted(found)

    def _find_stranded(self, awaited: Waits, now: float) -> dict[int, set[int]]:
        """Return ranks that have waited too long for ranks that have returned, with the ranks they wait for."""
        if self._failed:
            return {}
        found = {}
        for rank in self._since.keys() - self._stranded:
            if not (self._launch or self._looks[rank].meeting):  # another cell may bring the others there
                continue
            gone = {
                other for other in awaited[rank] & self._returned.keys() if self._left_out(other, self._looks[rank])
            }
            if not gone:
                continue
            due = max(self._since[rank], *(self._returned[other] for other in gone)) + _STRANDED
            if due <= now:
                found[rank] = gone
            else:
                self._due = min(self._due, due)
        return found

    def _left_out(self, returned: int, look: Position) -> bool:
        """Return whether a rank has returned without entering what another waits in; what it has begun may go on."""
        there = self._looks.get(returned)
        if there is None:
            return returned not in self._ranks  # nothing else is known of ranks on other nodes
        if look.group not in look.groups or look.group not in there.groups:
            return True
        entered, waited_for = (sum(each.groups[look.group].entered) for each in (there, look))
        return entered < waited_for

    # --- reporting

    def _explain(self, awaited: Waits, now: float) -> None:
        mismatch = self._mismatch(awaited)
        waits = {rank: self._wait(rank, exactly=bool(mismatch)) for rank in awaited}
        names = {who: self._names.describe(who) for who in set(awaited.values())}
        self.waits = {rank: f"{waits[rank]}, for {names[awaited[rank]]}" for rank in sorted(self._since)}
        whom = _union(awaited)
        rest = {rank: self._elsewhere(rank) for rank in sorted((self._left | whom) - awaited.keys())}
        text = mismatch + self._sentence(waits, rest)
        never = self._never(awaited)
        if never:
            text += ". They wait for each other, so none of them can continue"
        news = (waits, whom - awaited.keys(), never)  # where the others are changes all the time
        same, self._told = news == self._told, news
        self._waited_since = min(self._since.values())
        seconds = now - self._waited_since
        self._say(f"for {seconds:.0f} s {text}" if seconds >= _WORTH_SAYING else text, same, True)

    def _mismatch(self, awaited: Waits) -> str:
        """Return what ranks do differently that are in the same collective of the same group; "" if nothing is."""
        calls = [self._looks[rank] for rank in sorted(awaited) if self._looks[rank].sequence]
        calls.sort(key=lambda look: (look.group, look.sequence))
        pairs = [(one, other) for one, other in itertools.pairwise(calls) if one.group == other.group]
        same = [(one, other) for one, other in pairs if one.sequence == other.sequence]
        if any(one.collective != other.collective for one, other in same):
            return "mismatched collectives: "
        if any(differ(one, other) for one, other in same):
            return "mismatched tensors: "
        return "not at the same collective: " if len(same) < len(pairs) else ""

    def _explain_stopped(self, now: float) -> None:
        news: tuple[dict[int, str], Set[int], bool] = ({}, set(self._stopped), False)
        same, self._told = news == self._told, news
        self._waited_since = now if not same else self._waited_since
        self._say(self._sentence({}, {rank: self._elsewhere(rank) for rank in self._stopped}), same, True)

    def _explain_late(self, now: float) -> None:
        assert self._finished_at is not None
        who = self._names.describe([rank for rank in self._ranks if rank not in self._left])
        where = self._sentence({}, {rank: self._elsewhere(rank) for rank in sorted(self._left)})
        news: tuple[dict[int, str], Set[int], bool] = ({}, set(self._left), False)
        same, self._told = news == self._told, news
        self._waited_since = self._finished_at
        self._say(f"{who} finished {now - self._finished_at:.0f} s ago; {where}", same, True)

    def _sentence(self, waits: dict[int, str], rest: dict[int, str]) -> str:
        """Describe what each rank does, grouping ranks that do the same."""
        clauses = [self._clause(ranks, words) for words, ranks in [*_by_words(waits).items(), *_by_words(rest).items()]]
        if len(clauses) > _CLAUSES:
            clauses[_CLAUSES:] = ["`%distributed stacks` shows the others"]
        return "; ".join(clauses)

    def _clause(self, ranks: Sequence[int], words: str) -> str:
        """Return a clause for several ranks, from the clause for each."""
        verb, _, rest = words.partition(" ")
        return f"{self._names.describe(ranks)} {verb if len(ranks) == 1 else _PLURAL[verb]} {rest}"

    def _wait(self, rank: int, *, exactly: bool = False) -> str:
        look = self._looks[rank]
        if not exactly or not look.sequence:
            return f"waits in {look.collective}, {look.place}"
        tensors = f" ({look.tensors})" if look.tensors else ""
        return f"waits in {look.collective} #{look.sequence:,} of {look.label}{tensors}, {look.place}"

    def _gone(self, ranks: set[int]) -> str:
        """Describe ranks that will not arrive any more, and what to do about it."""
        who, has = self._names.describe(ranks), "has" if len(ranks) == 1 else "have"
        if self._launch:
            return f"{who}, which {has} returned: make the same calls on all ranks before the function returns"
        return f"{who}, which {has} finished the cell: call it on all ranks, not under `if is_main_process()`"

    def _elsewhere(self, rank: int) -> str:
        if rank in self._dead:
            return "has died"
        if rank not in self._ranks:
            return "is on another node" if self._launch else "is not in this cell"
        if rank in self._failed:
            return "has failed"
        look = self._looks.get(rank)
        if rank in self._stopped:
            found = self._states[rank]
            how = "by a debugger" if found.state == "t" else f"by a signal: `kill -CONT {found.pid}` lets it continue"
            return f"is stopped {how}"
        if look is None:
            return "is in a call that blocks Python"
        if rank not in self._left or not look.running:
            return "has finished the cell"
        verb = "is computing" if _computes(look, self._earlier.get(rank)) else "is"
        return f"{verb} at {look.line}" if look.line else "is still running"

    def _never(self, awaited: Waits) -> bool:
        """Return whether all remaining ranks wait only for each other."""
        known = all(self._looks[rank].members is None or self._looks[rank].members for rank in awaited)
        return known and self._since.keys() == self._left and _union(awaited) <= self._left

    def _close(self, now: float, end: str) -> None:
        """Replace the line that was shown: it is no longer true."""
        if self._told is None:
            return
        seconds = now - self._waited_since
        waited = f"waited {seconds:.0f} s" if seconds >= _WORTH_SAYING else "waited"
        _, others, _ = self._told
        whom = f" for {self._names.describe(others)}" if others else ""
        self._told, self.waits = None, {}
        self._say(f"{waited}{whom}{end}", False, False)


def _is_same(look: Position, before: Position | None) -> bool:
    """Return whether a rank has neither moved nor computed since."""
    if before is None or _where(look) != _where(before):
        return False
    # CUDA uses the processor while it waits, so this counts only where no collective is known to be in progress.
    known = look.members is None or bool(look.members)
    known = known or any(before.unfinished.get(name) == at for name, at in look.unfinished.items())
    return known or (look.cpu - before.cpu) / max(1e-3, look.at - before.at) < _BUSY


def _computes(look: Position, before: Position | None) -> bool:
    """Return whether a rank has used a processor since."""
    return before is not None and (look.cpu - before.cpu) / max(1e-3, look.at - before.at) >= _BUSY


def _union(awaited: Waits) -> frozenset[int]:
    return frozenset().union(*set(awaited.values()))  # most ranks wait for the same


def _where(look: Position) -> tuple[object, ...]:
    return look.running, look.position, [sum(group.entered) for group in look.groups.values()]


def _by_words(words: dict[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in words.items():
        groups.setdefault(text, []).append(rank)
    return groups
