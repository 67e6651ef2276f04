"""One cell in progress: what is known of each rank when the notebook gets its line back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from nbdist.base.ranks import ONE_NODE
from nbdist.client.base.widget_proxies import WidgetProxies
from nbdist.client.ranks.task import Task
from nbdist.client.ranks.task_record import CellOptions, TaskRecord
from nbdist.errors import RankDied, RankError
from nbdist.launch.launch_errors import LaunchFailure
from nbdist.wire.base.message import Message
from nbdist.wire.messages.cells import Failure, Reply
from nbdist.wire.messages.life import Died
from nbdist.wire.messages.output import Display, LogPart, WidgetMessage

INTERRUPTED = Failure("KeyboardInterrupt", "", "frames", 2.0, kind="interrupted")


class SlowRanks:
    """A line to ranks that have no time for questions; those that a test lists end while they are asked."""

    key = "session"
    slack = 0.0
    is_stopping = False
    places = ONE_NODE

    def __init__(self, ending: Sequence[int]) -> None:
        self.widgets = WidgetProxies(self.send)
        self.task: Task | None = None
        self._ending = ending

    def ask(self, ranks: Sequence[int], question: Any, *, timeout: float) -> dict[int, Any]:
        assert self.task is not None
        for rank in self._ending:
            self.task.put(Reply(self.task.serial, rank, "interrupted", INTERRUPTED))
        return {}

    def send(self, message: Message) -> None: ...

    def pay(self, rank: int, size: int) -> None: ...

    def pay_item(self, item: Display | WidgetMessage) -> None: ...

    def put_late(self, task: TaskRecord | None, message: Message) -> None: ...

    def read_log(self, **question: Any) -> LogPart:
        return LogPart(0)

    def doing(self) -> list[str]:
        return []


def test_a_rank_that_ends_while_it_is_asked_where_it_is_does_not_count_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NBDIST_REPORTS", "0")
    ranks = SlowRanks(ending=[1])
    ranks.task = task = Task(ranks, 1, [0, 1, 2], "work()", CellOptions())
    task.put(Died(0, 4242, -9, "", 1, 1.0))
    with pytest.raises(RankDied) as caught:
        task.wait()
    assert {rank: failure.kind for rank, failure in caught.value.failures.items()} == {
        0: "died",
        1: "interrupted",
        2: "running",
    }


def test_a_failure_on_another_node_ends_it_whatever_kind_of_failure_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_REPORTS", "0")
    ranks = SlowRanks(ending=[0, 1])
    ranks.task = task = Task(ranks, 1, [0, 1], "train", CellOptions(), "launch")
    task.fail(LaunchFailure(2, "raised", "ValueError", "no such file", "", 1.0))
    with pytest.raises(RankError, match="no such file") as caught:
        task.wait()
    assert {rank: failure.kind for rank, failure in caught.value.failures.items()} == {
        0: "interrupted",
        1: "interrupted",
        2: "raised",
    }


def test_it_is_freed_with_its_results_once_nobody_holds_it() -> None:
    ranks = SlowRanks(ending=[])
    task = Task(ranks, 1, [0], "work()", CellOptions(keep=True))
    gone = weakref.ref(task)
    gc.disable()
    try:
        task.put(Reply(1, 0, "ok"))
        task.wait()
        del task
        assert gone() is None
    finally:
        gc.enable()
