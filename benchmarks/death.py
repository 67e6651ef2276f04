"""From a SIGKILL of a rank in a cell to the error in the notebook, in a real kernel."""

from __future__ import annotations

import functools
import os
import signal
import time

import _tools

RANKS = _tools.size(8, 4)
ROUNDS = 7
BUDGET = 0.1

_CELLS = {
    "others sleep": "import time\nprint('there')\ntime.sleep(100)",
    "others wait for it in all_reduce": "import torch, torch.distributed as dist, time\nprint('there')\n"
    "if rank == 3:\n    time.sleep(100)\ndist.all_reduce(torch.ones(1))",
}


def main() -> None:
    _tools.prepare()
    from testbed.kernel import Kernel, kernel_with_ranks

    def measure(kernel: Kernel, code: str) -> float:
        victim = kernel.rank_pids()[3]
        execution = kernel.start(f"%%distributed\n{code}")
        execution.wait_until(lambda outcome: _speakers(outcome.stdout) == RANKS, "a word of every rank")
        began = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        execution.wait_until(lambda outcome: bool(outcome.ename), "an error")
        seconds = time.perf_counter() - began
        outcome = execution.finish()
        assert outcome.ename == "RankDied", str(outcome)
        kernel.ok(f"%distributed restart -n {RANKS}")
        return seconds

    with kernel_with_ranks(RANKS) as kernel:
        samples = _tools.rounds(
            ROUNDS, {name: functools.partial(measure, kernel, code) for name, code in _CELLS.items()}
        )
    _tools.header(f"death of one of {RANKS} ranks to error")
    for name in _CELLS:
        _tools.row(name, samples[name], **_tools.limit(BUDGET))


def _speakers(text: str) -> int:
    """How many ranks have said that they are there."""
    from nbdist.base.ranks import parse_ranks

    lines = [line for line in text.splitlines() if line.endswith("] there")]
    return sum(len(parse_ranks(line[1:].partition("]")[0], RANKS)) for line in lines)


if __name__ == "__main__":
    main()
