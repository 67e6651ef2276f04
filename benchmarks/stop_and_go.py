"""From Ctrl-C to a notebook that can be used again, in a real kernel; what putting in order after a failure costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import _tools

RANKS = _tools.size(8, 2)
ROUNDS = 5
STEP = 0.05  # seconds

_SETUP = """%%distributed
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
x = torch.ones(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
dist.all_reduce(x)
"""
_STUCK = "%%distributed\nprint('there')\nif rank: dist.all_reduce(x)\nelse: dist.recv(x, 1)"
_TRAIN = f"""%%distributed
for step in range(100000):
    began = time.perf_counter()
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    time.sleep(max(0, {STEP} - (time.perf_counter() - began)))
    optimizer.step()
    if step == 5: print('there')
"""


def main() -> None:
    _tools.prepare()
    import nbdist
    from nbdist.client.ranks.task_record import CellOptions
    from nbdist.client.session.session import rank_set_of
    from testbed.kernel import Kernel, kernel_with_ranks

    def stopped(kernel: Kernel, code: str, forced: bool) -> float:
        """Seconds from the interrupt that does it to the end of the next cell."""
        cell = kernel.start(code)
        cell.wait_until(lambda seen: _speakers(seen.stdout) == RANKS, "a word of every rank")
        if forced:
            kernel.interrupt()
            cell.wait_for("Interrupt again to stop them now")
        began = time.perf_counter()
        kernel.interrupt()
        outcome = cell.finish()
        assert outcome.ename == "KeyboardInterrupt", str(outcome)
        kernel.ok("%%distributed\ny = torch.ones(1)\ndist.all_reduce(y)\nassert int(y) == world_size")
        return time.perf_counter() - began

    with kernel_with_ranks(RANKS) as kernel:
        kernel.ok(_SETUP)
        measures: dict[str, Callable[[], float]] = {
            "stuck in collectives, second Ctrl-C": lambda: stopped(kernel, _STUCK, True),
            "stuck in collectives, one Ctrl-C": lambda: stopped(kernel, _STUCK, False),
            "training, stopped after a step": lambda: stopped(kernel, _TRAIN, False),
        }
        samples = _tools.rounds(ROUNDS, measures)

    _tools.header(f"Ctrl-C to usable, {RANKS} ranks")
    for (name, values), budget in zip(samples.items(), (0.5, 3.0, STEP + 0.1), strict=True):
        _tools.row(name, values, **_tools.limit(budget))

    with nbdist.Session(RANKS) as session:
        session.run(_SETUP.partition("\n")[2])

        def recovery(code: str) -> float:
            task = rank_set_of(session).submit("cell", code, None, CellOptions())
            with contextlib.suppress(nbdist.RankError):
                task.wait()
            assert task.recovered is not None
            return float(task.recovered.seconds)

        samples = _tools.rounds(
            3 * ROUNDS,
            {
                "nothing amiss": lambda: recovery("dist.barrier()\n1/0"),
                "rank 0 a collective ahead: all groups rebuilt": lambda: recovery(
                    "if rank == 0: work = dist.all_reduce(x, async_op=True)\n1/0"
                ),
            },
            warm_up=2,
        )
    _tools.header(f"after a failed cell, {RANKS} ranks")
    for (name, values), budget in zip(samples.items(), (0.005, 0.05), strict=True):
        _tools.row(name, values, **_tools.limit(budget))


def _speakers(text: str) -> int:
    """How many ranks have said that they are there."""
    from nbdist.base.ranks import parse_ranks

    lines = [line for line in text.splitlines() if line.endswith("] there")]
    return sum(len(parse_ranks(line[1:].partition("]")[0], RANKS)) for line in lines)


if __name__ == "__main__":
    main()
