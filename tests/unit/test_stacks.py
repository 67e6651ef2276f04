from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from nbdist.client.session.stack_report import Stack, render, stack_of, with_native_frames
from nbdist.errors import UsageError
from nbdist.wire.stopping import ThreadStack

DUMP = """Process 42: python
Python v3.11.7 (/usr/bin/python3.11)

Thread 42 (idle): "MainThread"
    pthread_cond_wait (libc.so.6)
    0x7efd260a3f16 (libgloo.so)
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    train (<ipython-input-5-f35ef804bba2>:4)
    <module> (<ipython-input-5-f35ef804bba2>:8)
    run_code (IPython/core/interactiveshell.py:3823)
Thread 43 (idle): "nbdist-control"
    poll (libc.so.6)
"""


def busy(rank_line: str, still: float = 0.0, collective: str = "") -> Stack:
    return stack_of(ThreadStack(1, "", rank_line, collective, still), "cell 7 (9 s)")


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for py-spy can be put; no other can be found."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path / "py-spy"


def install(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_equal_stacks_are_shown_once_with_the_shortest_wait() -> None:
    stacks = {
        0: busy("cell 7 line 2: work()"),
        1: busy("cell 7 line 4: dist.barrier()", 7.2, "barrier"),
        2: busy("cell 7 line 4: dist.barrier()", 5.4, "barrier"),
        3: stack_of(ThreadStack(), ""),
    }
    assert render(stacks).splitlines() == [
        "rank 0, cell 7 (9 s)",
        "    cell 7 line 2: work()",
        "ranks 1-2, cell 7 (9 s), in barrier for 5 s",
        "    cell 7 line 4: dist.barrier()",
        "rank 3, idle",
    ]


def test_a_rank_that_does_not_answer_is_said_not_to() -> None:
    assert render({0: stack_of(None, "cell 7 (9 s)")}).startswith("rank 0, cell 7 (9 s), in a call that blocks")


def test_native_frames_stand_below_the_cell_that_called_them(py_spy: Path) -> None:
    install(py_spy, f"cat <<'END'\n{DUMP}END")
    found = with_native_frames({0: busy(""), 1: stack_of(ThreadStack(), "")}, {0: 42, 1: 43})
    assert found[0].lines == (
        "cell 5 line 8",
        "cell 5 line 4, in train",
        "all_reduce (torch/distributed/distributed_c10d.py:3252)",
        "?? (libgloo.so)",
        "pthread_cond_wait (libc.so.6)",
    )
    assert str(found[1]) == "idle"


def test_without_py_spy_it_says_what_to_install(py_spy: Path) -> None:
    with pytest.raises(UsageError, match="pip install py-spy"):
        with_native_frames({0: busy("")}, {0: 42})


def test_a_system_that_forbids_it_is_named_with_what_to_do(py_spy: Path) -> None:
    install(py_spy, "echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1")
    with pytest.raises(UsageError, match=r"ptrace_scope=0.*SYS_PTRACE.*without --native"):
        with_native_frames({0: busy("")}, {0: 42})


def test_any_other_failure_of_py_spy_is_passed_on(py_spy: Path) -> None:
    install(py_spy, "echo 'Error: Failed to find python version' >&2; exit 1")
    with pytest.raises(UsageError, match=r"rank 0 \(pid 42\): Error: Failed to find python version"):
        with_native_frames({0: busy("")}, {0: 42})
