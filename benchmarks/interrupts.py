"""Interrupts at seeded random moments of a training: how each ended, how soon the notebook could be used, what broke.

Takes turns, so that what time there is falls on all alike: `--minutes 90` is enough for all 200 of each.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _tools

COUNT = _tools.size(200, 1)  # of each wrapper, number of ranks and phase
TURN = 10
MINUTES = 0.1 if _tools.ONCE else 10.0
_WIDTH = 20  # of a column
# Seconds from the interrupt to a notebook that can be used. A step here takes up to 0.1 s, a checkpoint more.
BOUNDS = {"step stop": 0.5, "KeyboardInterrupt": 3.0, "freed by force": 0.5}


@dataclass(frozen=True)
class Row:
    wrapper: str
    ranks: int
    phase: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT, help="interrupts of each (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no turn later (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    _tools.prepare()
    from testbed.resilience import PHASES, WRAPPERS

    rows = [Row(*pair, phase) for pair in _pairs(WRAPPERS) for phase in PHASES]
    results: dict[Row, list[Any]] = {row: [] for row in rows}
    deadline = time.monotonic() + 60 * arguments.minutes
    for seed in range(arguments.seed, arguments.seed + -(-arguments.count // TURN)):
        for wrapper, ranks in _pairs(WRAPPERS):
            if time.monotonic() < deadline:
                for phase, result in _turn(wrapper, ranks, seed, min(TURN, arguments.count)):
                    results[Row(wrapper, ranks, phase)].append(result)
    print(f"seed {arguments.seed}; for each end: how many, and the slowest")
    return _report(results)


def _pairs(wrappers: dict[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    return [(wrapper, ranks) for wrapper, counts in wrappers.items() for ranks in counts]


def _turn(wrapper: str, ranks: int, seed: int, count: int) -> Iterator[tuple[str, Any]]:
    """Some interrupts in each phase, with ranks of their own. When something went wrong, the next phase gets others."""
    import nbdist
    from testbed.resilience import PHASES, Training

    phases = list(PHASES)
    while phases:
        with tempfile.TemporaryDirectory() as folder, nbdist.Session(ranks) as session:
            training = Training(session, wrapper, seed, Path(folder))
            while phases:
                result = training.interrupt(phases[0], count)
                yield phases.pop(0), result
                if result.wrong:
                    break


def _report(results: dict[Row, list[Any]]) -> int:
    ends = "".join(f"{name:>{_WIDTH}}" for name in BOUNDS)
    print(f"{'wrapper':<18}{'ranks':<6}{'phase':<18}{ends}  synced  apart  hangs  lost  unequal  other  verdict")
    for row, found in results.items():
        _print(f"{row.wrapper:<18}{row.ranks:<6}{row.phase:<18}", found)
    everything = [result for found in results.values() for result in found]
    _print(f"{'all':<42}", everything)
    wrong = [text for result in everything for text in result.wrong]
    for text in wrong[:5]:
        print(f"\n{text}")
    return 1 if wrong else 0


def _print(head: str, found: list[Any]) -> None:
    from testbed.resilience import HANGS, LOST, UNEQUAL

    rounds = [each for result in found for each in result.rounds]
    line, late = head, False
    for how, bound in BOUNDS.items():
        seconds = [each.seconds for each in rounds if each.how == how]
        slowest = _tools.show(max(seconds), "s") if seconds else "-"
        line += f"{len(seconds):>{_WIDTH - 9}}{slowest:>9}"
        late = late or any(value > bound for value in seconds)
    wrong = [text for result in found for text in result.wrong]
    kinds = [sum(text.startswith(kind) for text in wrong) for kind in (HANGS, LOST, UNEQUAL)]
    synced, apart = sum(each.synced for each in rounds), sum(bool(each.apart) for each in rounds)
    line += f"{synced:>8}{apart:>7}{kinds[0]:>7}{kinds[1]:>6}{kinds[2]:>9}{len(wrong) - sum(kinds):>7}"
    print(f"{line}  {'FAILED' if wrong else 'late' if late else 'passed' if rounds else 'no time'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
