"""A look into a job that others have started: `nbdist serve`, `nbdist.serve()`, `nbdist ls`, `nbdist look`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nbdist.jobs.found_jobs import find_jobs
from testbed.kernel import wait_until

# After ten steps rank 1 waits for a file, and rank 0 in a collective for rank 1.
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        loss = net(torch.ones(1, 4)).sum()
        loss.backward()
        optimizer.step()
    while dist.get_rank() == 1 and not os.path.exists("go on"):
        time.sleep(0.05)
    dist.all_reduce(torch.ones(3))


main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scripts run, with sockets of their own."""
    monkeypatch.setenv("NBDIST_JOBS", str(tmp_path / "sockets"))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def nbdist(*arguments: str, folder: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if path is None else {"PATH": path})
    command = [sys.executable, "-m", "nbdist", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def job(folder: Path, *how: str) -> Iterator[str]:
    """A job of two ranks under torchrun while rank 1 waits for its file; its name."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *how]
    process = subprocess.Popen(command, cwd=folder)
    try:

        def name() -> str:
            pids = {each.pid for each in psutil.Process(process.pid).children()}
            mine = (found.name for found in find_jobs() if pids == {each.pid for each in found.processes})
            return next(mine, "") if len(pids) == 2 else ""

        wait_until(name, "the job", 60)
        yield name()
        (folder / "go on").touch()
        assert process.wait(60) == 0
    finally:
        process.terminate()  # and with it its ranks
        process.wait()


def served(folder: Path, *how: str) -> Iterator[tuple[str, str]]:
    """A job that waits, and what a look shows of it then."""
    with job(folder, *how) as name:

        def looks() -> str:
            return nbdist("look", name, folder=folder).stdout

        wait_until(lambda: "(in all_reduce)" in looks() and "time.sleep(0.05)" in looks(), looks, 60)
        yield name, looks()


def test_a_served_script_shows_steps_lines_and_who_waits_for_whom(folder: Path) -> None:
    for name, text in served(folder, "-m", "nbdist", "serve", "train.py"):
        rows = [line.split() for line in text.splitlines()[1:3]]
        assert [(row[0], row[2]) for row in rows] == [("0", "10"), ("1", "10")]
        assert "train.py:17: dist.all_reduce(torch.ones(3)) (in all_reduce)" in text
        assert text.endswith("rank 0 is in all_reduce; rank 1 is elsewhere\n")
        assert nbdist("look", name[:4], folder=folder).returncode == 0


def test_stacks_begin_in_the_script_and_collectives_stand_side_by_side(folder: Path) -> None:
    for name, _ in served(folder, "-m", "nbdist", "serve", "train.py"):
        text = nbdist("look", name, "--stacks", "--flight", folder=folder).stdout
        assert "rank 1\n    train.py:20: main()\n    train.py:16, in main: time.sleep(0.05)\n" in text
        assert "all_reduce float32[3] …" in text and "<- not yet on rank 1" in text


def test_names_stand_with_short_values_equal_ones_once(folder: Path) -> None:
    for name, _ in served(folder, "-m", "nbdist", "serve", "train.py"):
        text = nbdist("look", name, "--locals", folder=folder).stdout
        assert "\n[0] train.py:17, in main\n" in text and "\n[1] train.py:16, in main\n" in text
        assert "\n[0-1] loss = float32[] on cpu\n" in text and "[0-1] net = <Linear>\n" in text


def test_a_script_may_serve_itself(folder: Path) -> None:
    (folder / "own.py").write_text("import nbdist\nnbdist.serve()\n" + TRAIN)
    for name, text in served(folder, "own.py"):
        assert "own.py:19: dist.all_reduce" in text
        listed = nbdist("ls", folder=folder).stdout
        row = next(line.split() for line in listed.splitlines() if line.startswith(name))
        assert row[:7] == [name, "ranks", "0-1", "2", "own.py", "10", "steps"]
    assert not list((folder / "sockets").glob("*"))


@pytest.fixture
def exported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in which `nbdist env` was evaluated."""
    shell = subprocess.run(
        ["bash", "-c", f'eval "$({sys.executable} -m nbdist env)"; echo "$PYTHONPATH"; echo "$NBDIST_SERVE"'],
        capture_output=True,
        text=True,
        check=True,
    )
    for name, value in zip(("PYTHONPATH", "NBDIST_SERVE"), shell.stdout.splitlines(), strict=True):
        monkeypatch.setenv(name, value)


def test_a_script_that_knows_nothing_answers_by_variables(
    folder: Path, exported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)  # of the launcher, which is no rank
    for _, text in served(folder, "train.py"):
        rows = [line.split() for line in text.splitlines()[1:3]]
        assert [(row[0], row[2]) for row in rows] == [("0", "10"), ("1", "10")]


def test_what_a_rank_starts_and_what_is_no_rank_does_not_answer(folder: Path, exported: None) -> None:
    code = "import os, subprocess, sys\nprint(len(os.listdir(os.environ['NBDIST_JOBS'])), os.getenv('NBDIST_SERVE'))\n"
    (folder / "this.py").write_text(f"{code}if len(sys.argv) > 1:\n    subprocess.run([sys.executable, 'this.py'])")
    (folder / "sockets").mkdir(mode=0o700)
    command = [sys.executable, "-u", "this.py", "parent"]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}
    rank = subprocess.run(command, cwd=folder, env=os.environ | place, capture_output=True, text=True, check=True)
    assert rank.stdout == "1 None\n1 None\n"
    other = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert other.stdout == "0 1\n0 1\n" and rank.stderr == other.stderr == ""
    place = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    alone = subprocess.run(command, cwd=folder, env=os.environ | place, capture_output=True, text=True, check=True)
    assert alone.stdout == "0 1\n0 1\n"


def test_ranks_of_a_session_do_not_answer_as_a_job(folder: Path, exported: None) -> None:
    code = "import nbdist\nfrom nbdist.jobs.found_jobs import find_jobs\nwith nbdist.Session(2) as session:\n"
    code += "    print([job.name for job in find_jobs() if job.serves])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_the_environments_own_sitecustomize_runs_too(
    folder: Path, exported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:{folder}")
    code = "import sys, sitecustomize; print(sitecustomize.__file__, any('at_start' in each for each in sys.path))"

    def told() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert told().endswith("at_start/sitecustomize.py False\n") or "at_start" not in told()
    (folder / "sitecustomize.py").touch()
    assert told() == f"{folder}/sitecustomize.py False\n"


def test_a_job_whose_sockets_have_no_place_runs_all_the_same(folder: Path, exported: None) -> None:
    (folder / "sockets").mkdir()
    (folder / "sockets").chmod(0o777)
    place = {"RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", "print('runs')"]
    ended = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, check=True)
    assert ended.stdout == "runs\n" and ended.stderr.startswith("nbdist: this process can't be looked into: ")


def test_a_job_that_does_not_serve_is_listed_and_a_look_says_what_is_missing(folder: Path) -> None:
    with job(folder, "train.py") as name:
        assert f"`nbdist look {name}` shows stacks" in nbdist("ls", folder=folder).stdout
        seen = nbdist("look", name, "--locals", folder=folder, path=str(folder))
        if seen.returncode:  # py-spy may be installed beside this Python
            assert "py-spy, which shows stacks from outside, is not installed" in seen.stderr
            assert "start it as `torchrun ... -m nbdist serve SCRIPT`" in seen.stderr
        else:
            assert "stacks by py-spy" in seen.stdout and "train.py" in seen.stdout
            assert "[0-1] optimizer = <SGD>\n" in seen.stdout


def test_a_launcher_that_srun_has_started_is_no_rank_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    with job(folder, "train.py") as name:
        (found,) = (each for each in find_jobs() if each.name == name)
        assert [each.rank for each in found.processes] == [0, 1]
        launchers = {psutil.Process(each.pid).ppid() for each in found.processes}
        assert not launchers & {each.pid for other in find_jobs() for each in other.processes}


def test_looks_while_torch_is_imported_are_answered_and_so_are_those_after(folder: Path) -> None:
    (folder / "own.py").write_text("import nbdist, os\nnbdist.serve()\nprint('serves', flush=True)\n" + TRAIN)
    looks = []

    def all_steps_are_made(name: str) -> bool:
        looks.append(nbdist("look", name, folder=folder).stdout)
        return looks[-1].count("10 of") == 2

    with job(folder, "own.py") as name:
        wait_until(lambda: all_steps_are_made(name), "all steps", 60)
    assert all("can't be looked at" not in each and "has ended" not in each for each in looks)


def test_ranks_of_a_session_are_no_job(folder: Path) -> None:
    code = "import nbdist\nfrom nbdist.jobs.found_jobs import find_jobs\nwith nbdist.Session(2) as session:\n"
    code += "    pids = {info.pid for info in session.ranks}\n"
    code += "    assert not pids & {each.pid for job in find_jobs() for each in job.processes}\n"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=60)


def test_a_served_script_is_the_main_program_with_its_arguments_and_its_exit_code(folder: Path) -> None:
    code = (
        "import sys, os\nimport helper\nprint(__name__, __file__, sys.argv, os.path.basename(sys.path[0]))\nsys.exit(3)"
    )
    (folder / "sub").mkdir()
    (folder / "sub/this.py").write_text(code)
    (folder / "sub/helper.py").touch()
    ended = nbdist("serve", "sub/this.py", "--lr", "1", "--", "-x", folder=folder)
    assert ended.stdout == "__main__ sub/this.py ['sub/this.py', '--lr', '1', '--', '-x'] sub\n"
    assert ended.returncode == 3


def test_what_a_served_script_raises_is_its_own(folder: Path) -> None:
    (folder / "this.py").write_text("import nbdist\nraise nbdist.UsageError('mine')")
    ended = nbdist("serve", "this.py", folder=folder)
    assert ended.returncode == 1 and 'File "this.py", line 2' in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("serve", "gone.py"), "nbdist: gone.py can't be read: No such file or directory"),
        (("look", "nothing"), "nbdist: there is no job 'nothing': you have "),
    ],
)
def test_bad_input_is_one_line(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    ended = nbdist(*arguments, folder=folder)
    assert ended.returncode == 2 and ended.stderr.startswith(told) and ended.stderr.count("\n") == 1


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    (folder / "sockets").mkdir()
    (folder / "sockets").chmod(0o777)
    ended = nbdist("serve", "train.py", folder=folder)
    assert ended.returncode == 2 and "must belong to you and to nobody else" in ended.stderr


def test_the_socket_of_a_process_that_was_killed_is_removed_by_the_next_look(folder: Path) -> None:
    (folder / "this.py").write_text("import os\nos.kill(os.getpid(), 9)")
    nbdist("serve", "this.py", folder=folder)
    assert len(list((folder / "sockets").glob("*"))) == 1
    nbdist("ls", folder=folder)
    assert not list((folder / "sockets").glob("*"))
