"""The lines between pages and this kernel: a page asks and is answered, also while a cell runs, and hears what changes.

Each page is heard in a thread of its own: what a button does may take seconds, and the control channel, over which its
line goes, also carries what debuggers ask, and the kernel's end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist import shells
from nbdist._version import __version__
from nbdist.base.ranks import format_ranks
from nbdist.client.ranks import observers
from nbdist.lab.cells_seen import CellSeen, CellsSeen
from nbdist.panel import control_comms
from nbdist.wire.pages.targets import PAGE_TARGET

if TYPE_CHECKING:
    from nbdist.lab.page_actions import NotebookVerbs, PageActions
    from nbdist.lab.state_watch import StateWatch
    from nbdist.panel.panel_feed import Feed
    from nbdist.wire.pages.page_messages import News, PageCall, PageOpening, PageRequest, SessionState
    from nbdist.wire.pages.panel_messages import PanelWish

_log = logging.getLogger(__name__)


def offer(notebook: NotebookVerbs) -> None:
    """Let pages open lines to this kernel."""
    cells = CellsSeen()
    observers.subscribe(cells)
    control_comms.offer(PAGE_TARGET, _Lines(notebook, cells).open)


class _Lines:
    """The lines of all pages.

    Args:
        notebook: The notebook's magics.
        cells: The notebook's cells that ran on ranks.

    Attributes:
        cells: As given.
    """

    def __init__(self, notebook: NotebookVerbs, cells: CellsSeen) -> None:
        self.cells = cells
        self._notebook = notebook
        self._open: dict[str, _PageLine] = {}  # by page

    @cached_property
    def actions(self) -> PageActions:
        """What buttons do."""
        from nbdist.lab.page_actions import PageActions  # a session without pages need not wait for it

        return PageActions(self._notebook, self.cells)

    @cached_property
    def watch(self) -> StateWatch:
        """What reports changes of the session."""
        from nbdist.lab.state_watch import StateWatch

        return StateWatch(self.actions.state)

    def open(self, line: control_comms.ControlLine, opening: Any) -> control_comms.Hearer | None:
        """Greet a page, and hear it from now on."""
        from nbdist.wire.pages.page_messages import PAGE_PROTOCOL, Greeting, PageOpening

        page = _read(opening, PageOpening)
        if page is None:
            return None
        line.send(msgspec.to_builtins(Greeting(PAGE_PROTOCOL, __version__)))
        if page.protocol != PAGE_PROTOCOL:
            return lambda _: None  # it says so, and asks nothing
        for name in (page.page, *page.left):
            if (gone := self._open.pop(name, None)) is not None:
                gone.end()
        opened = self._open[page.page] = _PageLine(self, line, page)
        return opened.hear


class _PageLine:
    """One page's line.

    Args:
        lines: Those of all pages.
        line: This one.
        page: The page.
    """

    def __init__(self, lines: _Lines, line: control_comms.ControlLine, page: PageOpening) -> None:
        self._lines = lines
        self._line = line
        self._page = page.page
        self._calls: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, name="nbdist-page", daemon=True).start()

    def hear(self, message: Any) -> None:
        """Take what the page has sent; None: it has closed its line."""
        self._calls.put(message)

    def end(self) -> None:
        """End as if the page had closed its line, as it could not."""
        self._line.forget()
        self._calls.put(None)

    def _run(self) -> None:
        from nbdist.panel.panel_feed import Feed
        from nbdist.wire.pages.page_messages import FrameNews, PageCall, StateNews

        feed = Feed(self._send, lambda: self._send(FrameNews(feed.state())))

        def tell(state: SessionState) -> None:
            self._send(StateNews(state))

        with contextlib.ExitStack() as followed:
            followed.callback(feed.rest)
            followed.callback(_after_each_cell(feed.follow))
            followed.callback(self._lines.watch.subscribe(self._page, tell))
            followed.callback(self._lines.cells.subscribe(self._page, _Reader(self._send)))
            while (message := self._calls.get()) is not None:
                call = _read(message, PageCall)
                if call is None:
                    continue
                try:
                    self._do(call, feed)
                except Exception:  # a mistake of ours, and the page goes on
                    _log.exception("nbdist could not handle a page's message")

    def _do(self, call: PageCall, feed: Feed) -> None:
        from nbdist.wire.pages.page_messages import SLOW

        if isinstance(call.request, SLOW):  # meanwhile, buttons still act
            threading.Thread(target=self._answer, args=(call.request,), name="nbdist-page", daemon=True).start()
        elif call.request is not None:
            self._answer(call.request)
        elif call.wish is not None:
            _hear_wish(feed, call.wish)
        elif call.look is not None:
            self._lines.cells.look(self._page, call.look.id, call.look.rank)

    def _answer(self, request: PageRequest) -> None:
        from nbdist.wire.pages.page_messages import PageReply

        actions = self._lines.actions
        try:
            reply = actions.answer(request)
        except Exception as error:  # a mistake of ours: the page must not wait
            _log.exception("nbdist could not answer a %s", type(request).__name__)
            reply = PageReply(request.id, actions.state(), f"{type(error).__name__}: {error}", failed=True)
        self._send(reply)
        self._lines.watch.told(self._page, reply.state)

    def _send(self, news: News) -> None:
        self._line.send(msgspec.to_builtins(news))


class _Reader:
    """A page, as the cells know it.

    Args:
        send: Sends it something.
    """

    def __init__(self, send: Callable[[News], None]) -> None:
        self._send = send

    def cells(self, cells: list[CellSeen]) -> None:
        from nbdist.wire.pages.page_messages import CellRan, CellsNews

        ran = [CellRan(each.id, each.number, format_ranks(each.ranks), format_ranks(each.failed)) for each in cells]
        self._send(CellsNews(ran))

    def bars(self, name: str, rank: int, bars: dict[str, str], whole: bool) -> None:
        from nbdist.wire.pages.page_messages import BarsNews

        self._send(BarsNews(name, rank, bars, whole))


def _hear_wish(feed: Feed, wish: PanelWish) -> None:
    from nbdist.wire.pages.panel_messages import ViewOpened

    if isinstance(wish, ViewOpened) and feed.view is not None:
        feed.send_all()  # the page shows it in a new element, which knows nothing of what was sent before
    feed.hear(wish)


def _read(data: Any, kind: type[Any]) -> Any:
    """Return what a page has sent; None: it is of another version, or no page of ours."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError:
        return None


def _after_each_cell(call: Callable[[], None]) -> Callable[[], None]:
    """Call something after each cell. Returns what ends that."""
    shell = shells.current()

    def ended(_: object) -> None:
        call()

    shell.events.register("post_run_cell", ended)

    def unregister() -> None:
        with contextlib.suppress(ValueError):  # the kernel is going
            shell.events.unregister("post_run_cell", ended)

    return unregister
