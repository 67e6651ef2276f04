"""The server by which JupyterLab and VS Code debug this rank.

debugpy, which comes with ipykernel, is imported only here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from types import FrameType
from typing import Any

from nbdist.errors import UsageError

_OWN_THREADS = "nbdist-"
_WAITS = ("do_wait_suspend", "pydevd.py")  # the function in which debugpy keeps a thread, and its file
_STEPS = "_pydevd_bundle.pydevd_additional_thread_info"  # debugpy's module that knows which thread makes a step
_FILES = "pydevd_file_utils"  # debugpy's module that refuses breakpoints in files that it does not find
_DEEP = 12  # frames of debugpy's own above it

_was_attached = False  # by the notebook


@functools.cache
def listen() -> int:
    """Listen on loopback, from now on until the rank ends.

    Returns:
        The port, the same each time.

    Raises:
        UsageError: debugpy is not installed.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about Python's own frozen modules
    try:
        debugpy: Any = importlib.import_module("debugpy")
    except ImportError:
        raise UsageError("breakpoints need debugpy on the ranks: `%pip install debugpy`, then run this again") from None
    debugpy.configure(subProcess=False)  # a worker of a DataLoader would wait for a client of its own
    _exempt_own_threads()
    _accept_cells_of_elsewhere()
    _, port = debugpy.listen(("127.0.0.1", 0))
    return int(port)


def holds(frame: FrameType | None) -> bool:
    """Return whether a debugger holds the thread whose innermost frame this is."""
    function, file = _WAITS
    for _ in range(_DEEP):
        if frame is None:
            return False
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def trace_cell(*, by_notebook: bool) -> None:
    """Trace the main thread, which slows it, only while a debugger is on. In the main thread.

    Args:
        by_notebook: Whether the notebook's is. A rank that it never was attached to is always traced: VS Code may
            attach while a cell runs.
    """
    global _was_attached
    debugpy: Any = sys.modules.get("debugpy")
    _was_attached = _was_attached or by_notebook
    if debugpy is not None and _was_attached:
        with contextlib.suppress(AttributeError):  # debugpy's own, if its other process has ended
            debugpy.trace_this_thread(by_notebook)


def end_step() -> None:
    """Forget a step that has left the cell: it would stop in the next one."""
    module: Any = sys.modules.get(_STEPS)
    if module is not None:
        info = module.set_additional_thread_info(threading.main_thread())
        info.pydev_step_cmd = info.pydev_original_step_cmd = -1
        info.pydev_step_stop = None
        info.update_stepping_info()


def _accept_cells_of_elsewhere() -> None:
    """Have breakpoints set in cells whose files lie only on the notebook's machine."""
    module: Any = sys.modules.get(_FILES)
    if module is not None:
        module.exists = lambda path: True


def exempt(thread: threading.Thread) -> None:
    """Keep a thread running that answers for this rank: debugpy stops all that it traces."""
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


def _exempt_own_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith(_OWN_THREADS):
            exempt(thread)
