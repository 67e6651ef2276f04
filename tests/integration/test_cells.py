from __future__ import annotations

import pytest

from testbed.kernel import Kernel, Outcome, both, lines_by_rank
from tests.support.cells import number_of


def on_ranks(kernel: Kernel, code: str) -> Outcome:
    return kernel.ok(f"%%distributed\n{code}")


def test_a_cell_runs_on_every_rank(ranks: Kernel) -> None:
    assert sorted(on_ranks(ranks, "print(rank)").stdout.splitlines()) == ["[0] 0", "[1] 1"]


def test_the_last_value_of_each_rank_is_shown_in_one_output(ranks: Kernel) -> None:
    assert on_ranks(ranks, "rank + 10").plain == ["[0] 10\n[1] 11"]


def test_a_last_value_that_all_ranks_share_is_shown_once(ranks: Kernel) -> None:
    assert on_ranks(ranks, "'same'").plain == ["[0-1] 'same'"]


@pytest.mark.parametrize("code", ["rank;", "value = rank", "None", "# nothing"])
def test_without_a_last_value_nothing_is_shown(ranks: Kernel, code: str) -> None:
    outcome = on_ranks(ranks, code)
    assert outcome.plain == [] and outcome.stdout == "" and outcome.stderr == ""


def test_each_rank_knows_who_it_is(ranks: Kernel) -> None:
    shown = on_ranks(ranks, "rank, local_rank, world_size, device.type").plain
    assert shown == ["[0] (0, 0, 2, 'cpu')\n[1] (1, 1, 2, 'cpu')"]


def test_names_of_the_notebook_and_of_the_ranks_are_apart(ranks: Kernel) -> None:
    ranks.ok("separate = 'notebook'")
    on_ranks(ranks, "separate = 'ranks'")
    assert ranks.value("separate") == "notebook"
    assert ranks.value("'rank' in globals()") is False
    assert on_ranks(ranks, "separate").plain == ["[0-1] 'ranks'"]


def test_line_time_tells_each_rank_s_time_and_runs_in_its_namespace(ranks: Kernel) -> None:
    outcome = on_ranks(ranks, "%time timed = sum(range(10))")
    assert "[0] Wall time" in outcome.stdout.replace("[0-1]", "[0]")
    assert on_ranks(ranks, "timed").plain == ["[0-1] 45"]


def test_cell_time_runs_the_cell_and_shows_its_value(ranks: Kernel) -> None:
    outcome = on_ranks(ranks, "%%time\ntimed = rank\ntimed + 1")
    assert outcome.stdout.count("Wall time") in (1, 2)
    assert outcome.plain == ["[0] 1\n[1] 2"]


def test_timeit_measures_on_the_ranks(ranks: Kernel) -> None:
    assert "per loop" in on_ranks(ranks, "%timeit -n 2 -r 1 rank + 1").stdout


def test_a_shell_command_prints_as_the_rank_and_leaves_its_exit_code(ranks: Kernel) -> None:
    outcome = on_ranks(ranks, "!echo out; echo err >&2; exit 4\n_exit_code")
    assert outcome.lines == both("out")
    assert lines_by_rank(outcome.stderr) == both("err")
    assert outcome.plain == ["[0-1] 4"]


def test_a_shell_command_sees_the_rank_s_variables_and_environment(ranks: Kernel) -> None:
    outcome = on_ranks(ranks, "word = f'w{rank}'\n!echo {word} $$RANK")
    assert sorted(outcome.stdout.splitlines()) == ["[0] w0 0", "[1] w1 1"]


def test_the_output_of_a_shell_command_can_be_assigned(ranks: Kernel) -> None:
    outcome = on_ranks(ranks, "lines = !echo a; echo b\nlines")
    assert outcome.plain == ["[0-1] ['a', 'b']"] and outcome.stdout == ""


def test_a_question_mark_shows_documentation_and_two_the_source(ranks: Kernel) -> None:
    on_ranks(ranks, "def documented(a):\n    'what it does'\n    return a + 41")
    assert "what it does" in on_ranks(ranks, "documented?").plain[0]
    assert "41" in on_ranks(ranks, "documented??").plain[0]


def test_await_works_at_top_level(ranks: Kernel) -> None:
    assert on_ranks(ranks, "import asyncio\nawait asyncio.sleep(0, rank)").plain == ["[0] 0\n[1] 1"]


def test_underscores_hold_the_last_values(ranks: Kernel) -> None:
    on_ranks(ranks, "'older'")
    on_ranks(ranks, "'newer'")
    assert on_ranks(ranks, "_, __").plain == ["[0-1] ('newer', 'older')"]


def test_in_and_out_are_indexed_by_the_numbers_that_the_notebook_shows(ranks: Kernel) -> None:
    ranks.ok("'a local cell in between'")
    number = number_of(on_ranks(ranks, "rank + 100"))
    shown = on_ranks(ranks, f"Out[{number}], In[{number}], _{number}").plain
    assert shown == ["[0] (100, 'rank + 100', 100)\n[1] (101, 'rank + 100', 101)"]


def test_a_rank_s_names_do_not_grow_with_its_cells(ranks: Kernel) -> None:
    run_twenty = "import nbdist\nfor _ in range(20): nbdist.get_session().run('pass')"
    names = []
    for _ in range(2):
        ranks.ok(run_twenty)
        names.append(on_ranks(ranks, "len(globals()) - len(Out)").plain)  # each value has a name of its own
    assert names[0] == names[1]


def test_cells_run_in_main(ranks: Kernel) -> None:
    code = "import sys\nmine = 1\n__name__, sys.modules['__main__'].mine"
    assert on_ranks(ranks, code).plain == ["[0-1] ('__main__', 1)"]


def test_classes_and_functions_of_cells_pickle(ranks: Kernel) -> None:
    on_ranks(ranks, "class Thing: pass\ndef work(): pass")
    code = (
        "import pickle\n"
        "again = pickle.loads(pickle.dumps((Thing(), work)))\n"
        "isinstance(again[0], Thing), again[1] is work"
    )
    assert on_ranks(ranks, code).plain == ["[0-1] (True, True)"]


def test_a_dataset_class_of_a_cell_works_in_dataloader_workers(ranks: Kernel) -> None:
    on_ranks(
        ranks,
        "import torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, at): return torch.tensor(at * at + rank)\n"
        "def double(batch): return [2 * int(value) for value in batch]",
    )
    code = "list(torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2, collate_fn=double))"
    assert on_ranks(ranks, code).plain == ["[0] [[0, 2], [8, 18]]\n[1] [[2, 4], [10, 20]]"]


def test_the_source_of_functions_and_methods_of_cells_is_found(ranks: Kernel) -> None:
    on_ranks(
        ranks, "\n\ndef function():\n    return 'in a function'\nclass Owner:\n    def method(self):\n        return 1"
    )
    outcome = on_ranks(
        ranks, "import inspect\nprint(inspect.getsource(function), inspect.getsource(Owner.method), sep='')"
    )
    lines = ["def function():", "    return 'in a function'", "    def method(self):", "        return 1"]
    assert {rank: printed[:4] for rank, printed in outcome.lines.items()} == both(*lines)


CLASSES = """import dataclasses, inspect
class Outer:
    there = 1
    class Inner: depth = 2

def mark(kind): return kind

@mark
class Decorated:
    there = 3

@dataclasses.dataclass
class Data:
    field: int = 4

def make():
    class Local:
        there = 5
    return Local

class Method(Outer):
    def first(self): return 6
"""
SOURCES = {
    "Outer": ["class Outer:", "    there = 1", "    class Inner: depth = 2"],
    "Outer.Inner": ["    class Inner: depth = 2"],
    "Decorated": ["@mark", "class Decorated:", "    there = 3"],
    "Data": ["@dataclasses.dataclass", "class Data:", "    field: int = 4"],
    "make()": ["    class Local:", "        there = 5"],
    "Method": ["class Method(Outer):", "    def first(self): return 6"],
}


def test_the_source_of_classes_of_cells_is_found(ranks: Kernel) -> None:
    on_ranks(ranks, CLASSES)
    for kind, lines in SOURCES.items():
        assert on_ranks(ranks, f"print(inspect.getsource({kind}), end='')").lines == both(*lines), kind


def test_the_source_of_a_class_that_was_defined_again_is_the_newest(ranks: Kernel) -> None:
    on_ranks(ranks, "import inspect\nclass Again:\n    there = 1")
    on_ranks(ranks, "old = Again\nclass Again:\n    there = 2\n    def method(self): return 3")
    on_ranks(ranks, "class Again:\n    there = 4")
    lines = ["class Again:", "    there = 4"]
    assert on_ranks(ranks, "print(inspect.getsource(Again), end='')").lines == both(*lines)


def test_the_source_of_a_class_that_no_cell_has_defined_is_not_found_as_ever(ranks: Kernel) -> None:
    code = (
        "import inspect\n"
        "errors = []\n"
        "for kind in (type('Made', (), {}), int):\n"
        "    try: inspect.getsource(kind)\n"
        "    except (OSError, TypeError) as error: errors.append(type(error).__name__)\n"
        "errors"
    )
    assert on_ranks(ranks, code).plain == ["[0-1] ['OSError', 'TypeError']"]


@pytest.mark.parametrize("code", ["import sys; sys.exit()", "exit", "exit()", "quit()", "raise SystemExit(0)"])
def test_an_exit_without_a_code_ends_the_cell_and_not_the_rank(ranks: Kernel, code: str) -> None:
    pids = ranks.rank_pids()
    outcome = on_ranks(ranks, f"print('before')\n{code}\nprint('after')" if code != "exit" else "print('before')\nexit")
    assert outcome.lines == both("before") and outcome.stderr == ""
    on_ranks(ranks, "1")
    assert ranks.rank_pids() == pids


def test_an_exit_with_a_code_fails_the_cell_and_names_its_line(ranks: Kernel) -> None:
    outcome = ranks.fails("%%distributed\nimport sys\nsys.exit(3)", "RankError")
    assert "rank 0 raised SystemExit: 3" in outcome.traceback or "rank 1 raised SystemExit: 3" in outcome.traceback
    assert "line 3" in outcome.traceback
    assert "%tb" not in outcome.traceback
    assert on_ranks(ranks, "'alive'").plain == ["[0-1] 'alive'"]


def test_display_shows_rich_output(ranks: Kernel) -> None:
    outcome = on_ranks(ranks, "from IPython.display import HTML\ndisplay(HTML('<b>bold</b>'))")
    assert [data["text/html"] for data in outcome.displays if "bold" in data.get("text/html", "")] == ["<b>bold</b>"]


def test_figures_are_shown_as_images(ranks: Kernel) -> None:
    outcome = on_ranks(ranks, "import matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    assert any("image/png" in data for data in outcome.displays)


def test_an_empty_body_below_the_magic_runs_and_shows_nothing(ranks: Kernel) -> None:
    outcome = on_ranks(ranks, "\n\n")
    assert outcome.displays == [] and outcome.stdout == ""
