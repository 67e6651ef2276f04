from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.base.processes import describe_exit, python_command
from testbed.kernel import wait_until
from tests.support.roles import alive

HERE = str(Path(__file__).resolve().parents[2])


@contextlib.contextmanager
def program(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs code with `nbdist.base.processes` at hand, until the end of the block."""
    prelude = "import os, signal, subprocess, sys, time\nfrom nbdist.base.processes import *\n"
    environment = {**os.environ, "PYTHONPATH": HERE}
    command = [sys.executable, "-c", prelude + code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def said(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-15, "SIGTERM"),
        (-11, "SIGSEGV (segmentation fault)"),
        (-9, "SIGKILL (killed; often by the system when memory runs out)"),
        (-6, "SIGABRT"),
        (-62, "signal 62"),
    ],
)
def test_an_end_is_described_by_its_code_or_its_signals_name(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_a_child_dies_with_its_parent() -> None:
    code = (
        "parent = os.getpid()\n"
        "if (pid := os.fork()) == 0:\n    die_with_parent(parent)\n"
        "    print(os.getpid(), flush=True)\n    time.sleep(600)\n"
        "time.sleep(600)"
    )
    with program(code) as process:
        (child,) = said(process)
        process.kill()
        wait_until(lambda: not alive(child), "the child's end")


def test_a_child_whose_parent_has_gone_before_it_could_ask_dies_too() -> None:
    code = (
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n    while os.getppid() == parent: pass\n"
        "    print(os.getpid(), flush=True)\n    die_with_parent(parent)\n    time.sleep(600)\n"
    )
    with program(code) as process:
        (child,) = said(process)
        wait_until(lambda: not alive(child), "the child's end")


def test_descendants_end_wherever_they_have_moved() -> None:
    code = (
        "adopt_orphans()\n"
        "pids = [subprocess.Popen(['sleep', '600']).pid]\n"
        "for line in ('setsid sleep 600', 'sleep 600'):\n"
        "    shell = f'{line} > /dev/null 2>&1 & echo $!'\n"
        "    pids.append(int(subprocess.run(shell, shell=True, capture_output=True).stdout))\n"
        "print(*pids, flush=True)\n"
        "end_descendants()\nprint(0, flush=True)\ntime.sleep(600)"
    )
    with program(code) as process:
        pids = said(process)
        assert len(pids) == 3 and said(process) == [0]
        assert not any(map(psutil.pid_exists, pids)), "they are reaped, too"


def test_children_to_keep_are_kept_with_their_own() -> None:
    code = (
        "adopt_orphans()\n"
        "kept = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!; wait'], stdout=subprocess.PIPE)\n"
        "own = int(kept.stdout.readline())\n"
        "shell = 'setsid sleep 600 > /dev/null 2>&1 & echo $!'\n"
        "lost = int(subprocess.run(shell, shell=True, capture_output=True).stdout)\n"
        "end_descendants(keep={kept.pid})\n"
        "print(kept.pid, own, lost, flush=True)\ntime.sleep(600)"
    )
    with program(code) as process:
        kept, own, lost = said(process)
        assert alive(kept) and alive(own) and not psutil.pid_exists(lost)


def test_a_group_ends_with_its_leader_whose_code_is_kept() -> None:
    code = (
        "pid = os.fork()\n"
        "if pid == 0:\n    os.setsid()\n    child = subprocess.Popen(['sleep', '600'])\n"
        "    print(child.pid, flush=True)\n    os._exit(3)\n"
        "print(reap_group(pid), flush=True)\ntime.sleep(600)"
    )
    with program(code) as process:
        (member,) = said(process)
        assert said(process) == [3]
        wait_until(lambda: not alive(member), "the end of the group")


def test_our_modules_are_found_whatever_lies_in_the_current_folder(tmp_path: Path) -> None:
    for name in ("random", "json", "nbdist"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    command = [*python_command("nbdist.base.processes"), "x"]
    command[2] = command[2].replace(
        "import main; main()", "import describe_exit; import json, random; print(len(sys.argv))"
    )
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
