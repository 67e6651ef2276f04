"""What `%%distributed` adds to a cell in a real kernel, as a notebook sees it: from request to idle and reply."""

from __future__ import annotations

import functools
import statistics

import _tools

RANKS = _tools.size(8, 2)
ROUNDS = 150
BUDGET = 5e-3


def main() -> None:
    _tools.prepare()
    from testbed.kernel import kernel_with_ranks

    with kernel_with_ranks(RANKS) as kernel:

        def measure(code: str) -> float:
            return kernel.ok(code).seconds

        cells = {"local": "pass", "distributed": "%%distributed\npass"}
        samples = _tools.rounds(
            ROUNDS, {name: functools.partial(measure, code) for name, code in cells.items()}, warm_up=20
        )
    local = statistics.median(samples["local"])
    _tools.header("cell in a real kernel")
    _tools.row("empty local cell", samples["local"])
    _tools.row(f"%%distributed pass, {RANKS} ranks", samples["distributed"])
    _tools.row("  beyond the local cell", [value - local for value in samples["distributed"]], **_tools.limit(BUDGET))


if __name__ == "__main__":
    main()
