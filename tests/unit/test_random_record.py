"""The random state that a dead rank leaves to the one that takes its place."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbdist.worker.recovery.random_record import RandomRecord


def states() -> dict[str, Any]:
    return {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def test_the_states_of_the_last_two_steps_are_kept(tmp_path: Path) -> None:
    record = RandomRecord(tmp_path / "record", new=True)
    kept = {}
    for step in range(3):
        kept[step] = states()
        record.write(step, kept[step])
        torch.rand(1)
    left = RandomRecord(tmp_path / "record", new=False)
    for step in (1, 2):
        found = left.read(step)
        assert found is not None
        assert found[0] == step
        assert torch.equal(found[1]["torch"], kept[step]["torch"])
        assert found[1]["random"] == kept[step]["random"]


def test_the_last_state_is_had_for_a_step_that_was_not_made(tmp_path: Path) -> None:
    record = RandomRecord(tmp_path / "record", new=True)
    record.write(1, states())
    record.write(2, states())
    found = record.read(5)
    assert found is not None
    assert found[0] == 2


def test_a_state_whose_writing_was_cut_off_is_not_used(tmp_path: Path) -> None:
    record = RandomRecord(tmp_path / "record", new=True)
    record.write(1, states())
    record.write(2, states())
    torn = bytearray((tmp_path / "record").read_bytes())
    torn[8:16] = (-1).to_bytes(8, "little", signed=True)  # of step 2, as it stands while it is written
    (tmp_path / "torn").write_bytes(torn)
    found = RandomRecord(tmp_path / "torn", new=False).read(2)
    assert found is not None
    assert found[0] == 1


def test_there_is_none_before_the_first_cell(tmp_path: Path) -> None:
    assert RandomRecord(tmp_path / "record", new=True).read(0) is None
