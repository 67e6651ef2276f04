"""Code that is run in a job that others have started: `nbdist look JOB --run`, `nbdist serve --control`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import nbdist
from nbdist.jobs.found_jobs import find_jobs
from nbdist.serving.look_messages import RankLook
from testbed.kernel import Kernel, wait_until
from tests.conftest import sharing

# Trains until a file is there, then for as many steps as all ranks agree on; rank 1 may stop at another file.
TRAIN = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for step in range(1, 1_000_000):
        loss = net(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        while dist.get_rank() == 1 and os.path.exists("rank 1 waits") and not os.path.exists("end"):
            time.sleep(0.01)
        ends = torch.tensor(float(os.path.exists("end")))
        dist.all_reduce(ends)
        if ends and step >= 30:
            break
    if dist.get_rank() == 0:
        torch.save(losses, "losses.pt")


main()
"""


# Ranks that have nothing to do with each other, one of them faster.
ALONE = """
import os, time, torch
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], lr=0.1)
step = 0
while not os.path.exists("end"):
    while os.environ["RANK"] == "1" and os.path.exists("rank 1 waits"):
        time.sleep(0.01)
    step += 1
    optimizer.step()
    time.sleep(0.0002 * (1 + int(os.environ["RANK"])))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scripts run, with sockets of their own."""
    monkeypatch.setenv("NBDIST_JOBS", str(tmp_path / "sockets"))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A job that trains, and its folder, for tests that leave it as it was."""
    place = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBDIST_JOBS", str(place / "sockets"))
        (place / "train.py").write_text(TRAIN)
        with job(place) as name, sharing(psutil.Process(launcher_of(name))):
            yield name, place


def look(*arguments: str, folder: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbdist", "look", *arguments]
    return subprocess.run(command, cwd=folder, input=code, capture_output=True, text=True, timeout=60, check=False)


def launcher_of(name: str) -> int:
    """The process of torchrun."""
    found = next(job for job in find_jobs() if job.name == name)
    return psutil.Process(found.processes[0].pid).ppid()


def steps(name: str) -> list[int]:
    looks = next((job.look() for job in find_jobs() if job.name == name), {})
    return [each.steps for each in looks.values() if isinstance(each, RankLook)]


def trains_on(name: str) -> bool:
    """Whether both ranks make more steps."""
    before = steps(name)
    wait_until(lambda: all(now > then for now, then in zip(steps(name), before, strict=True)), "more steps", 30)
    return True


@contextmanager
def job(folder: Path, *how: str, output: str = "") -> Iterator[str]:
    """A job of two ranks under torchrun that trains; its name. It has to end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    serve = ["-m", "nbdist", "serve", "--control"]
    errors = (folder / output).open("w") if output else None
    process = subprocess.Popen([*command, *(how or serve), "train.py"], cwd=folder, stderr=errors)
    try:

        def name() -> str:
            pids = {each.pid for each in psutil.Process(process.pid).children()}
            mine = (found.name for found in find_jobs() if pids == {each.pid for each in found.processes})
            return next(mine, "") if len(pids) == 2 else ""

        wait_until(name, "the job", 60)
        wait_until(lambda: len(steps(name())) == 2 and min(steps(name())) > 0, "a step", 60)
        yield name()
        (folder / "end").touch()
        assert process.wait(60) == 0, f"exit code {process.returncode}"
    finally:
        if errors is not None:
            errors.close()
        process.terminate()  # and with it its ranks
        process.wait()


def test_ranks_pause_after_the_same_step_and_code_sees_their_names(shared: tuple[str, Path]) -> None:
    name, folder = shared
    seen = look(name, "--run", "step, len(losses)", "--run", "dist.get_rank()", folder=folder)
    line, *ranks, pause = seen.stdout.splitlines()
    assert line.startswith("[0-1] (") and ranks == ["[0] 0", "[1] 1"]
    step = int(line.removeprefix("[0-1] (").partition(",")[0])
    assert line == f"[0-1] ({step}, {step - 1})"
    assert pause.startswith(f"paused after step {step:,} for ") and seen.returncode == 0
    assert trains_on(name)


def test_code_may_call_collectives(shared: tuple[str, Path]) -> None:
    name, folder = shared
    code = "sums = torch.ones(2)\ndist.all_reduce(sums)\nsums.tolist()\n"
    assert "[0-1] [2.0, 2.0]\n" in look(name, "--run", "-", folder=folder, code=code).stdout


def test_code_assigns_in_the_main_program_and_reads_what_it_has_assigned(shared: tuple[str, Path]) -> None:
    name, folder = shared
    look(name, "--run", "step = 'mine'", "--run", "print(step)", folder=folder)
    printed = look(name, "--run", "import __main__; __main__.step, type(step).__name__", folder=folder).stdout
    assert printed.startswith("[0-1] ('mine', 'int')\n")


def test_code_runs_on_some_ranks_while_all_are_paused(shared: tuple[str, Path]) -> None:
    name, folder = shared
    assert look(name, "--run", "print('here')", "--ranks", "1", folder=folder).stdout.startswith("[1] here\npaused")
    wrong = look(name, "--run", "1", "--ranks", "2", folder=folder)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "nbdist: rank 2 isn't in this job: it has ranks 0-1; for example -r 0-1\n",
    )


def test_a_notebook_runs_code_in_the_job(shared: tuple[str, Path]) -> None:
    name, folder = shared
    with Kernel(NBDIST_JOBS=str(folder / "sockets")) as kernel:
        kernel.ok("%load_ext nbdist")
        assert ", in main: " in kernel.ok(f"%distributed look {name} --stacks").stdout
        shown = kernel.ok(f"%distributed look {name} --run 'dist.get_world_size()' -r 1").stdout
        assert shown.startswith("[1] 2\npaused after step ")
        failed = kernel.run(f"%distributed look {name} --run '1 / 0'")
        assert failed.ename == "RankError" and "[0-1] ZeroDivisionError: division by zero" in failed.traceback


def test_python_has_the_output_by_rank_and_what_failed(shared: tuple[str, Path]) -> None:
    name, _ = shared
    job = nbdist.job(name[:5])
    assert (job.name, job.world_size, sorted(job.looks())) == (name, 2, [0, 1])
    assert job.run("dist.get_rank()") == {0: "0\n", 1: "1\n"} and job.run("x = 1", [1]) == {1: ""}
    told = f"rank 1 of job {name}: ZeroDivisionError: division by zero\n"
    with pytest.raises(nbdist.RankError) as caught:
        job.run("1 / (1 - dist.get_rank())")
    assert caught.value.report.startswith(told)
    assert {rank: failure.name for rank, failure in caught.value.failures.items()} == {1: "ZeroDivisionError"}


def test_code_that_fails_does_not_end_the_job_and_what_follows_is_not_run(shared: tuple[str, Path]) -> None:
    name, folder = shared
    failed = look(name, "--run", "def f():\n    1 / 0\nf()", "--run", "print('next')", folder=folder)
    assert failed.returncode == 1 and "next" not in failed.stdout
    assert '[0-1]   File "<look>", line 2, in f\n[0-1]     1 / 0\n' in failed.stdout
    assert "[0-1] ZeroDivisionError: division by zero\npaused after step " in failed.stdout
    assert look(name, "--run", "raise SystemExit(3)", folder=folder).returncode == 1
    assert trains_on(name)


def test_a_job_that_was_paused_computes_the_same_to_the_bit(folder: Path) -> None:
    import torch

    def losses() -> list[float]:
        found: list[float] = torch.load(folder / "losses.pt")
        (folder / "end").unlink(missing_ok=True)
        return found

    with job(folder) as name:
        assert look(name, "--run", "loss.item(), net.module.weight.sum()", folder=folder).returncode == 0
        assert look(name, "--run", "[each.shape for each in net.parameters()]", folder=folder).returncode == 0
    paused = losses()
    with job(folder, "-m", "nbdist", "serve"):
        pass
    never = losses()
    count = min(len(paused), len(never))
    assert count >= 30 and paused[:count] == never[:count]


def test_ranks_go_on_when_who_paused_them_is_killed(folder: Path) -> None:
    code = "open(f'paused {dist.get_rank()}', 'w').close()\nwhile True: time.sleep(0.01)"
    with job(folder) as name:
        visitor = subprocess.Popen([sys.executable, "-m", "nbdist", "look", name, "--run", code], cwd=folder)
        wait_until(lambda: len(list(folder.glob("paused *"))) == 2, "both ranks in the code", 30)
        assert look(name, folder=folder).stdout.count("paused by a look, after train.py:18: optimizer.step()") == 2
        visitor.send_signal(signal.SIGKILL)
        visitor.wait()
        assert trains_on(name)
        assert look(name, "--run", "1", folder=folder).returncode == 0


def test_who_comes_second_is_told_who_has_paused_the_job(shared: tuple[str, Path]) -> None:
    name, folder = shared
    code = "open(f'first {dist.get_rank()}', 'w').close()\nwhile not os.path.exists('first ends'): time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-m", "nbdist", "look", name, "--run", code], cwd=folder) as first:
        wait_until(lambda: len(list(folder.glob("first *"))) == 2, "both ranks in the code", 30)
        second = look(name, "--run", "1", folder=folder)
        assert f"is paused already, or about to be, by process {first.pid}: try again" in second.stderr
        (folder / "first ends").touch()
        assert first.wait(30) == 0


def test_ctrl_c_lets_ranks_go_on(shared: tuple[str, Path]) -> None:
    name, folder = shared
    code = "open(f'stopped {dist.get_rank()}', 'w').close()\nwhile True: time.sleep(0.01)"
    command = [sys.executable, "-m", "nbdist", "look", name, "--run", code]
    visitor = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(folder.glob("stopped *"))) == 2, "both ranks in the code", 30)
    visitor.send_signal(signal.SIGINT)
    assert visitor.communicate(timeout=30)[1] == "nbdist: interrupted; all ranks go on\n"
    assert visitor.returncode == 130 and trains_on(name)


def test_code_that_does_not_end_is_stopped_when_its_time_is_over(shared: tuple[str, Path]) -> None:
    name, folder = shared
    late = look(name, "--run", "print('begins')\nwhile True: time.sleep(0.01)", "--for", "1s", folder=folder)
    assert late.returncode == 1 and "[0-1] begins\n[0-1] stopped, as its time was over" in late.stdout
    assert trains_on(name)


def test_a_rank_that_does_not_come_to_the_step_is_named_and_the_others_go_on(folder: Path) -> None:
    with job(folder) as name:
        (folder / "rank 1 waits").touch()
        wait_until(lambda: "rank 1 is elsewhere" in look(name, folder=folder).stdout, "rank 1 to wait", 30)
        late = look(name, "--run", "print('runs')", "--for", "1s", folder=folder)
        assert late.returncode == 2 and "runs" not in late.stdout
        assert "was not paused: ranks 0-1 did not come to step " in late.stderr
        assert (
            "rank 0 is in train.py:23: dist.all_reduce(ends) (in all_reduce); rank 1 is in train.py:21: " in late.stderr
        )
        (folder / "rank 1 waits").unlink()
        assert trains_on(name)


def test_ranks_that_have_come_to_the_step_do_not_wait_for_good(folder: Path) -> None:
    (folder / "train.py").write_text(ALONE)
    with job(folder) as name:
        (folder / "rank 1 waits").touch()
        late = look(name, "--run", "print('runs')", "--for", "1s", folder=folder)
        assert late.returncode == 2 and "runs" not in late.stdout
        assert "rank 1 did not come to step " in late.stderr and ", where rank 0 waited. rank 1 is in " in late.stderr
        (folder / "rank 1 waits").unlink()
        assert trains_on(name)


def test_a_job_ends_rather_than_to_go_on_with_collectives_out_of_step(folder: Path) -> None:
    code = "if dist.get_rank() == 0: 1 / 0\ndist.all_reduce(torch.ones(()))"
    with pytest.raises(AssertionError, match="exit code 1"), job(folder, output="output.txt") as name:
        ended = look(name, "--run", code, "--for", "4s", folder=folder)
        assert "[0] ZeroDivisionError: division by zero" in ended.stdout
        assert "[1] this rank did not end the code: code of a look has left rank 1 in all_reduce" in ended.stdout
    errors = (folder / "output.txt").read_text()
    assert "StaleGroupError: code of a look has left rank 1 in all_reduce, which not all ranks have called." in errors


def test_a_job_has_to_allow_code(folder: Path) -> None:
    with job(folder, "-m", "nbdist", "serve") as name:
        refused = look(name, "--run", "1", folder=folder)
        assert refused.returncode == 2 and f"job {name} may be looked at only. To have it take code" in refused.stderr
        assert "nbdist serve --control SCRIPT" in refused.stderr


def test_a_script_may_allow_it_itself(folder: Path) -> None:
    (folder / "train.py").write_text("import nbdist\nnbdist.serve(control=True)\n" + TRAIN)
    with job(folder, "--no-python", sys.executable) as name:
        assert look(name, "--run", "1 + 1", folder=folder).stdout.startswith("[0-1] 2\n")


def test_ranks_without_collectives_meet_at_a_step_that_none_has_made(folder: Path) -> None:
    (folder / "train.py").write_text(ALONE)
    with job(folder) as name:
        for _ in range(3):
            seen = look(name, "--run", "step", folder=folder).stdout
            step = int(seen.splitlines()[0].removeprefix("[0-1] "))
            assert f"paused after step {step:,} for" in seen


def test_a_job_with_ranks_elsewhere_is_not_paused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "this.py").write_text("input()")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "nbdist", "serve", "--control", "this.py"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.PIPE) as process:
        wait_until(lambda: any(job.serves for job in find_jobs()), "the job", 30)
        refused = look("--run", "1", folder=folder) if len(find_jobs()) == 1 else None
        name = next(job.name for job in find_jobs() if job.serves)
        refused = refused or look(name, "--run", "1", folder=folder)
        assert refused.returncode == 2 and "has 2 ranks, and rank 0 is here. Ranks must be paused all" in refused.stderr
        process.communicate(b"\n")


@pytest.mark.parametrize("step", ["optimizer.step", "torch.compile(lambda: optimizer.step(), backend='eager')"])
def test_steps_are_counted_from_the_first_one(folder: Path, step: str) -> None:
    (folder / "this.py").write_text(
        "import torch\nweight = torch.nn.Parameter(torch.zeros(1))\nweight.grad = torch.ones(1)\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        f"step = {step}\nfor _ in range(3):\n    step()\n"
        "import os\nfrom nbdist.jobs.found_jobs import find_jobs\n"
        "own = next(job for job in find_jobs() if job.processes[0].pid == os.getpid())\nprint(own.look()[0].steps)\n"
    )
    command = [sys.executable, "-m", "nbdist", "serve", "this.py"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "3\n" and "Dynamo does not know" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--run", "1 +"), "nbdist: invalid code, so nothing was run: invalid syntax in line 1: '1 +'\n"),
        (("--run", "1", "--for", "soon"), "nbdist: invalid time 'soon' after --for: use, for example, 90s or 5m\n"),
        (
            ("--run", "1", "--for", "0"),
            "nbdist: invalid limit 0.0: use a number of seconds greater than 0, for example 60\n",
        ),
    ],
)
def test_what_can_not_be_run_is_one_line(shared: tuple[str, Path], arguments: tuple[str, ...], told: str) -> None:
    name, folder = shared
    refused = look(name, *arguments, folder=folder)
    assert (refused.returncode, refused.stderr) == (2, told)
