"""An interrupt while ranks train: all stop after the same step, at the end of the loop's body."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.kernel import Kernel, Outcome, kernel_with_ranks

pytestmark = pytest.mark.torch_private

SETUP = """%%distributed
import random, time, torch, torch.distributed as dist
jitter = random.Random(rank)
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
done, shown = 0, False
"""

LOOP = """%%distributed
while done < 100_000:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    time.sleep(jitter.random() * 0.01)
    optimizer.step()
    scheduler.step()
    done += 1
    if done % 5 == 0: print('five more')
"""


def interrupted(kernel: Kernel, code: str, at: str = "five more") -> Outcome:
    cell = kernel.start(code)
    cell.wait_until(lambda seen: all(at in seen.lines.get(rank, []) for rank in (0, 1)), f"{at!r} from both ranks")
    kernel.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    return outcome


def counts(kernel: Kernel) -> list[Any]:
    return [kernel.value(f"nbdist.get_session().pull({what!r})") for what in ("done", "scheduler.last_epoch")]


def test_all_ranks_stop_after_the_same_step_with_the_body_of_the_loop_done(ranks: Kernel) -> None:
    ranks.ok(SETUP + "import nbdist")
    ranks.ok("import nbdist")
    steps = 0
    for _ in range(3):
        outcome = interrupted(ranks, LOOP)
        (first, second), epochs = counts(ranks)
        assert first == second and epochs == [first, second]
        assert outcome.evalue == f"all ranks stopped after step {first - steps:,}; run the cell again to continue"
        assert "nbdist:" not in outcome.traceback
        steps = first
    ranks.ok("%%distributed\nreport = nbdist.check(model)\nassert report.equal, report")


def test_the_line_says_where_the_loop_stopped(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    assert "while done < 100_000" in interrupted(ranks, LOOP).traceback


def test_a_background_cell_stops_at_a_step_by_the_verb(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    cell = ranks.start(LOOP.replace("%%distributed", "%%distributed --background"))
    cell.finish()
    ranks.ok("handle = _")
    cell.wait_late("five more")
    ranks.ok("%distributed interrupt")
    outcome = ranks.run("handle.wait(20)")
    assert outcome.evalue.startswith("all ranks stopped after step"), str(outcome)


def test_now_does_not_wait_for_the_step(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    slow = LOOP.replace("jitter.random() * 0.01", "60 if done > 9 else 0")
    ranks.start(slow.replace("%%distributed", "%%distributed --background")).finish()
    ranks.ok("handle = _\nimport time\nwhile handle.output[0].stdout.count('five') < 2: time.sleep(0.01)")
    ranks.ok("%distributed interrupt --now")
    outcome = ranks.run("handle.wait(30)")
    assert outcome.ename == "KeyboardInterrupt" and "ranks 0-1 interrupted" in outcome.evalue, str(outcome)
    (first, second), _ = counts(ranks)
    assert first == second


def test_a_loop_whose_steps_have_ended_is_interrupted_where_it_is(ranks: Kernel) -> None:
    """An evaluation after training makes no steps, so no step is waited for."""
    ranks.ok(SETUP)
    code = LOOP.replace("100_000", "7") + "print('evaluation')\nwhile True: time.sleep(0.01)"
    outcome = interrupted(ranks, code, at="evaluation")
    assert "interrupted; their variables are kept" in outcome.evalue


def test_ranks_of_different_speed_stop_after_the_same_step_too(ranks: Kernel) -> None:
    """Rank 1 has about 30 steps of 0.1 s to make until it is where rank 0 is."""
    ranks.ok(SETUP)
    cell = ranks.start(
        "%%distributed\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "while done < 100_000:\n"
        "    model(torch.randn(8, 4)).square().mean().backward()\n"
        "    if rank or done > 30: time.sleep(0.1)\n"
        "    optimizer.step()\n"
        "    done += 1\n"
        "    if done == (3 if rank else 34): print('apart')"
    )
    cell.wait_until(lambda seen: all("apart" in seen.lines.get(rank, []) for rank in (0, 1)))
    ranks.interrupt()
    outcome = cell.finish()
    first, second = counts(ranks)[0]
    assert first == second and outcome.evalue.startswith(f"all ranks stopped after step {first}"), str(outcome)
    assert any("nbdist: rank 1 had" in text and "steps to go before all could stop" in text for text in outcome.plain)


def test_a_loop_that_catches_the_stop_takes_its_time_and_may_train_on(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    loop = LOOP.removeprefix("%%distributed\n").replace("\n", "\n    ").rstrip()
    save = "    for _ in range(35): time.sleep(0.1); dist.barrier()\n"
    more = "for _ in range(3): model(torch.randn(8, 4)).square().mean().backward(); optimizer.step()\n"
    cell = ranks.start(f"%%distributed\ntry:\n    {loop}\nexcept KeyboardInterrupt:\n{save}{more}print('saved')")
    cell.wait_for_ranks(2, "five more")
    ranks.interrupt()
    outcome = cell.finish()
    assert outcome.status == "ok" and outcome.lines[0][-1] == outcome.lines[1][-1] == "saved", str(outcome)


def test_ranks_of_a_loaded_machine_get_the_time_that_the_user_allows() -> None:
    """They answer after 1.2 s, as the step holds Python all the time; without the allowance they have 0.5 s."""
    with kernel_with_ranks(2, NBDIST_SLACK="3") as kernel:
        kernel.ok(SETUP + "import ctypes\nhold = ctypes.PyDLL(None).usleep")
        outcome = interrupted(
            kernel, LOOP.replace("time.sleep(jitter.random() * 0.01)", "hold(1_200_000 if done > 5 else 0)")
        )
        assert outcome.evalue.startswith("all ranks stopped after step"), str(outcome)
