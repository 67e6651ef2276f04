"""What code on a rank reads from the user: `input()`, `getpass()`, and the debuggers that read by them.

A line is asked for in the rank's output lane, so that it comes after what was printed before, and arrives by the
control thread. Independent of what the notebook does to get it.
"""

from __future__ import annotations

import bdb
import builtins
import contextlib
import functools
import getpass
import os
import pdb
import queue
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from IPython.core.debugger import Pdb

from nbdist import shells
from nbdist.errors import InteractionError
from nbdist.wire.questions.question import Done
from nbdist.wire.questions.stopping import Enter
from nbdist.worker.cell import failures
from nbdist.worker.lanes.display_lane import DisplayLane

_LOOK = 0.5  # seconds between which the main thread comes back from C, for those who look at its memory
_ONE_THREAD = "input() works in a cell's main thread only, not in {}: read the value first, then pass it"
_CONVENIENCE = "__pdb_convenience_variables"  # Python 3.12 and newer keep the exception and frame there


class Keyboard:
    """Reads lines from the user, one at a time. `running`: whether a cell runs, so that somebody waits for it."""

    def __init__(self, lane: DisplayLane, running: Callable[[], bool]) -> None:
        self.asking = False
        self._lane = lane
        self._running = running
        self._pid = os.getpid()
        self._answers: queue.SimpleQueue[Enter] = queue.SimpleQueue()

    def install(self) -> None:
        """Have Python's own functions read by this keyboard."""
        builtins.input = self.input
        getpass.getpass = self.getpass
        sys.breakpointhook = _break
        _let_interrupts_leave_pdb()

    def input(self, prompt: object = "", /) -> str:
        """Read a line, like the builtin.

        Raises:
            EOFError: The user has ended the input.
            InteractionError: Nobody can enter anything.
        """
        return self._read(str(prompt), password=False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: object) -> str:
        """Read a line that is not shown, like `getpass.getpass`."""
        return self._read(str(prompt), password=True)

    def enter(self, answer: Enter) -> Done:
        """Hand over what the user has entered. In the control thread."""
        self._answers.put(answer)
        return Done()

    def _read(self, prompt: str, *, password: bool) -> str:
        if os.getpid() != self._pid:
            raise InteractionError(_ONE_THREAD.format("a process that it has forked"))
        if threading.current_thread() is not threading.main_thread():
            raise InteractionError(_ONE_THREAD.format(f"thread {threading.current_thread().name!r}"))
        if not self._running():
            raise InteractionError("input() works while a cell runs, not between cells: read the value in a cell")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):  # a cell may have put anything in its place
                stream.flush()
        number = self._lane.prompt(prompt.encode(errors="backslashreplace").decode(), password=password)
        self.asking = True
        try:
            answer = self._wait(number)
        finally:
            self.asking = False
        if answer.outcome == "refused":
            raise InteractionError(answer.text)
        if answer.outcome == "end":
            raise EOFError
        return answer.text

    def _wait(self, number: int) -> Enter:
        while True:
            with contextlib.suppress(queue.Empty):
                answer = self._answers.get(timeout=_LOOK)
                if answer.number == number:  # else to a prompt that was interrupted
                    return answer


class RankPdb(Pdb):
    """IPython's debugger, which an interrupt leaves: it raises KeyboardInterrupt in what is debugged."""

    def __init__(self) -> None:
        super().__init__()
        self._interrupted = False
        self._stopped = False  # anywhere yet

    def cmdloop(self, intro: object = None) -> None:
        """Read commands, like `cmd.Cmd.cmdloop`."""
        try:
            super().cmdloop(intro)
        except KeyboardInterrupt:
            self._interrupted = True
            raise

    def interaction(self, frame: types.FrameType | None, tb_or_exc: object) -> None:
        """Debug a frame, or the frames of a traceback."""
        self._stopped = True
        super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
        if self._interrupted:  # IPython has swallowed it
            self.forget()
            sys.settrace(None)
            raise KeyboardInterrupt

    def user_call(self, frame: types.FrameType, argument_list: Any) -> None:
        """Stop where a function is called; a statement of the cell, which IPython runs as one, is none."""
        if frame.f_code.co_name != "<module>":
            super().user_call(frame, argument_list)

    def user_return(self, frame: types.FrameType, return_value: object) -> None:
        """Stop where a function returns, and at a `breakpoint()` that ends a cell."""
        if frame.f_code.co_name != "<module>" or not self._stopped:
            super().user_return(frame, return_value)
        frame.f_locals.pop("__return__", None)  # those of a cell's statement are the user's variables

    def stop_here(self, frame: types.FrameType) -> bool:
        """Return whether to stop in a frame: not in what surrounds the cell, which IPython and nbdist run."""
        return _is_called_by_user(frame) and bool(super().stop_here(frame))  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Let go of the frames."""
        names = [frame.f_globals for frame, _ in getattr(self, "stack", None) or []]
        super().forget()
        for known in names:
            known.pop(_CONVENIENCE, None)


def look_into(error: BaseException) -> None:
    """Open a debugger at the frames of an exception, from the user's outermost one inwards. An interrupt leaves it."""
    debugger = RankPdb()
    debugger.reset()
    with contextlib.suppress(KeyboardInterrupt):
        debugger.interaction(None, failures.within_users_code(error.__traceback__))


def stop_tracing() -> None:
    """Leave no debugger on guard when a cell has ended: it would stop in the next one."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(None)


def _is_called_by_user(frame: types.FrameType | None) -> bool:
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename in shells.cell_files() or (filename[:1] != "<" and failures.is_users_code(frame.f_code)):
            return True
        frame = frame.f_back
    return False


def _break(*args: object, **keywords: object) -> Any:
    """Stop in IPython's debugger at `breakpoint()`, or do what PYTHONBREAKPOINT says."""
    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **keywords)
    RankPdb().set_trace(sys._getframe().f_back)  # type: ignore[no-untyped-call]
    return None


@functools.cache
def _let_interrupts_leave_pdb() -> None:
    """Have every debugger that is made of Python's be left by an interrupt, and leave its signal to the cell.

    pdb swallows it and asks again, so nothing could stop the cell; and after `continue` it would take over Ctrl-C.
    """
    original = pdb.Pdb.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        self.nosigint = True
        self._cmdloop = functools.partial(_read_commands, self)

    pdb.Pdb.__init__ = __init__  # type: ignore[method-assign]


def _read_commands(debugger: Any) -> None:
    debugger.allow_kbdint = True
    try:
        debugger.cmdloop()
    except KeyboardInterrupt:
        sys.settrace(None)
        raise
    finally:
        debugger.allow_kbdint = False
