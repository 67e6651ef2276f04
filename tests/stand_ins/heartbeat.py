"""The heartbeat of NCCL's watchdog, and the thread that ends the process when it stops. Compiled for a test.

What it does, and where torch 2.13 does so (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp):

- The watchdog's heart beats each time that it looks, every 100 ms (`Watchdog::runLoop`). The monitor compares every
  TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 unless it is set). If nothing has moved since the last time, it waits once more
  as long, whatever happens meanwhile, and calls std::abort, so SIGABRT (`HeartbeatMonitor::runLoop`,
  `terminateProcess`).
- With TORCH_NCCL_ENABLE_MONITORING=0 it does all that but the last, and then looks no more.
- It is a thread of C++'s and needs no GIL. In a process that was stopped it notices nothing: it was stopped, too, and
  the heart has beaten since it looked last.

The real watchdog needs the GIL only indirectly: it hangs in a call of CUDA's, such as cudaEventDestroy, "and could be
triggered by another thread holding the GIL inside a CUDA api", as its message says. How often is not known. This one
always needs it. What is written before the end (flight record, stacks) is not modeled.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from tests.stand_ins import native
from tests.stand_ins.nccl import LOOK

_SOURCE = """
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

static atomic_ulong beats = 1;
static int enabled;
static struct timespec timeout;
static sem_t over;

static void *monitor(void *unused) {
    for (unsigned long seen = 0, now; (now = beats) != seen; seen = now) nanosleep(&timeout, NULL);
    nanosleep(&timeout, NULL);
    if (enabled) abort();
    sem_post(&over);
    return NULL;
}

void start(int seconds, int may_abort) {
    pthread_t thread;
    sigset_t all, before;
    timeout.tv_sec = seconds;
    enabled = may_abort;
    sem_init(&over, 0, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_create(&thread, NULL, monitor, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void beat(void) { beats++; }
void wait_for_monitor(void) { while (sem_wait(&over)); }
"""


def compiled(folder: Path) -> Path | None:
    """The library, made in a folder; None without a C compiler."""
    return native.compiled(folder, "heartbeat", _SOURCE, "-pthread")


class Heart:
    """The watchdog's heart, and its monitor. They begin at once, as the environment wants.

    Args:
        library: What `compiled` has returned.
    """

    def __init__(self, library: str) -> None:
        self._library = ctypes.PyDLL(library)  # its functions are called with the GIL
        seconds = int(os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480"))
        self._library.start(seconds, os.environ.get("TORCH_NCCL_ENABLE_MONITORING", "1") != "0")
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def hold_gil(self) -> None:
        """Hold the GIL until the monitor has given up, or has ended the process."""
        self._library.wait_for_monitor()
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(LOOK):
            self._library.beat()
