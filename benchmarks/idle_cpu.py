"""Processor time of kernel, controller, agent and ranks while ranks work silently, and while nothing runs."""

from __future__ import annotations

import time

import _tools
import psutil

RANKS = _tools.size(8, 2)
SECONDS = _tools.size(10, 1)
BUDGET = 1.0


def main() -> None:
    _tools.prepare()
    from testbed.kernel import kernel_with_ranks

    with kernel_with_ranks(RANKS) as kernel:
        processes = _tools.session_processes(kernel.pid)
        ranks = [psutil.Process(pid) for pid in kernel.rank_pids()]
        _tools.wait_until_quiet([*processes.values(), *ranks])
        _tools.header(f"processor time over {SECONDS:g} s, in % of a core")
        execution = kernel.start(
            f"%%distributed\nimport time\nprint('there')\nend = time.monotonic() + {SECONDS + 3}\n"
            "while time.monotonic() < end:\n    time.sleep(0.001)"
        )
        execution.wait_for("there")
        time.sleep(1)
        for role, share in _tools.shares(processes, SECONDS).items():
            _tools.row(f"{role} while ranks work silently", [share], "%", **_tools.limit(BUDGET))
        execution.finish()
        _tools.wait_until_quiet(list(processes.values()))
        watched = {**processes, **{f"rank {number}": rank for number, rank in enumerate(ranks)}}
        idle = _tools.shares(watched, SECONDS)
        for role in processes:
            _tools.row(f"{role} while nothing runs", [idle[role]], "%", **_tools.limit(BUDGET))
        _tools.row("each rank while nothing runs", [share for role, share in idle.items() if "rank" in role], "%")


if __name__ == "__main__":
    main()
