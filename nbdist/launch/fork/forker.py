"""Forks ranks from the notebook's own process when the agent asks for them, as the template does.

The notebook does what nobody else can: the fork itself, and reaping its children. All else is the agent's. With this
module it imports what ranks need, so that not each of them does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing.process
import os
import queue
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import stack_data  # noqa: F401
import torch.distributed  # noqa: F401

from nbdist.agent.forking import Template
from nbdist.errors import UsageError
from nbdist.wire.template_messages import Fork
from nbdist.worker import rank
from nbdist.worker.processes import forks

_LONGEST_FOLDER = 90  # characters; the path of a socket in it may have 107
_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group

InCell = Callable[[Callable[[], None]], None]


class Forker:
    """Listens for the agent, and forks what it asks for. As a context manager it leaves no child behind.

    Args:
        function: What the ranks are to call.
        in_cell: Has the thread that runs the cell call something soon. It is the one to fork, so that ranks have what
            belongs to that thread, and live as long as it.

    Attributes:
        address: Where it listens: the path of a Unix socket.

    Raises:
        UsageError: This system does not let it listen.
    """

    def __init__(self, function: Callable[[], Any], in_cell: InCell) -> None:
        self._make = function, in_cell
        self._closed = False
        self._forks: _Forks | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            short = len(tempfile.gettempdir()) < _LONGEST_FOLDER
            self._folder = tempfile.mkdtemp(prefix="nbdist-", dir=None if short else "/tmp")
            self.address = f"{self._folder}/fork"
            self._listener.bind(self.address)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise UsageError(
                f"can't make a socket for forked ranks in {tempfile.gettempdir()}: {error}. Set TMPDIR to a local "
                "folder, or pass start_method='warm'"
            ) from None
        self._thread = threading.Thread(target=self._serve, name="nbdist-forks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End what children there still are. The agent has ended them all, if it could."""
        self._closed = True
        with contextlib.suppress(OSError):  # it has been closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._forks is not None:
            self._forks.stop()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Forker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed before anybody came, or the agent has gone
            with self._listener:
                channel = self._accept()
            with channel:
                self._forks = _Forks(channel, *self._make)
                if not self._closed:
                    self._forks.fork_on_request()

    def _accept(self) -> socket.socket:
        """The connection of the agent: the first process of the same user."""
        while True:
            channel, _ = self._listener.accept()
            credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
                return channel
            channel.close()


class _Forks(Template):
    """As the template, but from a process with threads, whose memory the children keep."""

    def __init__(self, channel: socket.socket, function: Callable[[], Any], in_cell: InCell) -> None:
        super().__init__(channel)
        self._function = function
        self._in_cell = in_cell
        self._made: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()  # for each fork that was asked for
        self._processes: list[BaseProcess] = []  # they know of their parent's end by a pipe that these hold

    def stop(self) -> None:
        """Fork nothing any more, and end the children. From any thread."""
        self._made.put(RuntimeError("the launch is over"))
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def make_child(self, request: Fork, descriptors: list[int]) -> int:
        """As of `Template`; by `multiprocessing`, whose clean-up makes queues and locks of the notebook work there."""
        process = multiprocessing.get_context("fork").Process(
            target=self._be_child,
            args=(os.getpid(), request, descriptors),
            name="nbdist-store" if request.rank is None else f"nbdist-rank-{request.rank}",
        )
        self._in_cell(lambda: self._made.put(_start(process)))
        failure = self._made.get()
        if failure is not None:
            self._made.put(failure)  # for whatever else is asked for
            raise failure
        assert process.pid is not None
        self._processes.append(process)
        return process.pid

    def _be_child(self, parent: int, request: Fork, descriptors: list[int]) -> None:
        _shed_notebook()
        self.let_go()
        if request.rank is None:
            rank.become_store(parent, *descriptors)
        else:
            rank.become_rank(parent, *descriptors, function=self._function)


def _start(process: BaseProcess) -> Exception | None:
    """Fork it. Returns why that failed."""
    try:
        with forks.mended(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the user is told of those that matter
            process.start()
    except OSError as error:
        return error
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # it is ours to wait for
    return None


def _shed_notebook() -> None:
    """In a child: what is the notebook's alone is not for this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)  # of its event loop
    atexit._clear()
    gc.freeze()  # its objects are not to be finalized here
    for name in ("stdout", "stderr"):  # loggers hold the streams that it had
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
