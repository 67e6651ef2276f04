"""A monitor without a session: the notebook's own process, looked at while somebody watches."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from nbdist.client.costs.monitor import Monitor
from nbdist.errors import UsageError
from nbdist.metrics.node.sample import HeldLately, RankSample, Sample
from testbed.kernel import wait_until

LIMIT = 20.0


class Watcher:
    """What one watcher has been told."""

    def __init__(self, monitor: Monitor) -> None:
        self._samples: queue.SimpleQueue[Sample] = queue.SimpleQueue()
        self.stop = monitor.subscribe(self._samples.put)

    def next(self) -> Sample:
        return self._samples.get(timeout=LIMIT)

    def told(self) -> bool:
        return not self._samples.empty()

    def forget(self) -> None:
        while self.told():
            self.next()


def threads() -> list[str]:
    names = ("nbdist-monitor", "nbdist-sampler", "nbdist-driver")
    return sorted(thread.name for thread in threading.enumerate() if thread.name in names)


class Watch:
    """Begins to watch a monitor."""

    def __init__(self) -> None:
        self.monitor = Monitor(None)
        self.monitor.rate = 0.25
        self._watchers: list[Watcher] = []

    def __call__(self) -> Watcher:
        self._watchers.append(Watcher(self.monitor))
        return self._watchers[-1]

    def end(self) -> None:
        for watcher in self._watchers:
            watcher.stop()


@pytest.fixture
def watch() -> Iterator[Watch]:
    """All that watch end with the test, and nothing runs then."""
    watch = Watch()
    yield watch
    watch.end()
    wait_until(lambda: not threads(), "the monitor's threads to end")


def test_it_sees_this_process_and_its_machine(watch: Watch) -> None:
    sample = watch().next()
    (rank,) = sample.ranks
    (node,) = sample.nodes
    assert (rank.rank, rank.pid, rank.node, rank.device) == (-1, os.getpid(), socket.gethostname(), "cpu")
    assert rank.private is not None and rank.private > 1 << 20
    assert node.memory_total is not None and rank.private < node.memory_total


def test_a_machine_without_gpus_says_why(watch: Watch) -> None:
    (node,) = watch().next().nodes
    assert bool(node.gpus) != bool(node.why)


def test_before_it_is_watched_and_afterwards_nothing_runs(watch: Watch) -> None:
    assert threads() == []
    watcher = watch()
    watcher.next()
    assert "nbdist-monitor" in threads()
    watcher.stop()
    wait_until(lambda: not threads(), "the monitor's threads to end")
    assert watch.monitor.latest is not None


def test_two_watchers_share_one_thread_and_see_the_same(watch: Watch) -> None:
    first, second = watch(), watch()
    one, other = first.next(), second.next()
    while one.at < other.at:
        one = first.next()
    assert one is other
    assert threads().count("nbdist-monitor") == 1


def test_one_that_leaves_twice_does_not_take_another_with_it(watch: Watch) -> None:
    first, second = watch(), watch()
    first.stop()
    first.stop()
    second.forget()
    assert second.next()


def test_it_can_be_watched_again_at_once(watch: Watch) -> None:
    for _ in range(20):
        watcher = watch()
        watcher.stop()
    last = watch()
    last.next()
    last.forget()
    assert last.next().nodes


def test_a_watcher_that_raises_is_called_no_more_and_the_others_are(
    watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def fail(sample: Sample) -> None:
        calls.append(sample)
        raise ValueError("mine")

    watch.monitor.subscribe(fail)
    good = watch()
    good.next()
    good.forget()
    good.next()
    assert len(calls) == 1
    assert "ValueError: mine" in capfd.readouterr().err


def test_while_it_is_paused_it_does_not_look_and_then_it_does_at_once(watch: Watch) -> None:
    monitor, watcher = watch.monitor, watch()
    watcher.next()
    monitor.paused = True
    wait_until(lambda: "nbdist-sampler" not in threads(), "the sampler to rest")
    watcher.forget()
    monitor.rate = 60
    monitor.paused = False
    assert watcher.next().at


def test_another_rate_counts_at_once(watch: Watch) -> None:
    monitor, watcher = watch.monitor, watch()
    monitor.rate = 60
    watcher.next()
    monitor.rate = 0.25
    while watcher.next().nodes[0].period != 0.25:  # one look at the old rate may be under way
        pass
    assert watcher.next().nodes[0].period == 0.25


@pytest.mark.parametrize("seconds", [0, 0.2, -1, 61, float("nan"), float("inf")])
def test_a_rate_that_makes_no_sense_is_refused(seconds: float, watch: Watch) -> None:
    with pytest.raises(UsageError, match=r"0\.25 to 60 seconds, got"):
        watch.monitor.rate = seconds


def test_what_ranks_held_is_remembered_from_the_look_before_the_drivers_last_answer_on() -> None:
    held = HeldLately()

    def note(reserved: int | None, came: float | None, now: float, pid: int = 7) -> list[int]:
        (rank,) = held.note([RankSample(0, pid=pid, reserved=reserved)], [came], now)
        return rank.held

    assert note(10, None, now=1.0) == [10]
    assert note(20, 1.5, now=2.0) == [10, 20]
    assert note(30, 2.5, now=3.0) == [20, 30]
    assert note(40, 2.5, now=4.0) == [20, 30, 40]
    assert note(5, 4.5, now=5.0, pid=8) == [5], "a new process in the place of the rank"
    assert note(None, 5.5, now=6.0, pid=8) == [], "without a GPU"
