"""Runs code of a visitor in the main program of this process, like a cell: what it prints and returns is text.

Independent of connections and of when it may run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import sys
import traceback
from collections.abc import Iterator, KeysView
from types import FrameType
from typing import Any, Literal

from nbdist.base.text import size
from nbdist.serving.control_messages import CodeFailure, PrintedText
from nbdist.serving.script_frame import names_in, script_frames

_FILE = "<look>"
_MOST = 1 << 20  # characters that are kept of what code prints


class VisitorNames(dict[str, Any]):
    """The globals of a visitor's code: those of the main program, and names of functions, which are only read.

    The functions are the user's that run now; of equal names, the inner function's counts. What code assigns goes to
    the main program, and hides theirs.

    Args:
        frame: Where the main thread is.
    """

    def __init__(self, frame: FrameType) -> None:
        super().__init__()
        self._frame: dict[str, Any] = {}
        for each in script_frames(frame):
            self._frame = names_in(each) | self._frame
        self._main = vars(sys.modules["__main__"])

    def __missing__(self, name: str) -> Any:
        return self._frame[name] if name in self._frame else self._main[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._frame.pop(name, None)
        self._main[name] = value

    def __delitem__(self, name: str) -> None:
        del self._main[name]

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Return all names, which `dir()` shows."""
        return {**self._main, **self._frame}.keys()

    def settle(self) -> None:
        """Move what functions of the code have assigned by `global`, which does not come by here, to its place."""
        for name, value in list(dict.items(self)):
            if name != "__builtins__":
                self[name] = value
                dict.__delitem__(self, name)

    def forget_frame(self) -> None:
        """Keep nothing of the functions alive, whoever holds a function that the code has defined."""
        self._frame.clear()


def run_code(code: str, names: VisitorNames, printed: PrintedTexts) -> CodeFailure | None:
    """Run code, and return what it raised.

    Args:
        code: Python.
        names: Its globals.
        printed: Takes what it prints, and the value of its last expression.

    Raises:
        KeyboardInterrupt: Whoever runs this process wants it to end.
    """
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    try:
        with _redirected(printed):
            _execute(code, names)
    except (Exception, SystemExit) as error:  # the visitor's, not the job's
        return _describe(error)
    finally:
        names.settle()
        linecache.cache.pop(_FILE, None)
    return None


def _execute(code: str, names: VisitorNames) -> None:
    tree = ast.parse(code, _FILE)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        del tree.body[-1]
    exec(compile(tree, _FILE, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _FILE, "eval"), names)
        if value is not None:
            print(repr(value))


def _describe(error: BaseException) -> CodeFailure:
    """Describe an error with its stack from the visitor's code inwards."""
    stack = error.__traceback__
    while stack is not None and stack.tb_frame.f_code.co_filename != _FILE:
        stack = stack.tb_next
    lines = traceback.format_exception(type(error), error, stack)
    last = traceback.format_exception_only(error)[-1].strip()
    return CodeFailure(type(error).__name__, last, "".join(lines)[-_MOST:])


class PrintedTexts:
    """What code has printed, up to a limit.

    Attributes:
        texts: In order, with their streams.
    """

    def __init__(self) -> None:
        self.texts: list[PrintedText] = []
        self._length = 0

    def add(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        """Take what was printed."""
        if self._length < _MOST:
            self.texts.append((stream, text[: _MOST - self._length]))
            if self._length + len(text) > _MOST:
                self.texts.append(("stderr", f"\n... (only the first {size(_MOST)} are shown)\n"))
        self._length += len(text)


class _Stream(io.TextIOBase):
    def __init__(self, printed: PrintedTexts, stream: Literal["stdout", "stderr"]) -> None:
        self._printed = printed
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._printed.add(self._stream, text)
        return len(text)


@contextlib.contextmanager
def _redirected(printed: PrintedTexts) -> Iterator[None]:
    with contextlib.redirect_stdout(_Stream(printed, "stdout")), contextlib.redirect_stderr(_Stream(printed, "stderr")):
        yield
