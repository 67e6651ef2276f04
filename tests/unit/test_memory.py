"""What a MemoryMeter says of allocations of known size; and that Meters disturb neither each other nor the user."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.metrics import memory
from nbdist.metrics.allocation import watermarks
from nbdist.metrics.allocation.watermarks import Peaks, SharedDevices, SharedStats, Watermark
from nbdist.metrics.memory import DeviceUsage, MemoryMeter, MemoryUsage, Usage
from tests.stand_ins.cuda import Allocator, Torch

PAGE = 4096
MIB = 1 << 20
NOISE = 64 * PAGE  # what Python itself may take meanwhile


def resolution() -> int:
    """Return the possible error, in bytes, of a CPU peak after memory was freed: the kernel counts in batches.

    Linux 6.2 and later, include/linux/percpu_counter.h: max(32, 2 x cores) pages on each core, for each of three kinds
    of pages. What is in use at the start and the end is summed exactly.
    """
    cores = os.cpu_count() or 1
    return 3 * cores * max(32, 2 * cores) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def no_garbage_is_freed_meanwhile() -> Iterator[None]:
    """What earlier tests left in cycles may be hundreds of megabytes: it goes before a test measures, not meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def block(size: int) -> np.ndarray[Any, Any]:
    """Pages of its own, which it takes when it is made and gives back at once: malloc may have kept some of before."""
    found = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    found.fill(1)
    return found


# --- definitions


def test_where_memory_grew_consumed_and_peaked_are_what_was_needed() -> None:
    usage = Usage(start=10, end=14, peak=25)
    assert (usage.consumed, usage.peaked, usage.needed) == (4, 11, 15)


def test_where_memory_shrank_peaked_counts_from_the_start() -> None:
    usage = Usage(start=10, end=4, peak=25)
    assert (usage.consumed, usage.peaked, usage.needed) == (-6, 15, 15)


def test_an_unknown_peak_stays_unknown() -> None:
    usage = Usage(start=10, end=14)
    assert (usage.consumed, usage.peaked, usage.needed) == (4, None, None)


def test_two_pieces_in_a_row_are_one_from_the_first_start_to_the_last_end() -> None:
    first, second = Usage(10, 20, 30), Usage(15, 12, 26)
    assert first.then(second) == Usage(10, 12, 30)


# --- this process


def test_a_known_allocation_is_measured_to_the_page() -> None:
    deviations = []
    for _ in range(5):  # Python may need a page of its own in one of them
        with MemoryMeter() as meter:
            kept = block(33 * MIB)
        deviations.append(abs(meter.data["cpu"]["consumed"] - 33 * MIB))
        del kept
    assert max(deviations) <= NOISE
    assert min(deviations) <= PAGE


def test_what_is_freed_again_is_a_peak() -> None:
    with MemoryMeter() as meter:
        block(64 * MIB)
    cpu = meter.data["cpu"]
    assert abs(cpu["consumed"]) <= NOISE
    assert abs(cpu["peaked"] - 64 * MIB) <= resolution() + NOISE


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(8, 24).map(lambda count: 4 * count)), max_size=6))
def test_consumed_and_peaked_follow_any_sequence_of_allocations(steps: list[tuple[bool, int]]) -> None:
    base = block(40 * MIB)
    live: list[np.ndarray[Any, Any]] = []
    now = most = 0
    with MemoryMeter() as meter:
        for allocate, mebibytes in steps:
            if allocate:
                live.append(block(mebibytes * MIB))
                now += mebibytes * MIB
            elif live:
                now -= live.pop(0).nbytes
            most = max(most, now)
    usage = meter.usage
    assert usage is not None
    assert usage.cpu is not None
    assert abs(usage.cpu.consumed - now) <= NOISE
    assert usage.cpu.peaked is not None
    assert abs(usage.cpu.peaked - (most - max(0, now))) <= resolution() + NOISE
    if usage.cpu.consumed >= 0:
        assert usage.cpu.consumed + usage.cpu.peaked == usage.cpu.needed
    del base


def test_an_inner_meter_does_not_hide_a_peak_from_the_outer_one() -> None:
    with MemoryMeter() as outer:
        block(96 * MIB)
        with MemoryMeter() as inner:
            block(48 * MIB)
    assert abs(outer.data["cpu"]["peaked"] - 96 * MIB) <= resolution() + NOISE
    assert abs(inner.data["cpu"]["peaked"] - 48 * MIB) <= resolution() + NOISE


def test_meters_of_two_threads_may_overlap() -> None:
    began, go_on = threading.Event(), threading.Event()
    other = MemoryMeter()

    def measure() -> None:
        other.begin()
        began.set()
        go_on.wait(10)
        other.end()

    thread = threading.Thread(target=measure)
    with MemoryMeter() as first:
        thread.start()
        assert began.wait(10)
        block(64 * MIB)
    go_on.set()
    thread.join()
    for meter in (first, other):
        assert meter.data["cpu"]["peaked"] > 60 * MIB


def test_a_body_that_raises_is_measured() -> None:
    meter = MemoryMeter()
    with pytest.raises(ZeroDivisionError), meter:
        block(48 * MIB)
        1 / 0  # noqa: B018
    assert meter.data["cpu"]["peaked"] > 40 * MIB


def test_what_malloc_keeps_of_freed_memory_is_told() -> None:
    """In a process of its own, as this one's heap may have room for it already."""
    told = subprocess.run([sys.executable, "-c", FREES_BELOW_A_KEPT_PIECE], capture_output=True, text=True, check=True)
    kept, consumed = map(int, told.stdout.split())
    assert kept > 0.8 * consumed > 10 * MIB


FREES_BELOW_A_KEPT_PIECE = """
from nbdist.metrics.memory import MemoryMeter

with MemoryMeter() as meter:
    pieces = [bytearray(100_000) for _ in range(200)]
    kept = pieces[-1]  # so that the heap can't shrink
    del pieces
print(meter.usage.kept, meter.usage.cpu.consumed)
"""


def test_a_meter_reads_as_one_line() -> None:
    usage = MemoryUsage(
        2.5, Usage(MIB, 3 * MIB, 4 * MIB), {"cuda:0": DeviceUsage(Usage(0, MIB, MIB), Usage(0, 2 * MIB))}
    )
    assert str(usage).split("; ") == [
        "CPU: consumed +2.0 MiB, peaked +1.0 MiB, used 3.0 MiB",
        "cuda:0 allocated: consumed +1.0 MiB, peaked 0 B, used 1.0 MiB",
        "cuda:0 reserved: consumed +2.0 MiB, peaked n/a, used 2.0 MiB",
        "2.50 s",
    ]


# --- counters that several share


class Gauge:
    """A counter in our hands, with a peak that can be reset or not."""

    def __init__(self, *, resettable: bool = True) -> None:
        self.now = self.peak = 0
        self._resettable = resettable

    def set(self, value: int) -> None:
        self.now = value
        self.peak = max(self.peak, value)

    def peaks(self) -> Peaks:
        return {"it": self.peak}

    def reset(self) -> bool:
        if self._resettable:
            self.peak = self.now
        return self._resettable


def test_a_scope_sees_the_largest_value_within_it_only() -> None:
    gauge = Gauge()
    mark = Watermark(gauge)
    gauge.set(9)
    gauge.set(1)
    scope = mark.begin()
    gauge.set(5)
    gauge.set(2)
    assert mark.end(scope).peak("it") == 5


def test_a_peak_that_an_old_one_hides_is_not_known() -> None:
    gauge = Gauge(resettable=False)
    mark = Watermark(gauge)
    gauge.set(9)
    gauge.set(1)
    low, high = mark.begin(), mark.begin()
    gauge.set(5)
    assert mark.end(low).peak("it") is None
    gauge.set(12)
    assert mark.end(high).peak("it") == 12


def peak_for_user(shared: SharedStats) -> int:
    return int(shared.for_user()["allocated_bytes"]["all"]["peak"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(-5, 5), st.sampled_from(["begin", "end", "reset", "read"])), max_size=40))
def test_the_user_reads_the_peak_that_there_would_be_without_meters(actions: list[int | str]) -> None:
    ours, theirs = Allocator(), Allocator()  # the same allocations, with and without Meters
    shared = SharedStats(ours.stats, ours.reset)
    open_scopes: list[tuple[Any, int]] = []
    for action in actions:
        if isinstance(action, int):
            amount = max(action, -ours.now["allocated_bytes"])
            for allocator in (ours, theirs):
                allocator.allocate(amount) if amount > 0 else allocator.free(-amount)
            open_scopes = [(scope, max(most, ours.now["allocated_bytes"])) for scope, most in open_scopes]
        elif action == "begin":
            open_scopes.append((shared.watermark.begin(), ours.now["allocated_bytes"]))
        elif action == "end" and open_scopes:
            scope, most = open_scopes.pop(len(open_scopes) // 2)  # not always the innermost
            assert shared.watermark.end(scope).peak(("allocated_bytes", "all")) == most
        elif action == "reset":
            shared.reset_for_user()
            theirs.reset()
        assert peak_for_user(shared) == theirs.peak["allocated_bytes"]


# --- a torch with GPUs, in our hands


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    """One with two GPUs of 80 bytes, the second without a context of this process."""
    stand_in = Torch("GPU-uuid-0", "GPU-uuid-1")
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    monkeypatch.setattr(watermarks, "shared_devices", None)
    memory.uuid_of.cache_clear()
    yield stand_in
    memory.uuid_of.cache_clear()


def test_a_gpu_is_measured_by_what_torch_allocates_reserves_and_what_the_whole_device_has(torch: Torch) -> None:
    gpu = torch.gpus[0]
    gpu.allocate(10)
    with MemoryMeter() as meter:
        gpu.allocate(30)
        gpu.free(25)
    assert meter.usage is not None
    assert meter.usage.devices == {
        "cuda:0": DeviceUsage(
            Usage(10, 15, 40), Usage(10, 40, 40), device=Usage(20, 50, 50, sampled=True), uuid="GPU-uuid-0"
        )
    }


def test_the_users_own_peaks_do_not_see_a_meter(torch: Torch) -> None:
    gpu = torch.gpus[0]
    with MemoryMeter():
        gpu.allocate(30)
        gpu.free(30)
        with MemoryMeter():
            gpu.allocate(5)
        assert torch.max_memory_allocated() == 30
        torch._C._cuda_resetPeakMemoryStats(0)
        assert torch.max_memory_allocated() == 5


def test_a_meter_does_not_see_the_users_resets(torch: Torch) -> None:
    with MemoryMeter() as meter:
        torch.gpus[0].allocate(30)
        torch.gpus[0].free(30)
        torch._C._cuda_resetPeakMemoryStats(0)
    assert meter.data["devices"]["cuda:0"]["allocated"]["peak"] == 30


def test_a_gpu_that_is_used_for_the_first_time_within_is_measured_from_nothing(torch: Torch) -> None:
    torch.initialized = False
    with MemoryMeter() as meter:
        torch.initialized = True
        torch.gpus[0].allocate(30)
        torch.gpus[0].free(20)
    assert meter.data["devices"]["cuda:0"]["allocated"]["peak"] == 30
    assert meter.data["devices"]["cuda:0"]["device"] is None


def test_a_gpu_that_this_process_does_not_use_is_left_out(torch: Torch) -> None:
    torch.gpus[0].allocate(1)
    with MemoryMeter() as meter:
        pass
    assert list(meter.data["devices"]) == ["cuda:0"]


def test_a_broken_gpu_costs_the_figures_not_the_cell(torch: Torch) -> None:
    with MemoryMeter() as meter:
        torch.gpus[0].allocate(1)
        torch.lose_context()
    assert meter.data["devices"] == {}
    assert meter.data["why"] == "GPU memory n/a: AcceleratorError: CUDA error: device-side assert triggered"


def test_a_torch_without_these_counters_says_so(torch: Torch) -> None:
    del torch._C._cuda_resetPeakMemoryStats
    with MemoryMeter() as meter:
        torch.gpus[0].allocate(1)
    assert meter.data["devices"] == {}
    assert "no peak counters" in meter.data["why"]


def test_torchs_other_functions_for_the_same_counters_are_shared_too(torch: Torch) -> None:
    torch._C._accelerator_getDeviceStats = torch._C._cuda_memoryStats
    torch._C._accelerator_resetPeakStats = torch._C._cuda_resetPeakMemoryStats
    SharedDevices(torch._C).of(0).watermark.begin()
    torch.gpus[0].allocate(7)
    torch.gpus[0].free(7)
    torch._C._accelerator_resetPeakStats(0)
    assert torch._C._accelerator_getDeviceStats(0)["allocated_bytes"]["all"]["peak"] == 0
    assert torch.max_memory_allocated() == 0


# --- real ones


@pytest.mark.gpu
@pytest.mark.torch_private
def test_a_real_gpu_is_measured_exactly_and_the_users_peak_stays() -> None:
    import torch

    torch.cuda.init()
    held = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.empty_cache()
    with MemoryMeter() as outer, MemoryMeter() as inner:
        kept = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda")
        spike = torch.ones(16 * MIB, dtype=torch.uint8, device="cuda")
        del spike
    for meter in (outer, inner):
        allocated = next(iter(meter.data["devices"].values()))["allocated"]
        assert (allocated["consumed"], allocated["peaked"]) == (32 * MIB, 16 * MIB)
    assert torch.cuda.max_memory_allocated() >= 64 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == 32 * MIB
    del kept
