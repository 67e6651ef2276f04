"""A session over several machines takes in more ranks: on machines that it has, and on machines that join it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, ranks_with_line, wait_until
from tests.conftest import sharing
from tests.multinode.nodes import SUM, Node, invitations, joined, lines_of, lose, two_nodes

NAMES = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"
NUMBERS = f"import os\nprint(rank, local_rank, world_size, dist.get_rank(), *(os.environ[name] for name in {NAMES}))"
SETUP = "%%distributed --setup\nimport torch, torch.distributed as dist\nkept = rank"
TRAINING = """%%distributed --setup
import torch, nbdist
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
data = torch.utils.data.DataLoader(torch.arange(96.).reshape(24, 4).sin(), batch_size=1)
model, optimizer, loader = nbdist.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
def step():
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        break
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A notebook without a session."""
    with Kernel() as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


def is_connected(node: Node) -> bool:
    """Whether the agent of a machine has reached the controller, so that it can say why it leaves."""
    with suppress(IndexError, psutil.Error):  # there is no agent yet
        ends = psutil.Process(node.agent()).net_connections("tcp")
        return any(end.status == psutil.CONN_ESTABLISHED for end in ends)
    return False


def expected(*counts: int) -> dict[int, list[str]]:
    """What SUM and NUMBERS print with so many ranks on each machine."""
    size, found = sum(counts), dict[int, list[str]]()
    for node, count in enumerate(counts):
        for local in range(count):
            rank = len(found)
            found[rank] = [
                f"{size * (size + 1) // 2}",
                f"{rank} {local} {size} {rank} {rank} {local} {size} {count} {node}",
            ]
    return found


def numbers(kernel: Kernel) -> dict[int, list[str]]:
    return lines_of(kernel, SUM + NUMBERS)


def test_ranks_are_added_on_each_machine_and_numbered_machine_by_machine(kernel: Kernel) -> None:
    with two_nodes(kernel) as node:
        kernel.ok(SETUP)
        said = kernel.ok("%distributed grow").stdout
        assert "ranks 2, 5 added in " in said and "ranks 2-3 are now ranks 3-4" in said, said
        assert numbers(kernel) == expected(3, 3)
        assert lines_of(kernel, "print(kept)") == {0: ["0"], 1: ["1"], 2: ["2"], 3: ["2"], 4: ["3"], 5: ["5"]}
        assert lines_of(kernel, "print(os.environ.get('ONLY_THERE'))") == {
            rank: ["None" if rank < 3 else "yes"] for rank in range(6)
        }
        restarted = kernel.ok("%distributed restart").stdout
        assert "NBDIST_TOKEN" not in restarted and "6 ranks on 2 nodes ready" in restarted, restarted
        kernel.ok("%distributed stop")
        assert "the session has ended" in node.end()


def test_ranks_are_added_on_one_machine_and_a_training_goes_on(kernel: Kernel) -> None:
    with two_nodes(kernel):
        kernel.ok(TRAINING)
        kernel.ok("%%distributed\nstep()")
        name = kernel.value("__import__('nbdist').get_session().ranks[3].host")
        assert "ranks 4-5 added" in kernel.ok(f"%distributed grow -n 2 -r @{name}").stdout
        here = kernel.value("__import__('nbdist').get_session().ranks[0].host")
        said = kernel.ok(f"%distributed grow -r @{here}").stdout
        assert "rank 2 added" in said and "ranks 2-5 are now ranks 3-6" in said, said
        kernel.ok("%%distributed\nimport torch.distributed as dist\nnbdist.sync()\nstep()\nassert nbdist.check(model)")
        assert numbers(kernel) == expected(3, 4)
        said = kernel.ok(f"%%distributed -r @{name}\nprint('here')").stdout
        assert ranks_with_line(said, f"({name}) here") == [3, 4, 5, 6], said
        assert "ranks 4-6 removed" in kernel.ok("%distributed shrink -r 4-6").stdout
        assert numbers(kernel) == expected(3, 1)
        assert "ranks 4-5 added" in kernel.ok(f"%distributed grow -n 2 -r @{name}").stdout
        assert numbers(kernel) == expected(3, 3)


def test_an_interrupted_set_up_leaves_the_ranks_as_they_were(kernel: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with two_nodes(kernel):
        kernel.ok(f"{SETUP}\nimport os, time\nprint('set up')\nwhile os.path.exists({str(gate)!r}): time.sleep(0.01)")
        gate.touch()
        cell = kernel.start("%distributed grow")
        cell.wait_for_ranks(2, "set up")
        kernel.interrupt()
        outcome = cell.finish()
        assert outcome.ename == "KeyboardInterrupt" and "no rank was added" in str(outcome), str(outcome)
        assert numbers(kernel) == expected(2, 2)
        assert lines_of(kernel, "print(kept)") == {rank: [f"{rank}"] for rank in range(4)}
        gate.unlink()
        kernel.ok("%distributed grow")
        assert numbers(kernel) == expected(3, 3)


def test_a_machine_that_is_lost_while_ranks_are_added_is_named_and_the_others_go_on(
    kernel: Kernel, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with two_nodes(kernel) as node:
        kernel.ok(f"{SETUP}\nimport os, time\nprint('set up')\nwhile os.path.exists({str(gate)!r}): time.sleep(0.01)")
        gate.touch()
        cell = kernel.start("%distributed grow")
        cell.wait_for_ranks(2, "set up")
        node.process.send_signal(signal.SIGINT)
        outcome = cell.finish()
        assert "is lost" in str(outcome) and outcome.status == "error", str(outcome)
        gate.unlink()
        assert "ranks 2-3 removed" in kernel.ok("%distributed shrink").stdout
        assert numbers(kernel) == expected(2)
        assert "rank 2 added" in kernel.ok("%distributed grow").stdout
        assert numbers(kernel) == expected(3)


def test_another_machine_joins_with_ranks_of_its_own(kernel: Kernel) -> None:
    with ExitStack() as nodes:
        nodes.enter_context(two_nodes(kernel))
        kernel.ok(TRAINING)
        kernel.ok("%%distributed\nstep()")
        cell = kernel.start("%distributed grow --num-nodes 1 -n 3")
        address, (token,) = invitations(cell)
        assert "waiting for 1 more node: run this on the other machine" in cell.outcome.stdout, str(cell.outcome)
        third = nodes.enter_context(joined(address, token, WHERE="third"))
        outcome = cell.finish()
        assert outcome.status == "ok" and "ranks 4-6 added" in outcome.stdout, str(outcome)
        kernel.ok("%%distributed\nimport torch.distributed as dist\nnbdist.sync()\nstep()\nassert nbdist.check(model)")
        assert numbers(kernel) == expected(2, 2, 3)
        assert lines_of(kernel, "import os\nif rank > 3: print(os.environ['WHERE'])") == {
            rank: ["third"] for rank in (4, 5, 6)
        }
        kernel.ok("%distributed grow")
        assert numbers(kernel) == expected(3, 3, 4)
        kernel.ok("%distributed detach --linger 60\n%distributed attach")
        restarted = kernel.ok("%distributed restart").stdout
        assert "NBDIST_TOKEN" not in restarted and "10 ranks on 3 nodes ready" in restarted, restarted
        kernel.ok("%distributed stop")
        assert "the session has ended" in third.end()


def test_after_a_lost_machine_was_given_up_another_brings_the_ranks_back(kernel: Kernel) -> None:
    with ExitStack() as nodes:
        node = nodes.enter_context(two_nodes(kernel))
        kernel.ok(SETUP)
        lose(kernel, node)
        kernel.ok("%distributed shrink")
        cell = kernel.start("%distributed grow --num-nodes 1 -n 2")
        address, (token,) = invitations(cell)
        nodes.enter_context(joined(address, token))
        assert "ranks 2-3 added" in cell.finish().stdout
        assert numbers(kernel) == expected(2, 2)
        restarted = kernel.ok("%distributed restart").stdout
        assert "NBDIST_TOKEN" not in restarted and "4 ranks on 2 nodes ready" in restarted, restarted


def test_an_interrupt_gives_up_waiting_for_another_machine(kernel: Kernel) -> None:
    with ExitStack() as nodes:
        nodes.enter_context(two_nodes(kernel))
        kernel.ok(SETUP)
        cell = kernel.start("%distributed grow --num-nodes 2")
        address, tokens = invitations(cell, 2)
        one = nodes.enter_context(joined(address, tokens[0]))
        cell.wait_for("has joined as node")
        kernel.interrupt()
        outcome = cell.finish()
        assert outcome.ename == "KeyboardInterrupt" and "no rank was added" in str(outcome), str(outcome)
        assert "the session has ended" in one.end()
        with joined(address, tokens[1]) as late:
            assert "token is no longer valid" in late.end()
        assert numbers(kernel) == expected(2, 2)
        restarted = kernel.ok("%distributed restart").stdout
        assert "NBDIST_TOKEN" not in restarted and "4 ranks on 2 nodes ready" in restarted, restarted


def test_a_machine_that_leaves_while_another_is_waited_for_is_called_again(kernel: Kernel) -> None:
    with ExitStack() as nodes:
        nodes.enter_context(two_nodes(kernel))
        cell = kernel.start("%distributed grow --num-nodes 2")
        address, (first, second) = invitations(cell, 2)
        with joined(address, first) as one:
            wait_until(lambda: is_connected(one), "its agent")
            one.process.send_signal(signal.SIGINT)
            one.end()
        *_, third = invitations(cell, 3)[1]
        nodes.enter_context(joined(address, second))
        nodes.enter_context(joined(address, third))
        assert "ranks 4-5 added" in cell.finish().stdout
        assert numbers(kernel) == expected(2, 2, 1, 1)


def test_a_machine_whose_ranks_can_not_be_set_up_is_let_go(kernel: Kernel) -> None:
    with ExitStack() as nodes:
        nodes.enter_context(two_nodes(kernel))
        kernel.ok(f"{SETUP}\nimport os\nif os.environ.get('WHERE') == 'third': os._exit(3)")
        cell = kernel.start("%distributed grow --num-nodes 1")
        address, (token,) = invitations(cell)
        third = nodes.enter_context(joined(address, token, WHERE="third"))
        outcome = cell.finish()
        assert "rank 4 ended while it took its place: exit code 3" in str(outcome), str(outcome)
        assert "the session has ended" in third.end()
        assert numbers(kernel) == expected(2, 2)


def test_what_can_not_be_added_is_refused(kernel: Kernel) -> None:
    with two_nodes(kernel):
        assert (
            "'@mars' is not a machine of this session"
            in kernel.fails("%distributed grow -r @mars", "UsageError").evalue
        )
        both = kernel.fails("%distributed grow --num-nodes 1 -r 0", "UsageError").evalue
        assert "use only one of them" in both
        assert "invalid number" in kernel.fails("%distributed grow --num-nodes -1", "UsageError").evalue
        assert numbers(kernel) == expected(2, 2)
