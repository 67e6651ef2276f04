"""The node's sampler: looks while somebody watches, whatever the driver does meanwhile."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from nbdist.metrics.node.nvml import Nvml
from nbdist.metrics.node.sample import NodeSample
from nbdist.metrics.node.sampler import FASTEST, Sampler
from testbed.kernel import wait_until
from testbed.nvml import GIB, FakeNvml, machine

LIMIT = 20.0
FOR_EVER = 1e6


class Watched:
    """A sampler of a machine that a dict describes, and what it has told."""

    def __init__(self) -> None:
        self.state = machine(1)
        self.drivers: list[FakeNvml] = []
        self.sampler = Sampler(self.open_driver)

    def open_driver(self) -> Nvml:
        self.drivers.append(FakeNvml(self.state))
        return Nvml(self.drivers[-1])

    def next(self) -> NodeSample:
        """The next look that it tells of."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if select.select([self.sampler.wake], [], [], 1)[0] and (found := self.sampler.take()):
                return found[-1]
        raise AssertionError(f"no look in {LIMIT} s")

    def until(self, reached: Callable[[NodeSample], Any]) -> NodeSample:
        """The first look of which this is true."""
        deadline = time.monotonic() + LIMIT
        while not reached(sample := self.next()):
            assert time.monotonic() < deadline, sample
        return sample

    def free(self) -> None:
        self.state["seconds"] = 0.0
        for gpu in self.state["gpus"]:
            gpu["seconds"] = 0.0


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name in ("nbdist-sampler", "nbdist-driver"))


@pytest.fixture
def node() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.free()
    watched.sampler.watch(0)
    wait_until(lambda: not threads(), "the sampler's threads to end")


def test_nothing_runs_before_somebody_watches(node: Watched) -> None:
    assert threads() == []
    assert node.sampler.take() == []


def test_who_watches_is_told_at_once_of_the_node_and_its_gpus(node: Watched) -> None:
    node.sampler.watch(FOR_EVER)
    sample = node.next()
    assert sample.name == socket.gethostname()
    assert sample.gpus[0].used == 10 * GIB
    assert sample.memory_total is not None and sample.memory_total <= psutil.virtual_memory().total
    assert sample.why == ""


def test_cores_are_not_known_at_the_first_look(node: Watched) -> None:
    node.sampler.watch(FASTEST)
    assert node.next().cpu is None
    assert 0 <= (node.until(lambda sample: sample.cpu is not None).cpu or 0) <= 1


def test_after_the_last_watcher_nothing_runs_and_nothing_is_told(node: Watched) -> None:
    node.sampler.watch(FASTEST)
    node.next()
    node.sampler.watch(0)
    wait_until(lambda: not threads(), "the sampler's threads to end")
    node.sampler.take()
    calls = node.drivers[0].calls
    assert not select.select([node.sampler.wake], [], [], 2 * FASTEST)[0]
    assert node.drivers[0].calls == calls


def test_it_can_be_watched_again(node: Watched) -> None:
    for _ in range(3):
        node.sampler.watch(FASTEST)
        assert node.next().gpus
        node.sampler.watch(0)
        wait_until(lambda: not threads(), "the sampler's threads to end")


def test_a_second_watcher_changes_the_rate_and_adds_no_thread(node: Watched) -> None:
    node.sampler.watch(FOR_EVER)
    node.next()
    node.sampler.watch(0.5)
    assert node.next().period == 0.5
    assert threads() == ["nbdist-driver", "nbdist-sampler"]


def test_it_looks_no_faster_than_it_should(node: Watched) -> None:
    node.sampler.watch(0.001)
    assert node.next().period == FASTEST


def test_who_has_not_asked_for_long_gets_the_newest_look_only(node: Watched) -> None:
    node.sampler.watch(FASTEST)
    first = node.next()
    wait_until(lambda: node.drivers[0].calls > 60, "some more looks")
    (sample,) = node.sampler.take()
    assert sample.at > first.at


def test_a_driver_that_takes_50_ms_for_each_answer_is_asked_less_often(node: Watched) -> None:
    node.state["gpus"][0]["seconds"] = 0.05
    node.sampler.watch(FASTEST)
    periods = [node.next().period for _ in range(3)]
    assert periods == [FASTEST, 2 * FASTEST, 4 * FASTEST]
    assert node.next().gpus, "and its answers count"


def test_a_driver_that_is_fast_again_is_asked_as_often_as_before(node: Watched) -> None:
    node.state["gpus"][0]["seconds"] = 0.05
    node.sampler.watch(FASTEST)
    node.until(lambda sample: sample.period >= 2 * FASTEST)
    node.free()
    node.until(lambda sample: sample.period == FASTEST)


def test_a_driver_that_never_answers_does_not_keep_the_rest_from_being_seen(node: Watched) -> None:
    node.state["gpus"][0]["seconds"] = FOR_EVER
    node.sampler.watch(FASTEST)
    sample = node.next()
    assert sample.gpus == []
    assert sample.why == "the NVIDIA driver has not answered for 1 s"
    assert sample.memory_used is not None
    later = node.until(lambda sample: sample.cpu is not None)
    assert later.why.startswith("the NVIDIA driver has not answered for")


def test_a_driver_that_answers_after_all_is_believed(node: Watched) -> None:
    node.state["gpus"][0]["seconds"] = FOR_EVER
    node.sampler.watch(FASTEST)
    assert node.next().why
    node.free()
    assert node.until(lambda sample: sample.gpus).why == ""


def test_a_driver_that_is_not_ready_yet_delays_no_look(node: Watched) -> None:
    node.state["seconds"] = FOR_EVER
    node.sampler.watch(FASTEST)
    assert "has not answered" in node.next().why
    node.state["seconds"] = 0.0
    assert node.until(lambda sample: sample.gpus).why == ""


def test_a_driver_that_never_answers_holds_one_thread_however_often_it_is_asked(node: Watched) -> None:
    node.state["gpus"][0]["seconds"] = FOR_EVER
    for _ in range(3):
        node.sampler.watch(FASTEST)
        assert node.next().why
        node.sampler.watch(0)
        wait_until(lambda: threads() == ["nbdist-driver"], "the sampler's thread to end")
    assert len(node.drivers) == 1


def test_a_gpu_that_vanishes_while_it_is_watched_says_so(node: Watched) -> None:
    node.sampler.watch(FASTEST)
    assert node.next().gpus[0].why == ""
    node.state["gpus"][0]["handle"] = "GPU_IS_LOST"
    sample = node.until(lambda sample: sample.gpus[0].why)
    assert "fallen off the bus" in sample.gpus[0].why
    assert sample.gpus[0].used is None


def test_without_a_driver_there_is_a_reason(node: Watched) -> None:
    node.state["init"] = "LIBRARY_NOT_FOUND"
    node.sampler.watch(FASTEST)
    assert node.next().why == "this machine has no NVIDIA driver"


def test_an_answer_that_makes_no_sense_ends_nothing(node: Watched) -> None:
    node.state["gpus"][0]["utilization"] = "much"
    node.sampler.watch(FASTEST)
    assert "makes no sense" in node.next().gpus[0].why
    node.state["gpus"][0]["utilization"] = 55
    assert node.until(lambda sample: not sample.gpus[0].why).gpus[0].utilization == 0.55
