"""Forks ranks from the notebook's own process when the agent requests them, as the template does.

The notebook does only what no other process can: the fork itself, and reaping its children. The rest is the agent's
work. Importing this module imports what ranks need, so that they don't each have to.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing.process
import os
import queue
import secrets
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import stack_data  # noqa: F401
import torch.distributed  # noqa: F401

from nbdist.agent.forks.forking import Template
from nbdist.wire.processes.template_messages import Fork
from nbdist.worker import rank
from nbdist.worker.processes import forks

_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group

InCell = Callable[[Callable[[], None]], None]


class Forker:
    """Listens for the agent, and forks what it requests. As a context manager it leaves no child behind.

    Args:
        function: The function that the ranks call.
        in_cell: Has the thread that runs the cell call something soon. That thread must fork, so that ranks have its
                thread-local state and live as long as it does.

    Attributes:
        address: Where it listens: the name of an abstract Unix socket, which leaves no file whatever ends this process.
    """

    def __init__(self, function: Callable[[], Any], in_cell: InCell) -> None:
        self._make = function, in_cell
        self._closed = False
        self._forks: _Forks | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address = f"\0nbdist-{secrets.token_hex(16)}"
        self._listener.bind(self.address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="nbdist-forks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End any children that are left. The agent has already ended them all, if it could."""
        self._closed = True
        with contextlib.suppress(OSError):  # it is already closed
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._forks is not None:
            self._forks.stop()
        self._thread.join()

    def __enter__(self) -> Forker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """Serve one set of ranks after another: a start whose port is taken is tried again with another."""
        with contextlib.suppress(OSError), self._listener:  # closed, or the agent is gone
            while True:
                with self._accept() as channel:
                    self._forks = _Forks(channel, self._listener, *self._make)
                    if self._closed:
                        return
                    self._forks.fork_on_request()

    def _accept(self) -> socket.socket:
        """Return the agent's connection: the first process of the same user."""
        while True:
            channel, _ = self._listener.accept()
            credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
                return channel
            channel.close()


class _Forks(Template):
    """Forks like the template, but from a process with threads, whose memory the children keep."""

    def __init__(
        self, channel: socket.socket, listener: socket.socket, function: Callable[[], Any], in_cell: InCell
    ) -> None:
        super().__init__(channel)
        self._listener = listener
        self._function = function
        self._in_cell = in_cell
        self._made: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()  # for each requested fork
        self._processes: list[BaseProcess] = []  # these hold the pipes by which children notice their parent's end

    def stop(self) -> None:
        """Stop forking, and end the children. From any thread."""
        self._made.put(RuntimeError("the launch is over"))
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def make_child(self, request: Fork, descriptors: list[int]) -> int:
        """Fork a child by `multiprocessing`, whose clean-up makes the notebook's queues and locks work there."""
        process = multiprocessing.get_context("fork").Process(
            target=self._be_child,
            args=(os.getpid(), request, descriptors),
            name="nbdist-store" if request.rank is None else f"nbdist-rank-{request.rank}",
        )
        self._in_cell(lambda: self._made.put(start_process(process)))
        failure = self._made.get()
        if failure is not None:
            self._made.put(failure)  # for any other request
            raise failure
        assert process.pid is not None
        self._processes.append(process)
        return process.pid

    def _be_child(self, parent: int, request: Fork, descriptors: list[int]) -> None:
        _shed_notebook()
        self._listener.close()
        self.let_go()
        if request.rank is None:
            rank.become_store(parent, *descriptors)
        else:
            rank.become_rank(parent, *descriptors, function=self._function)


def start_process(process: BaseProcess) -> Exception | None:
    """Fork the process, and return the error if that failed."""
    try:
        with forks.mended(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the user is told of those that matter
            process.start()
    except OSError as error:
        return error
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # we wait for it
    return None


def _shed_notebook() -> None:
    """Drop in a child what belongs only to the notebook."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)  # of the notebook's event loop
    atexit._clear()
    gc.freeze()  # the notebook's objects must not be finalized here
    for name in ("stdout", "stderr"):  # loggers hold the streams of the notebook
        stream = getattr(sys, name)
        with contextlib.suppress(AttributeError):
            stream.write, stream.flush = functools.partial(_write, name), functools.partial(_flush, name)
    state = sys.modules.get("accelerate.state")
    reset = getattr(getattr(state, "PartialState", None), "_reset_state", None)
    if reset is not None:  # the notebook's says that there is one process
        reset()


def _write(stream: str, text: str) -> int:
    return int(getattr(sys, f"__{stream}__").write(text))


def _flush(stream: str) -> None:
    getattr(sys, f"__{stream}__").flush()
