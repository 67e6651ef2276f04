"""The widget: takes Samples from a Monitor, tells the page, and does what its buttons ask.

Owns the traffic with the page, and the copy without JavaScript that stands in the saved notebook. Knows nothing of what
the values mean (`model`) or how they are packed (`updates`).
"""

from __future__ import annotations

import contextlib
import contextvars
import secrets
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import anywidget
import comm
import comm.base_comm
import traitlets

from nbdist import shells
from nbdist.client.costs.history import history
from nbdist.client.costs.monitor import Monitor
from nbdist.client.session.session import Session, current_session
from nbdist.errors import NbdistError, UsageError
from nbdist.metrics.allocation import memory_snapshot
from nbdist.metrics.node.sample import Sample
from nbdist.panel import fallback
from nbdist.panel.model import View, view_of
from nbdist.panel.plot import Point, plot
from nbdist.panel.updates import METRICS, Updates
from nbdist.text import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BUILT = Path(__file__).parent / "static"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_TARGET = "nbdist.panel"  # of comms that pages open to be heard while a cell runs
_FIRST_LOOK = 1.0  # seconds that the first copy in the notebook waits for something to show


class SampleSource(Protocol):
    """Where Samples come from; a `Monitor` is one."""

    rate: float

    def subscribe(self, watcher: Callable[[Sample], None], /) -> Callable[[], None]:
        """Call this with each Sample, from any thread. Returns what ends it."""


class Panel(anywidget.AnyWidget):
    """Memory, speed and health of every rank, live in the notebook, also while a cell runs.

    >>> nbdist.Panel()

    The last values stay in the notebook when it is saved, exported, or its kernel has gone.

    Args:
        session: What to look at; None: the notebook's session, whichever is the newest, and this process while there
            is none.
        rate: Seconds between two looks, 0.25 to 60; None: as it is (1 at first).
        source: Where Samples come from instead of a session.

    Raises:
        UsageError: The rate is out of bounds.
    """

    _esm: ClassVar[Path] = _BUILT / "widget.js"
    _css: ClassVar[Path] = _BUILT / "widget.css"
    _all: ClassVar[weakref.WeakValueDictionary[str, Panel]] = weakref.WeakValueDictionary()
    frame = traitlets.Dict().tag(sync=True, to_json=lambda _, panel: panel.state())

    def __init__(
        self, session: Session | None = None, *, rate: float | None = None, source: SampleSource | None = None
    ) -> None:
        self._identity = secrets.token_hex(4)
        self._lock = threading.RLock()  # what the page knows: the monitor's thread and the notebook's change it
        self._updates = Updates(self._identity)
        self._view: View | None = None
        self._seen = threading.Event()
        self._session: weakref.ref[Session] | None = None
        self._follows = session is None and source is None
        self._source: SampleSource = source or Monitor.of(None)
        self._rate = rate  # that somebody has asked for; a new session's monitor has its own
        self._unsubscribe: Callable[[], None] | None = None
        self._views = 0  # that pages have opened and not closed again
        self._paused = False
        self._stale = False  # whether the copy in the notebook is older than what has been seen
        self._shown = False
        self._ended = False
        if rate is not None:
            self._source.rate = rate
        if session is not None:
            self._attach(session)
        super().__init__()
        self.on_msg(self._on_message)
        self._follow()
        self._watch_cells()
        self._all[self._identity] = self
        comm.get_comm_manager().register_target(_TARGET, self._on_line)

    # --- what a user calls

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
        if paused:
            self._rest()
        elif self._shown or self._views:
            self._wake()
        self._tell()

    @property
    def text(self) -> str:
        """The last values as a table for a terminal."""
        self._follow()
        view = self._look()
        return fallback.text(view, ended=self._ended) if view is not None else "nothing has been seen yet"

    @property
    def html(self) -> str:
        """The last values as HTML without scripts: what the saved notebook shows."""
        self._follow()
        view = self._look()
        return fallback.html(view, self._identity, ended=self._ended) if view is not None else ""

    def plot(self) -> Figure:
        """Return memory and TFLOPS over time, by matplotlib: what `nbdist.history()` has kept.

        Raises:
            UsageError: matplotlib is not installed, or nothing has been seen yet.
        """
        here = self._session is None
        looks = [look for look in history().looks if here == any(rank.rank < 0 for rank in look.ranks)]
        return plot([point for look in looks if (point := Point.of(view_of(look))) is not None])

    def close(self) -> None:
        """Look no more; the page keeps what it shows."""
        self._rest()
        self._unwatch_cells()
        super().close()

    # --- Samples

    def state(self) -> dict[str, Any]:
        """Return what the page knows, for a page that opens now."""
        with self._lock:
            return self._updates.state()

    def _attach(self, session: Session) -> None:
        self._session, self._source = weakref.ref(session), Monitor.of(session)
        if self._rate is not None:
            self._source.rate = self._rate

    def _follow(self) -> None:
        """Turn to the notebook's newest session. When one has ended its last values stay until there is another."""
        newest = current_session()
        if self._follows and newest is not None and not _is_over(newest) and newest is not self._looked_at():
            with self._lock:
                watching = self._unsubscribe is not None
                self._rest()
                self._attach(newest)
                self._view = None
                if watching:
                    self._wake()
        ended = self._session is not None and _is_over(self._looked_at())
        if ended != self._ended:
            self._ended = self._stale = ended
            self._tell()

    def _looked_at(self) -> Session | None:
        return self._session() if self._session is not None else None

    def _wake(self) -> None:
        with self._lock:
            if self._unsubscribe is None:
                source = self._source
                self._unsubscribe = source.subscribe(lambda sample: self._on_sample(source, sample))

    def _rest(self) -> None:
        with self._lock:
            if self._unsubscribe is not None:
                self._unsubscribe()
                self._unsubscribe = None

    def _on_sample(self, source: SampleSource, sample: Sample) -> None:
        """Handle a Sample. In the monitor's thread, which others need too."""
        if source is not self._source or (self._session is not None and _is_over(self._looked_at())):
            return  # a look that was under way when its session ended
        try:
            self._take(view_of(sample))
        except Exception as error:
            self._rest()
            with contextlib.suppress(Exception):  # the notebook may be going
                self._say(f"the panel has stopped: {type(error).__name__}: {error}")

    def _take(self, view: View) -> None:
        with self._lock:
            self._view, self._stale = view, True
            if self._updates.fits(view):
                self.send(self._updates.update(view, self._live(), self.rate))
            else:
                self._send_all()
        self._seen.set()

    def _send_all(self) -> None:
        assert self._view is not None
        self._updates.reset(self._view, self._live(), self.rate)
        self.send_state("frame")

    def _live(self) -> str:
        return "ended" if self._ended else "paused" if self._paused else "live"

    def _tell(self) -> None:
        """Report a change that no Sample brings."""
        with self._lock:
            self.send(self._updates.update_head(self._live(), self.rate))

    def _look(self) -> View | None:
        """Return what is in view; where nobody watches, what is seen now."""
        if self._view is not None and (self._unsubscribe is not None or self._paused or self._ended):
            return self._view
        watching = self._unsubscribe is not None
        self._seen.clear()
        self._wake()
        self._seen.wait(_FIRST_LOOK)
        if not watching:
            self._rest()
        return self._view

    # --- the notebook

    def _ipython_display_(self) -> None:
        """Show two outputs: the copy for later, and the living view, which hides the copy while it lives."""
        from IPython.display import display

        self._follow()
        if not shells.in_kernel():
            print(self.text)
            return
        self._shown, self._paused = True, False
        self._wake()
        display(self._copy(), raw=True, display_id=self._display_id)
        # Without the widget's state, exporters take the empty HTML.
        living = {_WIDGET: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}}
        display({**living, "text/html": "", "text/plain": ""}, raw=True)

    @property
    def _display_id(self) -> str:
        return f"nbdist-panel-{self._identity}"

    def _copy(self) -> dict[str, str]:
        self._stale = False
        return {"text/plain": self.text, "text/html": self.html}

    def _watch_cells(self) -> None:
        if (shell := shells.current()) is not None:
            shell.events.register("post_run_cell", self._on_cell_end)

    def _unwatch_cells(self) -> None:
        if (shell := shells.current()) is not None:
            with contextlib.suppress(ValueError):  # it has been closed before
                shell.events.unregister("post_run_cell", self._on_cell_end)

    def _on_cell_end(self, result: object) -> None:
        """Bring up to date what the notebook keeps."""
        self._follow()
        if not self._shown or not self._stale or self._view is None:
            return
        from IPython.display import update_display

        if not self._view.heat:  # a state that is saved is as new as the copy
            with self._lock:
                self._send_all()
        update_display(self._copy(), raw=True, display_id=self._display_id)

    # --- the page

    @classmethod
    def _on_line(cls, line: comm.base_comm.BaseComm, opening: dict[str, Any]) -> None:
        """Open a line for a page that must be heard while a cell runs: then in a thread of ipykernel.

        That thread's context says whose messages it answers. What is sent in it takes the widget's own messages there;
        in an empty context they stay with the main thread.
        """
        panel = cls._all.get(str(opening["content"]["data"].get("id")))
        if panel is None:
            line.close()
            return
        heard = weakref.WeakMethod(panel._on_message)

        def hear(message: dict[str, Any]) -> None:
            if (on_message := heard()) is not None:
                contextvars.Context().run(on_message, None, message["content"]["data"], [])

        line.on_msg(hear)

    def _on_message(self, _: object, content: Any, __: object) -> None:
        """Handle a reader's action on a page. Without its own line it arrives when the running cell has ended."""
        handlers = {
            "opened": self._on_opened,
            "closed": self._on_closed,
            "pause": self._on_pause,
            "rate": self._on_rate,
            "choose": self._on_choose,
            "metric": self._on_metric,
            "snapshot": self._on_snapshot,
        }
        handler = handlers.get(content.get("type", "")) if isinstance(content, dict) else None
        if handler is None:
            return  # a page of another version
        try:
            handler(content.get("value"))
        except NbdistError as error:
            self._say(str(error).splitlines()[0])
        except (TypeError, ValueError, LookupError):
            self._say(f"the page sent something that makes no sense here: {content!r}"[:200])

    def _on_opened(self, _: object) -> None:
        self._views += 1
        if not self._paused:
            self._wake()

    def _on_closed(self, _: object) -> None:
        self._views -= 1
        if self._views <= 0:
            self._views = 0
            self._rest()

    def _on_pause(self, value: Any) -> None:
        self.paused = bool(value)

    def _on_rate(self, value: Any) -> None:
        self.rate = float(value)

    def _on_choose(self, value: Any) -> None:
        self._updates.chosen = None if value is None else int(value)

    def _on_metric(self, value: Any) -> None:
        self._updates.metric = METRICS[METRICS.index(value)]

    def _on_snapshot(self, value: Any) -> None:
        rank = int(value)
        name = "this process" if rank < 0 else f"rank {rank}"
        path = self._snapshot(rank)
        self._say(
            f"{name}: {path.name} ({size(path.stat().st_size)}) is written; https://pytorch.org/memory_viz shows it"
        )

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
        self.send({"type": "note", "text": text})


def _is_over(session: Session | None) -> bool:
    return session is None or session.closed or bool(session.broken)
