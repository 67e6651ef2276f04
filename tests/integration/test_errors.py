from __future__ import annotations

import functools
import sys
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, Outcome, wait_until
from tests.support.cells import number_of


def fails(kernel: Kernel, code: str, magic: str = "%%distributed") -> Outcome:
    return kernel.fails(f"{magic}\n{code}", "RankError")


def places(outcome: Outcome) -> list[str]:
    """Where the traceback says it was, outermost first."""
    lines = outcome.traceback.splitlines()
    return [line.split(", in ")[0] for line in lines if line.startswith(("Cell In", "File "))]


def test_the_reply_is_an_error_with_one_report(ranks: Kernel) -> None:
    outcome = fails(ranks, "1/0")
    assert outcome.status == "error"
    assert [kind for kind, _ in outcome.events].count("error") == 1
    assert outcome.stdout == "" and outcome.stderr == "" and outcome.displays == []


def test_the_report_names_rank_exception_cell_and_line(ranks: Kernel) -> None:
    outcome = fails(ranks, "x = 1\n1/0", "%%distributed -r 1")
    assert outcome.evalue == "rank 1 raised ZeroDivisionError: division by zero"
    assert outcome.traceback.startswith(outcome.evalue)
    assert f"Cell In[{number_of(outcome)}], line 3" in outcome.traceback
    assert "----> 3 1/0" in outcome.traceback


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%%distributed\n1/0", 2),
        ("%%distributed\n\n\n1/0", 4),
        ("\n\n%%distributed\n\n1/0", 3),  # blank lines at the very top do not count, as in any other cell
        ("%%rank 0\n\n1/0", 3),
        ("%%dist -r 1\nif True:\n    1/0", 3),
        ("%%distributed\nx = (1 +\n  1/0)", 3),
        ("%%distributed\n%%time\n\n1/0", 2),
    ],
)
def test_line_numbers_are_those_of_the_notebook(ranks: Kernel, cell: str, line: int) -> None:
    outcome = ranks.fails(cell, "RankError")
    assert places(outcome)[0] == f"Cell In[{number_of(outcome)}], line {line}"


def test_a_function_of_an_earlier_cell_is_named_by_that_cell(ranks: Kernel) -> None:
    ranks.ok("'so that the numbers differ'")
    defining = ranks.ok(
        "%%distributed\n\ndef broken():\n    return 1/0\nclass Owner:\n    def method(self): return broken()"
    )
    calling = fails(ranks, "\nOwner().method()")
    first, second = number_of(calling), number_of(defining)
    assert places(calling) == [
        f"Cell In[{first}], line 3",
        f"Cell In[{second}], line 6",
        f"Cell In[{second}], line 4",
    ]


def test_of_library_frames_only_the_innermost_is_shown(ranks: Kernel) -> None:
    outcome = fails(ranks, "import json\njson.loads('{')")
    shown = places(outcome)
    assert shown[0] == f"Cell In[{number_of(outcome)}], line 3"
    assert len(shown) == 2 and "json" in shown[1]


def test_ranks_that_failed_alike_are_one_word(ranks: Kernel) -> None:
    lines = fails(ranks, "1/0").traceback.splitlines()
    assert lines[-1] in ("rank 0: same", "rank 1: same")


def in_turn(gate: Path, late: int, error: str, first: str) -> str:
    """A cell in which one rank raises an error once the other's was raised."""
    return (
        f"from tests.support.gates import await_gate, opening\nif rank == {late}:\n    await_gate({str(gate)!r})\n"
        f"    raise {error}\nraise opening({first}, {str(gate)!r})"
    )


def test_another_failure_is_one_line_with_its_place(ranks: Kernel, tmp_path: Path) -> None:
    outcome = fails(ranks, in_turn(tmp_path / "gate", 1, "ValueError('second\\nmore')", "KeyError('first')"))
    assert outcome.evalue == "rank 0 raised KeyError: 'first'"
    assert outcome.traceback.splitlines()[-1] == f"rank 1: ValueError: second (cell {number_of(outcome)} line 5)"


def test_the_rank_that_failed_first_is_named_first(ranks: Kernel, tmp_path: Path) -> None:
    code = in_turn(tmp_path / "gate", 0, "KeyError('late')", "ValueError('early')")
    assert fails(ranks, code).evalue == "rank 1 raised ValueError: early"


def test_ranks_that_ended_well_are_named(ranks: Kernel) -> None:
    assert fails(ranks, "if rank == 0: 1/0").traceback.splitlines()[-1] == "rank 1: finished"


def test_what_follows_from_another_rank_s_failure_comes_second(ranks: Kernel, tmp_path: Path) -> None:
    """Even if it was raised first."""
    ranks.ok(
        "%%distributed\n"
        "import datetime, gc, torch, torch.distributed as dist\n"
        "from tests.support.gates import await_gate, opening\n"
        f"gate = {str(tmp_path / 'gate')!r}\n"
        "extra = dist.new_group(timeout=datetime.timedelta(seconds=10))\n"
        "dist.all_reduce(torch.ones(1), group=extra)"
    )
    code = (
        "if rank == 0:\n"
        "    dist.destroy_process_group(extra)\n"
        "    del extra\n"
        "    gc.collect()\n"
        "    await_gate(gate)\n"
        "    raise ValueError('the cause')\n"
        "try:\n"
        "    dist.all_reduce(torch.ones(1), group=extra)\n"
        "except RuntimeError as error:\n"
        "    opening(error, gate)\n"
        "    raise"
    )
    outcome = fails(ranks, code)
    assert outcome.evalue == "rank 0 raised ValueError: the cause"
    *_, other, last = outcome.traceback.splitlines()
    assert other.startswith("rank 1: ") and other.endswith(", caused by the failure of rank 0")
    assert last.startswith("nbdist: ")


def test_rank_error_is_caught_in_a_cell_and_carries_every_rank_s_exception(ranks: Kernel) -> None:
    ranks.ok(
        "import nbdist\n"
        "try:\n"
        "    nbdist.get_session().run('raise KeyError(rank)')\n"
        "except nbdist.RankError as error:\n"
        "    caught = error\n"
    )
    assert ranks.value("sorted((f.rank, f.kind, f.name, f.text) for f in caught.failures.values())") == [
        (0, "raised", "KeyError", "0"),
        (1, "raised", "KeyError", "1"),
    ]
    assert ranks.value("[caught.exceptions[rank].args for rank in (0, 1)]") == [(0,), (1,)]
    assert ranks.value("caught.first.rank == next(iter(caught.failures))") is True
    assert ranks.value("'Traceback' in caught.failures[1].traceback") is True


def test_rank_error_is_caught_around_a_magic_too(ranks: Kernel) -> None:
    ranks.ok(
        "import nbdist\n"
        "try:\n"
        "    get_ipython().run_cell_magic('distributed', '', '1/0')\n"
        "except nbdist.RankError as error:\n"
        "    caught = repr(error.first.exception)"
    )
    assert ranks.value("caught") == "ZeroDivisionError('division by zero')"


def test_an_exception_that_only_ranks_know_comes_as_text(ranks: Kernel) -> None:
    ranks.ok(
        "import nbdist\n"
        "try: nbdist.get_session().run('class Own(Exception): pass\\nraise Own(\"mine\")')\n"
        "except nbdist.RankError as error: caught = error"
    )
    assert ranks.value("(caught.first.name, caught.first.text, caught.first.exception)") == ("Own", "mine", None)


@pytest.mark.parametrize(
    "argument", ["__import__('torch').ones(2)", "'x' * 2_000_000", "__import__('threading').Lock()"]
)
def test_an_exception_that_holds_what_should_not_travel_comes_as_text(ranks: Kernel, argument: str) -> None:
    ranks.ok(
        "import nbdist\n"
        f"try: nbdist.get_session().run(\"raise ValueError('short', [{argument}])\")\n"
        "except nbdist.RankError as error: caught = error"
    )
    assert ranks.value("(caught.first.name, 'short' in caught.first.text, caught.first.exception)") == (
        "ValueError",
        True,
        None,
    )


def test_the_cause_of_an_exception_is_shown_before_it(ranks: Kernel) -> None:
    code = (
        "import json\n"
        "try:\n"
        "    json.loads('{')\n"
        "except ValueError as error:\n"
        "    raise RuntimeError('outer') from error"
    )
    text = fails(ranks, code).traceback
    assert text.index("JSONDecodeError") < text.index("direct cause") < text.rindex("RuntimeError: outer")


if sys.version_info >= (3, 11):

    def test_an_exception_group_is_shown_with_all_its_parts(ranks: Kernel) -> None:
        outcome = fails(ranks, "raise ExceptionGroup('several', [ValueError('one'), KeyError('two')])")
        assert "raised ExceptionGroup: several (2 sub-exceptions)" in outcome.evalue
        assert "ValueError: one" in outcome.traceback and "KeyError: 'two'" in outcome.traceback
        assert f"Cell In[{number_of(outcome)}], line 2" in outcome.traceback
        assert "nbdist/" not in outcome.traceback and "interactiveshell" not in outcome.traceback


def test_an_exception_whose_text_can_not_be_made_is_still_named(ranks: Kernel) -> None:
    outcome = fails(
        ranks, "class Mute(Exception):\n    def __str__(self): raise OSError('no text')\n\nraise Mute", "%%rank 0"
    )
    assert outcome.evalue == "rank 0 raised Mute: <its str() raised OSError>"
    assert "line 5" in outcome.traceback


def test_a_huge_message_is_cut_on_the_page_and_whole_in_the_error(ranks: Kernel) -> None:
    outcome = fails(ranks, "raise ValueError('x' * 1_000_000)", "%%rank 0")
    assert len(outcome.evalue) < 1000 and len(outcome.traceback) < 50_000
    assert "error.failures[0].traceback" in outcome.traceback
    ranks.ok(
        "import nbdist\n"
        "try: nbdist.get_session().run('raise ValueError(\"x\" * 1_000_000)')\n"
        "except nbdist.RankError as error: caught = error"
    )
    assert ranks.value("len(caught.first.text)") == 1_000_000


def test_endless_recursion_is_reported_in_short(ranks: Kernel) -> None:
    outcome = fails(ranks, "def deeper(n):\n    return deeper(n + 1)\ndeeper(0)")
    assert "RecursionError" in outcome.evalue and len(outcome.traceback.splitlines()) < 60


WATCHED = """
import sys, types
class Watched(types.ModuleType):
    looks = 0
    @property
    def __file__(self):
        Watched.looks += 1
        return '/nowhere/watched.py'
def again(): again()
sys.modules['watched'] = Watched('watched')"""


def test_a_traceback_of_cells_is_made_without_a_search_of_the_loaded_modules(ranks: Kernel) -> None:
    """There are thousands of them, and Python would look at each for each frame."""
    ranks.ok(f"%%distributed\n{WATCHED}")
    fails(ranks, "again()")
    looks = "print(Watched.looks); del sys.modules['watched']"
    assert ranks.ok(f"%%distributed\n{looks}").lines == {0: ["0"], 1: ["0"]}


def test_an_exception_that_draws_its_own_traceback_may(ranks: Kernel) -> None:
    code = "class Drawn(Exception):\n    def _render_traceback_(self): return ['drawn by itself']\nraise Drawn"
    assert "drawn by itself" in fails(ranks, code).traceback


FAIL = (
    "import sys, weakref, torch, threading, pathlib, time\n"
    "class Held: pass\n"
    "def fail():\n"
    "    held = Held()\n"
    "    held.tensor = torch.ones(8)\n"
    "    watched.append(weakref.ref(held.tensor))\n"
    "    try:\n"
    "        raise KeyError('inner')\n"
    "    except KeyError:\n"
    "        raise ValueError(held)\n"
)


def says(path: Path, text: str) -> bool:
    return path.read_text() == text


def test_a_failed_cell_s_frames_live_until_the_next_cell_starts(ranks: Kernel, tmp_path: Path) -> None:
    look = (
        "def look(folder):\n"
        "    while not (folder / 'go').exists(): time.sleep(0.01)\n"
        "    (folder / f'seen{rank}').write_text(str(watched[0]() is not None))\n"
        f"threading.Thread(target=look, args=(pathlib.Path({str(tmp_path)!r}),)).start()\n"
    )
    fails(ranks, f"watched = []\n{FAIL}{look}fail()")
    (tmp_path / "go").touch()
    for rank in (0, 1):
        wait_until((tmp_path / f"seen{rank}").exists, f"rank {rank} to look")
        wait_until(functools.partial(says, tmp_path / f"seen{rank}", "True"), "the tensor to be alive")
    assert ranks.ok("%%distributed\nwatched[0]() is None").plain == ["[0-1] True"]


@pytest.mark.parametrize("work", ["push", "call", "free"])
def test_other_work_frees_a_failed_cell_s_frames_too(ranks: Kernel, work: str) -> None:
    ranks.ok("%%distributed\nwatched = []")
    fails(ranks, f"{FAIL}fail()")
    look = "[ref() is None for ref in sys.modules['__main__'].watched]"
    ranks.ok("import nbdist, sys\nsession = nbdist.get_session()")
    ranks.ok(
        {
            "push": "session.push({'unused': 1})",
            "call": "session.call(int)",
            "free": "session.free()",
        }[work]
    )
    assert ranks.value(f"session.pull({look!r})") == [[True], [True]]


def test_a_failed_cell_s_dataloader_workers_end_when_the_next_cell_starts(ranks: Kernel) -> None:
    def workers() -> list[int]:
        return [child.pid for pid in ranks.rank_pids() for child in psutil.Process(pid).children()]

    assert workers() == []
    fails(
        ranks,
        "import torch\n"
        "def work():\n"
        "    batches = iter(torch.utils.data.DataLoader(range(100), num_workers=2))\n"
        "    next(batches)\n"
        "    1/0\n"
        "work()",
    )
    assert len(workers()) == 4
    ranks.ok("%%distributed\n1")
    wait_until(lambda: not workers(), "the workers to end")


def test_after_a_failure_variables_are_kept_and_the_next_cell_works(ranks: Kernel) -> None:
    fails(ranks, "kept = rank + 5\n1/0")
    assert ranks.ok("%%distributed\nkept").plain == ["[0] 5\n[1] 6"]


def test_a_syntax_error_is_shown_once_with_its_line_and_runs_nowhere(ranks: Kernel) -> None:
    outcome = ranks.run("%%distributed\nran_anyway = True\nx = = 3")
    assert outcome.status == "error" and "so it did not run" in outcome.evalue
    assert f'"Cell In[{number_of(outcome)}]", line 3' in outcome.traceback
    assert outcome.traceback.count("SyntaxError") == 1
    assert ranks.ok("%%distributed\n'ran_anyway' in globals()").plain == ["[0-1] False"]


@pytest.mark.parametrize("code", ["return 1", "nonlocal x", "def f(a, a): pass", "x = 'a", "    x = 1\n  y = 2"])
def test_every_kind_of_syntax_error_is_found_before_anything_runs(ranks: Kernel, code: str) -> None:
    outcome = ranks.run(f"%%distributed\nran_anyway = True\n{code}")
    assert outcome.ename == "UsageError" and "so it did not run" in outcome.evalue
    assert "rank " not in outcome.traceback


def test_a_syntax_error_of_what_a_cell_evaluates_is_the_ranks_failure(ranks: Kernel) -> None:
    outcome = fails(ranks, "eval('1 +')")
    assert "SyntaxError" in outcome.evalue and outcome.traceback.splitlines()[-1].endswith("same")
