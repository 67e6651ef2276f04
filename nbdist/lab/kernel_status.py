"""A kernel that runs a cell is busy, whatever else it answers meanwhile.

ipykernel says "busy" and "idle" around every message, also around those that it answers in other threads while a cell
runs: what comes over our lines, and what comes over its control channel. JupyterLab and the Jupyter server take the
last status for the kernel's: the page shows "Idle" below a training run, and a server that ends idle kernels ends it
(jupyterlab issue 10701, jupyter_server issue 989). So such an "idle" is followed by "busy" here.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from nbdist import shells
from nbdist.client.base import interruption

Message = dict[str, Any]  # as Jupyter's protocol has it
Handler = Callable[[Any, Any, Message], Any]


def keep_busy(kernel: Any) -> None:
    """Have a kernel say that it is busy as long as it runs a cell; only ipykernel's can."""
    if not hasattr(kernel, "shell_handlers"):
        return
    status = _Status(kernel)
    for handlers in (kernel.shell_handlers, kernel.control_handlers):
        for kind, handler in handlers.items():
            handlers[kind] = status.around_cell(handler) if kind == "execute_request" else status.beside_cell(handler)


class _Status:
    """What a kernel has said of itself, and what it does.

    Messages that threads publish under this lock arrive in its order. A cell counts as running from before its code to
    after it, so its own "idle" comes after every "busy" from here.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._lock = threading.Lock()
        self._cell: Message | None = kernel.get_parent() or None  # the one that loads nbdist
        self._idle_said = False  # perhaps after the next cell's "busy", just before its code
        shells.current().events.register("post_execute", self._end_first)

    def around_cell(self, handler: Handler) -> Handler:
        """Return a handler of requests to run code that also notes them, where they are a notebook's cells."""

        async def handle(stream: Any, identity: Any, request: Message) -> None:
            if not _in_main_thread():  # in a subshell, beside a cell
                await _finished(handler(stream, identity, request))
                self._say_after_idle()
                return
            try:
                with interruption.deferred():
                    self._begin(request)
                await _finished(handler(stream, identity, request))
            finally:
                with interruption.deferred():
                    self._end()

        return handle

    def beside_cell(self, handler: Handler) -> Handler:
        """Return a handler of other messages that has the kernel say how it is after its "idle"."""

        async def handle(stream: Any, identity: Any, message: Message) -> None:
            try:
                await _finished(handler(stream, identity, message))
            finally:
                if not _in_main_thread():
                    self._say_after_idle()

        return handle

    def _begin(self, request: Message) -> None:
        with self._lock:
            self._cell = request
            if self._idle_said:
                self._say_busy(request)

    def _end(self) -> None:
        with self._lock:
            self._cell = None
            self._idle_said = False

    def _end_first(self) -> None:
        shells.current().events.unregister("post_execute", self._end_first)
        self._end()

    def _say_after_idle(self) -> None:
        asyncio.get_running_loop().call_soon(self._say)  # the kernel says "idle" before its loop goes on

    def _say(self) -> None:
        with self._lock:
            self._idle_said = True
            if self._cell is not None:
                self._say_busy(self._cell)

    def _say_busy(self, request: Message) -> None:
        kernel = self._kernel
        content = {"execution_state": "busy"}
        topic = f"kernel.{kernel.ident}.status".encode()
        kernel.session.send(kernel.iopub_socket, "status", content, parent=request, ident=topic)


def _in_main_thread() -> bool:
    """Return whether this is the thread that runs cells, which does nothing else meanwhile."""
    return threading.current_thread() is threading.main_thread()


async def _finished(result: Any) -> None:
    if inspect.isawaitable(result):
        await result
