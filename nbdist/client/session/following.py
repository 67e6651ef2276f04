"""Shows what a session does that another client drives: its cells, what they print, how they end."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted, size, span
from nbdist.client.base import interruption
from nbdist.client.output.publisher import Publisher
from nbdist.client.output.screen import Screen
from nbdist.client.ranks.background import rendered
from nbdist.client.reports import report
from nbdist.errors import UsageError
from nbdist.visits import Found, SessionGone, Visitor, of_this_machine, reach
from nbdist.wire.messages.cells import Reply
from nbdist.wire.messages.output import Output
from nbdist.wire.messages.visitor_messages import Follow, Followed, FollowedCell, Overtaken, Printed

_EVERY = 0.2  # seconds between two questions, where there was nothing more to read
_FIRST_LINE = 60  # characters of a cell that name it
_SHOWN = ("cell", "call", "launch")  # kinds of what runs that are the user's own


class Following:
    """Follows a session until it ends, or `stop`. In a thread of its own, below the cell that began it.

    What begins there after this has returned is shown.

    Args:
        name: The session's name, or its beginning; None: the only one that this process does not drive.

    Attributes:
        name: The session's.

    Raises:
        UsageError: There is no such session, or several.
    """

    def __init__(self, name: str | None = None) -> None:
        self._found = _choose(name)
        self.name = self._found.name
        self._stop, self._begun = threading.Event(), threading.Event()
        self._view = _View(self.name)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._follow,), name="nbdist-follow", daemon=True)
        self._thread.start()
        try:
            interruption.wait_for(self._begun)
        except KeyboardInterrupt:
            self.stop()
            raise

    @property
    def refusal(self) -> str:
        """Why cells don't run on these ranks, and what to type; "" once it no longer follows."""
        if not self._thread.is_alive():
            return ""
        return (
            f"this notebook follows session {self.name}, which is driven by {self._view.driver or self._found.holder}: "
            f"`%distributed attach {self.name} --take` takes it over"
        )

    def wait(self) -> None:
        """Wait for the session's end. Ctrl-C ends following, and nothing else."""
        try:
            while self._thread.is_alive():
                self._thread.join(0.2)  # one without a limit would not hear Ctrl-C before Python 3.12
        except KeyboardInterrupt:
            self.stop()

    def stop(self) -> None:
        """Follow no longer. The session does not notice."""
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            with Visitor(self._found.key_file) as visitor:
                answer = visitor.ask(Follow())
                while not self._stop.is_set():
                    if not isinstance(answer, Followed):
                        self._view.miss()
                        self._begun.set()
                        answer = visitor.wait()  # asked twice, it would answer twice
                        continue
                    self._view.show(answer)
                    self._begun.set()
                    if not answer.printed:
                        self._stop.wait(_EVERY)
                    answer = visitor.ask(Follow(answer.position, answer.seen))
                self._view.end(f"session {self.name} is no longer being followed")
        except SessionGone:
            self._view.end(f"session {self.name} has ended")
        finally:
            self._begun.set()


def _choose(name: str | None) -> Found:
    if name is not None:
        return reach(name)
    found = [each for each in of_this_machine() if not each.is_own]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(each.name for each in found)
        raise UsageError(
            f"there are {counted(len(found), 'session')} ({names}): give the name of one, as in "
            f"`follow {found[0].name}`. `nbdist ls` describes them"
        )
    raise UsageError("there is no session to follow: you have no other session on this machine")


@dataclass
class _Shown:
    """A cell on the page. `early`: what it printed before it was known."""

    cell: FollowedCell | None = None
    screen: Screen | None = None
    early: list[Printed] = field(default_factory=list)


class _View:
    """What is shown of a session, cell by cell."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cells: dict[int, _Shown] = {}
        self._screen = Screen([], Publisher(0), f"follow-{name}")
        self._has_ranks: bool | None = None
        self._missing = False
        self.driver = ""

    def show(self, news: Followed) -> None:
        """Show what is new."""
        self._missing = False
        self._show_driver(news)
        self._show_missed(news.missed)
        for cell in (*news.running, *news.ended):
            self._begin(cell)
        for printed in news.printed:
            self._print(printed)
        for cell in news.ended:
            self._end(cell)
        self._show_ranks(news.ranks)
        self._poll()

    def miss(self) -> None:
        """Show that the session does not answer, once until it does."""
        if not self._missing:
            self._screen.say(f"session {self._name} does not answer; `nbdist ls` shows whether it is there")
        self._missing = True

    def end(self, text: str) -> None:
        """Show what still waits, and why nothing follows."""
        for shown in self._cells.values():
            if shown.screen is not None:
                shown.screen.finish(time.monotonic())
        self._screen.say(text)

    def _show_driver(self, news: Followed) -> None:
        who = f"{news.notebook} (pid {news.kernel})" if news.notebook else f"pid {news.kernel}"
        driver = f"no client ({news.left})" if news.left is not None else who
        if driver == self.driver:
            return
        if not self.driver:
            self._screen.say(f"following session {self._name}: {counted(len(news.ranks), 'rank')}, driven by {driver}")
        else:
            self._screen.say(f"the session is now driven by {driver}")
        self.driver = driver

    def _show_ranks(self, ranks: Sequence[int]) -> None:
        """Show that all ranks have ended, or that there are new ones."""
        if self._has_ranks is not None and self._has_ranks != bool(ranks):
            what = f"has {counted(len(ranks), 'rank')} now" if ranks else "no longer has ranks"
            self._screen.say(f"session {self._name} {what}")
        self._has_ranks = bool(ranks)

    def _show_missed(self, missed: Overtaken) -> None:
        if missed.ends or missed.output:
            what = [counted(missed.ends, "cell")] if missed.ends else []
            what += [f"{size(missed.output)} of output"] if missed.output else []
            self._screen.say(f"{' and '.join(what)} went by too fast to be shown here")

    def _begin(self, cell: FollowedCell) -> None:
        shown = self._cells.setdefault(cell.serial, _Shown())
        if shown.cell is not None or cell.kind not in _SHOWN:
            return
        shown.cell = cell
        shown.screen = Screen(cell.ranks, Publisher(cell.number), f"follow-{self._name}-{cell.serial}")
        since = f", for {span(cell.seconds)}" if cell.seconds >= 1.0 and not cell.ends else ""
        first = next((line.strip() for line in cell.code.splitlines() if line.strip()), "")
        self._screen.say(f"{_title(cell)} on {describe_ranks(cell.ranks)}{since}: {first[:_FIRST_LINE]}")
        for printed in shown.early:
            self._print(printed)
        shown.early.clear()

    def _print(self, printed: Printed) -> None:
        shown = self._cells.setdefault(printed.serial, _Shown())
        if shown.screen is None:
            shown.early.append(printed)
        else:
            shown.screen.print(Output(printed.rank, printed.stream, printed.data), time.monotonic())

    def _end(self, cell: FollowedCell) -> None:
        shown = self._cells.pop(cell.serial)
        if shown.screen is None:
            return
        for rank in cell.ranks:
            shown.screen.end_rank(rank, time.monotonic())
        shown.screen.finish(time.monotonic())
        ends = [report.from_reply(end) if isinstance(end, Reply) else report.from_death(end, "") for end in cell.ends]
        failures = [failure for failure in ends if failure is not None]
        if not failures:
            self._screen.say(f"{_title(cell)} has ended")
            return
        failed = {failure.rank for failure in failures}
        error = report.build(failures, [rank for rank in cell.ranks if rank not in failed])
        self._screen.say(f"{_title(cell)} has failed:\n{rendered(error)}")

    def _poll(self) -> None:
        for shown in self._cells.values():
            if shown.screen is not None:
                shown.screen.poll(time.monotonic())


def _title(cell: FollowedCell) -> str:
    return f"cell {cell.number}" if cell.kind == "cell" and cell.number else "a function"
