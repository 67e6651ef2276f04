"""When a warm template has become stale."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nbdist.agent.forks.warm_template import WarmTemplate, changed_variables, find_torch, installed_versions
from nbdist.wire.messages.life import StartOptions
from nbdist.wire.processes.template_messages import ImportFailed


@pytest.mark.parametrize(
    "name",
    [
        "LD_LIBRARY_PATH",
        "PYTHONHASHSEED",
        "PYTHONPATH",
        "PYTHONWARNINGS",
        "TORCH_LOGS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "MKL_NUM_THREADS",
        "MALLOC_ARENA_MAX",
    ],
)
def test_a_variable_that_libraries_read_when_they_are_imported_makes_it_stale(name: str) -> None:
    assert changed_variables({}, {name: "1"}) == [name]
    assert changed_variables({name: "1"}, {}) == [name]
    assert changed_variables({name: "1"}, {name: "2"}) == [name]
    assert changed_variables({name: "1"}, {name: "1"}) == []


@pytest.mark.parametrize(
    "name",
    [
        "OF_THE_USER",
        "CUDA_VISIBLE_DEVICES",
        "TZ",
        "OMP_NUM_THREADS",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCHINDUCTOR_CACHE_DIR",
        "NCCL_DEBUG",
    ],
)
def test_a_variable_that_ranks_read_later_does_not(name: str) -> None:
    assert changed_variables({}, {name: "1"}) == []


def test_all_that_changed_are_named_in_order() -> None:
    assert changed_variables({"LD_A": "1"}, {"TORCH_B": "1", "PATH": "x"}) == ["LD_A", "TORCH_B"]


def test_the_torch_that_a_path_leads_to_is_the_first_on_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "torch.py").touch()
    assert find_torch([str(tmp_path), str(tmp_path / "two"), str(tmp_path / "one")]) == str(
        tmp_path / "two" / "torch.py"
    )
    assert find_torch([str(tmp_path)]) == ""


def test_versions_are_those_on_disk_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = installed_versions()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "torch-99.dist-info").mkdir()
    (tmp_path / "torch-99.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99\n")
    assert installed_versions() == {**before, "torch": "99"}


def _options(**changes: object) -> StartOptions:
    fields = {"environment": dict(os.environ), "sys_path": [], "argv": [], "cwd": "/", "umask": 0, "open_files": 99}
    return StartOptions(count=1, **{**fields, **changes})  # type: ignore[arg-type]


def test_a_template_whose_torch_is_missing_says_what_to_type_and_ends(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    template = WarmTemplate(dict(os.environ), [str(tmp_path), *_python_path()])
    answer, _ = template.channel.receive()
    assert isinstance(answer, ImportFailed) and "PyTorch is not installed" in answer.text
    assert "`%pip install torch`" in answer.text and "`%distributed start`" in answer.text
    assert template.channel.receive() == (None, None)
    assert template.reap() == 0


def test_a_template_whose_torch_is_broken_names_the_error(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.99: cannot open')")
    template = WarmTemplate(dict(os.environ), [str(tmp_path), *_python_path()])
    answer, _ = template.channel.receive()
    assert isinstance(answer, ImportFailed) and "OSError: libcudart.so.99: cannot open" in answer.text
    assert template.channel.receive() == (None, None)
    assert template.reap() == 0


def test_a_template_that_is_ended_is_reaped() -> None:
    template = WarmTemplate(dict(os.environ))
    assert template.stale(_options()) == []
    assert template.stale(_options(environment={**os.environ, "PYTHONHASHSEED": "1", "LD_X": "1"})) == [
        "LD_X, PYTHONHASHSEED changed after torch was imported for the ranks, and libraries read it only at import"
    ]
    template.end()
    with pytest.raises(ProcessLookupError):
        os.kill(template.pid, 0)


def test_relative_entries_of_the_path_are_meant_in_the_notebooks_folder() -> None:
    options = _options(sys_path=["", "lib", "/usr/lib"], cwd="/home/someone")
    assert options.search_path() == ["/home/someone/", "/home/someone/lib", "/usr/lib"]


def _python_path() -> list[str]:
    import subprocess
    import sys

    command = [sys.executable, "-c", "import json, sys; print(json.dumps([p for p in sys.path if p]))"]
    here = str(Path(__file__).resolve().parents[2])
    return [*json.loads(subprocess.run(command, capture_output=True, check=True).stdout), here]
