"""Trackers on ranks: one of them writes, and their own libraries read what it wrote."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from testbed.kernel import Kernel

RUN = """
import torch
from nbdist.train.tracking.trackers import end_training, init_trackers, log
init_trackers("gpt", config={{"lr": 0.1}}, to=["csv", "tensorboard"], folder="{0}")
for step in range(3):
    log({{"loss": torch.tensor(1 / (step + 1) + rank), "lr": {{"head": 0.1 * step}}}}, step)
end_training()
"""


def test_rank_0_writes_what_csv_and_tensorboard_read(ranks: Kernel, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ranks.ok(f"%%distributed\n{RUN.format(tmp_path)}")
    with (tmp_path / "gpt.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert json.loads((tmp_path / "gpt.config.json").read_text()) == {"lr": 0.1}
    events = accumulator.EventAccumulator(str(tmp_path / "gpt")).Reload()
    assert events.Tags()["scalars"] == ["loss", "lr/head"]
    assert [event.value for event in events.Scalars("lr/head")] == pytest.approx([0, 0.1, 0.2])
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2]


SHARDED = """
import warnings
from torch.distributed.tensor import Partial, distribute_tensor
from nbdist.train.tracking.trackers import end_training, init_trackers, log
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))
norm = distribute_tensor(torch.ones(4), mesh).sum()
spread = torch.distributed.tensor.DTensor.from_local(norm.to_local(), mesh, [Partial()])
init_trackers("gpt", folder="{0}")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    log({{"norm": norm, "spread": spread}}, 0)
end_training()
"""


def test_a_number_of_which_each_rank_has_a_part_is_no_number(ranks: Kernel, tmp_path: Path) -> None:
    ranks.ok(f"%%distributed\n{SHARDED.format(tmp_path)}")
    assert (tmp_path / "gpt.csv").read_text() == "step,norm\n0,4.0\n"
    said = "\n".join(ranks.ok("%%distributed\n[str(warning.message).split(',')[0] for warning in said]").plain)
    assert said == "[0] ['spread is not logged: it is spread over ranks']\n[1] []"


def test_a_second_run_of_the_name_goes_on_in_its_files(ranks: Kernel, tmp_path: Path) -> None:
    for _ in range(2):
        ranks.ok(f"%%distributed\n{RUN.format(tmp_path)}")
    with (tmp_path / "gpt.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1", "2", "0", "1", "2"]
