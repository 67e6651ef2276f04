"""A node whose connection to the session is slow, silent for a while, or cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from testbed.kernel import Execution, Kernel, wait_until
from testbed.slow_network import SlowNetwork, slow_network
from tests.conftest import sharing
from tests.multinode.nodes import Node, invitations, joined, start

TIMEOUT = 4  # seconds that a node may be silent here
FAR = 0.28  # seconds; an answer takes twice that, and so longer than limits that are meant for one machine
TRAINING = """%%distributed
import torch
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
done = 0
"""
LOOP = """%%distributed
import time
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    time.sleep(0.02)
    optimizer.step()
    done += 1
    if done == 5: print('at it')
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


@contextlib.contextmanager
def far_node(kernel: Kernel, delay: float = 0.0, rate: float | None = None) -> Iterator[tuple[SlowNetwork, Node]]:
    """A session of two ranks, the second on a node behind a slow network."""
    cell = start(kernel, arguments=f"-n 1 --node-timeout {TIMEOUT}")
    where, (token,) = invitations(cell)
    with slow_network(where, delay=delay, rate=rate) as network, joined(network.address, token) as node:
        outcome = cell.finish()
        assert "2 ranks on 2 nodes ready" in outcome.stdout, str(outcome)
        yield network, node
        kernel.run("%distributed stop")


def wait_for_both(cell: Execution) -> None:
    """Until both ranks have printed "at it", in one line or two."""
    cell.wait_until(lambda seen: "[0-1] at it" in seen.stdout or seen.stdout.count("at it") == 2, "both at it")


def test_ranks_far_away_stop_after_the_same_step(kernel: Kernel) -> None:
    with far_node(kernel, delay=FAR):
        kernel.ok(TRAINING)
        cell = kernel.start(LOOP)
        wait_for_both(cell)
        kernel.interrupt()
        outcome = cell.finish()
        assert outcome.ename == "KeyboardInterrupt", str(outcome)
        assert "all ranks stopped after step" in outcome.evalue, str(outcome)
        kernel.ok("%distributed pull done")
        assert kernel.value("len(set(done))") == 1


def test_names_on_ranks_far_away_are_completed(kernel: Kernel) -> None:
    with far_node(kernel, delay=FAR):
        kernel.run("%%distributed -r 1\nkept_there = 1")
        kernel.ok(
            "import nbdist\nfrom nbdist.base import limits\nfrom nbdist.client.session.session import rank_set_of\n"
            "from nbdist.wire.questions.knowing import Complete\n"
            "traffic = rank_set_of(nbdist.get_session()).traffic\n"
            "found = traffic.ask([1], Complete('kept_', 5), timeout=limits.COMPLETION_ANSWER)"
        )
        assert kernel.value("[item.text for item in found[1].matches]") == ["kept_there"]


def test_what_takes_long_over_a_slow_network_is_interrupted_at_once(kernel: Kernel) -> None:
    """What is to be sent takes minutes, and goes by a connection of its own."""
    with far_node(kernel, rate=200_000) as (network, _):
        kernel.run("%%distributed\nkept = rank")
        before = network.passed
        cell = kernel.start("big = bytes(50_000_000)\n%distributed push big")
        wait_until(lambda: network.passed > before + 500_000, "the value to be on its way")
        kernel.interrupt()
        assert cell.finish(20).ename == "KeyboardInterrupt"
        kernel.ok("%distributed pull kept")
        assert kernel.value("kept") == [0, 1]


def test_silence_shorter_than_the_timeout_costs_nothing(kernel: Kernel) -> None:
    with far_node(kernel) as (network, _):
        cell = kernel.start("%%distributed\nimport time\nkept = rank\nprint('at it')\nwhile True: time.sleep(0.05)")
        wait_for_both(cell)
        with network.silent():
            cell.wait_for("has not answered for")
        cell.wait_for("answers again")
        kernel.interrupt()
        assert cell.finish().ename == "KeyboardInterrupt"
        kernel.ok("%distributed pull kept")
        assert kernel.value("kept") == [0, 1]


def test_silence_longer_than_the_timeout_loses_the_node_on_both_sides(kernel: Kernel) -> None:
    with far_node(kernel) as (network, node):
        kernel.run("%%distributed\nkept = rank + 10")
        cell = kernel.start("%%distributed\nimport time\nprint('at it')\nif rank: time.sleep(1000)")
        wait_for_both(cell)
        with network.silent():
            outcome = cell.finish()
            assert outcome.ename == "RankDied" and "has not answered for" in str(outcome), str(outcome)
            assert "where the session runs, has not answered for" in node.end()
        assert " 10" in kernel.run("%%distributed -r 0\nprint(kept)").stdout


def test_a_connection_that_is_reset_is_reported_at_once(kernel: Kernel) -> None:
    with far_node(kernel) as (network, node):
        cell = kernel.start("%%distributed\nimport time\nprint('at it')\nif rank: time.sleep(1000)")
        wait_for_both(cell)
        network.cut()
        outcome = cell.finish()
        assert outcome.ename == "RankDied" and "its connection has ended" in str(outcome), str(outcome)
        assert "the session has ended" in node.end()


def test_a_timeout_that_is_too_short_is_refused(kernel: Kernel) -> None:
    line = "%distributed start --num-nodes 2 --master-addr 127.0.0.1 --node-timeout 1 -n 1"
    assert "node_timeout must be at least 3 seconds, got 1" in kernel.fails(line, "UsageError").evalue
