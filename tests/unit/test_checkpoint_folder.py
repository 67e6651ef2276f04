"""Which folders are whole checkpoints, whenever the process that wrote them was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.train.checkpoint_folder import Draft, find, latest


def save(path: Path) -> Path:
    Draft(path).publish({"world_size": 1})
    return path


def test_the_newest_is_told_by_when_it_was_saved_not_by_its_name(tmp_path: Path) -> None:
    save(tmp_path / "b")
    save(tmp_path / "a")
    assert latest(tmp_path) == tmp_path / "a"
    assert latest(tmp_path / "none") is None


def test_a_replacement_that_was_killed_between_two_renames_leaves_the_earlier_one(tmp_path: Path) -> None:
    save(tmp_path / "a").rename(tmp_path / "a.previous")
    assert find(tmp_path / "a") == tmp_path / "a.previous"
    save(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    writing = Draft(tmp_path / "a")
    save(tmp_path / "b")
    with pytest.raises(UsageError, match="another process is saving"):
        Draft(tmp_path / "a")
    writing.publish({})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_partial_one_is_not_taken(tmp_path: Path) -> None:
    writing = Draft(tmp_path / "a")
    with pytest.raises(UsageError, match=r"holds partial ones only \(a\.partial\)"):
        find(tmp_path)
    with pytest.raises(UsageError, match="is a save that did not come to its end"):
        find(tmp_path / "a.partial")
    writing.discard()
    assert list(tmp_path.iterdir()) == []
