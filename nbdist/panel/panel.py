"""The widget: brings a Feed to a notebook, and keeps the copy without JavaScript that stands in the saved notebook.

Independent of where values come from (`panel_feed`) or what they mean (`model`).
"""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import msgspec
import traitlets

from nbdist import shells
from nbdist.client.costs.history import history
from nbdist.client.session.session import Session
from nbdist.panel import control_comms, fallback
from nbdist.panel.model import view_of
from nbdist.panel.panel_feed import Feed, SampleSource
from nbdist.panel.plot import Point, plot
from nbdist.wire.pages.panel_messages import PanelGreeting, PanelNews, PanelOpening
from nbdist.wire.pages.targets import PANEL_TARGET

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BUILT = Path(__file__).parent / "static"


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
        self._feed = Feed(self._tell, self._send_all, session, source)
        if rate is not None:
            self._feed.rate = rate
        super().__init__()
        self.on_msg(self._on_message)
        self._feed.follow()
        self._watch_cells()
        self._all[self._feed.identity] = self
        control_comms.offer(PANEL_TARGET, self._on_line)

    # --- what a user calls

    @property
    def rate(self) -> float:
        """Seconds between two looks.

        Raises:
            UsageError: It is out of bounds.
        """
        return self._feed.rate

    @rate.setter
    def rate(self, seconds: float) -> None:
        self._feed.rate = seconds

    @property
    def paused(self) -> bool:
        """Whether it rests."""
        return self._feed.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._feed.paused = paused

    @property
    def text(self) -> str:
        """The last values as a table for a terminal."""
        view = self._feed.look()
        return fallback.text(view, ended=self._feed.ended) if view is not None else "nothing has been seen yet"

    @property
    def html(self) -> str:
        """The last values as HTML without scripts: what the saved notebook shows."""
        view = self._feed.look()
        return fallback.html(view, self._feed.identity, ended=self._feed.ended) if view is not None else ""

    def plot(self) -> Figure:
        """Return memory and TFLOPS over time, by matplotlib: what `nbdist.history()` has kept.

        Raises:
            UsageError: matplotlib is not installed, or nothing has been seen yet.
        """
        looks = [look for look in history().looks if self._feed.of_session != any(rank.rank < 0 for rank in look.ranks)]
        return plot([point for look in looks if (point := Point.of(view_of(look))) is not None])

    def close(self) -> None:
        """Look no more; the page keeps what it shows."""
        self._feed.rest()
        self._unwatch_cells()
        super().close()

    def state(self) -> dict[str, Any]:
        """Return what the page knows, for a page that opens now."""
        frame: dict[str, Any] = msgspec.to_builtins(self._feed.state())
        return frame

    def _tell(self, news: PanelNews) -> None:
        self.send(msgspec.to_builtins(news))

    def _send_all(self) -> None:
        self.send_state("frame")

    # --- the notebook

    def _ipython_display_(self) -> None:
        """Show two outputs: the copy for later, and the living view, which hides the copy while it lives."""
        from IPython.display import display

        if not shells.in_kernel():
            print(self.text)
            return
        self._feed.show()
        display(self._copy(), raw=True, display_id=self._display_id)
        if (living := self._repr_mimebundle_()) is not None:
            data, metadata = living  # of anywidget, which knows what each front end needs to find it again
            # Without the widget's state, exporters take the empty HTML.
            display({**data, "text/html": "", "text/plain": ""}, metadata=metadata, raw=True)

    @property
    def _display_id(self) -> str:
        return f"nbdist-panel-{self._feed.identity}"

    def _copy(self) -> dict[str, str]:
        self._feed.stale = False
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
        if not shells.in_cell():
            return
        feed = self._feed
        feed.follow()
        if not feed.shown or not feed.stale or feed.view is None:
            return
        from IPython.display import update_display

        if not feed.view.heat:  # a state that is saved is as new as the copy
            feed.send_all()
        update_display(self._copy(), raw=True, display_id=self._display_id)

    # --- the page

    @classmethod
    def _on_line(cls, line: control_comms.ControlLine, opening: Any) -> control_comms.Hearer | None:
        """Hear a page on a line of its own, also while a cell runs; the answers go over the widget's."""
        try:
            panel = cls._all.get(msgspec.convert(opening, PanelOpening).id)
        except msgspec.ValidationError:  # no page of ours
            return None
        if panel is None:
            return None
        heard = weakref.WeakMethod(panel._on_message)
        line.send(msgspec.to_builtins(PanelGreeting()))

        def hear(message: Any) -> None:
            if message is not None and (on_message := heard()) is not None:
                on_message(None, message, [])

        return hear

    def _on_message(self, _: object, content: Any, __: object) -> None:
        """Handle a reader's action on a page. Without its own line it arrives when the running cell has ended."""
        self._feed.read(content)
