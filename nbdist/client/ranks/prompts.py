"""Lines that code on ranks reads from the user: one rank's prompt after the other in the notebook's input field.

Independent of cells but for the thread that waits for theirs.
"""

from __future__ import annotations

import builtins
import contextlib
import getpass
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from nbdist import shells
from nbdist.client.base import interruption
from nbdist.wire.base.message import Message
from nbdist.wire.messages.output import Prompt
from nbdist.wire.questions.questions import ask
from nbdist.wire.questions.stopping import Enter

_TURN = 0.3  # seconds for a rank that has been answered to ask again, before others that ask have their turn
_NO_INPUT = (
    "input is not available here: nbclient, nbconvert, papermill, and scripts without a terminal can't ask for it. "
    "Set the value in the code"
)
_BEHIND = "a cell takes input only while the notebook waits for it: run it without --background"
OVER = "the notebook no longer waits for this cell, so input is not available"


def answer(send: Callable[[Message], None], prompt: Prompt, given: Enter) -> None:
    """Send a rank what the user has entered at its prompt."""
    send(ask(0, [prompt.rank], given))


def refuse(send: Callable[[Message], None], prompt: Prompt, why: str) -> None:
    """Have the code that asks raise an error instead."""
    answer(send, prompt, Enter(prompt.sequence, why, "refused"))


class Prompts:
    """The prompts of one cell. `send`: sends to the ranks."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: deque[Prompt] = deque()
        self._lock = threading.Lock()
        self._open: Prompt | None = None  # in the input field
        self._withdrawn = False
        self._turn: tuple[int, float] = (-1, 0.0)  # the rank that was answered last, and until when it comes first

    def add(self, prompt: Prompt) -> None:
        """Take a rank's prompt."""
        self._waiting.append(prompt)

    def due(self, now: float) -> float | None:
        """Return the seconds until a prompt is to be shown; None without one."""
        if not self._waiting:
            return None
        rank, until = self._turn
        if any(prompt.rank == rank for prompt in self._waiting):
            return 0.0
        return max(0.0, until - now)

    def withdraw(self, rank: int | None = None) -> None:
        """Drop the prompts of a rank (None: of all ranks), which no longer asks. From any thread."""
        with self._lock:
            self._waiting = deque(prompt for prompt in self._waiting if rank not in (None, prompt.rank))
            if self._open is not None and rank in (None, self._open.rank) and not self._withdrawn:
                self._withdrawn = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def show_next(self) -> bool:
        """Ask the user for the next line, and send it. In the thread that waits for the cell.

        Returns:
            Whether the user has interrupted instead.
        """
        with self._lock:
            rank, _ = self._turn
            first = next((prompt for prompt in self._waiting if prompt.rank == rank), None)
            prompt = first or (self._waiting[0] if self._waiting else None)
            if prompt is None:  # its rank has just died
                return False
            self._waiting.remove(prompt)
            in_front = threading.current_thread() is threading.main_thread()
            self._open = prompt if in_front else None
        if not in_front:
            refuse(self._send, prompt, _BEHIND)
            return False
        with interruption.raised():
            given = _read(prompt)
            withdrawn = self._close(arrived=given is None)
        if given is not None:
            answer(self._send, prompt, given)
            self._turn = prompt.rank, time.monotonic() + _TURN
        return given is None and not withdrawn

    def _close(self, *, arrived: bool) -> bool:
        """Close the input field.

        Args:
            arrived: Whether an interrupt has ended the input; else that of `withdraw` may be about to come.

        Returns:
            Whether the prompt was withdrawn.
        """
        with self._lock:
            self._open, withdrawn, self._withdrawn = None, self._withdrawn, False
        if withdrawn and not arrived:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(1)
        return withdrawn


def _read(prompt: Prompt) -> Enter | None:
    """Return what the user enters; None: an interrupt."""
    text = f"[rank {prompt.rank}] {prompt.text}"
    try:
        return Enter(prompt.sequence, _read_line(text, password=prompt.password))
    except KeyboardInterrupt:
        return None
    except EOFError:
        return Enter(prompt.sequence, outcome="end")
    except _NoInput:
        return Enter(prompt.sequence, _NO_INPUT, "refused")


class _NoInput(Exception):
    """This front end can't ask the user."""


def _read_line(text: str, *, password: bool) -> str:
    """Read a line as a local cell would.

    Raises:
        _NoInput: Nobody can type anything.
    """
    from IPython.core.error import StdinNotImplementedError

    if not shells.in_kernel() and not _has_terminal():
        raise _NoInput
    try:
        return getpass.getpass(text) if password else builtins.input(text)
    except StdinNotImplementedError:
        raise _NoInput from None


def _has_terminal() -> bool:
    with contextlib.suppress(AttributeError, ValueError):  # there is no stdin, or it is closed
        return sys.stdin.isatty()
    return False
