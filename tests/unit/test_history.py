"""The notebook's record: tables of what has been seen, within bounds, and lines in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

import nbdist
from nbdist.client.costs.history import History
from nbdist.errors import UsageError
from nbdist.metrics.node.sample import GpuSample, NodeSample, RankSample, Sample, StepSample
from testbed.kernel import wait_until

GIB = 1 << 30
RANK = RankSample(0, node="n", device="cuda:0", gpu="GPU-a", pid=7, private=1, allocated=1, reserved=GIB)
NODE = NodeSample(
    "n", 0.0, [GpuSample("GPU-a", 0, total=80 * GIB, used=9 * GIB, by_pid={7: 3 * GIB}, throttled=["heat", "power"])]
)


def look(at: float = 1.0, *ranks: RankSample, cell: int = 0) -> Sample:
    return Sample(at=at, ranks=list(ranks) or [RANK], nodes=[NODE], cell=cell)


def trained(steps: int, pid: int = 7, **values: Any) -> RankSample:
    return RankSample(0, pid=pid, step=StepSample(steps=steps, **values))


@pytest.fixture
def history() -> Iterator[History]:
    history = History()
    yield history
    history.stop()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pandas."""
    monkeypatch.setitem(sys.modules, "pandas", None)


def rows(path: Path, table: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in found if row["table"] == table]


# --- tables


def test_tables_are_data_frames_where_pandas_is_installed(history: History) -> None:
    history.ranks_looked_at(look())
    assert isinstance(history.samples, pandas.DataFrame)
    assert list(history.samples["rank"]) == [0]


def test_tables_without_rows_still_have_their_columns(history: History) -> None:
    assert {"at", "cell", "seconds", "status"} <= set(history.cells.columns)
    assert {"allocated", "gpu_used", "node_cpu"} <= set(history.samples.columns)
    assert {"steps", "tflops", "mfu"} <= set(history.steps.columns)


@pytest.mark.usefixtures("plain")
def test_tables_are_lists_of_dicts_where_pandas_is_not(history: History) -> None:
    history.ranks_looked_at(look())
    (row,) = history.samples
    assert (row["rank"], row["reserved"]) == (0, GIB)
    assert history.cells == []


def test_frames_and_lists_have_the_same_columns(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    history.ranks_looked_at(look(1.0, trained(1)))
    columns = list(history.samples.columns), list(history.steps.columns)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert columns == (list(history.samples[0]), list(history.steps[0]))


@pytest.mark.usefixtures("plain")
def test_a_sample_has_what_rank_driver_and_machine_tell(history: History) -> None:
    history.ranks_looked_at(look(2.0, cell=5))
    (row,) = history.samples
    assert (row["at"], row["cell"], row["allocated"], row["gpu_used"], row["non_torch"]) == (
        2.0,
        5,
        1,
        9 * GIB,
        2 * GIB,
    )
    assert row["throttled"] == "heat, power"
    assert row["temperature"] is None


@pytest.mark.usefixtures("plain")
def test_a_rank_without_a_gpu_has_no_figures_of_one(history: History) -> None:
    history.ranks_looked_at(look(1.0, RankSample(0, node="n")))
    assert history.samples[0]["gpu_used"] is None


@pytest.mark.usefixtures("plain")
def test_a_step_row_stands_for_each_look_in_which_steps_were_made(history: History) -> None:
    for steps in (0, 3, 3, 7):
        history.ranks_looked_at(look(1.0, trained(steps)))
    assert [row["steps"] for row in history.steps] == [3, 7]


@pytest.mark.usefixtures("plain")
def test_steps_of_a_fresh_rank_count_from_its_own_beginning(history: History) -> None:
    history.ranks_looked_at(look(1.0, trained(3)))
    history.ranks_looked_at(look(2.0, trained(3, pid=8)))
    assert [row["at"] for row in history.steps] == [1.0, 2.0]


@pytest.mark.usefixtures("plain")
def test_speed_and_utilisation_follow_from_flops_time_and_peak(history: History) -> None:
    history.ranks_looked_at(look(1.0, trained(1, seconds=0.5, flops=2e12, hardware_flops=3e12, peak=16e12)))
    (row,) = history.steps
    assert (row["tflops"], row["mfu"], row["hfu"]) == (4.0, 0.25, 0.375)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, float("nan")])
def test_a_time_that_makes_no_sense_gives_no_speed(history: History, seconds: float | None) -> None:
    history.ranks_looked_at(look(1.0, trained(1, seconds=seconds, flops=2e12, peak=16e12)))
    assert (history.steps[0]["tflops"], history.steps[0]["mfu"]) == (None, None)


@pytest.mark.usefixtures("plain")
def test_a_clock_that_runs_backwards_loses_no_row_and_no_order(history: History) -> None:
    for at in (5.0, 4.0, 6.0):
        history.ranks_looked_at(look(at))
    assert [row["at"] for row in history.samples] == [5.0, 4.0, 6.0]


# --- bounds


def test_the_last_600_looks_are_kept(history: History) -> None:
    for at in range(700):
        history.ranks_looked_at(look(float(at)))
    assert [history.looks[0].at, len(history.looks)] == [100.0, 600]


def test_of_very_many_ranks_fewer_looks_are_kept(history: History) -> None:
    many = [RankSample(rank) for rank in range(1024)]
    for at in range(40):
        history.ranks_looked_at(look(float(at), *many))
    assert [len(history.looks), history.looks[-1].at] == [29, 39.0]


def test_it_can_be_forgotten(history: History) -> None:
    history.ranks_looked_at(look())
    history.clear()
    assert history.looks == []


# --- in words


def test_an_empty_one_says_what_makes_looks(history: History) -> None:
    assert "0 looks at ranks (a panel, or `nbdist.history().record()`, makes them)" in repr(history)


def test_a_record_in_a_file_says_where(history: History, tmp_path: Path) -> None:
    history.record(tmp_path / "run.jsonl")
    assert f"in {tmp_path / 'run.jsonl'}" in repr(history)


# --- recording


def test_recording_watches_this_process_while_there_is_no_session(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    try:
        nbdist.history(path, rate=0.25)
        wait_until(lambda: rows(path, "samples"), "a row in the file")
    finally:
        nbdist.history().stop()
        nbdist.history().clear()
    (first, *_) = rows(path, "samples")
    assert first["rank"] == -1 and first["private"] > 0 and first["node_memory_total"] > 0


def test_rows_go_to_the_file_as_they_come(history: History, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    history.record(path)
    history.ranks_looked_at(look(1.0, trained(2, seconds=float("nan"))))
    assert rows(path, "samples")[0]["rank"] == 0
    assert [(row["steps"], row["seconds"]) for row in rows(path, "steps")] == [(2, None)]


def test_pandas_reads_the_file(history: History, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    history.record(path)
    for at in range(3):
        history.ranks_looked_at(look(float(at)))
    history.stop()
    frame = pandas.read_json(path, lines=True)
    ours = frame[(frame["table"] == "samples") & (frame["rank"] == 0)]
    assert list(ours["gpu_used"]) == [9 * GIB] * 3


def test_a_second_record_goes_on_in_the_same_file(history: History, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for at in (1.0, 2.0):
        history.record(path)
        history.ranks_looked_at(look(at))
        history.stop()
    assert [row["at"] for row in rows(path, "samples") if row["rank"] == 0] == [1.0, 2.0]


def test_after_stop_nothing_is_written(history: History, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    history.record(path).stop()
    before = path.read_text()
    history.ranks_looked_at(look())
    assert path.read_text() == before
    assert history.looks, "and what is seen anyway is still kept"


def test_a_full_disk_ends_the_file_with_a_word_and_nothing_else(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    history.record("/dev/full")
    history.ranks_looked_at(look(1.0))
    history.ranks_looked_at(look(2.0))
    assert capsys.readouterr().err.splitlines() == [
        "nbdist: the history's file /dev/full is no longer written to: No space left on device"
    ]
    assert "No space left on device" in repr(history)
    assert len([each for each in history.looks if each.ranks[0] == RANK]) == 2


def test_a_file_that_can_not_be_is_refused_with_what_to_type(history: History, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file or directory.*nbdist\.history\(path='run\.jsonl'\)"):
        history.record(tmp_path / "nowhere" / "run.jsonl")
    with pytest.raises(UsageError, match="Is a directory"):
        history.record(tmp_path)


def test_a_rate_that_makes_no_sense_is_refused_and_nothing_is_recorded(history: History, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"0\.25 to 60 s"):
        history.record(tmp_path / "run.jsonl", rate=0.0)
    assert "in /" not in repr(history)


def test_the_notebook_has_one() -> None:
    assert nbdist.history() is nbdist.history()
