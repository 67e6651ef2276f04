from __future__ import annotations

import select
import sysconfig
from pathlib import Path

import pytest

from nbdist.agent.slow_looks import NativeStacks, SlowLooks
from nbdist.base.ranks import ONE_NODE, RankNames
from nbdist.client.reports.stack_report import Stack, render, stack_of, with_native_frames
from nbdist.errors import UsageError
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import Ask
from nbdist.wire.questions.stopping import GetNativeStack, NativeStack, ThreadStack

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


def native(py_spy_says: str, py_spy: Path) -> NativeStack | NoAnswer:
    """What an agent answers for a rank where py-spy says this."""
    install(py_spy, py_spy_says)
    looks = SlowLooks()
    looks.begin(Ask(1, [0], GetNativeStack()), 0, NativeStacks().look, 42)
    assert select.select([looks.wake], [], [], 30)[0]
    [answer] = looks.take()
    looks.close()
    return GetNativeStack().checked(answer.body)


def test_native_frames_stand_below_the_cell_that_called_them(py_spy: Path) -> None:
    seen = native(f"cat <<'END'\n{DUMP}END", py_spy)
    found = with_native_frames({0: busy(""), 1: stack_of(ThreadStack(), "")}, {0: seen}, ONE_NODE)
    assert found[0].lines == (
        "cell 5 line 8",
        "cell 5 line 4, in train",
        "all_reduce (torch/distributed/distributed_c10d.py:3252)",
        "?? (libgloo.so)",
        "pthread_cond_wait (libc.so.6)",
    )
    assert str(found[1]) == "idle"


@pytest.mark.parametrize(
    ("says", "words"),
    [
        pytest.param("rm $0; exec $0", r"rank 0 \(node-a\): .*not found", id="gone"),
        pytest.param("echo 'Permission Denied: try sudo' >&2; exit 1", r"SYS_PTRACE.*without --native", id="refused"),
        pytest.param("echo 'Error: no Python' >&2; exit 1", r"rank 0 \(node-a\): Error: no Python", id="other"),
        pytest.param("exit 1", "it gave no reason", id="silent"),
    ],
)
def test_what_keeps_py_spy_from_looking_is_said(py_spy: Path, says: str, words: str) -> None:
    seen = native(says, py_spy)
    with pytest.raises(UsageError, match=words):
        with_native_frames({0: busy("")}, {0: seen}, RankNames({"node-a": [0], "node-b": [1]}))


@pytest.mark.parametrize(
    ("seen", "words"), [(None, "did not finish rank 0: use"), (NativeStack(obstacle="missing"), "pip install py-spy")]
)
def test_a_node_without_an_answer_or_py_spy_says_what_to_do(seen: NativeStack | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_native_frames({0: busy("")}, {0: seen} if seen is not None else {}, ONE_NODE)


def test_a_rank_that_ended_meanwhile_keeps_what_was_known() -> None:
    stacks = {0: busy("cell 7 line 2: work()")}
    assert with_native_frames(stacks, {0: NoAnswer("it has ended")}, ONE_NODE) == stacks


def test_stacks_of_other_nodes_are_named_by_their_node() -> None:
    names = RankNames({"node-a": [0, 1], "node-b": [2, 3]})
    text = render({rank: busy("here" if rank < 2 else "there") for rank in range(4)}, names)
    assert text.splitlines()[::2] == ["ranks 0-1 (node-a), cell 7 (9 s)", "ranks 2-3 (node-b), cell 7 (9 s)"]
