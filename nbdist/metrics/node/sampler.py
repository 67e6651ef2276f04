"""Looks at this node now and then, while somebody watches: its GPUs through the driver, its memory and cores.

Two threads of its own while it is at it, and none while nobody watches: the driver may take its time or never answer,
and then the rest goes on without it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from nbdist.base import limits
from nbdist.metrics.node import host
from nbdist.metrics.node.nvml import Nvml
from nbdist.metrics.node.sample import GpuSample, NodeSample

FASTEST = 0.25  # seconds
_SLOWEST = 30.0
_SHARE = 0.05  # of its period that a look may take; above, the period doubles
_FIRST_PATIENCE = 1.0  # seconds that the first look waits for the driver, so that there is soon something to see
_PATIENCE = limits.MACHINE_LATE  # for later ones: a driver that takes 50 ms to answer needs 4 s for eight GPUs


class Sampler:
    """The node's one sampler.

    Args:
        nvml: Makes the access to the driver, in the thread that asks it.

    Attributes:
        wake: Readable when `take` has something.
    """

    def __init__(self, nvml: Callable[[], Nvml] = Nvml) -> None:
        self.wake, self._signal = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._driver = _Driver(nvml)
        self._samples: queue.SimpleQueue[NodeSample] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._period = 0.0
        self._slowed = 1.0  # times the period that is asked for
        self._asked = 0  # how often `watch` has been called
        self._thread: threading.Thread | None = None

    def watch(self, period: float) -> None:
        """Look now, and then every so many seconds; 0: no longer."""
        with self._changed:
            self._period = max(FASTEST, period) if period else 0.0
            self._asked += 1
            self._changed.notify()
            if period and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-sampler", daemon=True)
                self._thread.start()

    def take(self) -> list[NodeSample]:
        """Return the looks since the last time; only the newest, if nobody has asked for long."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        newest: list[NodeSample] = []
        while not self._samples.empty():
            newest = [self._samples.get()]
        return newest

    def _run(self) -> None:
        name, cpu = socket.gethostname(), None
        host.busy_cores()
        while True:
            with self._changed:
                if not self._period:
                    self._driver.leave()
                    self._thread = None
                    return
                asked, period = self._asked, min(self._period * self._slowed, max(_SLOWEST, self._period))
            began = time.monotonic()
            self._tell(self._look(name, period, cpu))
            took = time.monotonic() - began
            self._slowed = _slow_down(self._slowed, took / period)
            hurried = self._wait(max(0.0, period - took), asked)
            cpu = None if hurried else host.busy_cores()  # over a moment it would be all or nothing

    def _wait(self, seconds: float, asked: int) -> bool:
        """Wait, but no longer than until `watch` is called for the next time. True: it has been."""
        with self._changed:
            return self._changed.wait_for(lambda: self._asked != asked, seconds)

    def _look(self, name: str, period: float, cpu: float | None) -> NodeSample:
        gpus, why = self._driver.ask()
        total, used = host.memory()
        return NodeSample(
            name=name,
            at=time.time(),
            gpus=gpus,
            memory_total=total,
            memory_used=used,
            cpu=cpu,
            why=why,
            period=period,
        )

    def _tell(self, sample: NodeSample) -> None:
        with self._changed:
            if not self._period:
                return
        self._samples.put(sample)
        with contextlib.suppress(BlockingIOError):  # it has been told
            os.write(self._signal, b".")


def _slow_down(factor: float, share: float) -> float:
    """Return how much longer than asked the next period is, when a look has taken this share of the last one."""
    if share > _SHARE:
        return min(factor * 2, _SLOWEST / FASTEST)
    return max(1.0, factor / 2) if share < _SHARE / 3 else factor


class _Driver:
    """Asks the driver in a thread of its own, which it may keep for as long as it likes."""

    def __init__(self, make: Callable[[], Nvml]) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._asking = False
        self._since = 0.0
        self._answer: tuple[list[GpuSample], str] | None = None
        self._heard = False
        self._leaving = False
        self._thread: threading.Thread | None = None

    def ask(self) -> tuple[list[GpuSample], str]:
        """Return all GPUs; where there are none, the reason. An answer that comes late is given the next time."""
        with self._changed:
            self._leaving = False
            patience = 0.0 if self._asking else _PATIENCE if self._heard else _FIRST_PATIENCE
            if self._answer is None and not self._asking:
                self._asking, self._since = True, time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-driver", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answer is not None, patience)
            answer, self._answer = self._answer, None
            self._heard = answer is not None
            return answer or ([], f"the NVIDIA driver has not answered for {time.monotonic() - self._since:.0f} s")

    def leave(self) -> None:
        """Let go of the driver until it is asked again."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def _run(self) -> None:
        nvml = self._make()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asking or self._leaving)
                if self._leaving:
                    self._thread, self._answer, self._asking, self._heard = None, None, False, False
                    break
            answer = _read(nvml)
            with self._changed:
                self._asking, self._answer = False, answer
                self._changed.notify_all()
        nvml.close()


def _read(nvml: Nvml) -> tuple[list[GpuSample], str]:
    try:
        gpus = nvml.read()
    except Exception as error:  # a driver of tomorrow may answer in ways that nobody knows
        return [], f"the NVIDIA driver's answer makes no sense: {type(error).__name__}: {error}"
    return gpus, "" if gpus else nvml.why
