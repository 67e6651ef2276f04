"""Linux process control: sessions, death signals, descendants. Independent of ranks or the wire.

Processes are signalled only while they can't have been replaced by a stranger: through a pidfd, or as children that
we have not reaped yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil  # 40 ms that a process which starts another one need not wait for

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_COMMAND_LIMIT = 60  # characters of another process's command line


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process by SIGKILL when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request above
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that `end_descendants` finds every one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_group(pid: int) -> int:
    """End what is left of the process group of a child that has ended, then reap it.

    The group's number can't be reused while its leader is not reaped.

    Returns:
        The exit code as subprocess has it: -9 for SIGKILL.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def end_descendants(limit: float = 3.0, keep: Collection[int] = ()) -> None:
    """End and reap all descendants of this process, those that come to it as orphans meanwhile too.

    Args:
        limit: Seconds after which to give up on processes that the kernel does not let go.
        keep: Children to leave alone, with their own descendants.
    """
    import psutil

    end = time.monotonic() + limit
    while doomed := _descendants(keep):
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # psutil compares start times first: never a stranger
        if not keep:
            _reap_children()
        if time.monotonic() > end:
            return
        psutil.wait_procs(doomed, timeout=0.05)


def _descendants(keep: Collection[int]) -> list[psutil.Process]:
    import psutil

    found = []
    for child in psutil.Process().children():
        if child.pid not in keep:
            found.append(child)
            with contextlib.suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
    return found


def allow_many_files() -> int:
    """Raise this process's limit of open files to the most that the system allows, and return that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _reap_children() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def state_of(pid: int) -> str:
    """Return the state of a process as a letter: R runs, S and D wait, T and t are stopped; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def describe_exit(code: int) -> str:
    """Return an exit code in words: "exit code 3", "SIGKILL (killed, maybe out of memory)"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    hints = {
        "SIGKILL": " (killed; often by the system when memory runs out)",
        "SIGSEGV": " (segmentation fault)",
        "SIGBUS": " (bus error)",
    }
    return name + hints.get(name, "")


# Of each interpreter that ranks come from, unless the user has set it: else sets of strings, and what is built in their
# order, differ between nodes.
SAME_HASHES = {"PYTHONHASHSEED": "0"}


def python_command(module: str, *arguments: str) -> list[str]:
    """Command that runs `main()` of one of our modules in a fresh interpreter, whatever lies in the current folder.

    `-m` and scripts put folders of the user's on `sys.path`, where a `random.py` would shadow the library's. It is the
    nbdist of this process, also where another one is installed.
    """
    here = str(Path(__file__).resolve().parents[2])
    code = (
        "import sys; from importlib import machinery, util; sys.path[:] = [p for p in sys.path if p]; "
        f"sys.path.append({here!r}); spec = machinery.PathFinder.find_spec('nbdist', [{here!r}]); "
        "sys.modules['nbdist'] = util.module_from_spec(spec); spec.loader.exec_module(sys.modules['nbdist']); "
        f"from {module} import main; main()"
    )
    return [sys.executable, "-c", code, *arguments]


def describe_owner(port: int) -> str:
    """Describe the process that listens on a local port, if this user may see it: " by process 123 (python …)"."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())[:_COMMAND_LIMIT]
                return f" by process {connection.pid} ({command})"
    return " by another process"
