"""ProcessGroupNCCL without a GPU: a group of one process by itself, and one of real ranks that talk through gloo.

What it does, and where torch 2.13 does so (torch/csrc/distributed/c10d; headers as in the wheel):

- Collectives return when their kernel is queued; only what waits for the kernel notices that a peer is absent:
  `tests.stand_ins.spinning`.
- `abort` frees the kernels at once (`ncclCommAbort` sets the flag that they look at), but may return as late as the
  group's own time-out, and raises DistBackendError then: it waits for `abortComms`, which takes every communicator's
  lock (ProcessGroupNCCL.cpp, `abort`: `waitForFutureOrTimeout` with `options_->timeout` and `throwException`). The GIL
  is let go meanwhile (init.cpp: `py::call_guard<py::gil_scoped_release>`). How often it blocks in life is not known.
- A second `abort` at the same time waits as well.
- A watchdog ends the process when a collective has not ended within the time-out: TORCH_NCCL_ASYNC_ERROR_HANDLING is 3
  unless it is set, and 1 and 3 tear down, 0 and 2 don't (ProcessGroupNCCL.hpp:167-176; `terminateProcess` is
  std::abort, so SIGABRT). It looks every 100 ms (kWatchdogThreadSleepMillis). Nothing of Python's runs then.
- A slot of a ProcessGroup is taken once and for all: registering another backend there keeps the first
  (ProcessGroup.hpp, `setBackend`).

The watchdog's own heartbeat: `tests.stand_ins.heartbeat`. Peers' watchdogs that see a remote error are not modeled:
they end the process likewise.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.stand_ins.spinning import spin, spinning_until

_TEARS_DOWN = ("1", "3")
LOOK = 0.1  # seconds between two looks of the watchdog
_MEETING = timedelta(seconds=30)
_SLOT = 200  # of the backend that `install` makes: nbdist takes them from 16 upward
_CPU = torch.device("cpu")


class Options:
    """Those of ProcessGroupNCCL that matter here (ProcessGroupNCCL.hpp:512, Backend.hpp)."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = is_high_priority_stream
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: Any = None
        self.split_color = -2  # NCCL_SPLIT_NOCOLOR - 1: not set


class _Abort:
    """How a backend is aborted: its kernels end at once, the call when it can.

    Attributes:
        asked: Whether it is.
        can_end: Set: the call returns. Else it raises, after the time-out.
    """

    def __init__(self) -> None:
        self.asked, self.can_end = threading.Event(), threading.Event()

    def __call__(self, timeout: timedelta) -> None:
        self.asked.set()
        if not self.can_end.wait(timeout.total_seconds()):
            raise dist.DistBackendError("ProcessGroup abort timed out")


# --- in one process


class NcclBackend:
    """What ProcessGroupNCCL offers, as far as it is used. Nothing is communicated.

    Attributes:
        number: Collectives entered so far.
        counts: Whether they are counted.
        aborting: By which threads it has been, or is being, aborted.
        abort_can_end: Whether an abort returns; not set: after the time-out.
    """

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        self.store, self.options = store, options or Options()
        self.number, self.counts = 0, False
        self.aborting: list[int] = []
        self._abort = _Abort()
        self.abort_can_end = self._abort.can_end
        self.abort_can_end.set()

    @property
    def aborted(self) -> bool:
        return self._abort.asked.is_set()

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborting.append(threading.get_ident())
        self._abort(self.options._timeout)

    def _set_sequence_number_for_group(self) -> None:
        self.counts = True

    def _get_sequence_number_for_group(self) -> int:
        return self.number


class Group:
    """What ProcessGroup offers, as far as it is used."""

    class BackendType(int): ...

    group_name, group_desc = "0", "default_pg"

    def __init__(self, backend: NcclBackend) -> None:
        self._slots: dict[int, Any] = {6: backend}
        self._backend = backend
        self._device_types = [torch.device("cuda")]

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _get_backend(self, device: Any) -> NcclBackend:
        assert device.type == "cuda"
        return self._backend

    def _register_backend(self, device: Any, slot: int, backend: NcclBackend) -> None:
        self._backend = self._slots.setdefault(slot, backend)


# --- in ranks


class NcclOverGloo(dist.ProcessGroupGloo):
    """A backend of real ranks: collectives are gloo's, everything around them is as NCCL does it.

    Its abort does not return, but raises after the group's time-out. Start collectives with `async_op=True`, as gloo's
    own calls wait, and then `synchronize`.
    """

    Options = Options  # type: ignore[assignment]
    kept: ClassVar[list[NcclOverGloo]] = []  # one that Python has forgotten would be a plain ProcessGroupGloo again

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        self._options = options or Options()
        # gloo of the same group meets its peers in the same store, under keys that NCCL does not use.
        super().__init__(dist.PrefixStore("nccl", store), rank, size, timeout=_MEETING)
        self._set_default_timeout(timedelta(hours=1))  # it is the watchdog that ends what takes too long
        self._tears_down = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in _TEARS_DOWN
        self._abort = _Abort()
        self.kept.append(self)

    @property
    def options(self) -> Any:
        return self._options

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self._abort(self._options._timeout)

    def await_kernel(self, work: Any) -> None:
        """Return when the kernel of a collective has ended: with all ranks, or because it is aborted."""
        while not work.is_completed() and not self._abort.asked.wait(0.01):
            pass

    def watch(self, work: Any) -> None:
        """The watchdog: end the process if the collective takes longer than the time-out."""
        end = time.monotonic() + self._options._timeout.total_seconds()
        while not work.is_completed() and not self._abort.asked.wait(LOOK):
            if time.monotonic() > end and self._tears_down:
                os.abort()


def install(timeout: timedelta | None = None) -> NcclOverGloo:
    """Let NCCL be the default group's backend, and that of its renewals. Call it on all ranks.

    Args:
        timeout: Of its collectives; None: NCCL's own.
    """
    group, options = dist.group.WORLD, Options()
    assert group is not None
    options._timeout = timeout or options._timeout
    store = dist.PrefixStore("stand-in", c10d._get_default_store())
    backend = NcclOverGloo(store, group.rank(), group.size(), options)
    backend._set_sequence_number_for_group()
    group._register_backend(_CPU, dist.ProcessGroup.BackendType(_SLOT), backend)
    dist.ProcessGroupNCCL = NcclOverGloo  # type: ignore[assignment, misc]
    return backend


def current() -> NcclOverGloo:
    """The default group's backend."""
    group = dist.group.WORLD
    assert group is not None
    found = group._get_backend(_CPU)
    assert isinstance(found, NcclOverGloo)
    return found


def all_reduce(tensor: torch.Tensor) -> Any:
    """Start one, under the watchdog's eyes."""
    work = dist.all_reduce(tensor, async_op=True)
    threading.Thread(target=current().watch, args=(work,), daemon=True).start()
    return work


def synchronize(work: Any) -> None:
    """Wait as `torch.cuda.synchronize()` does for the kernel of this collective: spinning in C."""
    backend = current()
    spin(spinning_until(lambda: backend.await_kernel(work)))
