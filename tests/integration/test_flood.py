"""Ranks that print without end fill no memory, delay no interrupt, and leave a page that can still be read."""

from __future__ import annotations

import re
import time

import psutil
import pytest

from testbed.kernel import Kernel

BOUND = 150_000_000  # bytes that any process of ours may grow by


def memory(kernel: Kernel) -> dict[int, int]:
    """Resident bytes of the kernel and of each process that it has started."""
    root = psutil.Process(kernel.pid)
    return {process.pid: process.memory_info().rss for process in [root, *root.children(recursive=True)]}


def flood(kernel: Kernel, body: str, seconds: float = 2.5) -> dict[int, int]:
    """Run an endless cell for a while, then interrupt it; return the largest growth of each process in bytes."""
    before = memory(kernel)
    cell = kernel.start(f"%%distributed\n{body}")
    growth = dict.fromkeys(before, 0)
    end = time.monotonic() + seconds

    def over(_: object) -> bool:
        for pid, size in memory(kernel).items():
            growth[pid] = max(growth.get(pid, 0), size - before.get(pid, 0))
        return time.monotonic() > end

    cell.wait_until(over)
    kernel.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt", str(outcome)[:2000]
    return growth


@pytest.mark.parametrize(
    "body",
    [
        "while True: print('the same on all ranks')",
        "i = 0\nwhile True:\n    i += 1\n    print(rank, i)",
        "while True: print('no end ', end='')",
        "import sys\nwhile True: print('x' * 10_000, file=sys.stderr)",
        "while True: print('x' * 3_000_000)",
        "while True: print('\\rbar 10%', end='')",
        "from IPython.display import HTML\nwhile True: display(HTML('x' * 100_000))",
    ],
    ids=["equal lines", "different lines", "one line", "stderr", "long lines", "carriage returns", "displays"],
)
def test_a_flood_fills_no_memory_and_stops_when_interrupted(ranks: Kernel, body: str) -> None:
    growth = flood(ranks, body)
    assert max(growth.values()) < BOUND, growth
    assert "well" in ranks.ok("%%distributed\nprint('well')").stdout


def test_above_the_limit_the_middle_is_folded_and_the_log_has_it(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed -r 0\nfor i in range(200_000): print(f'{i:094d}')")
    lines = outcome.stdout.splitlines()
    places = [index for index, line in enumerate(lines) if not line.startswith("[0] ")]
    assert len(places) == 1, [lines[place] for place in places[:5]]
    place = places[0]
    assert lines[:place] == [f"[0] {i:094d}" for i in range(place)] and place == 8_000_000 // 99
    rest = len(lines) - place - 1
    assert lines[place + 1 :] == [f"[0] {i:094d}" for i in range(200_000 - rest, 200_000)]
    assert 900_000 < rest * 99 <= 1_000_000
    command = re.search(r"`(%distributed logs --cell \d+)`", lines[place])
    assert command is not None and "MiB" in lines[place]
    log = ranks.ok(f"{command[1]} -r 0 --tail 80000")
    assert log.stdout.splitlines() == [f"[0] {i:094d}" for i in range(120_000, 200_000)]


def test_a_flood_of_one_rank_does_not_hold_up_another(ranks: Kernel) -> None:
    flooding = ranks.start("%%distributed --background -r 0\nwhile True: print('flood')")
    flooding.finish()
    flooding.wait_late("[0] flood")
    for i in range(10):
        assert ranks.ok(f"%%distributed -r 1\nprint({i})").stdout == f"[1] {i}\n"
    ranks.ok("%distributed interrupt")
    flooding.wait_late("interrupted")


def test_ranks_are_not_slowed_down_by_a_fold(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed -r 0\nfor i in range(400): print('x' * 99_999)", 60)
    assert len(outcome.stdout) < 10_000_000
