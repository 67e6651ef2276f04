"""From `%distributed heal` to a whole session, beside a restart of all ranks, in a real kernel."""

from __future__ import annotations

import functools
import time

import _tools

RANKS = _tools.size(8, 4)
ROUNDS = 7
BUDGET = 0.5

_SUM = """%%distributed
import torch, torch.distributed as dist
x = torch.ones(1)
dist.all_reduce(x)
print(int(x))"""


def main() -> None:
    _tools.prepare()
    from testbed.kernel import Kernel, kernel_with_ranks

    def measure(kernel: Kernel, line: str) -> float:
        died = kernel.run("%%distributed -r 3\nimport os\nos._exit(1)")
        assert died.ename == "RankDied", str(died)
        began = time.perf_counter()
        kernel.ok(line)
        seconds = time.perf_counter() - began
        sums = kernel.ok(_SUM).stdout
        assert sums == f"[0-{RANKS - 1}] {RANKS}\n", sums
        return seconds

    ways = {"heal": "%distributed heal", "restart": f"%distributed restart -n {RANKS}"}
    with kernel_with_ranks(RANKS) as kernel:
        kernel.ok("%%distributed --setup\nimport torch, torch.distributed as dist")
        samples = _tools.rounds(ROUNDS, {name: functools.partial(measure, kernel, line) for name, line in ways.items()})
    _tools.header(f"one of {RANKS} ranks has died")
    _tools.row("all are there again after a heal", samples["heal"], **_tools.limit(BUDGET))
    _tools.row("... after a restart of all", samples["restart"], **_tools.limit(BUDGET))


if __name__ == "__main__":
    main()
