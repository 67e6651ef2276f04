"""A cell against its last run: what recomputing more or less of the same work cost and brought."""

from __future__ import annotations

from nbdist.client.costs.recomputation import describe_change, run_of
from nbdist.metrics.memory import DeviceUsage, MemoryUsage, Usage
from nbdist.metrics.node.sample import StepSample

GIB = 1 << 30
KEPT = StepSample(10, typical=0.1, flops=3e12, hardware_flops=3e12, units=8.0, unit="samples")
RECOMPUTED = StepSample(10, typical=0.13, flops=3e12, hardware_flops=4e12, units=8.0, unit="samples")


def memory(peak: int | None) -> MemoryUsage:
    usage = Usage(0, GIB, peak)
    return MemoryUsage(1.0, devices={"cuda:0": DeviceUsage(usage, usage)})


def change(before: list[StepSample], now: list[StepSample]) -> str:
    earlier, later = run_of(3, before, []), run_of(5, now, [])
    assert earlier is not None and later is not None
    return describe_change(earlier, later)


def test_recomputing_more_tells_its_price_in_time() -> None:
    assert change([KEPT], [RECOMPUTED]) == (
        "33 % more FLOPs besides the model's than in cell 3 (recomputation, optimizer): "
        "a typical step takes 30 % longer (measured)"
    )


def test_recomputing_less_tells_the_time_that_is_saved() -> None:
    text = change([RECOMPUTED], [KEPT])
    assert text.startswith("33 % fewer FLOPs") and "a typical step takes 23 % less time" in text


def test_the_peak_of_the_fullest_gpu_is_compared_where_both_runs_measured_it() -> None:
    before, now = (
        run_of(3, [KEPT, KEPT], [memory(9 * GIB), memory(8 * GIB)]),
        run_of(5, [RECOMPUTED], [memory(6 * GIB)]),
    )
    assert before is not None and now is not None
    assert "the peak of GPU memory is 3.0 GiB lower (measured)" in describe_change(before, now)
    assert "peak" not in describe_change(before, now._replace(peak=None))


def test_the_slowest_rank_counts() -> None:
    late = StepSample(10, typical=0.2, flops=3e12, hardware_flops=3e12, units=8.0, unit="samples")
    assert "takes 100 % longer" in change([KEPT, KEPT], [RECOMPUTED, late])


def test_other_work_is_not_compared() -> None:
    larger = StepSample(10, typical=0.2, flops=6e12, hardware_flops=8e12, units=16.0, unit="samples")
    assert change([KEPT], [larger]) == ""
    assert change([KEPT], [KEPT]) == ""


def test_steps_that_were_not_all_counted_and_timed_are_not_compared() -> None:
    assert run_of(3, [StepSample(2, flops=3e12, hardware_flops=3e12)], []) is None
    assert run_of(3, [StepSample(10, typical=0.1)], []) is None
    assert run_of(3, [StepSample(10, typical=0.1, flops=3e12, hardware_flops=3e12, uncounted=0.2)], []) is None


def test_a_peak_that_one_rank_does_not_know_is_not_compared() -> None:
    run = run_of(3, [KEPT, KEPT], [memory(GIB), memory(None)])
    assert run is not None and run.peak is None
