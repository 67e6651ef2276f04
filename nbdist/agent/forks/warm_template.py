"""The agent's handle on its warm template: starts it, and knows when it is stale."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.agent.forks.fork_channel import ForkChannel
from nbdist.base.processes import SAME_HASHES, python_command

if TYPE_CHECKING:
    from nbdist.wire.messages.life import StartOptions

# Variables read when a library is imported, so that an existing template can't follow a change.
_LATCHED_PREFIXES = (
    "LD_",
    "PYTHON",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "NPY_",
    "NUMEXPR_",
    "MALLOC_",
    "GLIBC_",
)
_READ_LATER = (
    "OMP_NUM_THREADS",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_CPP_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",  # set by importing the compiler, in the notebook too
    "PYTHONSTARTUP",
    "PYTHONUNBUFFERED",
)
_READ_LATER_PREFIXES = ("TORCH_NCCL_", "TORCH_GLOO_", "TORCHELASTIC_")
_PACKAGES = ("torch", "numpy", "ipython", "nbdist")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LOW_PRIORITY = 10
_ROUND = 10  # seconds: the import time shown is rounded to this


@dataclass
class WarmTemplate:
    """One template process, a child of this process. The agent reaps it.

    Args:
        environment: The environment in which it imports.
        sys_path: Its `sys.path`; empty for Python's own.
        patient: Whether to yield the cores to others while it imports.
    """

    environment: Mapping[str, str]
    sys_path: list[str] = field(default_factory=list)
    patient: bool = False
    ready: bool = False
    origin: str = ""

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ForkChannel(ours)
        command = python_command("nbdist.agent.forks.template", str(theirs.fileno()), *self.sys_path)
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**SAME_HASHES, **self.environment, **_ONE_THREAD},
                cwd="/",
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._began = time.monotonic()
        self._work = _work_of(self.pid)
        if self.patient and os.geteuid() == 0:  # other users can lower their priority but never raise it again
            os.setpriority(os.PRIO_PROCESS, self.pid, _LOW_PRIORITY)
        self.versions = installed_versions()

    def progress(self) -> str:
        """Return what it is doing, in words; "" if it has done nothing since the last call."""
        before, self._work = self._work, _work_of(self.pid)
        seconds = int(time.monotonic() - self._began) // _ROUND * _ROUND
        what = f"importing torch, {seconds} s" if seconds else "importing torch"
        return what if self._work != before else ""

    def hurry(self) -> None:
        """Raise its priority: a start is waiting for it, and the ranks will inherit its priority."""
        if self.patient and os.geteuid() == 0:
            os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0))
            self.patient = False

    def stale(self, options: StartOptions) -> list[str]:
        """Return why ranks can't be forked from it for these options; empty if they can."""
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return ["the process that had imported torch for the ranks has ended"]
        if options.fresh:
            return []  # ranks with their own Python import everything again
        reasons = []
        if changed := changed_variables(self.environment, options.environment):
            reasons.append(
                f"{', '.join(changed)} changed after torch was imported for the ranks, and libraries read it only at "
                "import"
            )
        now = installed_versions()
        for name, version in self.versions.items():
            if now[name] != version:
                reasons.append(f"{name} {version} was replaced by {now[name]}")
        found = find_torch(options.search_path())
        if self.origin and found and found != self.origin:
            reasons.append(f"sys.path leads to another torch ({found})")
        return reasons

    def end(self) -> None:
        """End it and its children."""
        self._process.kill()
        self.reap()

    def reap(self) -> int:
        """Forget a template that has ended, and return its exit code."""
        self.channel.close()
        return self._process.wait()


def _work_of(pid: int) -> tuple[str, ...]:
    """Return counters that grow as soon as a process does anything: page faults, CPU ticks, CPU ns, bytes read."""
    folder, found = Path(f"/proc/{pid}"), []
    with contextlib.suppress(OSError):  # it is gone, or this system does not report them
        found += (folder / "stat").read_text().rpartition(")")[2].split()[7:13]
        found.append((folder / "io").read_text().split("\n", 1)[0])
        found.append((folder / "schedstat").read_text().split(" ", 1)[0])  # of its first thread
    return tuple(found)


def changed_variables(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of variables that differ and are read at import."""
    names = (name for name in {*before, *now} if before.get(name) != now.get(name))
    return sorted(name for name in names if _is_latched(name))


def _is_latched(name: str) -> bool:
    if name in _READ_LATER or name.startswith(_READ_LATER_PREFIXES):
        return False
    return name.startswith(_LATCHED_PREFIXES)


def find_torch(path: list[str]) -> str:
    """Return the file that `import torch` would load with this `sys.path`; empty without torch."""
    spec = importlib.machinery.PathFinder.find_spec("torch", path)
    return (spec.origin or "") if spec is not None else ""


def installed_versions() -> dict[str, str]:
    """Return the versions of what the template preloads, as installed on disk now."""
    import importlib.metadata  # slow itself, and the template should start first

    importlib.invalidate_caches()
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions
