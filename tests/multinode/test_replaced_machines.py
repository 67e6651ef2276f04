"""A machine that a session has lost is replaced by another one, while the others keep what they have."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from testbed.kernel import Execution, Kernel, ranks_with_line
from tests.conftest import sharing
from tests.multinode.hosts import two_hosts
from tests.multinode.nodes import SUM, invitations, joined, lose, two_nodes

KEEP = "import os, torch, torch.distributed as dist\nkept = rank + 10\npair = dist.new_group([1, 2])"
PLACES = "print(rank, local_rank, world_size, os.environ['GROUP_RANK'], os.environ['LOCAL_WORLD_SIZE'])"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A notebook without a session."""
    with Kernel() as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


def asks_for_a_machine(kernel: Kernel) -> tuple[Execution, str, str]:
    """A heal that waits for a machine; where that is to join, and with which token."""
    cell = kernel.start("%distributed heal")
    address, (token,) = invitations(cell)
    assert "waiting for 1 machine to replace " in cell.outcome.stdout, str(cell.outcome)
    return cell, address, token


def test_another_machine_takes_the_place_of_a_lost_one(kernel: Kernel) -> None:
    with two_nodes(kernel) as node:
        kernel.ok("%%distributed --setup\n" + KEEP)
        kernel.ok("%%distributed -r 0-1\nkept = rank + 20")
        lose(kernel, node)
        cell, address, token = asks_for_a_machine(kernel)
        with joined(address, token, WHERE="new") as other:
            outcome = cell.finish()
            assert outcome.status == "ok" and "ranks 2-3 replaced in" in outcome.stdout, str(outcome)
            found = kernel.ok("%%distributed\n" + SUM + PLACES + "\nprint(kept, os.environ.get('WHERE'))")
            assert found.lines == {
                0: ["10", "0 0 4 0 2", "20 None"],
                1: ["10", "1 1 4 0 2", "21 None"],
                2: ["10", "2 0 4 1 2", "12 new"],
                3: ["10", "3 1 4 1 2", "13 new"],
            }, str(found)
            of_pair = "total = torch.ones(1)\ndist.all_reduce(total, group=pair)\nprint(int(total))"
            assert kernel.ok("%%distributed -r 1-2\n" + of_pair).lines == {1: ["2"], 2: ["2"]}
            kernel.ok("%distributed stop")
            assert "the session has ended" in other.end()


TRAINING = """%%distributed --setup
import torch, nbdist
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
model, optimizer = nbdist.prepare(net, torch.optim.AdamW(net.parameters()))
def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SAMPLES = """
import nbdist, queue
from nbdist.client.costs.monitor import Monitor
samples = queue.Queue()
unsubscribe = Monitor.of(nbdist.get_session()).subscribe(samples.put)
def wait_for_node(name):
    while name not in {node.name for node in samples.get(timeout=60).nodes}:
        pass
"""


def test_a_machine_is_replaced_as_often_as_it_is_lost_and_is_one_like_the_others(kernel: Kernel) -> None:
    with ExitStack() as nodes:
        node = nodes.enter_context(two_nodes(kernel))
        kernel.ok(TRAINING)
        kernel.ok("%%distributed\nstep()")
        kernel.ok(SAMPLES)
        for _ in range(2):
            lose(kernel, node)
            cell, address, token = asks_for_a_machine(kernel)
            node = nodes.enter_context(joined(address, token))
            assert cell.finish().status == "ok"
            name = kernel.value("nbdist.get_session().ranks[3].host")
            kernel.ok(f"wait_for_node({name!r})")
            kernel.ok("%%distributed\nnbdist.sync()\nstep()\nassert nbdist.check(model, optimizer)")
            said = kernel.ok(f"%%distributed -r @{name}\nprint('here')").stdout
            assert ranks_with_line(said, f"({name}) here") == [2, 3], said
        kernel.ok("unsubscribe()")
        cell = kernel.start(
            "%%distributed\nimport time, torch.distributed as dist\nif rank == 2: time.sleep(1000)\ndist.barrier()"
        )
        cell.wait_until(lambda seen: any(f"rank 2 ({name}) is at" in text for text in seen.plain), "a live line")
        kernel.interrupt()
        assert cell.finish().ename == "KeyboardInterrupt"
        restarted = kernel.ok("%distributed restart").stdout
        assert "NBDIST_TOKEN" not in restarted and "4 ranks on 2 nodes ready" in restarted, restarted


def test_an_interrupt_gives_up_waiting_and_leaves_the_session_as_it_was(kernel: Kernel) -> None:
    with two_nodes(kernel) as node:
        kernel.ok("%%distributed\nkept = rank")
        lose(kernel, node)
        cell, address, token = asks_for_a_machine(kernel)
        kernel.interrupt()
        outcome = cell.finish()
        assert outcome.ename == "KeyboardInterrupt" and "ranks 2-3 were not replaced" in str(outcome), str(outcome)
        with joined(address, token) as late:
            assert "token is no longer valid" in late.end()
        assert kernel.ok("%%distributed -r 0-1\nprint(kept)").lines == {0: ["0"], 1: ["1"]}
        cell, address, token = asks_for_a_machine(kernel)
        with joined(address, token):
            assert cell.finish().status == "ok"
            assert kernel.ok("%%distributed\n" + SUM).lines == {rank: ["10"] for rank in range(4)}


def test_a_page_does_not_wait_for_a_machine(kernel: Kernel) -> None:
    with two_nodes(kernel) as node:
        lose(kernel, node)
        refused = kernel.fails("__import__('nbdist').get_session().heal(progress=None)", "SessionBroken").evalue
        assert "the machine that ranks 2-3 ran on is lost: `%distributed heal` in a cell waits for another" in refused
        assert "ranks 2-3 removed" in kernel.ok("%distributed shrink").stdout


def test_a_machine_that_is_lost_while_its_ranks_are_set_up_can_be_replaced(kernel: Kernel) -> None:
    setup = "import os, time\nif os.environ.get('WHERE') == 'doomed':\n    print('at it')\n    time.sleep(1000)"
    with two_nodes(kernel) as node:
        kernel.ok(f"%%distributed --setup\n{setup}")
        lose(kernel, node)
        cell, address, token = asks_for_a_machine(kernel)
        with joined(address, token, WHERE="doomed") as doomed:
            cell.wait_for("at it")
            doomed.process.send_signal(signal.SIGINT)
            outcome = cell.finish()
            assert outcome.status == "error" and "is lost: it was stopped on that machine" in str(outcome), str(outcome)
        cell, address, token = asks_for_a_machine(kernel)
        with joined(address, token):
            assert cell.finish().status == "ok"
            assert kernel.ok("%%distributed\n" + SUM).lines == {rank: ["10"] for rank in range(4)}


def test_tokens_for_a_replacement_go_to_the_file_that_the_start_had_named(kernel: Kernel, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    cell = kernel.start(f"%distributed start --num-nodes 2 --master-addr 127.0.0.1 -n 2 --token-file {tokens}")
    cell.wait_for("--token-file")
    address = cell.outcome.stdout.split("nbdist join ")[1].split()[0]
    with joined(address, tokens.read_text().strip()) as node:
        assert cell.finish().status == "ok"
        lose(kernel, node)
    cell = kernel.start("%distributed heal")
    cell.wait_for("to replace")
    cell.wait_for("--token-file")
    assert "NBDIST_TOKEN" not in cell.outcome.stdout
    with joined(address, tokens.read_text().strip()):
        assert cell.finish().status == "ok"
        assert not tokens.exists()
        kernel.ok("%distributed stop")


def test_a_machine_that_comes_back_after_another_has_its_place_has_ended_its_ranks() -> None:
    with two_hosts() as (here, there), Kernel(here.command) as kernel:
        kernel.ok("%load_ext nbdist")
        with two_nodes(kernel, here.address, there, "--node-timeout 4") as node:
            pids = kernel.ok("%%distributed -r 2-3\nimport os\nprint(os.getpid())").lines
            with there.cut_off():
                cell = kernel.start("%%distributed\nimport time\nif rank > 1: time.sleep(100)")
                assert cell.finish().ename == "RankDied"
                cell, address, token = asks_for_a_machine(kernel)
                with ExitStack() as ends:
                    ends.enter_context(joined(address, token, here))
                    assert cell.finish().status == "ok"
                    kept = ends.pop_all()
            with kept:
                end = node.end()  # it has given up by itself, or is refused when it comes back
                assert "has not answered for 4 s" in end or "the session has ended" in end
                assert not [pid for (pid,) in pids.values() if Path(f"/proc/{pid}").exists()]
                assert kernel.ok("%%distributed\n" + SUM).lines == {rank: ["10"] for rank in range(4)}
                kernel.ok("%distributed stop")
