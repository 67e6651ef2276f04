"""Runs a script as the main program of this process, which answers looks meanwhile: `python -m nbdist serve`.

Or has others do so as they start: `nbdist env`.
"""

from __future__ import annotations

import shlex
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from nbdist.errors import UsageError
from nbdist.serving.served_rank import serve


def variables_for_jobs(*, control: bool) -> list[str]:
    """Return what a shell is to export so that the ranks of a job that it starts answer looks.

    Args:
        control: Whether others may pause them and run code in them.
    """
    folder = shlex.quote(str(Path(__file__).with_name("at_start")))
    return [f"PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}", f"NBDIST_SERVE={'control' if control else '1'}"]


def read_script(script: str, *, control: bool = False) -> types.CodeType:
    """Return a script's code.

    Args:
        script: Its path.
        control: Whether others may pause it and run code in it.

    Raises:
        UsageError: It can't be read, or the place for this process's socket can't be used.
        SyntaxError: It is not Python.
    """
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
    except OSError as error:
        raise UsageError(f"{script} can't be read: {error.strerror}") from None
    serve(control=control)
    return code


def serve_script(code: types.CodeType, script: str, arguments: Sequence[str]) -> None:
    """Run a script like `python SCRIPT`. What it raises, or its exit, is that of this process.

    Args:
        code: Its code.
        script: Its path.
        arguments: What it finds in `sys.argv`.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(code, vars(main))
