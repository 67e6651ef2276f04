"""The file that is written when a rank dies in a cell."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from testbed.kernel import kernel_with_ranks, wait_until


def test_a_report_names_what_ran_where_and_keeps_secrets_out(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    with kernel_with_ranks(2, NBDIST_REPORTS=str(folder), MY_TOKEN="hunter2", NCCL_DEBUG="WARN") as kernel:
        died = kernel.fails(
            "%%distributed\nimport os, time\nprint('last words of', rank)\n"
            "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)",
            "RankDied",
        )
        (shown,) = re.findall(r"^report, to send with an issue: (.*)$", died.traceback, re.MULTILINE)
        path = Path(shown)
        assert path.parent == folder
        wait_until(lambda: path.exists() and "[1] last words of 1" in path.read_text(), "the report to be whole")
        text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "rank 1 died: SIGKILL" in text and "if rank == 1: os.kill(os.getpid(), 9)" in text
    assert "rank 0: interrupted" in text and "MemTotal" in text and "torch " in text
    assert "NCCL_DEBUG=WARN" in text and "hunter2" not in text and "MY_TOKEN" not in text


@pytest.mark.parametrize("verb", ["close", "restart"])
def test_a_stop_or_restart_right_after_the_death_leaves_the_report_whole(tmp_path: Path, verb: str) -> None:
    """The next line of the same cell stops the ranks, before the report's turn has come."""
    with kernel_with_ranks(2, NBDIST_REPORTS=str(tmp_path)) as kernel:
        kernel.ok(
            "import nbdist\nsession = nbdist.get_session()\n"
            'try: session.run(\'print("last words of", rank)\\nif rank: __import__("os")._exit(3)\')\n'
            f"except nbdist.RankDied: session.{verb}()"
        )
        (path,) = tmp_path.glob("death-*.txt")
        text = path.read_text()
    assert re.search(r"^rank 0: \S+ MiB private$", text, re.MULTILINE) and "[1] last words of 1" in text, text


def test_without_a_folder_to_write_to_the_error_comes_all_the_same(tmp_path: Path) -> None:
    taken = tmp_path / "a file"
    taken.touch()
    with kernel_with_ranks(2, NBDIST_REPORTS=str(taken)) as kernel:
        cell = kernel.start("%%distributed\nif rank == 1: __import__('os')._exit(3)")
        assert cell.finish().ename == "RankDied"
        cell.wait_late("the report could not be written")
