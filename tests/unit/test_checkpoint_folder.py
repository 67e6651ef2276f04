"""Which folders are whole checkpoints, whenever the process that wrote them was killed."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.train.checkpoint.checkpoint_folder import Draft, find, latest


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


@pytest.mark.parametrize("which", ["new", "same"])
def test_whenever_a_save_is_killed_a_whole_checkpoint_is_found_and_the_next_save_tidies_up(
    tmp_path: Path, which: str
) -> None:
    code = [sys.executable, "-m", "tests.stress.killed_saves", str(tmp_path), which]
    root = Path(__file__).parents[2]
    found = json.loads(subprocess.run(code, check=True, capture_output=True, cwd=root).stdout)
    *killed, unharmed = found
    assert len(killed) > 10 and all(seen["killed"] for seen in killed)
    for seen in found:
        assert len({seen["found"], seen["latest"], seen.get("named", seen["found"])}) == 1, seen
        assert seen["found"] in ("earlier", "later"), seen
        assert (seen["then"], seen["after"]) == (["a", "mine"], "after"), seen
    assert [unharmed["killed"], unharmed["found"]] == [False, "later"]


def test_a_save_that_is_about_to_get_its_name_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, rename = Draft(tmp_path / "a"), Path.rename

    def after_another_save(path: Path, target: Path) -> Path:
        monkeypatch.undo()
        save(tmp_path / "b")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", after_another_save)
    writing.publish({})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert find(save(tmp_path / "a")) == tmp_path / "a"


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    writing = Draft(tmp_path / "a")
    save(tmp_path / "b")
    with pytest.raises(UsageError, match="another process is saving"):
        Draft(tmp_path / "a")
    writing.publish({})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_partial_one_is_not_taken(tmp_path: Path) -> None:
    writing = Draft(tmp_path / "a")
    with pytest.raises(UsageError, match=r"holds only incomplete ones \(a\.partial\)"):
        find(tmp_path)
    with pytest.raises(UsageError, match="is a save that did not finish"):
        find(tmp_path / "a.partial")
    writing.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_path_where_nothing_is_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"there is no file or folder 'last' in {tmp_path}: "):
        find(Path("last"))
