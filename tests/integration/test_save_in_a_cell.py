"""A save between two steps of a cell that trains, which goes on: `%distributed save` meanwhile, and `start --every`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel, lines_by_rank, wait_until
from tests.support.spare import without_session

HANG = 60.0
SETUP = """%%distributed --setup
import time, torch, nbdist
from torch.distributed.tensor import DTensor
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
model, optimizer = nbdist.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
step, first_step = 0, 1
def train(steps):
    global step
    while step < steps:
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + 1 + step % 7))).square().mean().backward()
        optimizer.step()
        step += 1
        if step == first_step: open(f'trains-{rank}', 'w').close()
        time.sleep(0.002)
"""
RESULT = """%%distributed
whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
print(step, *[p.double().sum().item().hex() for p in whole])
"""


@pytest.fixture
def empty(notebook: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """The module's kernel, without a session before and after, in a new folder."""
    with without_session(notebook, tmp_path) as kernel:
        yield kernel


def prepare(kernel: Kernel, plan: str = "ddp", flags: str = "") -> None:
    kernel.ok(f"%distributed start -n 2 --replace {flags}", HANG)
    kernel.ok(f"%distributed plan {plan}")
    kernel.ok(SETUP)


def train_in_background(kernel: Kernel, folder: Path) -> None:
    kernel.ok("%%distributed --background --capture cell\nfirst_step = step + 1\ntrain(10**9)")
    wait_until((folder / "trains-0").exists, "the first step", 30)
    wait_until((folder / "trains-1").exists, "the first step", 30)


def await_free(kernel: Kernel) -> None:
    kernel.ok("nbdist.client.session.session.rank_set_of(nbdist.get_session()).traffic.wait_free([0, 1], 30)")


def stop_it(kernel: Kernel) -> None:
    kernel.ok("%distributed interrupt")
    await_free(kernel)


def steps_of(save: Path) -> int:
    return int(json.loads((save / "checkpoint.json").read_text())["steps"])


def result(kernel: Kernel) -> dict[int, list[str]]:
    return lines_by_rank(kernel.ok(RESULT).stdout)


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_cell_that_trains_is_saved_between_two_steps_and_goes_on(empty: Kernel, tmp_path: Path, plan: str) -> None:
    prepare(empty, plan)
    train_in_background(empty, tmp_path)
    assert "saved saves/save-1" in empty.ok("%distributed save saves", HANG).stdout
    steps = steps_of(tmp_path / "saves/save-1")
    assert "busy" in empty.ok("%distributed status").stdout
    stop_it(empty)
    later = {int(line.split()[0]) for [line] in result(empty).values()}
    assert len(later) == 1 and later.pop() > steps
    empty.ok("%distributed start --from saves --replace", HANG)
    empty.ok(f"%%distributed\ntrain({steps + 5})")
    resumed = result(empty)
    prepare(empty, plan)
    empty.ok(f"%%distributed\ntrain({steps + 5})")
    assert resumed == result(empty)


def test_a_cell_that_makes_no_steps_is_refused_and_goes_on(empty: Kernel) -> None:
    prepare(empty)
    empty.ok("%%distributed --background --capture cell\nwhile not step: time.sleep(0.01)\nprint('on', step)")
    text = empty.fails("%distributed save saves", "SessionBusy").evalue
    assert "still running" in text and "not all ranks of it make optimizer steps. `--stop` stops the cell first" in text
    stop_it(empty)


def test_a_loop_that_some_ranks_have_left_is_refused_and_the_others_go_on(empty: Kernel, tmp_path: Path) -> None:
    empty.ok("%distributed start -n 2", HANG)
    empty.ok(
        "%%distributed --background --capture cell\nimport time, torch\nfrom pathlib import Path\n"
        "own = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(own.parameters(), 0.1)\nsteps = 0\n"
        "def go(until):\n    global steps\n    while not until():\n        optimizer.step()\n        steps += 1\n"
        "        time.sleep(0.002)\n"
        "go(lambda: steps > 5)\nPath(f'begun-{rank}').touch()\n"
        "if rank == 0: go(lambda: Path('enough').exists())\n"
        "while not Path('enough').exists(): time.sleep(0.01)"
    )
    wait_until(lambda: (tmp_path / "begun-0").exists() and (tmp_path / "begun-1").exists(), "the steps", 30)
    text = empty.fails("%distributed save saves", "SessionBusy").evalue
    assert "rank 1 did not come to the end of step" in text
    (tmp_path / "enough").touch()
    await_free(empty)
    assert empty.value("nbdist.get_session().pull('steps', 0)") > 7


def test_an_interrupt_in_the_save_ends_the_cell_and_leaves_the_earlier_save(empty: Kernel, tmp_path: Path) -> None:
    prepare(empty)
    train_in_background(empty, tmp_path)
    empty.ok("%distributed save saves", HANG)
    stop_it(empty)
    slow = "class Slow:\n    def __reduce__(self):\n        open('begun', 'w').close()\n"
    slow += "        while True: time.sleep(0.01)\nslow = Slow()"
    empty.ok(f"%%distributed -r 1\n{slow}")
    empty.ok("os.remove('trains-0'), os.remove('trains-1')")
    train_in_background(empty, tmp_path)
    save = empty.start("%distributed save saves")
    wait_until((tmp_path / "begun").exists, "the save", 30)
    empty.interrupt()
    assert save.finish().ename == "KeyboardInterrupt"
    stop_it(empty)
    assert os.listdir(tmp_path / "saves") == ["save-1"]
    [steps] = {line.split()[0] for [line] in result(empty).values()}
    empty.ok("%%distributed -r 1\ndel slow")
    empty.ok(f"%%distributed\ntrain({int(steps) + 3})")


def test_a_rank_that_dies_in_the_save_is_named_and_nothing_waits_for_it(empty: Kernel, tmp_path: Path) -> None:
    prepare(empty)
    deadly = "import os, signal\nclass Deadly:\n    def __reduce__(self): os.kill(os.getpid(), signal.SIGKILL)\n"
    empty.ok(f"%%distributed -r 1\n{deadly}deadly = Deadly()")
    train_in_background(empty, tmp_path)
    assert "rank 1 died meanwhile" in empty.fails("%distributed save saves", "SessionError").evalue
    empty.ok("%distributed start -n 2 --replace", HANG)
    assert "saved saves/save-1" in empty.ok("%distributed save saves", HANG).stdout


# --- every so often


def test_what_a_cell_has_done_since_its_last_save_is_saved_when_it_has_ended(empty: Kernel, tmp_path: Path) -> None:
    prepare(empty, flags="--save saves --every 1")
    cell = empty.start("%%distributed\ntrain(10**9)")
    cell.wait_late("saved saves/save-1")
    empty.interrupt()
    stopped = re.search(r"stopped after step ([\d,]+)", str(cell.finish()))
    assert stopped is not None

    def newest() -> int:
        numbers = (path.name.removeprefix("save-") for path in (tmp_path / "saves").iterdir())
        return steps_of(tmp_path / f"saves/save-{max(int(number) for number in numbers if number.isdecimal())}")

    wait_until(lambda: newest() == int(stopped[1].replace(",", "")), "a save of the last step", 30)


def test_a_training_is_saved_again_and_again_and_status_says_when(empty: Kernel, tmp_path: Path) -> None:
    prepare(empty, flags="--save saves --every 1")
    cell = empty.start("%%distributed\ntrain(10**9)")
    cell.wait_late("saved saves/save-1")
    wait_until((tmp_path / "saves/save-3").exists, "the third save", 30)
    empty.interrupt()
    cell.finish()
    assert "saves/save-2" not in str(cell.outcome)
    assert "ago to saves/save-" in empty.ok("%distributed status").stdout
    [steps] = {line.split()[0] for [line] in result(empty).values()}
    assert 0 < steps_of(tmp_path / "saves/save-3") <= int(steps)


def test_a_cell_that_comes_while_idle_ranks_are_saved_runs_then(empty: Kernel, tmp_path: Path) -> None:
    empty.ok("%distributed start -n 2 --save saves --every 1", HANG)
    slow = "import time\nfrom pathlib import Path\nclass Slow:\n    def __reduce__(self):\n"
    slow += "        Path(f'begun').touch()\n        while not Path('enough').exists(): time.sleep(0.01)\n"
    slow += "        return Slow, ()\nslow = Slow()"
    empty.ok(f"%%distributed\n{slow}")
    wait_until((tmp_path / "begun").exists, "a save", 30)
    cell = empty.start("%%distributed\nprint('runs')")
    cell.wait_late("nbdist itself uses these ranks (save): this begins when that is done")
    (tmp_path / "enough").touch()
    assert lines_by_rank(cell.finish().stdout) == {0: ["runs"], 1: ["runs"]}


def test_regular_saves_need_a_folder(empty: Kernel) -> None:
    assert "add `--save DIR`" in empty.fails("%distributed start -n 2 --every 10m", "UsageError").evalue
