"""`%distributed shrink` and `grow`: a session goes on with fewer ranks, or more, and its training with it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from testbed.kernel import Kernel
from tests.support.cells import printed
from tests.support.spare import spare_with_ranks

pytestmark = pytest.mark.torch_private

HANG = 60.0
NUMBERS = """%%distributed
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print(rank, world_size, dist.get_rank(), dist.get_world_size(), int(x), *(os.environ[name] for name in names))
"""
SETUP = """%%distributed --setup
import os, signal, time
import torch, torch.distributed as dist
import nbdist
"""
TRAINING = """%%distributed --setup
torch.manual_seed(0)
net = torch.nn.Linear(3, 1, dtype=torch.float64)
data = torch.arange(144, dtype=torch.float64).reshape(48, 3).sin()
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = nbdist.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), loader)
def train(count):
    for step, batch in enumerate(loader, 1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == count:
            break
"""
WEIGHTS = "%%distributed\nprint(*net.weight.flatten().tolist(), net.bias.item())"
KILL = "%%distributed\nif rank == {rank}:\n    os.kill(os.getpid(), signal.SIGKILL)\n{rest}"


def numbers(size: int) -> dict[int, list[str]]:
    """What NUMBERS prints."""
    total = size * (size + 1) // 2
    return {rank: [f"{rank} {size} {rank} {size} {total} {rank} {rank} {size} {size}"] for rank in range(size)}


def kill(kernel: Kernel, rank: int, rest: str = "dist.barrier()") -> None:
    """End a rank while the others wait for it."""
    kernel.fails(KILL.format(rank=rank, rest=rest), "RankDied", HANG)


@pytest.fixture
def three() -> Iterator[Kernel]:
    """Three new ranks in a kernel that only this test uses."""
    with spare_with_ranks(3) as kernel:
        kernel.ok(SETUP)
        yield kernel


@pytest.mark.parametrize("rank", [0, 1])
def test_the_living_go_on_as_fewer_ranks_with_their_variables(three: Kernel, rank: int) -> None:
    three.ok("%%distributed\nkept = rank")
    kill(three, rank)
    said = three.ok("%distributed shrink", HANG).stdout
    assert f"rank {rank} removed" in said and "2 ranks left, 1 process group rebuilt (generation 2)" in said
    assert printed(three, NUMBERS) == numbers(2)
    left = [other for other in range(3) if other != rank]
    assert printed(three, "%%distributed\nprint(kept)") == {now: [str(before)] for now, before in enumerate(left)}
    assert len(three.value("__import__('nbdist').get_session().status()")) == 2


def test_groups_of_ranks_that_stay_go_on_and_the_others_are_named(three: Kernel) -> None:
    three.ok("%%distributed\npair = dist.new_group([0, 2], group_desc='pair')\nlost = dist.new_group([0, 1])")
    kill(three, 1)
    assert "group 2 (of ranks 0-1 before)" in three.ok("%distributed shrink", HANG).stdout
    code = "%%distributed\nx = torch.ones(1)\ndist.all_reduce(x, group=pair)\nassert nbdist.group('pair') is pair\n"
    assert printed(three, f"{code}print(int(x), dist.get_process_group_ranks(pair))") == {
        rank: ["2 [0, 1]"] for rank in range(2)
    }
    failed = three.fails("%%distributed -r 0\ndist.all_reduce(torch.ones(1), group=lost)", "RankError", HANG)
    assert "was created before the number of ranks changed" in failed.traceback
    assert printed(three, NUMBERS) == numbers(2)


def test_living_ranks_can_be_given_up_and_others_added(three: Kernel) -> None:
    assert "ranks 1-2 are now ranks 0-1" in three.ok("%distributed shrink -r 0", HANG).stdout
    assert printed(three, NUMBERS) == numbers(2)
    said = three.ok("%distributed grow -n 2", HANG).stdout
    assert "ranks 2-3 added" in said and "they ran the setup cell" in said
    assert printed(three, NUMBERS) == numbers(4)
    kill(three, 1)
    three.ok("%distributed heal", HANG)
    assert printed(three, NUMBERS) == numbers(4)
    three.ok("%distributed plan hsdp --replicas 2")
    assert "the plan does not fit 3 ranks" in three.ok("%distributed shrink -r 3", HANG).stdout
    three.ok("%distributed plan --reset")


def expected_weights(rounds: list[tuple[int, int]]) -> list[float]:
    """What one process gets: rounds of steps, in each of which so many batches are averaged."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches = iter(torch.arange(144, dtype=torch.float64).reshape(48, 3).sin().split(2))
    for steps, ranks in rounds:
        for _ in range(steps):
            torch.stack([net(batch).square().mean() for batch in islice(batches, ranks)]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*net.weight.flatten().tolist(), net.bias.item()]


def test_a_training_goes_on_with_two_ranks_and_with_three_again(three: Kernel) -> None:
    three.ok(TRAINING)
    three.ok("%%distributed\ntrain(2)", HANG)
    kill(three, 1, rest="model(data[:2]).square().mean().backward()")
    three.ok("%distributed shrink", HANG)
    three.ok("%%distributed\nnbdist.sync()\ntrain(2)", HANG)
    three.ok("%distributed grow", HANG)
    three.ok("%%distributed\nnbdist.sync()\ntrain(2)", HANG)
    found = printed(three, WEIGHTS)
    assert len(found) == 3 and len({line for lines in found.values() for line in lines}) == 1
    weights = [float(number) for number in found[0][0].split()]
    assert weights == pytest.approx(expected_weights([(2, 3), (2, 2), (2, 3)]), rel=1e-12, abs=1e-13)


def test_ranks_that_were_added_are_like_the_others_when_more_come(three: Kernel) -> None:
    for _ in range(2):
        assert "it ran the setup cell" in three.ok("%distributed grow").stdout
    assert printed(three, NUMBERS) == numbers(5)


def test_what_can_not_be_is_refused_and_changes_nothing(three: Kernel) -> None:
    assert "no rank has died" in three.fails("%distributed shrink", "UsageError").evalue
    assert "no rank would be left" in three.fails("%distributed shrink -r all", "UsageError").evalue
    assert "rank 7 isn't in this session" in three.fails("%distributed shrink -r 7", "UsageError").evalue
    assert "invalid number" in three.fails("%distributed grow -n 0", "UsageError").evalue
    three.ok("import nbdist\ncell = nbdist.get_session().run_in_background('while True: time.sleep(0.01)', ranks=1)")
    assert "rank 1 is still running" in three.fails("%distributed shrink -r 0", "SessionBusy").evalue
    assert "rank 1 is still running" in three.fails("%distributed grow", "SessionBusy").evalue
    three.ok("%distributed interrupt")
    three.fails("cell.wait()", "KeyboardInterrupt", HANG)
    kill(three, 2)
    assert "rank 2 has died" in three.fails("%distributed grow", "UsageError").evalue
    three.ok("%distributed shrink", HANG)
    assert printed(three, NUMBERS) == numbers(2)


def test_newcomers_whose_setup_ends_them_leave_the_others_as_they_were(three: Kernel) -> None:
    three.ok("%%distributed --setup\nif rank == 3: os._exit(3)")
    failed = three.fails("%distributed grow", "SessionBroken", HANG)
    assert "no rank was added" in failed.evalue
    assert printed(three, NUMBERS) == numbers(3)
    assert "number of ranks" not in three.ok("%distributed status").stdout


def test_a_thread_of_a_cell_goes_on_printing_below_it_under_the_new_number(three: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    three.ok(
        "%%distributed\nimport threading\n"
        f"def print_later():\n    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n    print('late')"
    )
    cell = three.start("%%distributed -r 1 --capture kept --tee\nthreading.Thread(target=print_later).start()")
    assert cell.finish(HANG).status == "ok"
    three.ok("%distributed shrink -r 0", HANG)
    go.touch()
    cell.wait_late("late")
    assert cell.outcome.stdout == "[0] late\n"
    assert three.value("kept[1].stdout") == "late\n"
