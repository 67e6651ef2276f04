"""A cable between two hosts that delays and loses packets, in user space: `tc netem`, which not every kernel has."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_FRAME = 1 << 16  # bytes, at most


class Cable:
    """What joins the networks of two namespaces.

    Args:
        ends: For each end the namespace and the name of the interface there.
        seed: Of what is lost.

    Attributes:
        delay: Seconds that each packet takes.
        loss: Share of the packets that don't arrive.
        is_out: Whether none does.
    """

    def __init__(self, ends: tuple[tuple[str, str], tuple[str, str]], seed: int = 0) -> None:
        self.delay, self.loss, self.is_out = 0.0, 0.0, False
        self._chance = random.Random(seed)
        self._files = [_tap(namespace, interface) for namespace, interface in ends]
        self._under_way: list[tuple[float, int, int, bytes]] = []  # when it is there, its number, where, and what it is
        self._ended = False
        self._thread = threading.Thread(target=self._carry, name="cable", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove both ends."""
        self._ended = True
        self._thread.join()
        for file in self._files:
            os.close(file)

    @contextlib.contextmanager
    def disturbed(self, *, delay: float = 0.0, loss: float = 0.0, out: bool = False) -> Iterator[None]:
        """It is as bad as this meanwhile."""
        self.delay, self.loss, self.is_out = delay, loss, out
        try:
            yield
        finally:
            self.delay, self.loss, self.is_out = 0.0, 0.0, False

    def _carry(self) -> None:
        number = 0
        while not self._ended:
            patience = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else 0.1
            ready, _, _ = select.select(self._files, [], [], min(patience, 0.1))
            for file in ready:
                frame = os.read(file, _FRAME)
                if not self.is_out and self._chance.random() >= self.loss:
                    number += 1
                    other = self._files[1 - self._files.index(file)]
                    heapq.heappush(self._under_way, (time.monotonic() + self.delay, number, other, frame))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, file, frame = heapq.heappop(self._under_way)
                with contextlib.suppress(OSError):  # that end is down
                    os.write(file, frame)


def _tap(namespace: str, interface: str) -> int:
    """Return a descriptor of a new interface in a namespace."""
    with ThreadPoolExecutor(1) as thread:  # a thread of its own, as it can't come back
        return thread.submit(_tap_here, namespace, interface).result()


def _tap_here(namespace: str, interface: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH14x", interface.encode(), _TAP | _NO_HEADER))
    return file
