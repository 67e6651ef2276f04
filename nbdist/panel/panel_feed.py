"""What a page is told of the ranks: follows a session, takes Samples, and does what a reader asks.

Owns what one page, or several that show the same, knows. Independent of widgets, of how messages travel, or of
what values mean (`model`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, get_args

import msgspec

from nbdist.base.text import size
from nbdist.client.costs.cell_steps import measure_peaks, without_peak
from nbdist.client.costs.monitor import Monitor
from nbdist.client.session.current import current_session
from nbdist.client.session.session import Session
from nbdist.errors import NbdistError, UsageError
from nbdist.metrics.allocation import memory_snapshot
from nbdist.metrics.node.sample import Sample
from nbdist.panel.model import View, view_of
from nbdist.panel.updates import Updates
from nbdist.visits import client_of, of_this_machine
from nbdist.wire.pages.panel_messages import (
    ChooseRow,
    Live,
    MeasurePeak,
    PanelFrame,
    PanelNews,
    PanelNote,
    PanelWish,
    Pause,
    SetRate,
    ShowMetric,
    TakeSnapshot,
    ViewClosed,
    ViewOpened,
)

_LOOK_AROUND = 10.0  # seconds between two looks for sessions without a client
_NAMED = 2  # of these sessions
_PEAK_SECONDS = 1.0  # that a measurement of the peak takes, about
_WISHES = [each.__struct_config__.tag for each in get_args(PanelWish)]
REST_AFTER = 60.0  # seconds without a cell after which pages hear no more: a Jupyter server takes that for activity
_FIRST_LOOK = 1.0  # seconds that somebody who asks for values waits for something to show


class SampleSource(Protocol):
    """Where Samples come from; a `Monitor` is one."""

    rate: float

    def subscribe(self, watcher: Callable[[Sample], None], /) -> Callable[[], None]:
        """Call this with each Sample, from any thread. Returns what ends it."""


class Feed:
    """Tells a page what is new.

    Args:
        send: Sends the page a message; called in any thread.
        send_all: Sends the page `state()` instead of all that it knew.
        session: What to look at; None: the notebook's session, whichever is the newest, and this process while there
            is none.
        source: Where Samples come from instead of a session.

    Attributes:
        identity: Names it among all of a notebook.
        ended: Whether its session has.
        stale: Whether something has been seen since this was last set to False.
        shown: Whether it stays awake without pages.
        view: What was seen last.
    """

    def __init__(
        self,
        send: Callable[[PanelNews], None],
        send_all: Callable[[], None],
        session: Session | None = None,
        source: SampleSource | None = None,
    ) -> None:
        self.identity = secrets.token_hex(4)
        self.ended = self.stale = self.shown = False
        self.view: View | None = None
        self._send = send
        self._send_all = send_all
        self._lock = threading.RLock()  # what the page knows: the monitor's thread and the notebook's change it
        self._updates = Updates(self.identity)
        self._left_alone = LeftAlone()
        self._seen = threading.Event()
        self._session: weakref.ref[Session] | None = None
        self._follows = session is None and source is None
        self._source: SampleSource = source or Monitor.of(None)
        self._rate: float | None = None  # that somebody has asked for; a new session's monitor has its own
        self._unsubscribe: Callable[[], None] | None = None
        self._without_peak: list[str] = []  # dtypes of the steps that were seen last
        self._views = 0  # that pages have opened and not closed again
        self._paused = False
        self._quiet = False  # nothing has happened for long
        self._happened = time.monotonic()  # when ranks have run a cell, or a reader has asked for something
        self._states: list[str] = []  # of ranks, then
        if session is not None:
            self._attach(session)

    @property
    def rate(self) -> float:
        """Seconds between two looks.

        Raises:
            UsageError: It is out of bounds.
        """
        return self._source.rate

    @rate.setter
    def rate(self, seconds: float) -> None:
        self._source.rate = self._rate = seconds
        self._tell()

    @property
    def paused(self) -> bool:
        """Whether it rests."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._note_event()
        if paused:
            self.rest()
        elif self.shown or self._views:
            self._wake()
        self._tell()

    @property
    def of_session(self) -> bool:
        """Whether it looks at a session, and not at this process."""
        return self._session is not None

    def show(self) -> None:
        """Turn to the newest session and stay awake, with or without pages."""
        self.follow()
        self.shown, self._paused = True, False
        self._note_event()
        self._wake()

    def rest(self) -> None:
        """Look no more; the page keeps what it shows."""
        with self._lock:
            if self._unsubscribe is not None:
                self._unsubscribe()
                self._unsubscribe = None

    # --- Samples

    def state(self) -> PanelFrame:
        """Return what the page knows, for a page that opens now."""
        with self._lock:
            return self._updates.state()

    def _attach(self, session: Session) -> None:
        self._session, self._source = weakref.ref(session), Monitor.of(session)
        if self._rate is not None:
            self._source.rate = self._rate

    def follow(self) -> None:
        """Turn to the notebook's newest session. When one has ended its last values stay until there is another."""
        newest = current_session()
        if self._follows and newest is not None and not _is_over(newest) and newest is not self._looked_at():
            with self._lock:
                watching = self._unsubscribe is not None
                self.rest()
                self._attach(newest)
                self.view = None
                if watching:
                    self._wake()
        ended = self._session is not None and _is_over(self._looked_at())
        if ended != self.ended:
            self.ended = self.stale = ended
            self._tell()

    def _looked_at(self) -> Session | None:
        return self._session() if self._session is not None else None

    def _wake(self) -> None:
        with self._lock:
            if self._unsubscribe is None:
                source = self._source
                self._unsubscribe = source.subscribe(lambda sample: self._on_sample(source, sample))

    def _on_sample(self, source: SampleSource, sample: Sample) -> None:
        """Handle a Sample. In the monitor's thread, which others need too."""
        if source is not self._source or (self._session is not None and _is_over(self._looked_at())):
            return  # a look that was under way when its session ended
        try:
            self._without_peak = without_peak(rank.step for rank in sample.ranks if rank.step is not None)
            self._take(view_of(sample, self._left_alone.words()))
        except Exception as error:  # a mistake of ours: the panel says so, and others get their samples
            self.rest()
            with contextlib.suppress(Exception):  # the notebook may be going
                self._say(f"the panel has stopped: {type(error).__name__}: {error}")

    def _take(self, view: View) -> None:
        with self._lock:
            self.view, self.stale = view, True
            was_quiet, self._quiet = self._quiet, not self._is_new(view)
            if self._quiet:
                if not was_quiet:
                    self._tell()
            elif self._updates.fits(view):
                self._send(self._updates.update(view, self._live(), self.rate))
            else:
                self.send_all()
        self._seen.set()

    def _is_new(self, view: View) -> bool:
        """Return whether ranks run a cell, or something has happened lately."""
        states = [row.state for row in view.rows]
        if states != self._states or not {"idle", "dead"}.issuperset(states):
            self._states = states
            self._note_event()
        return time.monotonic() - self._happened < REST_AFTER

    def _note_event(self) -> None:
        self._happened, self._quiet = time.monotonic(), False

    def send_all(self) -> None:
        """Send the page everything again, after a look."""
        assert self.view is not None
        with self._lock:
            self._updates.reset(self.view, self._live(), self.rate)
            self._send_all()

    def _live(self) -> Live:
        return "ended" if self.ended else "paused" if self._paused or self._quiet else "live"

    def _tell(self) -> None:
        """Report a change that no Sample brings."""
        with self._lock:
            self._send(self._updates.update_head(self._live(), self.rate))

    def look(self) -> View | None:
        """Return what is in view; where nobody watches, what is seen now."""
        self.follow()
        if self.view is not None and (self._unsubscribe is not None or self._paused or self.ended):
            return self.view
        watching = self._unsubscribe is not None
        self._seen.clear()
        self._wake()
        self._seen.wait(_FIRST_LOOK)
        if not watching:
            self.rest()
        return self.view

    # --- what a reader asks

    def read(self, content: Any) -> None:
        """Handle what a page has sent: nonsense is answered by a note, and what another version sends by nothing."""
        try:
            wish = msgspec.convert(content, PanelWish)
        except msgspec.ValidationError:
            if isinstance(content, dict) and content.get("type") in _WISHES:
                self._say(f"the page sent something that makes no sense here: {content!r}"[:200])
            return
        self.hear(wish)

    def hear(self, wish: PanelWish) -> None:
        """Do what a reader wants; a note says why it can't be done."""
        try:
            self._do(wish)
        except NbdistError as error:
            self._say(str(error).splitlines()[0])

    def _do(self, wish: PanelWish) -> None:
        self._happened = time.monotonic()
        match wish:
            case ViewOpened():
                self._on_opened()
            case ViewClosed():
                self._on_closed()
            case Pause(value):
                self.paused = value
            case SetRate(value):
                self.rate = value
            case ChooseRow(value):
                self._updates.chosen = value
            case ShowMetric(value):
                self._updates.metric = value
            case MeasurePeak():
                self._on_peak()
            case TakeSnapshot(value):
                self._on_snapshot(value)

    def _on_opened(self) -> None:
        self._views += 1
        self.follow()
        if not self._paused:
            self._wake()

    def _on_closed(self) -> None:
        self._views -= 1
        if self._views <= 0:
            self._views = 0
            self.rest()

    def _on_snapshot(self, rank: int) -> None:
        name = "this process" if rank < 0 else f"rank {rank}"
        path = self._snapshot(rank)
        self._say(
            f"{name}: {path.name} ({size(path.stat().st_size)}) is written; https://pytorch.org/memory_viz shows it"
        )

    def _on_peak(self) -> None:
        session = self._looked_at()
        if self.of_session and (session is None or _is_over(session)):
            raise UsageError("its session has ended: `%distributed start` starts another")
        measure_peaks(session, self._without_peak, _PEAK_SECONDS)
        self._say("The peak of matrix products is measured: the next steps show their MFU.")

    def _snapshot(self, rank: int) -> Path:
        if rank < 0:
            path = Path("snapshot-notebook.pickle").resolve()
            memory_snapshot.write(path)
            return path
        session = self._looked_at()
        if session is None or _is_over(session):
            raise UsageError("its session has ended: `%distributed start` starts another")
        return session.snapshot(rank)

    def _say(self, text: str) -> None:
        self._send(PanelNote(text))


def _is_over(session: Session | None) -> bool:
    return session is None or session.closed or bool(session.broken)


class LeftAlone:
    """What sessions on this machine hold that have no client, as of some seconds ago: it is missing elsewhere.

    Looks in a thread of its own: a session that is stuck answers late.
    """

    def __init__(self) -> None:
        self._words = ""
        self._due = 0.0
        self._looking = threading.Lock()

    def words(self) -> str:
        """Return what is known, at once; "" if there are none. Has it looked up where it is old."""
        if time.monotonic() >= self._due and self._looking.acquire(blocking=False):
            threading.Thread(target=self._look, name="nbdist-left-alone", daemon=True).start()
        return self._words

    def _look(self) -> None:
        try:
            found = [each for each in of_this_machine(but_of=os.getpid()) if each.lonely]
            words = [
                f"session {each.name} ({client_of(each.description)}) holds {each.holds}"
                for each in found[:_NAMED]
                if each.description is not None
            ]
            rest = [f"{len(found) - _NAMED} more sessions"] if len(found) > _NAMED else []
            self._words = ", ".join([*words, *rest])
        finally:
            self._due = time.monotonic() + _LOOK_AROUND
            self._looking.release()
