"""scripts/gpu: what runs on a machine with a GPU runs each by itself, with limits, and its results are kept."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.roles import await_end

ROOT = Path(__file__).resolve().parents[2]
FAR = 1e9  # a deadline that never comes, in seconds of the monotonic clock


@pytest.fixture(autouse=True)
def pytest_without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks are pytests of one small test: plugins, which none needs, take five times as long as the rest of it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


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
def gpu_results(scripts: None) -> ModuleType:
    return importlib.import_module("gpu_results")


@pytest.fixture(scope="module")
def gpu_step(scripts: None) -> ModuleType:
    return importlib.import_module("gpu_step")


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


def perform(run_gpu: ModuleType, steps: list[object], out: Path, lanes: int = 1, deadline: float = FAR) -> object:
    """A run of these steps."""
    run = run_gpu.Run({"gpus": 1, "GPU": "1 x Test"})
    run_gpu.run_through(run, steps, run_gpu.Runner(out, dict(os.environ), deadline), lanes)
    return run


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
    run = perform(run_gpu, steps, tmp_path)
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
    perform(run_gpu, steps, tmp_path)
    run = run_gpu.Run.kept(tmp_path)
    assert [result.lines for result in run.results.values()] == [["found False"], ["found True"]]
    run_gpu.run_through(run, [*steps, looking("third")], run_gpu.Runner(tmp_path, dict(os.environ), FAR))
    assert [result.lines[0] for result in run.results.values()] == ["found False", "found True", "found True"]


@pytest.mark.parametrize("lanes", [1, 2])
def test_steps_that_the_run_s_end_cuts_off_have_no_result_and_are_not_reached(
    run_gpu: ModuleType, gpu_parts: ModuleType, gpu_step: ModuleType, tmp_path: Path, lanes: int
) -> None:
    hanging = "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(1000)"
    steps = [check(tmp_path, name, hanging, gpu_parts) for name in ("one", "two", "three")]
    run = perform(run_gpu, steps, tmp_path, lanes, deadline=time.monotonic() + gpu_step.LEAST + 1)
    assert statuses(run) == {} and run_gpu.conclude(run, steps, tmp_path) == 3


def test_what_failed_comes_first_when_it_is_run_again(
    run_gpu: ModuleType, gpu_parts: ModuleType, gpu_results: ModuleType
) -> None:
    steps = [gpu_parts.Step(name, "part", gpu_parts.CHECK, name, 1.0) for name in ("a", "b", "c", "d")]
    found = {"b": "passed", "c": "hung", "d": "failed"}
    run = run_gpu.Run(results={name: gpu_results.Result(status, 1.0, name, "", "") for name, status in found.items()})
    again = run.take_failed()
    assert list(run.results) == ["b"]
    assert [step.name for step in run_gpu.first(again, steps)] == ["c", "d", "a", "b"]


def test_a_check_is_judged_by_pytest_and_brings_its_figures(
    run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path
) -> None:
    steps = [
        check(tmp_path, "good", "record_property('latency', '3 ms')", gpu_parts),
        check(tmp_path, "bad", "record_property('latency', '9 s'); assert 1 == 2", gpu_parts),
        check(tmp_path, "unable", "pytest.skip('torchao is not installed')", gpu_parts),
        check(tmp_path, "without", "pytest.skip('no GPU')", gpu_parts),
    ]
    run = perform(run_gpu, steps, tmp_path)
    assert statuses(run) == {"good": "passed", "bad": "failed", "unable": "skipped", "without": "failed"}
    page = (tmp_path / "page.md").read_text()
    assert (
        f"## 1 x Test, {run_gpu.Run().day}" in page
        and "latency 3 ms |" in page
        and "latency 9 s; exit code 1 |" in page
    )
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
    run_gpu: ModuleType,
    gpu_parts: ModuleType,
    gpu_results: ModuleType,
    tmp_path: Path,
    found: list[str | None],
    code: int,
) -> None:
    steps = [gpu_parts.Step(str(number), "part", gpu_parts.CHECK, str(number), 1.0) for number in range(len(found))]
    results = {
        step.target: gpu_results.Result(status, 1.0, step.name, "part", "check")
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


def test_time_that_is_over_before_the_machine_is_known_is_said(tmp_path: Path) -> None:
    done = gpu("--dry", "--minutes", "0", "--only", "two_ranks_compute", "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (3, "") and done.stdout.startswith("1 not reached: --resume. ")


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    """scripts/gpu on a machine that shows no GPU. What --pack has left in this checkout plays no part."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NBDIST_PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "gpu"), "--wheels", os.devnull, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


# --- side by side


def test_checks_in_several_lanes_run_side_by_side(run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meeting")  # who opens it waits for the other
    steps = [
        check(tmp_path, "writes", f"open({str(tmp_path / 'meeting')!r}, 'w').close()", gpu_parts),
        check(tmp_path, "reads", f"open({str(tmp_path / 'meeting')!r}).close()", gpu_parts),
    ]
    assert statuses(perform(run_gpu, steps, tmp_path, lanes=2)) == {"writes": "passed", "reads": "passed"}


def test_benchmarks_run_alone_after_all_checks(run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path) -> None:
    begin, end = (f"open({str(tmp_path / 'events')!r}, 'a').write('{word} ')" for word in ("begin", "end"))
    os.mkfifo(tmp_path / "meeting")
    meeting = str(tmp_path / "meeting")
    steps = [
        program(tmp_path, "measures", f"{begin}\n{end}", gpu_parts),
        program(tmp_path, "measures_too", f"{begin}\n{end}", gpu_parts),
        check(tmp_path, "writes", f"{begin}; open({meeting!r}, 'w').close(); {end}", gpu_parts),
        check(tmp_path, "reads", f"{begin}; open({meeting!r}).close(); {end}", gpu_parts),
    ]
    perform(run_gpu, steps, tmp_path, lanes=2)
    assert (tmp_path / "events").read_text().split() == ["begin", "begin", "end", "end"] + ["begin", "end"] * 2


def test_results_are_in_the_order_of_steps_whichever_ends_first(
    run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "meeting")
    out = tmp_path / "out"
    out.mkdir()
    steps = [  # the third begins when the second has ended, and the first ends when the third has begun
        check(tmp_path, "first", f"open({str(tmp_path / 'meeting')!r}).close()", gpu_parts),
        check(tmp_path, "second", "pass", gpu_parts),
        check(tmp_path, "third", f"open({str(tmp_path / 'meeting')!r}, 'w').close()", gpu_parts),
    ]
    perform(run_gpu, steps, out, lanes=2)
    assert list(statuses(run_gpu.Run.kept(out))) == ["first", "second", "third"]
    page = (out / "page.md").read_text()
    assert page.index("| first |") < page.index("| second |") < page.index("| third |")
    assert {path.name for path in out.iterdir()} == {"results.json", "page.md", "log.txt"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_lanes_and_what_has_finished_is_kept(
    run_gpu: ModuleType, gpu_parts: ModuleType, tmp_path: Path, number: signal.Signals
) -> None:
    hanging = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True); "
        "open({!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(1000)"
    )
    hangs = [tmp_path / "pids_1", tmp_path / "pids_2"]
    for path in hangs:
        os.mkfifo(path)
    steps = [
        check(tmp_path, "quick", "pass", gpu_parts),
        *(check(tmp_path, path.name, hanging.format(str(path)), gpu_parts) for path in hangs),
    ]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            own_steps(steps),
            "--dry",
            "--lanes",
            "2",
            "--wheels",
            os.devnull,
            "--out",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(word) for path in hangs for word in first_words(path).split()]
    finally:
        process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 3 and "2 not reached: --resume" in printed
    assert statuses(run_gpu.Run.kept(tmp_path)) == {"quick": "passed"}
    await_end(pids)


def first_words(path: Path) -> str:
    """What is written to a named pipe first, within a minute."""
    descriptor = os.open(path, os.O_RDWR)  # as a writer, too, so that it opens without another
    try:
        assert select.select([descriptor], [], [], 60)[0], f"nothing was written to {path}"
        return os.read(descriptor, 1 << 12).decode()
    finally:
        os.close(descriptor)


def own_steps(steps: list[object]) -> str:
    """scripts/gpu with these steps."""
    return (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import run_gpu\nfrom gpu_parts import Step\n"
        f"run_gpu.all_steps = lambda: {steps!r}\n"
        "sys.exit(run_gpu.main())\n"
    )


@pytest.mark.parametrize("lanes", ["0", "-1", "1.5", "two"])
def test_a_number_of_lanes_that_is_none_is_one_clear_error(lanes: str) -> None:
    done = gpu("--lanes", lanes)
    assert done.returncode == 2
    error = f"invalid number of lanes '{lanes}': use a whole number, 1 or more, as in --lanes 4"
    assert done.stderr.splitlines()[-1] == f"scripts/gpu: error: argument --lanes: {error}"


def test_two_runs_at_once_in_one_checkout_both_finish(tmp_path: Path) -> None:
    for number in range(3):
        wheel(tmp_path / "wheels", f"nbdist_test_{number}")

    def run(name: str) -> subprocess.CompletedProcess[str]:
        asked = ("--dry", "--lanes", "2", "--only", "two_ranks_compute")
        return gpu(*asked, "--wheels", str(tmp_path / "wheels"), "--out", str(tmp_path / name))

    try:
        with ThreadPoolExecutor(2) as pool:
            for done in pool.map(run, ("one", "two")):
                assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for unpacked in (ROOT / "build" / "gpu" / "site").glob("*/nbdist_test_0.py"):
            shutil.rmtree(unpacked.parent)


def test_a_second_run_into_the_same_folder_is_refused(run_gpu: ModuleType, tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        assert run_gpu.reserve(tmp_path, held)
        done = gpu("--dry", "--out", str(tmp_path))
    refusal = f"another run writes to {tmp_path}: give this one another folder with --out\n"
    assert (done.returncode, done.stderr) == (2, refusal)


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


def wheel(folder: Path, name: str, answer: int = 42) -> Path:
    """A wheel with one module."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{name}.py", f"answer = {answer}")
    return path


def test_what_comes_from_the_wheels_can_be_imported_and_the_rest_stays_packed(
    gpu_wheels: ModuleType, tmp_path: Path
) -> None:
    wanted, _ = (wheel(tmp_path / "wheels", name) for name in ("wanted", "installed"))
    used = gpu_wheels.needed(tmp_path / "wheels", {"installed": "1.0"}.get)
    assert used == [wanted]
    assert [path.name for path in gpu_wheels.unpack(used, tmp_path / "site").iterdir()] == ["wanted.py"]


def test_runs_that_unpack_at_once_share_one_whole_folder(gpu_wheels: ModuleType, tmp_path: Path) -> None:
    wheels = [wheel(tmp_path / "wheels", f"module_{number}") for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: gpu_wheels.unpack(wheels, tmp_path / "site"), range(8)))
    (folder,) = folders
    assert list((tmp_path / "site").iterdir()) == [folder] and len(list(folder.iterdir())) == 20


def test_other_wheels_leave_alone_what_a_run_uses(gpu_wheels: ModuleType, tmp_path: Path) -> None:
    older = gpu_wheels.unpack([wheel(tmp_path / "wheels", "module", 1)], tmp_path / "site")
    newer = gpu_wheels.unpack([wheel(tmp_path / "wheels", "module", 2)], tmp_path / "site")
    assert [(each / "module.py").read_text() for each in (older, newer)] == ["answer = 1", "answer = 2"]
