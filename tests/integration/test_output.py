"""What ranks print stands below their cell: whole, in order, named by rank, each byte once, at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testbed.kernel import Kernel, both, lines_by_rank, wait_until
from tests.support.screen import screen

# Many lines, since one may be late on a busy machine.
IN_STEP = """%%distributed
import time, torch.distributed as dist
for i in range(20):
    dist.barrier()
    {step}
    print('epoch', i)"""


def until(path: Path) -> str:
    """Code that waits for a file."""
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.005)"


# --- prefixes and merging


def test_equal_lines_are_shown_once_with_all_their_ranks(ranks: Kernel) -> None:
    outcome = ranks.ok(IN_STEP.format(step="pass"))
    assert outcome.lines == both(*(f"epoch {i}" for i in range(20)))
    assert "[0-1] epoch" in outcome.stdout


def test_different_lines_carry_their_rank(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nprint('I am', rank)")
    assert sorted(outcome.stdout.splitlines()) == ["[0] I am 0", "[1] I am 1"]


def test_ranks_that_drift_apart_a_little_still_share_their_lines(ranks: Kernel) -> None:
    outcome = ranks.ok(IN_STEP.format(step="time.sleep(0.06 + 0.01 * rank)"))
    assert outcome.lines == both(*(f"epoch {i}" for i in range(20)))
    assert "[0-1] epoch" in outcome.stdout


def test_a_line_of_one_rank_before_a_common_one_stands_before_it(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nif rank == 0: print('setup')\nprint('epoch 1')")
    assert outcome.lines == {0: ["setup", "epoch 1"], 1: ["epoch 1"]}


def test_a_cell_on_one_rank_is_named_too(ranks: Kernel) -> None:
    assert ranks.ok("%%distributed -r 1\nprint('hello')").stdout == "[1] hello\n"


def test_stderr_stays_stderr(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nimport sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (outcome.lines, lines_by_rank(outcome.stderr)) == (both("out"), both("err"))


def test_the_wire_carries_what_was_printed_plus_prefixes_and_no_byte_twice(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nfor i in range(5000): print(rank, '.' * (i % 50), i)")
    printed = {r: [f"{r} {'.' * (i % 50)} {i}" for i in range(5000)] for r in (0, 1)}
    assert outcome.lines == printed
    streams = [content["text"] for kind, content in outcome.events if kind == "stream"]
    assert sum(map(len, streams)) == sum(len("[0] ") + len(line) + 1 for r in (0, 1) for line in printed[r])
    assert {kind for kind, _ in outcome.events} == {"status", "execute_input", "stream"}


def test_a_complete_line_is_never_split_or_interleaved(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nfor i in range(300): print(f'{rank}:{i}:' + 'x' * 5000)")
    assert outcome.lines == {rank: [f"{rank}:{i}:" + "x" * 5000 for i in range(300)] for rank in (0, 1)}


def test_eighty_thousand_lines_lose_none(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nfor i in range(40_000): print(rank, i)")
    assert outcome.lines == {rank: [f"{rank} {i}" for i in range(40_000)] for rank in (0, 1)}


def test_blank_lines_indentation_colors_and_other_alphabets_arrive_as_they_are(ranks: Kernel) -> None:
    text = "first\n\n    indented\n\ttab\n\x1b[31mred\x1b[0m\nπ 日本 🚀\ntrailing  \n"
    outcome = ranks.ok(f"%%distributed\nprint({text!r}, end='')")
    assert outcome.lines == both(*text.split("\n")[:-1])


def test_a_last_line_without_its_end_is_shown_and_closed(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nprint('a\\nb', end='')")
    assert outcome.lines == both("a", "b") and outcome.stdout.endswith("] b\n")


def test_a_carriage_return_shows_the_last_state_of_its_line(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed -r 0\nfor i in range(5): print(f'\\rstep {i}', end='')\nprint()\nprint('done')")
    assert screen(outcome.stdout) == ["[0] step 4", "[0] done"]


# --- while the cell runs


def test_the_first_line_is_on_screen_while_the_cell_runs(ranks: Kernel, tmp_path: Path) -> None:
    cell = ranks.start(f"%%distributed\nprint('first')\n{until(tmp_path / 'go')}\nprint('second')")
    cell.wait_until(lambda outcome: outcome.lines == both("first"), "the first line")
    (tmp_path / "go").touch()
    assert cell.finish().lines == both("first", "second")


def test_a_line_that_only_one_rank_has_does_not_wait_for_the_others(ranks: Kernel, tmp_path: Path) -> None:
    cell = ranks.start(f"%%distributed\nif rank == 1: print('mine')\n{until(tmp_path / 'go')}")
    cell.wait_for("[1] mine\n")
    (tmp_path / "go").touch()
    cell.finish()


def test_an_incomplete_line_is_shown_and_goes_on_in_place(ranks: Kernel, tmp_path: Path) -> None:
    cell = ranks.start(f"%%distributed -r 1\nprint('loading ...', end='')\n{until(tmp_path / 'go')}\nprint(' done')")
    cell.wait_for("[1] loading ...")
    (tmp_path / "go").touch()
    assert cell.finish().stdout == "[1] loading ... done\n"


def test_an_incomplete_line_is_closed_when_another_rank_prints(ranks: Kernel, tmp_path: Path) -> None:
    cell = ranks.start(
        "%%distributed\n"
        "import os\nif rank == 0: print('working ', end='')\n"
        f"else:\n    while not os.path.exists({str(tmp_path / 'a')!r}): pass\n    print('other')\n"
        f"{until(tmp_path / 'b')}\nif rank == 0: print('done')"
    )
    cell.wait_for("[0] working ")
    (tmp_path / "a").touch()
    cell.wait_for("[1] other\n")
    (tmp_path / "b").touch()
    assert cell.finish().stdout == "[0] working \n[1] other\n[0] done\n"


# --- everything that can print


def test_five_megabytes_in_one_string_arrive(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed -r 0\nprint('0123456789' * 500_000)")
    assert len(outcome.stdout) == 5_000_005
    assert outcome.stdout.count("0123456789") == 500_000


def test_180_kilobytes_to_stderr_arrive(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nimport sys\nfor i in range(2000): print('e' * 89, file=sys.stderr)")
    assert lines_by_rank(outcome.stderr) == both(*["e" * 89] * 2000)
    assert outcome.stdout == ""


def test_c_libraries_print_in_order_with_python(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nimport ctypes\nc = ctypes.CDLL(None)\nprint('1 python')\nc.puts(b'2 puts')\n"
        "print('3 python')\nc.printf(b'%s\\n', b'4 printf')\nprint('5 python')"
    )
    assert outcome.lines == both("1 python", "2 puts", "3 python", "4 printf", "5 python")


def test_what_a_c_library_has_not_flushed_arrives_with_its_cell(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nimport ctypes\nctypes.CDLL(None).printf(b'no newline');")
    assert outcome.lines == both("no newline")


def test_child_processes_print_in_order_with_python(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nimport subprocess, sys\nprint('1 python')\n!echo 2 shell\nprint('3 python')\n"
        "subprocess.run(['echo', '4 subprocess'])\n"
        "subprocess.run([sys.executable, '-c', 'print(\"5 child\")'])\nprint('6 python')"
    )
    assert outcome.lines == both("1 python", "2 shell", "3 python", "4 subprocess", "5 child", "6 python")


def test_workers_of_a_dataloader_print_each_line_once(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nimport torch\nclass Loud(torch.utils.data.Dataset):\n    def __len__(self): return 6\n"
        "    def __getitem__(self, i):\n        print('item', i)\n        return i\n"
        "print('no end', end=' ')\nfor _ in torch.utils.data.DataLoader(Loud(), num_workers=2): pass\nprint('end')"
    )
    for rank in (0, 1):
        text = "".join(outcome.lines[rank])
        assert sorted(re.findall(r"item \d", text)) == [f"item {i}" for i in range(6)]
        assert text.count("no end") == 1


def test_threads_of_a_rank_print(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nimport sys, threading\n"
        "threads = [threading.Thread(target=sys.stdout.write, args=(f'thread {i}\\n',)) for i in range(20)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()"
    )
    for rank in (0, 1):
        assert sorted(outcome.lines[rank]) == sorted(f"thread {i}" for i in range(20))


def test_bytes_that_are_no_text_are_replaced_and_cost_nothing_else(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nimport os\nos.write(1, b'before \\xff\\xfe after\\n')\nprint('next')")
    assert outcome.lines == both("before \ufffd\ufffd after", "next")


def test_a_character_that_is_cut_in_two_arrives_whole(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed -r 0\nimport os, time\n"
        "for byte in 'é🚀\\n'.encode():\n    os.write(1, bytes([byte]))\n    time.sleep(0.06)"
    )
    assert outcome.stdout == "[0] é🚀\n"


# --- after the cell


def test_what_a_thread_prints_after_the_end_appears_below_its_cell(ranks: Kernel, tmp_path: Path) -> None:
    cell = ranks.start(
        "%%distributed\nimport os, threading, time\ndef late():\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.005)\n    print('late', rank)\n"
        "threading.Thread(target=late).start()\nprint('done')"
    )
    assert cell.finish().lines == both("done")
    ranks.ok("1 + 1")
    (tmp_path / "go").touch()
    for rank in (0, 1):
        cell.wait_late(f"[{rank}] late {rank}\n")


def test_what_a_child_process_prints_after_the_end_appears_below_its_cell(ranks: Kernel, tmp_path: Path) -> None:
    script = f"until [ -e {tmp_path / 'go'} ]; do sleep 0.01; done; echo from the child"
    cell = ranks.start(f"%%distributed -r 0\nimport subprocess\nchild = subprocess.Popen({script!r}, shell=True)")
    assert cell.finish().stdout == ""
    (tmp_path / "go").touch()
    cell.wait_late("[0] from the child\n")


def test_a_late_line_that_comes_in_pieces_is_one_line(ranks: Kernel, tmp_path: Path) -> None:
    cell = ranks.start(
        "%%distributed -r 0\nimport os, threading, time\ndef pieces():\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.005)\n"
        "    for word in ('one ', 'two ', 'three\\n'):\n        print(word, end='')\n        time.sleep(0.15)\n"
        "    print('end')\n"
        "threading.Thread(target=pieces).start()"
    )
    cell.finish()
    (tmp_path / "go").touch()
    cell.wait_late("end\n")
    assert cell.outcome.stdout == "[0] one two three\n[0] end\n"


def test_a_rank_that_has_finished_may_print_while_others_run(ranks: Kernel, tmp_path: Path) -> None:
    cell = ranks.start(
        "%%distributed\nimport os, threading, time\n"
        "def late():\n    time.sleep(0.1)\n    for i in range(1000): print('late', i)\n    print('end')\n"
        f"if rank == 0: threading.Thread(target=late).start()\nelse:\n    print('still here')\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.005)\n    print('done')"
    )
    cell.wait_for("[0] end\n")
    (tmp_path / "go").touch()
    late = [*(f"late {i}" for i in range(1000)), "end"]
    assert cell.finish().lines == {0: late, 1: ["still here", "done"]}


def test_a_background_cell_prints_below_itself_while_other_cells_run(ranks: Kernel, tmp_path: Path) -> None:
    background = ranks.start(
        f"%%distributed --background -r 0\nprint('started')\n{until(tmp_path / 'a')}\n"
        f"print('behind')\n{until(tmp_path / 'b')}"
    )
    background.finish()
    background.wait_late("[0] started\n")
    other = ranks.start(f"%%distributed -r 1\n{until(tmp_path / 'c')}\nprint('in front')")
    (tmp_path / "a").touch()
    background.wait_late("[0] behind\n")
    (tmp_path / "c").touch()
    assert other.finish().stdout == "[1] in front\n"
    (tmp_path / "b").touch()
    ended = "[each.done for each in Out.values() if hasattr(each, 'done')][-1]"
    wait_until(lambda: ranks.value(ended), "the background cell to end")
    assert background.outcome.stdout == "[0] started\n[0] behind\n"


# --- captures


def test_a_capture_is_exact_and_not_shown(ranks: Kernel) -> None:
    text = "a\n\n  b\r\x1b[1mé\n no end"
    outcome = ranks.ok(
        f"%%distributed --capture got\nimport sys\nprint({text!r}, end='')\n"
        "print('err', rank, file=sys.stderr)\nrank * 10"
    )
    assert outcome.stdout + outcome.stderr == "" and outcome.displays == []
    for rank in (0, 1):
        assert ranks.value(f"got[{rank}].stdout") == text
        assert ranks.value(f"got[{rank}].stderr") == f"err {rank}\n"
        assert ranks.value(f"got[{rank}].result") == str(rank * 10)


def test_twenty_megabytes_are_captured_whole(ranks: Kernel) -> None:
    ranks.ok("%%distributed --capture got\nfor i in range(20): print(f'{rank}{i:02d}' + 'x' * 999_996)")
    for rank in (0, 1):
        expected = f"''.join(f'{rank}{{i:02d}}' + 'x' * 999_996 + '\\n' for i in range(20))"
        assert ranks.value(f"len(got[{rank}].stdout)") == 20_000_000
        assert ranks.value(f"got[{rank}].stdout == {expected}") is True


def test_with_tee_a_capture_is_shown_too(ranks: Kernel) -> None:
    assert ranks.ok("%%distributed --capture got --tee\nprint('both')").lines == both("both")
    assert ranks.value("got[1].stdout") == "both\n"


def test_captured_displays_are_kept_in_order(ranks: Kernel) -> None:
    ranks.ok("%%distributed --capture got\nfrom IPython.display import HTML\ndisplay(HTML('<b>x</b>'))\n'value'")
    assert ranks.value("[sorted(bundle) for bundle in got[0].outputs]") == [["text/html", "text/plain"], ["text/plain"]]


def test_quiet_shows_nothing_but_the_log_has_it(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed --quiet\nprint('hidden')\n1")
    assert outcome.stdout == "" and outcome.displays == []
    assert ranks.ok("%distributed logs -r 0").stdout == "[0] hidden\n"


@pytest.mark.parametrize("code", ["get_session().run('print(1)')", "get_session().run('print(1)', ranks=[0])"])
def test_session_run_returns_output_and_shows_none(ranks: Kernel, code: str) -> None:
    assert ranks.ok(f"from nbdist import get_session\nresult = {code}").stdout == ""
    assert ranks.value("result[0].stdout") == "1\n"


CLOSED_STREAM = """
import contextlib, io, nbdist, pathlib
session = nbdist.get_session()
buffer = io.StringIO()
with contextlib.redirect_stdout(buffer):
    session.run({code!r}, ranks=0, show=True)
buffer.close()
pathlib.Path({closed!r}).touch()
"""
PRINTS_LATE = """
import pathlib, threading, time
def print_late():
    while not pathlib.Path({closed!r}).exists(): time.sleep(0.005)
    for _ in range(300): print('late', 'x' * 10_000)
    pathlib.Path({printed!r}).touch()
threading.Thread(target=print_late).start()
"""


def test_what_is_printed_after_the_cell_s_stream_has_been_closed_is_shown_and_paid_for(
    ranks: Kernel, tmp_path: Path
) -> None:
    closed, printed = str(tmp_path / "closed"), tmp_path / "printed"
    code = PRINTS_LATE.format(closed=closed, printed=str(printed))
    cell = ranks.start(CLOSED_STREAM.format(code=code, closed=closed))
    assert cell.finish().status == "ok"
    wait_until(printed.exists, "the end of three megabytes of late output")
    cell.wait_late("late x")
    following = ranks.ok("%%distributed\nprint('next')").lines  # the end of the late text may come with it
    assert {rank: lines[-1] for rank, lines in following.items()} == {0: "next", 1: "next"}
