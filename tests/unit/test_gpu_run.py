"""scripts/gpu: what runs on a machine with a GPU runs each by itself, with limits, and its results are kept."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.roles import await_end

ROOT = Path(__file__).resolve().parents[2]
FAR = 1e9  # a deadline that never comes, in seconds of the monotonic clock


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """Their modules import each other as programs in one folder do."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def run_gpu(scripts: None) -> ModuleType:
    return importlib.import_module("run_gpu")


@pytest.fixture(scope="module")
def gpu_parts(scripts: None) -> ModuleType:
    return importlib.import_module("gpu_parts")


@pytest.fixture(scope="module")
def gpu_wheels(scripts: None) -> ModuleType:
    return importlib.import_module("gpu_wheels")


def program(folder: Path, name: str, text: str, gpu_parts: ModuleType, limit: float = 60.0) -> object:
    """A benchmark that is this text."""
    path = folder / f"{name}.py"
    path.write_text(text)
    return gpu_parts.Step(name, "part", gpu_parts.BENCHMARK, str(path), limit)


def check(folder: Path, name: str, text: str, gpu_parts: ModuleType) -> object:
    """A check that is this text in a test."""
    path = folder / f"test_{name}.py"
    path.write_text(f"import pytest\ndef test_{name}(record_property):\n    {text}\n")
    return gpu_parts.Step(name, "part", gpu_parts.CHECK, str(path), 60.0)


def statuses(run: object) -> dict[str, str]:
    return {result.name: result.status for result in run.results.values()}  # type: ignore[attr-defined]


# --- what there is


def test_every_test_marked_gpu_and_every_benchmark_of_gpus_is_a_step(gpu_parts: ModuleType) -> None:
    listed = {path for _, _, files in gpu_parts.PARTS for path in files}
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if gpu_parts.marked_tests(path.read_text(encoding="utf-8"))
    }
    benchmarks = {str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").glob("gpu_*.py")}
    assert listed == marked | benchmarks


def test_marked_tests_are_found_without_importing_them(gpu_parts: ModuleType) -> None:
    source = (
        "import missing\n@pytest.mark.gpu\ndef test_a(): ...\ndef test_b(): ...\n"
        "class TestC:\n    @pytest.mark.slow\n    @pytest.mark.gpu\n    def test_d(self): ...\n"
    )
    assert gpu_parts.marked_tests(source) == ["test_a", "TestC::test_d"]
    assert gpu_parts.marked_tests(f"pytestmark = pytest.mark.gpu\n{source}") == ["test_a", "test_b", "TestC::test_d"]


def test_steps_are_chosen_by_part_or_by_a_word_in_their_name(gpu_parts: ModuleType) -> None:
    steps = gpu_parts.all_steps()
    assert {step.part for step in gpu_parts.chosen(steps, ["nccl"])} == {"nccl"}
    assert [step.target for step in gpu_parts.chosen(steps, ["gpu_save"])] == ["benchmarks/gpu_save.py"]
    assert gpu_parts.chosen(steps, []) == steps
    with pytest.raises(ValueError, match="--only nothing-like-it fits nothing: name a part"):
        gpu_parts.chosen(steps, ["nothing-like-it"])


# --- running


def test_a_step_that_hangs_costs_its_own_limit_and_leaves_no_process(
    run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path
) -> None:
    hanging = (
        "import pathlib, subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "children = [subprocess.Popen(sleep, start_new_session=own) for own in (False, True)]\n"
        f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(' '.join(str(child.pid) for child in children))\n"
        "time.sleep(1000)\n"
    )
    steps = [
        program(tmp_path, "hangs", hanging, gpu_parts, limit=5.0),
        program(tmp_path, "works", "print('3 ms')", gpu_parts),
    ]
    run = run_gpu.Run({"gpus": 1})
    run_gpu.run_through(run, steps, tmp_path, dict(os.environ), FAR)
    assert statuses(run) == {"hangs": "hung", "works": "passed"}
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        await_end([pid])


def test_results_are_kept_after_each_step_and_a_resumed_run_goes_on(
    run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path
) -> None:
    def looking(name: str) -> object:
        text = f"import pathlib\nprint('found', pathlib.Path({str(tmp_path / 'results.json')!r}).exists())"
        return program(tmp_path, name, text, gpu_parts)

    steps = [looking("first"), looking("second")]
    run_gpu.run_through(run_gpu.Run({"gpus": 1}), steps, tmp_path, dict(os.environ), FAR)
    run = run_gpu.Run.kept(tmp_path)
    assert [result.lines for result in run.results.values()] == [["found False"], ["found True"]]
    run_gpu.run_through(run, [*steps, looking("third")], tmp_path, dict(os.environ), FAR)
    assert [result.lines[0] for result in run.results.values()] == ["found False", "found True", "found True"]


def test_a_step_that_the_run_s_end_cuts_off_has_no_result_and_is_not_reached(
    run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path
) -> None:
    steps = [program(tmp_path, "long", "import time; time.sleep(1000)", gpu_parts)]
    run = run_gpu.Run({"gpus": 1})
    run_gpu.run_through(run, steps, tmp_path, dict(os.environ), time.monotonic() + run_gpu.LEAST + 1)
    assert statuses(run) == {} and run_gpu.conclude(run, steps, tmp_path) == 3


def test_a_check_is_judged_by_pytest_and_brings_its_figures(
    run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path
) -> None:
    steps = [
        check(tmp_path, "good", "record_property('latency', '3 ms')", gpu_parts),
        check(tmp_path, "bad", "record_property('latency', '9 s'); assert 1 == 2", gpu_parts),
        check(tmp_path, "unable", "pytest.skip('torchao is not installed')", gpu_parts),
        check(tmp_path, "without", "pytest.skip('no GPU')", gpu_parts),
    ]
    run = run_gpu.Run({"gpus": 1, "GPU": "1 x Test"})
    run_gpu.run_through(run, steps, tmp_path, dict(os.environ), FAR)
    assert statuses(run) == {"good": "passed", "bad": "failed", "unable": "skipped", "without": "failed"}
    page = (tmp_path / "page.md").read_text()
    assert f"## 1 x Test, {run.day}" in page and "latency 3 ms |" in page and "latency 9 s; exit code 1 |" in page
    assert "| torch finds a GPU here, and this check found none |" in page
    assert "| torchao is not installed |" in page and "assert 1 == 2" in page
    assert "assert 1 == 2" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (["passed", "skipped"], 0),
        (["no GPU", "no GPU"], 0),
        (["passed", None], 3),
        (["failed", "passed"], 1),
        (["hung", None], 1),
    ],
)
def test_the_exit_code_says_how_it_went(
    run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path, found: list[str | None], code: int
) -> None:
    steps = [gpu_parts.Step(str(number), "part", gpu_parts.CHECK, str(number), 1.0) for number in range(len(found))]
    results = {
        step.target: run_gpu.Result(status, 1.0, step.name, "part", "check")
        for step, status in zip(steps, found, strict=True)
        if status
    }
    assert run_gpu.conclude(run_gpu.Run(results=results), steps, tmp_path) == code


def test_a_dry_run_runs_everything_and_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    done = gpu("--dry", "--only", "two_ranks_compute", "gpu_start", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["no GPU"] * 2 and summary.startswith("2 no GPU. Page: ")
    kept = json.loads((tmp_path / "results.json").read_text())
    assert {each["status"] for each in kept["results"].values()} == {"no GPU"} and len(kept["results"]) == 2
    assert (tmp_path / "page.md").read_text().startswith("## no GPU, ")


def test_without_a_gpu_nothing_is_run_and_that_is_said(tmp_path: Path) -> None:
    done = gpu("--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (
        2,
        "torch finds no GPU here. `scripts/gpu --dry` tests the run itself without one\n",
    )


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    """scripts/gpu on a machine that shows no GPU."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NBDIST_PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "gpu"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


# --- wheels


def test_the_wheels_are_those_of_nbdist_without_jupyterlab_and_torch(gpu_wheels: ModuleType) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = {gpu_wheels.name_of(each) for each in gpu_wheels.requirements(project, "3.12")}
    assert {"ipykernel", "msgspec", "pyzmq", "anywidget", "numpy", "pytest"} <= wanted
    assert not wanted & {"torch", "jupyterlab", "tomli"}
    assert "tomli" in gpu_wheels.requirements(project, "3.10")


def test_a_package_that_is_missing_or_older_comes_from_the_wheels(gpu_wheels: ModuleType) -> None:
    wheels = [
        "old_one-2.10.0-py3-none-any.whl",
        "same-1.5-cp312-cp312-linux.whl",
        "new-3.0-py3-none-any.whl",
        "none-1.0-py3-none-any.whl",
    ]
    here = {"old_one": "2.9.1", "same": "1.5", "new": "3.1+local"}
    assert gpu_wheels.missing(wheels, here.get) == ["old_one-2.10.0-py3-none-any.whl", "none-1.0-py3-none-any.whl"]


def test_what_comes_from_the_wheels_can_be_imported_and_the_rest_stays_packed(
    gpu_wheels: ModuleType, tmp_path: Path
) -> None:
    import zipfile

    (tmp_path / "wheels").mkdir()
    for name in ("wanted", "installed"):
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "answer = 42")
    used = gpu_wheels.unpack(tmp_path / "wheels", tmp_path / "site", {"installed": "1.0"}.get)
    assert used == ["wanted-1.0-py3-none-any.whl"]
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["wanted.py"]
