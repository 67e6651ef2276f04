"""Who is who among the processes of a session, seen from outside."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from testbed.kernel import Kernel, wait_until

MODULES = {
    "controller": "nbdist.controller.controller_boot",
    "agent": "nbdist.agent.agent_boot",
    "template": "nbdist.agent.forks.template",
}


def find(kernel_pid: int, role: str) -> int:
    """The process id of a kernel's controller, agent or template; 0 if there is none."""
    wanted = MODULES[role]
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(kernel_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                forked = parent is not None and wanted in " ".join(parent.cmdline())
                if wanted in " ".join(process.cmdline()) and not forked:
                    return process.pid
    return 0


def await_role(kernel_pid: int, role: str) -> int:
    """The process id of a role, once it is there."""
    wait_until(lambda: find(kernel_pid, role), f"a {role}")
    return find(kernel_pid, role)


def children(pid: int) -> list[int]:
    """Children in the order of their forks; zombies are none.

    The kernel's own list, `/proc/*/children`, leaves some out while their siblings end.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        found = sorted(psutil.Process(pid).children(), key=lambda child: (child.create_time(), child.pid))
        return [child.pid for child in found if alive(child.pid)]
    return []


def find_store(kernel: Kernel) -> int:
    """The process id of the rendezvous store: the template's child that is no rank."""
    (store,) = set(children(find(kernel.pid, "template"))) - set(kernel.rank_pids())
    return store


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def await_end(pids: Iterable[int], limit: float = 5.0) -> None:
    """Until none of these processes lives."""
    wait_until(lambda: not any(map(alive, pids)), f"an end of {sorted(pids)}", limit)


def open_files(pid: int) -> list[str]:
    """What a process's descriptors are open on; those it closes at this moment are left out."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(str(link.readlink()))
    return found


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Addresses and ports at which these processes listen, from the kernel's own tables."""
    inodes = {file for pid in pids for file in open_files(pid)}
    found = []
    for table, family_ in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path(f"/proc/{next(iter(pids), 'self')}/net/{table}")
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
                found.append((socket.inet_ntop(family_, b"".join(words)), int(port, 16)))
    return sorted(found)


_HEALTHY = (
    "(lambda s: bool(s) and not s.closed and [row['state'] == 'dead' for row in s.status()] == [False] * 2)"
    "(__import__('nbdist').client.session.current.current_session())"
)


def revive(kernel: Kernel) -> None:
    """Give a kernel that has had a session two living ranks."""
    if not kernel.value(_HEALTHY):
        kernel.ok("%distributed start -n 2 --replace")
