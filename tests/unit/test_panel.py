"""What the panel says of a Sample, and what stays of it without JavaScript."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec import UnsetType

import nbdist
from nbdist.errors import UsageError
from nbdist.metrics.node.sample import GpuSample, NodeSample, RankSample, Sample, StepSample
from nbdist.panel import fallback, panel_feed
from nbdist.panel.model import Node, Row, View, view_of
from nbdist.panel.panel_feed import Feed
from nbdist.panel.plot import Point, plot
from nbdist.wire.pages.panel_messages import (
    HeadUpdate,
    MeasurePeak,
    PanelNews,
    PanelNote,
    PanelUpdate,
    Pause,
    Stat,
)
from testbed.panel_samples import DEAD, FULL, GIB, HOT, LATE, OTHERS, TOTAL, Source, cpus, gpus, stuck


def one(rank: RankSample, *nodes: NodeSample) -> Row:
    return view_of(Sample(at=0.0, ranks=[rank], nodes=list(nodes))).rows[0]


def stat(view: View, label: str) -> Stat:
    return next(found for found in view.stats if found.label.startswith(label))


def on_gpu(gpu: GpuSample, **values: Any) -> Row:
    rank = RankSample(
        0, node="a", device="cuda:0", gpu=gpu.uuid, pid=7, allocated=10 * GIB, reserved=14 * GIB, **values
    )
    return one(rank, NodeSample("a", 0.0, gpus=[gpu]))


def training(*steps: StepSample, state: str = "busy") -> View:
    return view_of(Sample(at=0.0, ranks=[RankSample(rank, step=step, state=state) for rank, step in enumerate(steps)]))


# --- rows


def test_a_gpus_memory_is_shared_out_among_who_uses_it() -> None:
    row = on_gpu(GpuSample("u", 0, total=80 * GIB, used=20 * GIB, by_pid={7: 16 * GIB, 8: 4 * GIB}))
    parts = (row.allocated, row.cache, row.non_torch, row.others)
    assert [part and part // GIB for part in parts] == [10, 4, 2, 4]
    assert row.used == 20 * GIB


@pytest.mark.parametrize(("seen", "held"), [(56, [54, 14]), (16, [54, 14]), (16, [14, 54]), (56, [14, 54])])
def test_memory_that_torch_took_or_gave_back_beside_the_drivers_look_is_held_by_nobody_else(
    seen: int, held: list[int]
) -> None:
    row = on_gpu(
        GpuSample("u", 0, total=80 * GIB, used=(seen + 4) * GIB, by_pid={7: seen * GIB}),
        held=[each * GIB for each in held],
    )
    assert (row.non_torch, row.others) == (2 * GIB, 4 * GIB)


def test_what_the_driver_hides_counts_as_others() -> None:
    row = on_gpu(GpuSample("u", 0, total=80 * GIB, used=20 * GIB))
    assert (row.non_torch, row.others) == (None, 6 * GIB)


def test_a_mig_instance_is_a_device_of_its_own() -> None:
    whole = GpuSample("GPU-1", 0, total=80 * GIB, used=0)
    row = on_gpu(GpuSample("MIG-1", 0, name="H100 MIG 1g.10gb", total=20 * GIB, used=15 * GIB))
    assert (row.gpu, row.total) == ("H100 MIG 1g.10gb", 20 * GIB)
    assert on_gpu(whole).total == 80 * GIB


def test_what_the_driver_does_not_tell_has_its_reason() -> None:
    row = on_gpu(GpuSample("u", 0, why="no power: this GPU does not report it"))
    assert (row.total, row.power, row.temperature, row.utilization) == (None, None, None, None)
    assert row.why == "no power: this GPU does not report it"
    assert row.allocated == 10 * GIB


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (RankSample(0, device="cuda:0"), "this rank has not used its GPU yet"),
        (RankSample(0, device="cuda:0", gpu="GPU-gone", allocated=1, reserved=1), "the driver has not reported"),
        (RankSample(0), "this rank has not answered"),
        (RankSample(0, why="a call keeps its Python"), "a call keeps its Python"),
        (RankSample(0, device="cuda:0", why="a call keeps its Python"), "a call keeps its Python"),
        (RankSample(0, private=1), "the memory of this machine is not known yet"),
    ],
)
def test_every_row_that_lacks_something_says_why(rank: RankSample, why: str) -> None:
    assert one(rank).why.startswith(why)


WAITS = "torch can't be asked: its main thread is in a call into C"


def waiting(by_pid: dict[int, int]) -> Row:
    """A rank that torch can't be asked about."""
    gpu = GpuSample("u", 0, "H100", total=80 * GIB, used=20 * GIB, by_pid=by_pid, kept=GIB)
    rank = RankSample(0, node="a", device="cuda:0", gpu="u", pid=7, private=GIB, why=WAITS)
    return one(rank, NodeSample("a", 0.0, gpus=[gpu]))


def test_while_torch_can_t_be_asked_a_row_has_the_drivers_figure_and_says_so() -> None:
    row = waiting({7: 16 * GIB})
    assert (row.allocated, row.process, row.held, row.others) == (None, 16 * GIB, 16 * GIB, 4 * GIB)
    assert row.why == f"{WAITS}; this is the driver's figure"
    shown = fallback.text(View(0.0, "", (row,), (Node("a"),), ()))
    assert "20.0 of 80.0 GiB" in shown and "+ this rank, as the driver reports it" in shown


def test_where_the_driver_does_not_tell_processes_apart_either_the_gpus_memory_is_still_shown() -> None:
    row = waiting({})
    assert (row.held, row.others, row.used) == (None, 20 * GIB, 20 * GIB)
    assert row.why == f"{WAITS}; its own memory is not known"
    assert "20.0 of 80.0 GiB" in fallback.text(View(0.0, "", (row,), (Node("a"),), ()))


def test_whose_figures_the_memory_of_gpus_is_stands_above_them() -> None:
    assert "as nvidia-smi" in fallback.text(view_of(gpus(2))) and "as nvidia-smi" in fallback.html(view_of(gpus(2)))
    assert "nvidia-smi" not in fallback.text(view_of(cpus(2)))


def test_a_gpu_is_full_when_only_what_its_driver_keeps_is_left() -> None:
    row = on_gpu(GpuSample("u", 0, "H100", total=80 * GIB, used=76 * GIB, by_pid={7: 76 * GIB}, kept=4 * GIB))
    assert row.full == 1.0 and ("warn", "nearly full: 100 %") in row.badges
    assert row.used == 76 * GIB and row.total == 80 * GIB  # as nvidia-smi has them


def test_without_gpus_a_row_is_the_ranks_memory_and_the_node_says_why() -> None:
    view = view_of(cpus(2))
    assert (view.rows[1].allocated, view.rows[1].total) == (400 * 1024**2, int(23.4 * GIB))
    assert view.rows[1].cache is view.rows[1].utilization is None
    assert view.nodes[0].why == "no GPUs: no driver"


def test_where_the_driver_hides_processes_the_rest_is_not_called_others() -> None:
    rank = RankSample(0, node="n", device="cuda:0", gpu="u", pid=7, allocated=50 * GIB, reserved=57 * GIB)
    node = NodeSample("n", 0.0, gpus=[GpuSample("u", 0, total=141 * GIB, used=60 * GIB)])
    assert "outside torch (CUDA, NCCL, other processes)" in fallback.text(
        view_of(Sample(at=0.0, ranks=[rank], nodes=[node]))
    )
    assert "outside torch" not in fallback.text(view_of(gpus(2)))


def test_a_dead_rank_stays_with_how_it_died() -> None:
    row = view_of(gpus(16)).rows[DEAD]
    assert (row.state, row.doing, row.allocated, row.why) == ("dead", "killed by SIGKILL", None, "")


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (LATE, ["straggler: +15 %"]),
        (HOT, ["throttled: heat"]),
        (OTHERS, []),
        (FULL, ["nearly full: 98 %", "3 allocation retries", "fragmented: 16.3 GiB held empty"]),
    ],
)
def test_badges_name_what_deserves_a_look(rank: int, words: list[str]) -> None:
    assert [text for _, text in view_of(gpus(8)).rows[rank].badges] == words


def test_out_of_memory_is_a_bad_badge() -> None:
    assert on_gpu(GpuSample("u", 0), ooms=2).badges == (("bad", "out of memory 2 times"),)


def test_the_straggler_is_who_waits_least_in_collectives() -> None:
    steps = [StepSample(seconds=1.0, communication=share) for share in (0.4, 0.4, 0.1)]
    view = training(*steps)
    assert [len(row.badges) for row in view.rows] == [0, 0, 1]
    assert stat(view, "step").note == "rank 2 is late: +50 %"


def test_ranks_that_run_nothing_keep_nobody_waiting() -> None:
    view = training(StepSample(seconds=1.0), StepSample(seconds=2.0), state="idle")
    assert [row.badges for row in view.rows] == [(), ()]
    assert (stat(view, "step").value, stat(view, "step").note) == ("2.00 s", "as last seen")


def test_ranks_in_step_have_no_straggler_only_where_their_collectives_are_known() -> None:
    unknown = training(*[StepSample(seconds=1.0)] * 2)
    known = training(*[StepSample(seconds=1.0, communication=0.3)] * 2)
    assert stat(unknown, "step").note == "straggler n/a: time in collectives is not known"
    assert stat(known, "step").note == "no straggler"


def test_steps_of_ranks_that_are_idle_decide_nothing_while_others_train() -> None:
    ranks = [
        RankSample(0, state="busy", step=StepSample(seconds=0.1, flops=1e12)),
        RankSample(1, state="idle", step=StepSample(seconds=9.0, flops=1e12)),
    ]
    view = view_of(Sample(at=0.0, ranks=ranks))
    assert (stat(view, "step").value, stat(view, "TFLOPS").value, view.flops) == ("100 ms", "10.0", 1e13)


def test_when_all_are_idle_every_speed_is_as_last_seen_and_plots_have_a_gap() -> None:
    view = training(*[StepSample(seconds=0.1, flops=1e12, peak=1e14, units=8, unit="samples")] * 2, state="idle")
    speeds = [found for found in view.stats if not found.label.startswith("memory")]
    assert len(speeds) >= 4 and {found.level for found in speeds} == {"stale"}
    assert view.flops is None


def test_ranks_that_are_stuck_are_one_alert_who_does_not_wait_is_named_and_speeds_are_as_last_seen() -> None:
    waits = "waits in all_reduce, cell 3 line 4, for rank 2"
    step = StepSample(seconds=0.1, flops=1e12)
    ranks = [RankSample(rank, state="stuck", doing=waits, step=step, since=60.0) for rank in (0, 1)]
    view = view_of(Sample(at=100.0, ranks=[*ranks, RankSample(2, state="busy", step=step)]))
    assert view.alert is not None and view.alert.doing == waits
    assert fallback.sentence(view.alert) == f"2 ranks are stuck: each {waits} (40 s)"
    assert f"⚠ {fallback.sentence(view.alert)}" in fallback.text(view) and view.alert.words in fallback.html(view)
    assert [row.badges for row in view.rows] == [(), (), (("bad", "not waiting with the others"),)]
    assert stat(view, "step").level == "stale" and view.flops is None


# --- figures


def test_memory_is_given_as_range_and_who_has_most() -> None:
    found = stat(view_of(cpus(3)), "memory")
    assert (found.value, found.note) == ("300 / 400 / 500 MiB", "most on rank 2: +25 %")


def test_before_the_first_step_speed_is_not_available_and_says_why() -> None:
    view = view_of(cpus(2))
    assert [found.key for found in view.stats] == ["memory", "step"]
    assert stat(view, "step").value == "n/a"
    assert stat(view, "step").note == "no training steps yet"


def test_speed_is_by_the_slowest_rank() -> None:
    view = training(StepSample(seconds=1.0, flops=1e14, peak=1e15), StepSample(seconds=2.0, flops=1e14, peak=1e15))
    assert stat(view, "TFLOPS per rank").value == "50.0"
    assert stat(view, "TFLOPS per rank").note == "100 in all"
    assert stat(view, "MFU").value == "5.0 %"


def test_below_one_tflops_it_is_gflops() -> None:
    view = training(*[StepSample(seconds=1.0, flops=1.15e10, peak=2e11)] * 2)
    assert (stat(view, "GFLOPS per rank").value, stat(view, "GFLOPS per rank").note) == ("11.5", "23.0 in all")
    assert stat(view, "MFU").note == "of 200 GFLOPS"
    assert "11.5 GFLOPS" in fallback.text(view)


def test_figures_that_are_estimated_for_some_steps_are_marked_with_the_share() -> None:
    view = training(StepSample(seconds=1.0, flops=1e12, peak=1e13, uncounted=0.25))
    assert (stat(view, "TFLOPS").value, stat(view, "TFLOPS").note) == ("≈ 1.00", "25 % of steps not counted")
    assert stat(view, "MFU").value == "≈ 10.0 %"
    assert "≈ 1.00 TFLOPS" in fallback.text(view)


def test_work_without_a_formula_makes_figures_least_ones_and_is_named() -> None:
    view = training(StepSample(seconds=1.0, flops=1e12, peak=1e13, not_counted=["mylib.gemm"]))
    assert (stat(view, "TFLOPS").value, stat(view, "TFLOPS").note) == ("≥ 1.00", "without mylib.gemm")
    assert stat(view, "MFU").value == "≥ 10.0 %"
    assert "≥ 1.00 TFLOPS" in fallback.text(view)


def test_a_step_with_stalls_says_how_long_a_typical_one_is() -> None:
    assert stat(training(StepSample(seconds=0.1, typical=0.01)), "step").note == "typically 10.0 ms"
    assert stat(training(StepSample(seconds=0.1, typical=0.09)), "step").note == ""


def test_a_step_with_evaluations_says_how_long_one_without_them_is() -> None:
    sample = training(StepSample(seconds=0.1, typical=0.08, evaluation=0.18))
    assert stat(sample, "step").note == "evaluation 18 %, without it 82.0 ms"


def test_an_unknown_peak_is_no_mfu_and_says_how_to_get_one() -> None:
    found = stat(training(StepSample(seconds=1.0, flops=1e12)), "MFU")
    assert found.value == "n/a" and "%distributed peak" in found.note


def test_steps_that_were_not_counted_say_why() -> None:
    found = stat(training(StepSample(seconds=1.0, why="custom op: register_flops")), "TFLOPS")
    assert (found.value, found.note) == ("n/a", "custom op: register_flops")


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0, 0.0])
def test_a_clock_that_runs_backwards_gives_no_figure(broken: float) -> None:
    view = training(StepSample(seconds=broken, flops=1e12, peak=1e15))
    assert view.rows[0].step is None and stat(view, "step").value == "n/a"


def test_the_title_counts_ranks_by_what_they_do() -> None:
    assert view_of(gpus(8)).title == "8 ranks: all busy · cell 7"
    assert view_of(gpus(16)).title == "16 ranks: 15 busy, 1 dead · cell 7"
    assert view_of(Sample(at=0.0, ranks=[RankSample(-1)])).title == "this notebook's process"


# --- without JavaScript


def test_text_is_a_table_with_units() -> None:
    *head, columns, first, _, legend = fallback.text(view_of(cpus(2))).splitlines()
    assert head[-1] == "laptop: no GPUs: no driver · CPU 40 % · memory 9.2 of 23.4 GiB"
    assert columns.split() == ["rank", "device", "memory", "CPU", "state"]
    assert first.startswith("0     cpu") and first.endswith("300 MiB of 23.4 GiB  90 %  ● busy")
    assert legend == "# this rank's own  . everything else in use"


def test_text_and_html_of_a_session_that_has_ended_say_so() -> None:
    view = view_of(cpus(2))
    assert fallback.text(view, ended=True).startswith("2 ranks: all busy · session ended · ")
    assert "<b>2 ranks: all busy · session ended</b>" in fallback.html(view, ended=True)
    assert "ended" not in fallback.text(view) + fallback.html(view)


def test_text_says_what_a_stuck_rank_waits_for() -> None:
    rank = RankSample(0, private=1, state="stuck", doing="waits in all_reduce, cell 3 line 4, for rank 1")
    text = fallback.text(view_of(Sample(at=0.0, ranks=[rank])))
    assert text.startswith("1 rank: stuck") and "◐ stuck  waits in all_reduce, cell 3 line 4, for rank 1" in text


def test_of_many_ranks_the_one_that_has_died_comes_before_those_that_wait_for_it() -> None:
    text = fallback.text(view_of(stuck(gpus(256))))
    worth = text.partition("worth a look:")[2].splitlines()
    assert worth[2].split()[0] == str(DEAD) and "… and 224 more" in text


def test_text_of_gpus_shows_every_gauge_and_badge() -> None:
    text = fallback.text(view_of(gpus(8)))
    assert re.search(
        rf"^{FULL} +cuda:{FULL} +\[#+=+-+ *\].* of 79.6 GiB .* %.*°C.* W .*⚠ nearly full: 98 %", text, re.MULTILINE
    )


def test_text_of_many_ranks_is_a_line_for_each_node_and_what_deserves_a_look() -> None:
    text = fallback.text(view_of(gpus(256)))
    assert len(text.splitlines()) < 100
    assert "ranks 248-255: 8 busy; memory" in text and "killed by SIGKILL" in text


class Outline(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def test_html_is_a_table_without_scripts() -> None:
    page = Outline(fallback.html(view_of(gpus(8)), "id"))
    assert "script" not in page.tags and page.tags.count("tr") >= 8
    assert "78.1 of 79.6 GiB" in page.text and "straggler: +15 %" in page.text


def test_html_takes_no_names_for_markup() -> None:
    rank = RankSample(0, node="<b>x", private=1, doing="<i>", state="dead")
    page = Outline(fallback.html(view_of(Sample(at=0.0, ranks=[rank])), '"><script>'))
    assert "script" not in page.tags and "i" not in page.tags and "<b>x" in page.text


def test_html_of_1024_ranks_is_small() -> None:
    assert len(fallback.html(view_of(gpus(1024)))) < 30_000


# --- the widget


@pytest.fixture
def source() -> Source:
    return Source()


def test_a_panel_shows_what_its_source_shows(source: Source) -> None:
    panel = nbdist.Panel(source=source)
    source.show(gpus(8))
    assert panel.text.startswith("8 ranks: all busy") and "8 ranks: all busy" in panel.html
    panel.close()


def test_pages_hear_nothing_of_ranks_that_have_long_been_idle(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PanelNews] = []
    feed = Feed(told.append, lambda: None, source=source)
    feed.show()
    idle = [RankSample(0, private=1), RankSample(1, private=2)]
    source.show(Sample(at=0.0, ranks=idle))
    monkeypatch.setattr(panel_feed, "REST_AFTER", 0.0)
    for at in range(5):
        source.show(Sample(at=float(at), ranks=idle))
    (paused,) = told
    assert isinstance(paused, HeadUpdate) and paused.head.live == "paused"
    monkeypatch.setattr(panel_feed, "REST_AFTER", 60.0)
    source.show(Sample(at=9.0, ranks=[RankSample(0, private=1, state="busy"), idle[1]]))
    (update,) = told[1:]
    assert isinstance(update, PanelUpdate) and not isinstance(update.head, UnsetType) and update.head.live == "live"
    feed.rest()


def test_a_reader_has_a_panel_of_idle_ranks_go_on(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PanelNews] = []
    feed = Feed(told.append, lambda: None, source=source)
    feed.show()
    idle = Sample(at=0.0, ranks=[RankSample(0, private=1)])
    source.show(idle)
    monkeypatch.setattr(panel_feed, "REST_AFTER", 0.0)
    source.show(idle)
    monkeypatch.setattr(panel_feed, "REST_AFTER", 60.0)
    feed.hear(Pause(False))
    told.clear()
    source.show(idle)
    (update,) = told
    assert isinstance(update, PanelUpdate)
    feed.rest()


def test_nobody_looks_while_nobody_watches(source: Source) -> None:
    panel = nbdist.Panel(source=source)
    assert not source.watched
    source.show(gpus(8))
    assert panel.text and not source.watched
    panel.close()


def test_a_page_may_have_the_peak_measured(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from nbdist.metrics.rates import peaks

    monkeypatch.setattr(peaks, "measured_peaks", {})
    told: list[PanelNews] = []
    Feed(told.append, lambda: None, source=source).hear(MeasurePeak())
    (note,) = told
    assert isinstance(note, PanelNote) and "peak" in note.text
    assert peaks.known(torch.device("cpu"), "fp32") is not None


def test_a_page_has_the_peak_measured_in_what_its_steps_compute_in(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from nbdist.metrics.rates import peaks

    monkeypatch.setattr(peaks, "measured_peaks", {})
    feed = Feed(lambda message: None, lambda: None, source=source)
    feed.show()
    steps = StepSample(seconds=0.1, flops=1e9, without_peak=["bf16", "fp8"])  # fp8 is not measured, so it is left out
    source.show(Sample(at=0.0, ranks=[RankSample(0, step=steps)]))
    feed.hear(MeasurePeak())
    assert peaks.known(torch.device("cpu"), "bf16") is not None
    assert peaks.known(torch.device("cpu"), "fp32") is None
    feed.rest()


@pytest.mark.parametrize("rate", [0.0, 0.1, 61.0, -1.0, math.nan])
def test_a_rate_out_of_bounds_names_them(rate: float) -> None:
    with pytest.raises(UsageError, match=r"0\.25 to 60 s"):
        nbdist.Panel(rate=rate)


def test_memory_and_speed_are_drawn_over_time() -> None:
    points = [Point(at, GIB, 2 * GIB, 3 * GIB, 1e14) for at in (0.0, 60.0)]
    figure = plot(points)
    assert [axes.get_ylabel() for axes in figure.axes] == ["memory, GiB per rank", "TFLOPS, all ranks"]
    (line,) = figure.axes[1].lines
    drawn: Any = line.get_xydata()
    assert drawn.tolist() == [[0.0, 100.0], [1.0, 100.0]]


def test_without_speed_only_memory_is_drawn() -> None:
    assert len(plot([Point(0.0, GIB, GIB, GIB, None)]).axes) == 1


def test_a_machine_that_reports_no_more_is_named_with_for_how_long() -> None:
    node = NodeSample("a", 0.0, memory_total=8 * GIB, memory_used=GIB, cpu=0.5, why="no driver", silent=130.0)
    (line,) = view_of(Sample(0.0, [RankSample(0, node="a", private=1)], [node])).nodes
    assert line.why == "this machine has not reported for 2 min"


def test_a_plot_of_nothing_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="%distributed panel"):
        plot([])


def test_what_a_page_loads_is_small() -> None:
    static = Path(nbdist.__file__).parent / "panel" / "static"
    assert sum((static / name).stat().st_size for name in ("widget.js", "widget.css")) < 42_000


def test_free_memory_is_what_nobody_has() -> None:
    for row in view_of(gpus(8)).rows:
        assert row.used is not None and 0 < row.used <= TOTAL


def test_ranks_that_share_their_batches_count_them_once() -> None:
    first, other = (StepSample(seconds=0.5, units=100.0, unit="tokens", batch=batch) for batch in ("a", "b"))
    unknown = StepSample(seconds=0.5, units=100.0, unit="tokens")
    for steps, rate in (((first, first), "200"), ((first, first, other), "400"), ((unknown, unknown), "400")):
        (shown,) = [stat for stat in training(*steps).stats if stat.key == "throughput"]
        assert (shown.label, shown.value) == ("tokens per second", rate)
