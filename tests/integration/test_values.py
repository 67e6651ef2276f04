from __future__ import annotations

import pytest

from testbed.kernel import Kernel, both, wait_until
from tests.support.roles import open_files


def on_ranks(kernel: Kernel, code: str, magic: str = "%%distributed") -> list[str]:
    return kernel.ok(f"{magic}\n{code}").plain


def test_push_copies_variables_to_every_rank(ranks: Kernel) -> None:
    ranks.ok("x, y = [1, 'two'], {'three': 3.0}\n%distributed push x y")
    assert on_ranks(ranks, "x, y") == ["[0-1] ([1, 'two'], {'three': 3.0})"]


def test_names_may_stand_as_in_python_with_commas(ranks: Kernel) -> None:
    ranks.ok("x, y = 1, 2\n%distributed push x, y")
    ranks.ok("%distributed pull x, y")
    assert ranks.value("(x, y)") == ([1, 1], [2, 2])


def test_push_reaches_only_the_ranks_that_were_named(ranks: Kernel) -> None:
    ranks.ok("mine = 1\n%distributed push mine -r 1")
    assert on_ranks(ranks, "'mine' in globals()") == ["[0] False\n[1] True"]


def test_each_rank_s_copy_is_its_own(ranks: Kernel) -> None:
    ranks.ok("import torch\nweights = torch.zeros(3)\n%distributed push weights")
    on_ranks(ranks, "weights += rank + 1")
    assert on_ranks(ranks, "weights.tolist()") == ["[0] [1.0, 1.0, 1.0]\n[1] [2.0, 2.0, 2.0]"]
    assert ranks.value("weights.tolist()") == [0.0, 0.0, 0.0]


def test_tensors_that_share_memory_still_do_after_a_push(ranks: Kernel) -> None:
    ranks.ok("import torch\nwhole = torch.zeros(4)\npart = whole[:2]\n%distributed push whole part")
    assert on_ranks(ranks, "part += 1\nwhole.tolist()") == ["[0-1] [1.0, 1.0, 0.0, 0.0]"]


def test_classes_and_functions_of_the_notebook_travel_by_value(ranks: Kernel) -> None:
    ranks.ok(
        "base = 40\n"
        "class Local:\n"
        "    def answer(self): return base + 2\n"
        "thing, function = Local(), lambda: Local().answer()\n"
        "%distributed push thing function"
    )
    assert on_ranks(ranks, "thing.answer(), function()") == ["[0-1] (42, 42)"]


def test_pull_makes_a_list_by_rank(ranks: Kernel) -> None:
    on_ranks(ranks, "loss = rank + 0.5")
    ranks.ok("%distributed pull loss")
    assert ranks.value("loss") == [0.5, 1.5]


def test_pull_from_one_rank_gives_its_bare_value_under_the_name_that_was_asked_for(ranks: Kernel) -> None:
    on_ranks(ranks, "loss = rank + 0.5")
    ranks.ok("loss = 'local'\n%distributed pull loss -r 1 --as second")
    assert ranks.value("(loss, second)") == ("local", 1.5)


def test_pull_from_several_ranks_gives_them_in_order(ranks: Kernel) -> None:
    on_ranks(ranks, "loss = rank")
    ranks.ok("%distributed pull loss -r 1,0")
    assert ranks.value("loss") == [0, 1]


def test_pull_takes_several_names_or_an_expression(ranks: Kernel) -> None:
    on_ranks(ranks, "first, second = rank, [rank, 'b']")
    ranks.ok("%distributed pull first second\n%distributed pull second[1] --as letter -r 0")
    assert ranks.value("(first, second, letter)") == ([0, 1], [[0, "b"], [1, "b"]], "b")


def test_pull_of_several_names_changes_nothing_when_one_is_missing(ranks: Kernel) -> None:
    on_ranks(ranks, "there = 1")
    ranks.ok("there = 'local'")
    ranks.fails("%distributed pull there not_there", "UsageError")
    assert ranks.value("there") == "local"


def test_pull_of_a_name_that_some_ranks_lack_names_them_and_what_to_type(ranks: Kernel) -> None:
    on_ranks(ranks, "only_here = 1", "%%rank 1")
    outcome = ranks.fails("%distributed pull only_here", "UsageError")
    assert "rank 0 has no 'only_here'" in outcome.evalue
    assert "`%distributed pull only_here -r 1`" in outcome.evalue


def test_pull_of_a_misspelt_name_suggests_the_right_one(ranks: Kernel) -> None:
    on_ranks(ranks, "learning_rate = 1")
    outcome = ranks.fails("%distributed pull lerning_rate", "UsageError")
    assert "ranks 0-1 have no 'lerning_rate'" in outcome.evalue and "learning_rate" in outcome.evalue


def test_a_name_that_is_missing_inside_of_what_is_pulled_is_an_error_of_its_own(ranks: Kernel) -> None:
    on_ranks(ranks, "class Model:\n    @property\n    def loss(self): return undefined\nbroken = Model()")
    outcome = ranks.fails("%distributed pull broken.loss --as loss", "RankError")
    assert "NameError: name 'undefined' is not defined" in outcome.evalue


def test_push_of_what_does_not_pickle_names_the_variable_and_the_part(ranks: Kernel) -> None:
    ranks.ok("import threading\nfine, state = 1, {'locks': [threading.Lock()]}")
    outcome = ranks.fails("%distributed push fine state", "TransferError")
    assert "cannot send 'state': state['locks'][0] is a _thread.lock" in outcome.evalue
    assert on_ranks(ranks, "'fine' in globals()") == ["[0-1] False"]


def test_pull_of_what_does_not_pickle_names_rank_variable_and_part(ranks: Kernel) -> None:
    on_ranks(ranks, "import threading\nstate = {'locks': [threading.Lock()]}")
    outcome = ranks.run("%distributed pull state -r 1")
    assert "rank 1" in outcome.evalue and "state['locks'][0] is a _thread.lock" in outcome.evalue
    assert outcome.traceback.count("_thread.lock") == 1


def test_push_of_a_name_that_the_notebook_lacks_says_so(ranks: Kernel) -> None:
    outcome = ranks.fails("%distributed push never_defined", "UsageError")
    assert "can't push 'never_defined'" in outcome.evalue


def test_a_large_tensor_travels_both_ways_unchanged(ranks: Kernel) -> None:
    ranks.ok("import torch\nlarge = torch.arange(4_000_000)\n%distributed push large")
    on_ranks(ranks, "large += rank")
    ranks.ok("%distributed pull large --as returned")
    assert ranks.value("[bool((torch.arange(4_000_000) + rank == returned[rank]).all()) for rank in (0, 1)]") == [
        True,
        True,
    ]


def test_ranks_are_named_in_python_as_they_are_typed(ranks: Kernel) -> None:
    ranks.ok("import nbdist\nsession = nbdist.get_session()")
    assert ranks.value("(session.call(lambda: 1, ranks=1), session.pull('rank', '0-1'))") == ([1], [0, 1])
    assert ranks.value("sorted(session.run('rank', ranks='1'))") == [1]
    assert ranks.value("repr(session)") == "<nbdist.Session: ranks 0-1 on cpu>"


def test_the_session_pushes_and_pulls_from_python(ranks: Kernel) -> None:
    ranks.ok("import nbdist\nsession = nbdist.get_session()\nsession.push({'a': 1})\nsession.push({'a': 2}, ranks=[1])")
    assert ranks.value("(session.pull('a'), session.pull('a', ranks=1))") == ([1, 2], 2)
    assert ranks.value("session.pull('a', ranks=[1])") == [2]


BIG_ON_RANK_0 = """
import nbdist, os
session = nbdist.get_session()
def big_or_error():
    return bytes(4 << 20) if os.environ["RANK"] == "0" else 1 / 0
session.push({"notebook": os.getpid(), "first": session.ranks[0].pid})
session.run('''
import contextlib, os, time
big = bytes(4 << 20)
def interrupt_when_rank_0_has_packed():
    def has_packed():
        for name in os.listdir(f"/proc/{first}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if "memfd" in os.readlink(f"/proc/{first}/fd/{name}"):
                    return True
    while not has_packed(): time.sleep(0.005)
    os.kill(notebook, 2)
    time.sleep(60)
''')
"""


@pytest.mark.parametrize(
    ("work", "error"),
    [
        ("session.pull('big if rank == 0 else 1 / 0')", "RankError"),
        ("session.pull('big if rank == 0 else nowhere')", "UsageError"),
        ("session.pull('big if rank == 0 else interrupt_when_rank_0_has_packed()')", "KeyboardInterrupt"),
        ("session.call(big_or_error)", "RankError"),
    ],
)
def test_what_other_ranks_have_packed_is_let_go_of_when_it_can_not_be_taken(
    work: str, error: str, ranks: Kernel
) -> None:
    ranks.ok(BIG_ON_RANK_0)
    ranks.fails(work, error)
    wait_until(lambda: not _parcels(ranks.rank_pids()[0]), "the end of rank 0's parcel")


def test_call_runs_a_function_on_ranks_and_returns_by_rank(ranks: Kernel) -> None:
    ranks.ok(
        "import nbdist\n"
        "scale = 10\n"
        "def work(start, step=1):\n"
        "    import torch.distributed as dist\n"
        "    return start + step * scale * dist.get_rank()\n"
    )
    assert ranks.value("nbdist.get_session().call(work, 5, step=2)") == [5, 25]
    assert ranks.value("nbdist.get_session().call(work, 5, ranks=[1])") == [15]


def test_call_of_a_function_that_raises_names_its_line(ranks: Kernel) -> None:
    ranks.ok("import nbdist\ndef fails_there(x):\n    return x / 0")
    outcome = ranks.fails("nbdist.get_session().call(fails_there, 1)", "RankError")
    assert "ZeroDivisionError: division by zero" in outcome.evalue
    assert "line 3, in fails_there" in outcome.traceback and "----> 3     return x / 0" in outcome.traceback


def test_what_a_called_function_prints_is_shown(ranks: Kernel) -> None:
    assert ranks.ok("import nbdist\nnbdist.get_session().call(print, 'hello');").lines == both("hello")


def test_run_returns_output_and_last_values_by_rank_and_shows_nothing(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "import nbdist\n"
        "result = nbdist.get_session().run('import sys\\nprint(rank)\\nsys.stderr.write(\"e\")\\nrank * 2', ranks=[1])"
    )
    assert outcome.stdout == "" and outcome.stderr == "" and outcome.plain == []
    assert ranks.value("[(r, v.stdout, v.stderr, v.result, v.error) for r, v in result.items()]") == [
        (1, "1\n", "e", "2", None)
    ]


def test_run_with_a_timeout_interrupts_the_ranks(ranks: Kernel) -> None:
    code = "import nbdist\nnbdist.get_session().run('import time; time.sleep(60)', timeout=0.2)"
    outcome = ranks.fails(code, "RankTimeout")
    assert "0.2 s" in outcome.evalue
    assert on_ranks(ranks, "'idle'") == ["[0-1] 'idle'"]


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("session.run('1', ranks=[5])", "rank 5 isn't in this session"),
        ("session.run('1', ranks=[])", "an empty set isn't in this session"),
        ("session.push({'no name': 1})", "'no name' is not a variable name"),
    ],
)
def test_the_session_refuses_what_can_not_be_done(ranks: Kernel, code: str, part: str) -> None:
    ranks.ok("import nbdist\nsession = nbdist.get_session()")
    assert part in ranks.fails(code, "UsageError").evalue


def _parcels(pid: int) -> int:
    """How many segments of memory a process keeps for others."""
    return sum("memfd" in file for file in open_files(pid))
