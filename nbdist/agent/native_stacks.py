"""The stacks of this node's ranks with the frames of C code, by py-spy.

Knows nothing of what the frames mean.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from typing import Any

from nbdist.wire.questions.stopping import NativeStack

_DUMP_LIMIT = 60.0  # seconds: py-spy reads the symbols of all of torch's libraries
_MAIN_THREAD = re.compile(r'^Thread .*: "MainThread"\n((?: .*\n?)*)', re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REFUSED = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)


class NativeStacks:
    """Looks at the native stacks of processes, in any number of threads."""

    def __init__(self) -> None:
        self._programs: set[int] = set()

    @property
    def pids(self) -> set[int]:
        """The processes of py-spy."""
        return set(self._programs)

    def look(self, pid: int) -> NativeStack:
        """Return the stack of a process, or what keeps py-spy from it."""
        try:
            return self._dump(pid)
        except Exception as error:
            return NativeStack(obstacle="other", text=f"{type(error).__name__}: {error}")

    def _dump(self, pid: int) -> NativeStack:
        folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
        program = shutil.which("py-spy", path=os.pathsep.join(folders))
        if program is None:
            return NativeStack(obstacle="missing")
        keywords: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        command = [program, "dump", "--native", "--pid", str(pid)]
        with subprocess.Popen(command, text=True, errors="replace", **keywords) as process:
            self._programs.add(process.pid)
            try:
                output, errors = process.communicate(timeout=_DUMP_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                return NativeStack(obstacle="late", text=f"{_DUMP_LIMIT:.0f} s")
            finally:
                self._programs.discard(process.pid)
        return _read(output, errors, process.returncode)


def _read(output: str, errors: str, code: int) -> NativeStack:
    if _REFUSED.search(errors):
        return NativeStack(obstacle="refused")
    found = _MAIN_THREAD.search(_COLOURS.sub("", output))  # a notebook's environment asks for colors
    if code or found is None:
        what = next((line for line in errors.splitlines() if line.strip()), "it gave no reason")
        return NativeStack(obstacle="other", text=what)
    return NativeStack([line.strip() for line in reversed(found[1].splitlines())])
