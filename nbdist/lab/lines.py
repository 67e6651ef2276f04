"""The lines between a page and this kernel: two comms, both opened by the page.

Over `nbdist.control` a page asks and is answered, also while a cell runs: ipykernel then hears each such comm in a
thread of its own. It would hear it in the main thread from the moment that another thread has sent something over it;
so what the kernel says by itself, the session's state and the panel's news, goes over `nbdist.view`.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import comm
import comm.base_comm
import msgspec

from nbdist import shells

if TYPE_CHECKING:
    from nbdist.lab.deeds import Deeds, NotebookVerbs
    from nbdist.lab.page_messages import PageRequest
    from nbdist.lab.state_watch import StateWatch
    from nbdist.panel.panel_feed import Feed

CONTROL = "nbdist.control"
VIEW = "nbdist.view"

Line = comm.base_comm.BaseComm


def offer(notebook: NotebookVerbs) -> None:
    """Let pages open lines to this kernel."""
    lines = _Lines(notebook)
    manager = comm.get_comm_manager()
    manager.register_target(CONTROL, lines.open_control)
    manager.register_target(VIEW, lines.open_view)


class _Lines:
    """The lines of all pages."""

    def __init__(self, notebook: NotebookVerbs) -> None:
        self._notebook = notebook
        self._feeds: dict[str, Feed] = {}  # by page

    @cached_property
    def _deeds(self) -> Deeds:
        from nbdist.lab.deeds import Deeds  # a session without pages need not wait for it

        return Deeds(self._notebook)

    @cached_property
    def _watch(self) -> StateWatch:
        from nbdist.lab.state_watch import StateWatch

        return StateWatch(self._deeds.state)

    def open_control(self, line: Line, opening: dict[str, Any]) -> None:
        from nbdist.lab.page_messages import SLOW, PageCall, PageOpening

        page = _read(opening, PageOpening)
        if page is None:
            line.close()
            return

        def answer(request: PageRequest) -> None:
            reply = self._deeds.answer(request)
            line.send(msgspec.to_builtins(reply))
            self._watch.told(page.page, reply.state)

        def hear(message: dict[str, Any]) -> None:
            call = _read(message, PageCall)
            if call is not None and call.request is not None:
                if call.request.do in SLOW:
                    _in_thread(answer, call.request)
                else:
                    answer(call.request)
            elif call is not None and call.wish is not None and (feed := self._feeds.get(page.page)) is not None:
                # What is sent in this thread's context would take the other line here, too.
                contextvars.Context().run(feed.hear, msgspec.to_builtins(call.wish))

        line.on_msg(hear)  # and nothing is sent here, perhaps in the main thread: the page asks first

    def open_view(self, line: Line, opening: dict[str, Any]) -> None:
        from nbdist.lab.page_messages import PageOpening
        from nbdist.panel.panel_feed import Feed

        page = _read(opening, PageOpening)
        if page is None:
            line.close()
            return
        feed = self._feeds[page.page] = Feed(line.send, lambda: line.send({"type": "frame", "frame": feed.state()}))
        stop_following = _after_each_cell(feed.follow)
        stop_watching = self._watch.subscribe(
            page.page, lambda state: line.send({"type": "state", "state": msgspec.to_builtins(state)})
        )

        def close(_: object) -> None:
            stop_watching()
            stop_following()
            feed.rest()
            if self._feeds.get(page.page) is feed:
                del self._feeds[page.page]

        line.on_close(close)


def _read(message: dict[str, Any], kind: type[Any]) -> Any:
    """Return what a page has sent; None: it is of another version, or no page of ours."""
    try:
        return msgspec.convert(message["content"]["data"], kind)
    except msgspec.ValidationError:
        return None


def _in_thread(call: Callable[[PageRequest], None], request: PageRequest) -> None:
    """Answer meanwhile, so that buttons still act; in this context, so that the line stays in its own thread."""
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(call, request), name="nbdist-page", daemon=True).start()


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
