"""What becomes of numbers that are logged, and the CSV file that they go to."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy
import pytest
import torch

from nbdist.errors import UsageError
from nbdist.train import state
from nbdist.train.tracking import trackers
from nbdist.train.tracking.trackers import CsvLog


class Kept:
    """A tracker of the user's own."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept() -> Iterator[Kept]:
    tracker = Kept()
    trackers.init_trackers("run", to=tracker)
    yield tracker
    trackers.end_training()
    state.forget()


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_nested_names_are_joined_and_tensors_become_numbers(kept: Kept) -> None:
    values = {"loss": torch.tensor([1.5]), "lr": {"head": 0.1, "body": {"low": numpy.float32(0.5)}}, "done": True}
    trackers.log(values, step=3)
    assert kept.rows == [(3, {"loss": 1.5, "lr/head": 0.1, "lr/body/low": 0.5, "done": 1})]
    assert type(kept.rows[0][1]["loss"]) is float


def test_the_step_is_that_of_the_optimizer_unless_told(kept: Kept) -> None:
    state.current().steps = 7
    trackers.log({"loss": 1})
    assert kept.rows == [(7, {"loss": 1})]


def test_what_is_no_number_is_left_out_and_said_once(kept: Kept) -> None:
    with pytest.warns(UserWarning, match=r"loss is not logged: it has the shape \[2, 3\].* its mean\(\)"):
        trackers.log({"loss": torch.ones(2, 3), "good": 1}, 1)
    with pytest.warns(UserWarning, match="phase is not logged: it is str, not a number"):
        trackers.log({"phase": "warm-up", "good": 1}, 1)
    trackers.log({"phase": "warm-up", "loss": torch.ones(2, 3), "good": 2}, 2)
    assert kept.rows == [(1, {"good": 1}), (1, {"good": 1}), (2, {"good": 2})]


def test_the_next_run_closes_the_one_before(kept: Kept) -> None:
    trackers.init_trackers("next", to=Kept())
    assert kept.closed


def test_a_run_of_which_a_tracker_cant_begin_is_not_begun(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text("a,b\n1,2\n")
    other = Kept()
    with pytest.raises(UsageError, match="is not a log that can be continued"):
        trackers.init_trackers("run", to=[other, "csv"], folder=tmp_path)
    assert other.closed
    with pytest.raises(UsageError, match="there is nothing to log to"):
        trackers.log({"loss": 1})


def test_a_tracker_that_fails_to_close_does_not_keep_the_others_open(kept: Kept) -> None:
    class Failing(Kept):
        def close(self) -> None:
            raise OSError("no space left")

    others = Kept(), Failing(), Kept()
    trackers.init_trackers("run", to=others)
    with pytest.raises(OSError, match="no space left"):
        trackers.end_training()
    assert others[0].closed and others[2].closed
    trackers.end_training()


def test_before_a_run_it_says_how_to_begin_one() -> None:
    with pytest.raises(UsageError, match=r"call nbdist\.init_trackers"):
        trackers.log({"loss": 1})


def test_unknown_trackers_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="'neptune' is not a tracker: give one of csv, tensorboard, wandb, mlflow, comet"
    ):
        trackers.init_trackers("run", to=["csv", "neptune"])
    with pytest.raises(UsageError, match=r"or an object with log\(\) and close\(\)"):
        trackers.init_trackers("run", to=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("comet", "comet_ml")])
def test_a_missing_library_is_one_error_with_the_command(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(UsageError, match=f"{kind} needs a library that is not installed: run `%pip install {package}`"):
        trackers.init_trackers("run", to=kind)


def test_a_column_that_comes_later_is_added(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "run.csv", ["step"])
    log.add({"step": 1, "loss": 0.5})
    log.add({"step": 2, "accuracy": 0.25})
    log.add({"step": 3, "loss": 0.125})
    expected = [["step", "loss", "accuracy"], ["1", "0.5", ""], ["2", "", "0.25"], ["3", "0.125", ""]]
    assert rows(tmp_path / "run.csv") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["run.csv"]


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    CsvLog(tmp_path / "run.csv", ["step"]).add({"step": 1, "loss, all": 0.5})
    CsvLog(tmp_path / "run.csv", ["step"]).add({"step": 2, "loss, all": 0.25})
    assert rows(tmp_path / "run.csv") == [["step", "loss, all"], ["1", "0.5"], ["2", "0.25"]]


def test_a_line_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text("step,loss\n1,0.5\n2,0.2")
    CsvLog(tmp_path / "run.csv", ["step"]).add({"step": 2, "loss": 0.25})
    assert rows(tmp_path / "run.csv") == [["step", "loss"], ["1", "0.5"], ["2", "0.25"]]


def test_a_file_of_another_kind_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="is not a log that can be continued"):
        trackers.init_trackers("run", folder=tmp_path)
    assert (tmp_path / "run.csv").read_text() == "a,b\n1,2\n"
    trackers.end_training()
