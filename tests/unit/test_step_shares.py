"""Why a step takes as long as it does: shares that add up, and the rank that the others wait for."""

from __future__ import annotations

import pytest

from nbdist.client.costs.cell_steps import explain, render
from nbdist.metrics.node.sample import Spent, StepSample
from nbdist.metrics.node.step_shares import late_rank, parts_of, sentence
from nbdist.metrics.step_totals import TimedStep, Totals


def ranks(*communication: float | None, waiting: float | None = None, seconds: float = 0.1) -> dict[int, StepSample]:
    return {
        rank: StepSample(steps=20, seconds=seconds, waiting=waiting, communication=share)
        for rank, share in enumerate(communication)
    }


def test_the_least_time_in_collectives_is_the_transfer_and_the_rest_is_waiting() -> None:
    parts = parts_of(ranks(0.6, 0.6, 0.1))
    assert [each.others for each in parts.values()] == pytest.approx([0.05, 0.05, 0.0])
    assert [each.transfer for each in parts.values()] == pytest.approx([0.01] * 3)
    assert [each.work for each in parts.values()] == pytest.approx([0.04, 0.04, 0.09])


def test_parts_add_up_to_the_step() -> None:
    for each in parts_of(ranks(0.6, 0.2, waiting=0.15)).values():
        assert each.work + sum(part or 0.0 for part in (each.data, each.transfer, each.others)) == pytest.approx(0.1)


def test_parts_are_no_more_than_the_step_where_time_in_collectives_is_sampled_too_high() -> None:
    each = parts_of(ranks(0.95, 0.2, waiting=0.15))[0]
    assert (each.transfer or 0.0) + (each.others or 0.0) == pytest.approx(0.085) and each.work == pytest.approx(0.0)


def test_the_rank_that_waits_least_is_who_the_others_wait_for() -> None:
    assert late_rank(parts_of(ranks(0.6, 0.6, 0.1))) == 2
    assert late_rank(parts_of(ranks(0.3, 0.3, 0.3))) is None
    assert late_rank(parts_of(ranks(0.6, None, 0.1))) is None


def test_one_sentence_says_it() -> None:
    assert sentence(ranks(0.62, 0.62, 0.0)) == (
        "step 100 ms: 62 % waiting for rank 2 (it works 100 ms, the others 38.0 ms), 38 % work"
    )
    assert sentence(ranks(0.1, 0.1, waiting=0.15)) == "step 100 ms: 75 % work, 15 % waiting for data, 10 % collectives"


def test_a_rank_that_is_late_for_its_data_is_named_with_that() -> None:
    steps = ranks(0.6, 0.0)
    steps[1] = StepSample(steps=20, seconds=0.1, waiting=0.6, communication=0.0)
    assert "rank 1 (it waits for data, and works 40.0 ms" in sentence(steps)


def test_where_nothing_is_known_nothing_is_said() -> None:
    assert sentence(ranks(None, None)) == "" and sentence({}) == ""
    assert sentence({0: StepSample(steps=3, why="too few steps")}) == ""


def test_the_line_below_a_cell_has_the_sentence() -> None:
    assert "waiting for rank 2" in render(ranks(0.6, 0.6, 0.1)).splitlines()[1]
    assert "waiting for" not in render(ranks(None, None))


def test_steps_that_are_in_no_figure_are_told() -> None:
    def line(*timed: int) -> str:
        return render({rank: StepSample(steps=60, timed=steps, seconds=0.1) for rank, steps in enumerate(timed)})

    assert line(57, 58).startswith("60 steps, 57 timed | 100 ms a step")
    assert line(60).startswith("60 steps | ")


def test_time_that_counting_took_is_told_from_two_percent_on() -> None:
    def line(seconds: float) -> str:
        return render({0: StepSample(steps=60, timed=57, seconds=0.1, counting=seconds)})

    assert "counting FLOPs took 5 % of the time, which is left out" in line(0.3)
    assert "counting" not in line(0.1)


def test_a_step_without_evaluations_is_of_the_ranks_that_the_step_is_of() -> None:
    shares = {0.1: 0.2, 0.2: 0.1, 0.3: 0.0}
    steps = {
        rank: StepSample(steps=9, seconds=seconds, evaluation=share, units=3, unit="samples")
        for rank, (seconds, share) in enumerate(shares.items())
    }
    shown = render(steps)
    assert shown.startswith("9 steps | 200 ms a step | 30 samples/s")
    assert "without it a step takes 180 ms, 30 samples/s" in shown.replace("\n    ", " ")


def test_passes_without_a_step_have_a_line_with_the_reason() -> None:
    assert render({0: StepSample(passes=3, why="no step was seen")}) == "training steps n/a: no step was seen"
    assert render({0: StepSample(passes=1, why="no step was seen")}) == ""
    assert render({0: StepSample(why="no step yet")}) == ""


def test_the_table_has_a_row_for_each_rank_and_says_what_is_not_known() -> None:
    text = explain(ranks(0.6, 0.1))
    assert len(text.splitlines()) == 4 and "waiting for ranks" in text
    assert "n/a: time in collectives is not known here" in explain(ranks(None, None))
    assert "%distributed tflops on" in explain({})


def spending(gpus: list[str], joules: float | None = 90_000.0) -> str:
    """The line below a cell of 40 steps of 500 tokens a rank, which took half an hour."""
    steps = {
        rank: StepSample(steps=40, seconds=45.0, units=500, unit="tokens", spent=Spent(1800.0, joules, gpu))
        for rank, gpu in enumerate(gpus)
    }
    return render(steps)


def test_the_energy_of_a_gpu_counts_once() -> None:
    assert "energy 0.050 kWh, 4.5 J a token" in spending(["GPU-0", "GPU-1"])
    assert "energy 0.025 kWh, 2.25 J a token" in spending(["GPU-0", "GPU-0"])  # which both ranks use
    assert "energy" not in spending(["GPU-0"], joules=None)


def test_no_line_below_a_cell_is_longer_than_100_characters_and_nothing_is_lost() -> None:
    why = "no peak is known for the CPU at fp32; `%distributed peak` measures it"
    step = StepSample(
        steps=1000,
        seconds=0.138,
        typical=0.1,
        flops=62e12,
        hardware_flops=80e12,
        uncounted=0.1,
        not_counted=["mylib::gemm", "the Triton kernel of flash_attn"],
        waiting=0.15,
        communication=0.4,
        units=4096,
        unit="tokens",
        peak=989e12,
        peak_source="estimated: by its clock",
        why=why,
    )
    lines = render({rank: step for rank in range(8)}, missing=[8]).splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(line.strip() for line in lines)
    assert "HFU about 58.6 %" in text and text.count("15 % waiting for data") == 1
    assert why in text and "rank 8 missing" in text


def timed(seconds: float, communication: float | None) -> TimedStep:
    step = TimedStep()
    step.seconds, step.communication = seconds, communication
    return step


def test_collectives_keep_their_share_where_two_optimizers_take_turns() -> None:
    """The step of the second one is next to nothing, and too short to be looked at."""
    pairs = [timed(0.040, 0.010), timed(0.001, None)] * 10
    found = Totals().with_steps(pairs, {}).sample(20).communication
    assert found == pytest.approx(0.25)
