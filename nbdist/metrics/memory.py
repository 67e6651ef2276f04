"""What a piece of code costs in memory: what it consumed, where it peaked, on the CPU and on each GPU.

Owns the definitions and the meter. Runs no thread and waits for no device. Independent of notebooks or ranks: it
works in any script.

    >>> with MemoryMeter() as meter:
    ...     x = torch.ones(1 << 28)
    >>> print(meter)
    CPU: consumed +1.0 GiB, peaked +0.0 GiB, used 1.2 GiB; 0.31 s
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import msgspec

from nbdist.base.text import duration, size
from nbdist.metrics.allocation import watermarks
from nbdist.metrics.allocation.watermarks import Scope, SharedStats
from nbdist.metrics.node import device

_ALLOCATED = ("allocated_bytes", "all")
_RESERVED = ("reserved_bytes", "all")
_WORTH_A_LOOK = 1 << 20  # bytes of growth from which on it is asked what malloc keeps


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kind of memory over a piece of code. All in bytes.

    Attributes:
        start: In use when it began.
        end: In use when it ended.
        peak: Largest in between; None: not known.
        sampled: Whether `peak` was only looked for now and then, so that it may have been higher.
    """

    start: int
    end: int
    peak: int | None = None
    sampled: bool = False

    @property
    def consumed(self) -> int:
        """What is in use now and was not before: end - start."""
        return self.end - self.start

    @property
    def peaked(self) -> int | None:
        """What was needed on the way beyond that: peak - the larger of start and end."""
        return None if self.peak is None else self.peak - max(self.start, self.end)

    @property
    def needed(self) -> int | None:
        """What has to be free for it to run: peak - start. Where memory grew, that is consumed + peaked."""
        return None if self.peak is None else self.peak - self.start

    def then(self, later: Usage) -> Usage:
        """Return this and a later one as one piece."""
        peak = None if self.peak is None or later.peak is None else max(self.peak, later.peak)
        return Usage(self.start, later.end, peak, self.sampled or later.sampled)

    def as_data(self) -> dict[str, Any]:
        """Return all figures, including derived ones, for JSON."""
        derived = {"consumed": self.consumed, "peaked": self.peaked, "needed": self.needed}
        return {"start": self.start, "end": self.end, "peak": self.peak, "sampled": self.sampled} | derived


class DeviceUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU over a piece of code.

    Attributes:
        allocated: What torch has in tensors.
        reserved: What torch holds, its cache included.
        device: What is in use on the device, by anybody; None: not known.
        uuid: Of the GPU; empty where torch does not tell.
    """

    allocated: Usage
    reserved: Usage
    device: Usage | None = None
    uuid: str = ""

    def then(self, later: DeviceUsage) -> DeviceUsage:
        """Return this and a later one as one piece."""
        device = later.device if self.device is None or later.device is None else self.device.then(later.device)
        return DeviceUsage(self.allocated.then(later.allocated), self.reserved.then(later.reserved), device, later.uuid)


class MemoryUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process over a piece of code.

    Attributes:
        seconds: Wall time. Work that a GPU still has queued is not waited for.
        cpu: Resident memory, as the kernel counts it; None: not known.
        devices: By name ("cuda:0"), those that it has used.
        kept: Bytes of resident memory that malloc keeps of what was freed; 0 where memory has hardly grown.
        why: What is not known and why.
    """

    seconds: float
    cpu: Usage | None = None
    devices: dict[str, DeviceUsage] = {}
    kept: int = 0
    why: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """All figures, in bytes and seconds, for JSON."""
        devices = {
            name: {
                "uuid": one.uuid,
                "allocated": one.allocated.as_data(),
                "reserved": one.reserved.as_data(),
                "device": one.device.as_data() if one.device is not None else None,
            }
            for name, one in self.devices.items()
        }
        cpu = self.cpu.as_data() if self.cpu is not None else None
        return {"seconds": self.seconds, "cpu": cpu, "devices": devices, "kept": self.kept, "why": self.why}

    @property
    def kinds(self) -> dict[str, Usage]:
        """Each kind of memory by its name, those that are known."""
        found = {"CPU": self.cpu} if self.cpu is not None else {}
        for name, one in self.devices.items():
            found |= {f"{name} allocated": one.allocated, f"{name} reserved": one.reserved}
            if one.device is not None:
                found[f"{name} in all"] = one.device
        return found

    def then(self, later: MemoryUsage) -> MemoryUsage:
        """Return this and a later piece as one; what happened in between counts as consumed, its time does not."""
        cpu = later.cpu if self.cpu is None or later.cpu is None else self.cpu.then(later.cpu)
        devices = dict(self.devices)
        for name, one in later.devices.items():
            devices[name] = devices[name].then(one) if name in devices else one
        return MemoryUsage(self.seconds + later.seconds, cpu, devices, later.kept, later.why or self.why)

    def __str__(self) -> str:
        parts = [
            f"{name}: consumed {size(one.consumed, signed=True)}, "
            f"peaked {size(one.peaked, signed=True)}, used {size(one.end)}"
            for name, one in self.kinds.items()
        ]
        return "; ".join([*parts, duration(self.seconds), *([self.why] if self.why else [])])


class MemoryMeter:
    """Measures its body, also when that raises. Meters may nest and overlap, in any number of threads.

    The user's own `torch.cuda.max_memory_allocated()` and its relatives go on as if there were no MemoryMeter.

    Attributes:
        usage: What was measured; None until the end.
    """

    def __init__(self) -> None:
        self.usage: MemoryUsage | None = None

    def begin(self) -> MemoryMeter:
        """Measure from now on. Raises nothing: what can't be measured is n/a in the end."""
        self.usage = None
        self._began = time.perf_counter()
        self._devices = _Devices()
        self._process: Scope | None = None
        with contextlib.suppress(OSError):
            self._process = watermarks.process.begin()
            self._start = watermarks.resident()[0]
        return self

    def end(self) -> MemoryUsage:
        """Measure up to now."""
        seconds = time.perf_counter() - self._began
        cpu, why = self._end_process()
        devices, why_devices = self._devices.end()
        kept = kept_by_malloc() if cpu is not None and cpu.consumed >= _WORTH_A_LOOK else 0
        self.usage = MemoryUsage(seconds, cpu, devices, kept, "; ".join(filter(None, (why, why_devices))))
        return self.usage

    @property
    def data(self) -> dict[str, Any]:
        """The figures, in bytes and seconds; empty until the end."""
        return self.usage.data if self.usage is not None else {}

    def __enter__(self) -> MemoryMeter:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()

    def __str__(self) -> str:
        return str(self.usage) if self.usage is not None else "not measured yet"

    def _end_process(self) -> tuple[Usage | None, str]:
        if self._process is None:
            return None, "CPU memory n/a: this system has no /proc"
        scope = watermarks.process.end(self._process)
        end = watermarks.resident()[0]
        peak = scope.peak("resident")
        if peak is None:
            return Usage(self._start, end), "CPU peak n/a: the system does not let this process reset its VmHWM"
        return Usage(self._start, end, max(peak, self._start, end)), ""


class _Devices:
    """The GPUs of this process from now on, with a scope open on each."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Scope, tuple[int, int], int | None]] = {}
        self._why = ""
        shared = watermarks.devices()
        if shared is None or shared.why:
            return
        with self._noting():
            for index in _in_use():
                one = shared.of(index)
                self._open[index] = one.watermark.begin(), _levels(one), _in_use_by_anybody(index)

    def end(self) -> tuple[dict[str, DeviceUsage], str]:
        """Return what they cost, by name, and what is not known."""
        found: dict[str, DeviceUsage] = {}
        shared = watermarks.devices()
        if shared is None or shared.why:
            return found, shared.why if shared is not None and _in_use() else ""
        with self._noting():
            for index in _in_use():
                usage = self._end_one(index, shared.of(index))
                if usage.reserved.peak or usage.reserved.end:
                    found[f"cuda:{index}"] = usage
        return found, self._why

    def _end_one(self, index: int, one: SharedStats) -> DeviceUsage:
        scope, start, wide = self._open.pop(index, (None, (0, 0), None))
        # Nothing was there to open a scope on when this began, so all that was ever there is of this piece.
        seen = one.watermark.end(scope) if scope is not None else one.ever()
        end, wide_end = _levels(one), _in_use_by_anybody(index)
        allocated, reserved = (
            Usage(begin, now, max(begin, now, seen.peak(path) or 0))
            for path, begin, now in zip((_ALLOCATED, _RESERVED), start, end, strict=True)
        )
        device = Usage(wide, wide_end, max(wide, wide_end), True) if wide is not None and wide_end is not None else None
        return DeviceUsage(allocated, reserved, device, uuid_of(index))

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """After a failed kernel torch refuses whatever it is asked; that must not end the user's cell."""
        try:
            yield
        except Exception as error:  # of torch or a driver: the figure is left out
            self._why = f"GPU memory n/a: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _in_use() -> list[int]:
    """Return the GPUs on which this process has a context. Asking creates none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == torch.cuda.current_device())
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def _levels(one: SharedStats) -> tuple[int, int]:
    """Return the bytes allocated and reserved now."""
    allocated, reserved = one.current(_ALLOCATED, _RESERVED)
    return allocated, reserved


def _in_use_by_anybody(index: int) -> int:
    free, total = sys.modules["torch"].cuda.mem_get_info(index)
    return int(total - free)


@functools.cache
def uuid_of(index: int) -> str:
    """Return the UUID of a GPU that torch numbers."""
    return device.uuid(sys.modules["torch"].cuda, index)


# --- malloc


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def kept_by_malloc() -> int:
    """Return the bytes that malloc keeps for later of what was freed; 0 where it does not tell. Takes 1 µs to 20 ms."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
    if function is None:
        return 0
    function.restype = _MallocInfo
    return int(function().fordblks)
