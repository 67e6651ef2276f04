"""What `Session.run` keeps of a flood is bounded; the log has the rest, and is read without holding all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel

LINES = 1500  # of 100 kB
FLOOD = f"for i in range({LINES}): print(f'{{i:099999d}}')"
MB = 1_000_000


@pytest.fixture(scope="module")
def flooded(ranks: Kernel) -> Iterator[Kernel]:
    """A kernel in which rank 0 has printed 150 MB, with its peak memory in `peak`."""
    ranks.ok(
        "import warnings, nbdist\nsession = nbdist.get_session()\n"
        "def memory(field):\n"
        "    line = next(line for line in open('/proc/self/status') if line.startswith(field))\n"
        "    return int(line.split()[1]) * 1024\n"
        "def growth(work):\n"
        "    open('/proc/self/clear_refs', 'w').write('5')\n"
        "    before = memory('VmRSS')\n"
        "    work()\n"
        "    return memory('VmHWM') - before\n"
        "session.run('print(0)')"
    )
    ranks.ok(f"def flood():\n    global result\n    result = session.run({FLOOD!r}, ranks=[0])\ngrown = growth(flood)")
    yield ranks


def test_the_notebook_keeps_only_so_much(flooded: Kernel) -> None:
    assert 0 < flooded.value("grown") < 110 * MB


def test_the_newest_part_is_kept_below_a_line_that_tells_what_is_missing(flooded: Kernel) -> None:
    flooded.ok("head, _, text = result[0].stdout.partition('\\n')")
    assert "MiB of output above this line are not kept here; `session.logs(cell=result)`" in flooded.value("head")
    kept = flooded.value("[int(line[-6:]) for line in text.splitlines()]")
    assert kept == list(range(LINES - len(kept), LINES)) and 60 * MB < len(kept) * 100_000 < 68 * MB
    assert flooded.value("result[0].truncated") >= 80 * MB


def test_the_log_gives_all_of_it(flooded: Kernel) -> None:
    assert flooded.value("[int(line[-6:]) for line in session.logs(cell=result)[0].splitlines()]") == list(range(LINES))


def test_the_last_lines_are_read_without_holding_the_rest(flooded: Kernel) -> None:
    flooded.ok("from nbdist.client.reports.logs import CellLog\nfrom tests.support.inside import traffic_of")
    flooded.ok("tail, log = [], CellLog(traffic_of(session).read_log, result)")
    flooded.ok("grown = growth(lambda: tail.extend(log.lines([0], tail=2)))")
    assert flooded.value("''.join(tail)") == f"[0] {LINES - 2:099999d}\n[0] {LINES - 1:099999d}\n"
    assert flooded.value("grown") < 40 * MB


def test_a_log_is_saved_without_holding_it(flooded: Kernel, tmp_path: Path) -> None:
    flooded.ok(f"number = get_ipython().execution_count\nresult = session.run({FLOOD!r}, ranks=[0])")
    save = f"get_ipython().run_line_magic('distributed', 'logs -r 0 --save {tmp_path / 'log'}')"
    flooded.ok(f"grown = growth(lambda: {save})")
    assert flooded.value("grown") < 40 * MB
    with (tmp_path / "log").open() as file:
        assert [int(line[-7:]) for line in file] == list(range(LINES))


def test_output_below_the_limit_is_kept_whole(flooded: Kernel) -> None:
    flooded.ok("small = session.run('print(rank)')")
    assert flooded.value("[(r.stdout, r.truncated) for r in small.values()]") == [("0\n", 0), ("1\n", 0)]
