"""Looks whether this machine can be part of a session, and says what would fail: `nbdist doctor`.

Starts nothing and changes nothing.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from nbdist.base import network
from nbdist.base.text import counted, size
from nbdist.devices import unusable_gpus, visible_gpus
from nbdist.wire.processes.nodes import Versions

Level = Literal["ok", "note", "problem"]

_SHARED_MEMORY = 1 << 30  # bytes that DataLoader workers and NCCL easily use
_OPEN_FILES = 4096
_CONNECT_LIMIT = 5.0  # seconds
_PROBES = 3


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: "problem": a session would fail; "note": it may.
        subject: What was looked at.
        text: What was found, and for anything but "ok" what to do.
    """

    level: Level
    subject: str
    text: str


def examine(target: str = "") -> Iterator[Finding]:
    """Look at this machine.

    Args:
        target: Where a session listens (`10.0.0.1:29500`), to try the way there; "" for none.
    """
    yield _versions()
    yield _system()
    yield _gpus()
    yield _host_name()
    yield _addresses()
    yield _shared_memory()
    yield _open_files()
    if target:
        yield _way_to(target)


def _versions() -> Finding:
    found = Versions.here()
    text = f"Python {found.Python}, torch {found.torch}, nbdist {found.nbdist}"
    if found.torch == "none":
        return Finding("problem", "versions", f"{text}: install PyTorch, the same version as the notebook's")
    return Finding("ok", "versions", f"{text} (all nodes need the same)")


def _system() -> Finding:
    release = os.uname().release
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return Finding("problem", "system", f"Linux {release} does not offer pidfd_open: Linux 5.3 or newer is needed")
    return Finding("ok", "system", f"Linux {release}, {counted(len(os.sched_getaffinity(0)), 'core')}")


def _gpus() -> Finding:
    if gpus := visible_gpus():
        return Finding("ok", "GPUs", f"{counted(len(gpus), 'GPU')}: {', '.join(gpus)}")
    if files := unusable_gpus(os.environ):
        return Finding(
            "note", "GPUs", f"there are GPUs ({', '.join(files)}) that cannot be used: is the driver installed?"
        )
    return Finding("ok", "GPUs", "none; pass -n to start ranks on the CPU")


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return Finding("note", "host name", f"{name} has no address: use addresses, not names, for --master-addr")
    if address.startswith("127.") or address == "::1":
        return Finding(
            "note", "host name", f"{name} means {address} here (see /etc/hosts): pass an address as --master-addr"
        )
    return Finding("ok", "host name", f"{name} is {address}")


def _addresses() -> Finding:
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        up = psutil.net_if_stats().get(name)
        found += [
            f"{own.address} ({name})"
            for own in addresses
            if own.family in (socket.AF_INET, socket.AF_INET6) and up is not None and up.isup and name != "lo"
        ]
    if not found:
        return Finding("problem", "network", "no interface but loopback is up: other machines cannot reach this one")
    return Finding("ok", "network", ", ".join(found))


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("problem", "shared memory", "there is no /dev/shm, which PyTorch needs: mount it")
    if free < _SHARED_MEMORY:
        what = f"/dev/shm has {size(free)} free; loaders with workers and NCCL need more"
        return Finding("note", "shared memory", f"{what}: in containers, `--shm-size 8g` or `--ipc=host`")
    return Finding("ok", "shared memory", f"{size(free)} free")


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        return Finding(
            "note", "open files", f"at most {hard} per process: `ulimit -Hn {_OPEN_FILES}`, as root, allows more"
        )
    return Finding("ok", "open files", f"{'no limit' if hard == resource.RLIM_INFINITY else hard}")


def _way_to(target: str) -> Finding:
    host, port = network.parse_endpoint(target)
    times = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        try:
            socket.create_connection((host, port), timeout=_CONNECT_LIMIT).close()
        except OSError as error:
            return Finding(
                "problem",
                "session",
                f"{target} cannot be reached: {error}. A firewall may block it, or the session has ended",
            )
        times.append(time.perf_counter() - began)
    way = network.interface_of(network.address_towards(host))
    return Finding(
        "ok", "session", f"{target} answers in {min(times) * 1e3:.1f} ms, through {way or 'an unknown interface'}"
    )
