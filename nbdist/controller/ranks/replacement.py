"""Replaces ranks that have died: newcomers are forked in their places, set up, and join the groups of the living.

By the same steps ranks are given up, and others added: then all get another default group.

Goes on as far as it can at each call of `go_on`. Handles messages, not sockets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from nbdist.base.ranks import describe_ranks, format_ranks
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.cells.recovery import Recovery
from nbdist.controller.ranks.membership import Membership
from nbdist.wire.lanes import RANK_CELL
from nbdist.wire.messages.cells import InOrder
from nbdist.wire.messages.healing import Adopt, GroupRecipe, Healed, HealFailed, Replaced
from nbdist.wire.messages.rank_processes import Ready
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.stopping import GetState, RankState

_Phase = Literal["end", "start", "adopt", "set up", "resize", "join", "give up"]
_FREED_LIMIT = 15.0  # seconds for the living to leave the cell in which others have died
_ANSWER_LIMIT = 30.0  # seconds for the living to report where they are, and for all to renew their groups
_END_LIMIT = 5.0  # seconds for newcomers to end that are not wanted any more
_AGAIN = "Try again"
_FRESH = "`%distributed restart` starts fresh ranks"
KILLED = "it was ended by `%distributed heal --kill` or `shrink`"


@dataclass(frozen=True)
class MembershipChange:
    """What becomes of a set of ranks.

    Attributes:
        newcomers: The numbers of ranks that are to come.
        ended: Living ranks that are to be ended first.
        numbers: The new numbers of the ranks that stay, by their old ones, if there are to be more or fewer.
        coming: Likewise of the newcomers.
    """

    newcomers: Sequence[int]
    ended: Sequence[int]
    numbers: Mapping[int, int] | None = None
    coming: Mapping[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many ranks there will be, if there are to be more or fewer."""
        return len(self.numbers or ()) + len(self.newcomers)


class Replacement:
    """One replacement of ranks, or other change of who they are.

    Args:
        membership: Carries out each step.
        change: Who comes, and who goes.
        patience: Seconds without progress after which it fails.
        now: The time.

    Attributes:
        over: Whether it is at its end.
        due: When to call `go_on` at the latest; None while the notebook sets the newcomers up.
    """

    def __init__(self, membership: Membership, change: MembershipChange, patience: float, now: float) -> None:
        self._membership = membership
        self._roster, self._outbox, self._cells = membership.roster, membership.outbox, membership.cells
        self._change = change
        self._ranks = list(change.newcomers)
        self._alive = set(change.ended)
        self._group = ""  # the name of another default group
        self._resized = False  # whether the living have heard of it
        self._patience = patience
        self._phase: _Phase = "end"
        self._states: dict[int, RankState] = {}  # where the living are
        self._asked: set[int] = set()
        self._adopting: set[int] = set()
        self._forked: set[int] = set()  # newcomers whose end is not known
        self._failure = ""
        self.over = False
        self.due: float | None = now + min(patience, _FREED_LIMIT)
        for rank in change.ended:
            membership.end_rank(rank)

    def cause(self, rank: int) -> str:
        """Return why a rank has ended, if that was our doing."""
        return KILLED if rank in self._alive else ""

    # --- events

    def ended(self, rank: int, how: str) -> None:
        """Note the end of a rank: one that was to end, a newcomer, or another."""
        self._forked.discard(rank)
        if rank in self._alive:
            self._alive.discard(rank)
        elif self._resized:
            self._note_failure(rank, f"rank {rank} ended meanwhile: {how}")
        elif rank in self._ranks:
            self.fail(f"rank {self._number(rank)} ended while it took its place: {how}\n{_AGAIN}")
        else:
            self.fail(f"rank {rank} ended meanwhile: {how}\n{_AGAIN}")
        if self._phase == "give up" and not self._forked and not self.over:
            self._end()

    def ready(self, rank: Rank, message: Ready, now: float) -> None:
        """Note that a newcomer is up, or why it is not."""
        if message.failure:
            self.fail(f"rank {self._number(rank.rank)} did not come up: {message.failure}. {_AGAIN}")
            return
        rank.ready, rank.device = True, message.device
        self.due = now + self._patience

    def get_on(self, now: float) -> None:
        """Note that what newcomers are forked from makes progress."""
        if self._phase == "start":
            self.due = now + self._patience

    def in_order(self, rank: int, report: InOrder) -> bool:
        """Note that a newcomer has adopted its groups, or one that stays another default group. False: neither."""
        if rank not in self._adopting:
            return False
        self._adopting.discard(rank)
        if report.failure and self._resized:
            self._failure = self._failure or f"rank {rank} could not change its groups ({report.failure}). {_FRESH}"
        elif report.failure:
            who = f"rank {self._number(rank)}"
            self.fail(f"{who} could not take its place in the process groups ({report.failure}). {_FRESH}")
        elif not self._adopting and self._phase == "adopt":
            self._settle()
        self._join_if_resized()
        return True

    def _settle(self) -> None:
        """Have the newcomers take their places, and the notebook set them up."""
        self._forked = {self._number(rank) for rank in self._forked}
        infos = self._membership.settle()
        self._ranks = [info.rank for info in infos]
        self._enter("set up", None)
        cells = self._membership.history.cells
        self._outbox.to_notebook(Replaced(infos, cells, dict(self._change.numbers or {})))

    def _number(self, rank: int) -> int:
        """Return the number by which the notebook is to know a newcomer."""
        return self._change.coming.get(rank, rank) if rank in self._roster.newcomers else rank

    def _note_failure(self, rank: int, why: str) -> None:
        """Go on all the same: those that have other groups by now must have them connected, or lose them."""
        self._failure = self._failure or why
        self._adopting.discard(rank)
        self._join_if_resized()

    def _join_if_resized(self) -> None:
        if not self._adopting and self._phase == "resize":
            self._join(time.monotonic())

    def join_groups(self, now: float) -> None:
        """Bring the newcomers into their groups: they are set up."""
        if self._phase == "set up" and self._change.numbers is not None:
            self._resize(self._change.numbers, now)
        elif self._phase == "set up":
            self._join(now)

    def _resize(self, numbers: Mapping[int, int], now: float) -> None:
        """Have those that stay be as many as there are to be. From here on there is no way back."""
        self._enter("resize", now + _ANSWER_LIMIT)
        self._resized = True
        self._adopting = set(numbers.values())
        self._membership.resize(numbers, self._group)

    def _join(self, now: float) -> None:
        self._enter("join", now + _ANSWER_LIMIT)
        self._cells.admit(self._ranks, self._admitted, now)

    @property
    def undone(self) -> bool:
        """Whether it is over, and nobody has changed."""
        return self.over and bool(self._failure) and not self._resized

    def go_on(self, now: float) -> None:
        """Do what can be done now."""
        if self.over or self.due is None:
            return
        if now >= self.due:
            self._be_late()
        elif self._phase == "end" and not self._alive and self._cells.quiet:
            self._fork(now)
        if self._phase == "start" and all(rank.ready for rank in self._roster.newcomers.values()):
            self._ask(now)

    # --- steps

    def _enter(self, phase: _Phase, due: float | None) -> None:
        self._phase, self.due = phase, due
        self._roster.apart = set(self._ranks) if phase == "set up" else ()

    def _fork(self, now: float) -> None:
        self._enter("start", now + self._patience)
        for rank in self._ranks:
            self._forked.add(rank)
            self._membership.fork(rank)

    def _ask(self, now: float) -> None:
        """Ask the living which groups the newcomers take their places in."""
        self._enter("adopt", now + _ANSWER_LIMIT)
        self._asked = set(self._roster.idle())
        self._cells.ask(sorted(self._asked), GetState(0, recipes=True), self._answered)

    def _answered(self, rank: int, state: RankState | NoAnswer, now: float) -> None:
        self._asked.discard(rank)
        if isinstance(state, RankState):
            self._states[rank] = state
        if self._asked or self._phase != "adopt":
            return
        numbers = self._change.numbers
        if numbers is None:
            self._adopt(self._recipes(self._states))
            return
        default = [found for state in self._states.values() for found in state.recipes.values() if found.default]
        whole = len(default) == len(numbers)  # else there is none, or a cell has destroyed it
        self._group = str(max(state.count for state in self._states.values())) if whole else ""
        if not self._ranks:
            self._resize(numbers, now)
        else:
            members = list(range(self._change.size))
            self._adopt({self._group: msgspec.structs.replace(default[0], members=members)} if whole else {})

    def _recipes(self, states: Mapping[int, RankState]) -> dict[str, GroupRecipe]:
        """Return how the groups are made that newcomers have a place in."""
        recipes: dict[str, GroupRecipe] = {}
        for state in states.values():
            recipes |= {name: recipe for name, recipe in state.recipes.items() if name not in recipes}
        there = {*states, *self._ranks}
        return {
            name: recipe
            for name, recipe in recipes.items()
            if there.issuperset(recipe.members) and not set(recipe.members).isdisjoint(self._ranks)
        }

    def _adopt(self, recipes: dict[str, GroupRecipe]) -> None:
        self._adopting = set(self._ranks)
        for rank in self._ranks:
            self._outbox.to_rank(RANK_CELL, rank, Adopt(recipes))

    def _admitted(self, recovery: Recovery) -> None:
        if self._phase != "join":
            return
        if self._failure:
            self._end()
            return
        if recovery.failure:
            self.fail(f"{recovery.failure}. {_FRESH}")
            return
        self.over = True
        if self._change.numbers is not None:
            self._membership.history.include(self._ranks, self._change.numbers.values())
        self._outbox.to_notebook(Healed(recovery.generation, len(recovery.renewed), recovery.notes))

    # --- failure

    def _be_late(self) -> None:
        if self._phase == "give up":
            self._end()
        elif self._phase == "end":
            self.fail(self._describe_busy())
        elif self._phase == "start":
            missing = [self._number(number) for number, rank in self._roster.newcomers.items() if not rank.ready]
            self.fail(f"{describe_ranks(missing)} did not come up within {self._patience:g} s. {_AGAIN}")
        else:
            who = self._asked or self._adopting
            silent = describe_ranks(who) if who else "ranks"
            self.fail(f"{silent} did not answer for {_ANSWER_LIMIT:g} s. `%distributed stacks` shows where ranks are")

    def _describe_busy(self) -> str:
        busy = sorted(self._roster.busy() - set(self._ranks))
        if not busy:
            return f"the other ranks are still being restored. {_AGAIN}"
        all_of_them = format_ranks(sorted({*busy, *self._ranks}))
        verb, it, its = ("runs", "it", "its") if len(busy) == 1 else ("run", "them", "their")
        return (
            f"{describe_ranks(busy)} still {verb} a cell. `%distributed interrupt` stops it; if that does not help, "
            f"`%distributed heal -r {all_of_them} --kill` replaces {it}, too, and {its} variables are lost"
        )

    def interrupt(self) -> None:
        """Give up at the user's request, unless there is no way back any more."""
        if not self._resized:
            self.fail("it was interrupted")

    def fail(self, why: str) -> None:
        """Give up, and end the newcomers."""
        if self.over or self._phase == "give up":
            return
        self._enter("give up", time.monotonic() + _END_LIMIT)
        self._failure = why
        for rank in self._forked:
            self._membership.end_rank(rank)
        if not self._forked:
            self._end()

    def _end(self) -> None:
        self.over = True
        self._roster.newcomers = {}
        if self._change.numbers is not None and not self._resized:
            self._membership.dismiss(self._ranks)
        self._outbox.to_notebook(HealFailed(self._failure))
