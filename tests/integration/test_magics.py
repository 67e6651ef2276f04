from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from nbdist.client.magic_lines.parsers import verb_parsers
from testbed.kernel import Kernel, both, lines_by_rank, wait_until
from tests.support.cells import number_of


@pytest.fixture
def auto(ranks: Kernel) -> Iterator[Kernel]:
    """Every cell runs on all ranks."""
    ranks.ok("%distributed auto on")
    yield ranks
    ranks.ok("%distributed auto off")


@pytest.mark.parametrize(
    ("magic", "shown"),
    [
        ("%%distributed -r 1", "[1] 1"),
        ("%%distributed --ranks 0-1", "[0] 0\n[1] 1"),
        ("%%distributed -r all", "[0] 0\n[1] 1"),
        ("%%dist", "[0] 0\n[1] 1"),
        ("%%dist -r 0", "[0] 0"),
        ("%%rank 1", "[1] 1"),
        ("%%rank 0, 1", "[0] 0\n[1] 1"),
        ("%%rank 0 --timeout 60", "[0] 0"),
        ("%%distributed -r 1  # that's the second", "[1] 1"),
        ("%%rank 1  # the second", "[1] 1"),
    ],
)
def test_a_cell_runs_on_the_ranks_that_were_named(ranks: Kernel, magic: str, shown: str) -> None:
    assert ranks.ok(f"{magic}\nrank").plain == [shown]


def test_quiet_shows_no_output(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed --quiet\nimport sys\nprint('o')\nprint('e', file=sys.stderr)\ndisplay(1)\n2")
    assert (outcome.stdout, outcome.stderr, outcome.plain) == ("", "", [])


def test_quiet_shows_errors(ranks: Kernel) -> None:
    assert "ZeroDivisionError" in ranks.fails("%%distributed --quiet\n1/0", "RankError").traceback


def test_a_timeout_interrupts_the_ranks_and_says_so(ranks: Kernel) -> None:
    outcome = ranks.fails("%%distributed --timeout 0.3\nimport time\nkept = 1\ntime.sleep(60)", "RankTimeout")
    assert "not done after 0.3 s" in outcome.evalue
    assert "line 4" in outcome.traceback
    assert ranks.ok("%%distributed\nkept").plain == ["[0-1] 1"]


def test_a_timeout_does_nothing_to_a_cell_that_is_done_in_time(ranks: Kernel) -> None:
    assert ranks.ok("%%distributed --timeout 30\n1").plain == ["[0-1] 1"]


CAPTURED = (
    "import sys\n"
    "print('first', rank); print('no newline', end='')\n"
    "sys.stderr.write('wrong\\r\\n')\n"
    "display({'text/html': '<b>bold</b>', 'text/plain': 'bold'}, raw=True)\n"
    "rank * 2"
)


def test_capture_keeps_everything_exactly_and_shows_nothing(ranks: Kernel) -> None:
    outcome = ranks.ok(f"%%distributed --capture kept\n{CAPTURED}")
    assert (outcome.stdout, outcome.stderr, outcome.plain) == ("", "", [])
    assert ranks.value("sorted(kept)") == [0, 1]
    assert ranks.value("[(r.stdout, r.stderr, r.outputs, r.result, r.error) for r in kept.values()]") == [
        (
            f"first {rank}\nno newline",
            "wrong\r\n",
            [{"text/html": "<b>bold</b>", "text/plain": "bold"}, {"text/plain": str(2 * rank)}],
            str(2 * rank),
            None,
        )
        for rank in (0, 1)
    ]


def test_capture_with_tee_shows_the_output_as_well(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed --capture kept --tee\nprint('seen')\n5")
    assert outcome.lines == both("seen") and outcome.plain == ["[0-1] 5"]
    assert ranks.value("(kept[1].stdout, kept[1].result)") == ("seen\n", "5")


def test_capture_of_a_cell_that_fails_has_the_output_and_the_error(ranks: Kernel) -> None:
    ranks.fails("%%distributed --capture kept\nprint('before')\nif rank == 1: raise KeyError('why')\n7", "RankError")
    assert ranks.value("(kept[0].error, kept[0].result, kept[0].stdout)") == (None, "7", "before\n")
    assert ranks.value("(kept[1].error.name, kept[1].error.text, kept[1].result, kept[1].stdout)") == (
        "KeyError",
        "'why'",
        None,
        "before\n",
    )


def test_a_capture_says_which_ranks_it_has(ranks: Kernel) -> None:
    ranks.ok("%%distributed -r 1 --capture kept\n1")
    assert "rank 0 did not run this cell" in ranks.fails("kept[0]", "KeyError").evalue


def test_a_capture_s_repr_is_one_line_a_rank(ranks: Kernel) -> None:
    ranks.ok("%%distributed --capture kept\nprint('four')")
    lines = ranks.ok("kept").plain[0].splitlines()
    assert [line.split(":")[0] for line in lines] == ["<rank 0", "<rank 1"]


# --- auto and local


def test_auto_runs_plain_cells_on_all_ranks(auto: Kernel) -> None:
    assert auto.ok("rank").plain == ["[0] 0\n[1] 1"]


def test_auto_off_brings_cells_back_to_the_notebook(ranks: Kernel) -> None:
    ranks.ok("%distributed auto on")
    assert "in the notebook again" in ranks.ok("%distributed auto off").stdout
    assert ranks.ok("'rank' in globals()").plain == ["False"]


def test_with_auto_on_magics_and_commands_run_on_the_ranks_as_well(auto: Kernel) -> None:
    assert auto.ok("%%time\nrank").plain == ["[0] 0\n[1] 1"]
    outcome = auto.ok("!echo $$RANK\nrank")
    assert sorted(outcome.stdout.splitlines()) == ["[0] 0", "[1] 1"]
    assert auto.ok("%time rank").stdout.count("Wall time") >= 1


@pytest.mark.parametrize(
    "around", ["%%time", "%%timeit -n 1 -r 1", "%%capture kept", "%%prun -q", "%%time\n%%capture kept"]
)
def test_with_auto_on_a_magic_may_stand_above_the_line_that_says_where_a_cell_runs(auto: Kernel, around: str) -> None:
    auto.ok(f"{around}\n%%distributed -r 1\nwhere = 'named'")
    auto.ok("%distributed pull where -r 1 --as first")
    assert auto.value("first") == "named"
    auto.ok(f"{around}\n%%rank 0\nwhere = 'short'")
    auto.ok("%distributed pull where -r 0 --as second")
    assert auto.value("second") == "short"
    auto.ok(f"{around}\n%%local\nassert 'rank' not in globals()")
    auto.ok(f"{around}\n%distributed status")


@pytest.mark.parametrize("above", ["# train", "# train\n\n# on all ranks", "%%memory\n# train", "# train\n%%memory"])
def test_comments_may_stand_above_the_line_that_says_where_a_cell_runs(auto: Kernel, above: str) -> None:
    assert auto.ok(f"{above}\n%%distributed -r 1\nrank").plain[0] == "[1] 1"
    assert auto.ok(f"{above}\n%%rank 0\nrank").plain[0] == "[0] 0"
    assert "'rank'" in auto.fails(f"{above}\n%%local\nrank", "NameError").evalue


def test_below_a_comment_code_keeps_its_line_in_a_traceback(ranks: Kernel) -> None:
    failed = ranks.fails("# train\n%%distributed\nx = 1\n1 / 0", "RankError")
    assert "line 4" in failed.traceback


def test_a_magic_above_keeps_what_ranks_print_and_one_below_works_on_each_rank(ranks: Kernel) -> None:
    ranks.ok("%%capture kept\n%%distributed\nprint('shared')")
    assert lines_by_rank(ranks.value("kept.stdout")) == both("shared")
    ranks.ok("%%distributed\n%%capture kept\nprint(rank)")
    ranks.ok("%distributed pull kept")
    assert ranks.value("[each.stdout for each in kept]") == ["0\n", "1\n"]
    assert ranks.ok("%%time\n%%distributed\npass").stdout.count("Wall time") == 1
    timed = ranks.ok("%%distributed\n%%time\npass").lines
    assert all(any(line.startswith("Wall time") for line in timed[rank]) for rank in (0, 1)), timed


@pytest.mark.parametrize(
    ("magic", "advice"),
    [("%%memory", "put it above `%%distributed`"), ("%%rank 0", "remove one of the two lines")],
)
def test_a_cell_magic_of_the_notebook_below_that_of_the_ranks_says_where_it_belongs(
    ranks: Kernel, magic: str, advice: str
) -> None:
    assert advice in ranks.fails(f"%%distributed -r 0\n{magic}\nx = 1", "RankError").evalue


def test_with_auto_on_the_session_s_own_magics_stay_in_the_notebook(auto: Kernel) -> None:
    assert auto.ok("%%distributed -r 1\nrank").plain == ["[1] 1"]
    assert auto.ok("%%rank 0\nrank").plain == ["[0] 0"]
    auto.ok("# a comment above\n%distributed pull rank --as pulled")
    assert auto.value("pulled") == [0, 1]


def test_local_runs_a_cell_in_the_notebook_while_auto_is_on(auto: Kernel) -> None:
    assert auto.ok("%%local\nstayed = 'here'\nstayed, 'rank' in globals()").plain == ["('here', False)"]
    assert auto.value("stayed") == "here"


def test_local_may_have_a_comment(auto: Kernel) -> None:
    assert auto.ok("%%local  # not on ranks\n'rank' in globals()").plain == ["False"]


@pytest.mark.parametrize("mark", ["", "%%memory\n"])
def test_another_magic_may_stand_below_local(auto: Kernel, mark: str) -> None:
    outcome = auto.ok(f"{mark}%%local\n%%time\n'rank' in globals()")
    assert outcome.plain[0] == "False"
    assert "Wall time" in outcome.stdout


def test_a_program_of_another_language_may_stand_below_local(auto: Kernel) -> None:
    outcome = auto.fails("%%local\n%%bash\nexit 3", "CalledProcessError")
    assert "exit status 3" in outcome.traceback


def test_nothing_inside_a_local_cell_goes_to_the_ranks(auto: Kernel) -> None:
    assert auto.ok("%%local\n%time 'rank' in globals()").plain == ["False"]
    assert auto.ok("%%local\nget_ipython().run_cell(\"'rank' in globals()\").result").plain == ["False", "False"]


def test_local_works_without_auto(ranks: Kernel) -> None:
    outcome = ranks.ok("%%local\n40 + 2")
    assert outcome.plain == ["42"]
    assert ranks.ok(f"Out[{number_of(outcome)}]").plain == ["42"]


def test_an_error_in_a_local_cell_looks_like_any_other(auto: Kernel) -> None:
    outcome = auto.fails("%%local\n\n1/0", "ZeroDivisionError")
    assert f"Cell In[{number_of(outcome)}], line 3" in outcome.traceback
    assert "nbdist" not in outcome.traceback


def test_with_auto_on_line_numbers_are_those_of_the_notebook(auto: Kernel) -> None:
    outcome = auto.fails("x = 1\n\n1/0", "RankError")
    assert f"Cell In[{number_of(outcome)}], line 3" in outcome.traceback


def test_with_auto_on_a_syntax_error_names_its_line(auto: Kernel) -> None:
    outcome = auto.fails("x = 1\ny = = 2", "UsageError")
    assert f'"Cell In[{number_of(outcome)}]", line 2' in outcome.traceback


def test_auto_is_visible_in_every_cell_and_in_the_status(auto: Kernel) -> None:
    assert auto.ok("x = 1").stdout == "ran on ranks 0-1\n"
    assert auto.ok("print('said')").lines == both("said")
    assert "auto is on" in auto.ok("%distributed status").stdout


def test_what_the_history_keeps_is_what_was_typed(auto: Kernel) -> None:
    outcome = auto.ok("typed = 1")
    assert auto.value(f"get_ipython().history_manager.input_hist_raw[{number_of(outcome)}]") == "typed = 1"


def test_comments_alone_are_no_trouble_with_auto_on(auto: Kernel) -> None:
    auto.ok("# nothing to do")
    auto.ok("")


# --- verbs


def test_status_is_a_table_of_ranks(ranks: Kernel) -> None:
    head, *rows = ranks.ok("%distributed status").stdout.splitlines()
    assert head.split() == ["rank", "pid", "device", "state", "generation", "memory", "GPU", "memory", "doing"]
    pids = ranks.rank_pids()
    assert [row.split()[:5] for row in rows] == [[str(rank), str(pids[rank]), "cpu", "idle", "1"] for rank in (0, 1)]


def test_status_says_what_busy_ranks_are_doing(ranks: Kernel) -> None:
    ranks.ok("%%distributed -r 1 --background\nimport time\ntime.sleep(60)")
    ranks.ok("handle = _")
    wait_until(lambda: "time.sleep(60)" in ranks.ok("%distributed status").stdout, "the rank to be in its sleep")
    idle, busy = ranks.ok("%distributed status").stdout.splitlines()[1:]
    assert "idle" in idle and "busy" in busy and "line 3: time.sleep(60)" in busy
    ranks.ok("handle.interrupt()\ntry: handle.wait()\nexcept KeyboardInterrupt: pass")


def test_interrupt_stops_background_cells_and_says_when_there_are_none(ranks: Kernel) -> None:
    ranks.ok("%%distributed --background\nimport time\ntime.sleep(60)")
    ranks.ok("handle = _")
    assert ranks.ok("%distributed interrupt").stdout == ""
    ranks.ok("try: handle.wait(10)\nexcept KeyboardInterrupt: pass")
    assert "nothing to interrupt" in ranks.ok("%distributed interrupt").stdout


def test_free_lets_go_of_old_results_and_caches(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nimport torch, weakref\nvalue = torch.ones(10_000_000)\nwatch = weakref.ref(value)\nvalue")
    ranks.ok("%%distributed\ndel value")
    assert ranks.ok("%%distributed\nwatch() is None").plain == ["[0-1] False"]
    head, *rows = ranks.ok("%distributed free").stdout.splitlines()
    assert head.split() == ["rank", "private", "memory", "freed", "left", "GPU", "memory", "freed", "left"]
    assert all(float(row.split()[1]) >= 30 and row.split()[2] == "MiB" for row in rows)
    assert ranks.ok("%%distributed\nwatch() is None").plain == ["[0-1] True"]
    assert ranks.ok("%%distributed\n_").plain == ["[0-1] True"]  # and the cache goes on


def test_logs_show_what_the_newest_cell_printed_by_rank(ranks: Kernel) -> None:
    ranks.ok("%%distributed --quiet\nprint('a'); print('b', rank)")
    assert ranks.ok("%distributed logs").stdout == "[0] a\n[0] b 0\n[1] a\n[1] b 1\n"
    assert ranks.ok("%distributed logs -r 1 --tail 1").stdout == "[1] b 1\n"


@pytest.mark.parametrize("line", ["%distributed", "%distributed --help", "%dist help"])
def test_help_lists_every_verb_and_the_cell_magic_s_flags(ranks: Kernel, line: str) -> None:
    text = ranks.ok(line).stdout
    for word in ("start", "stop", "restart", "status", "auto", "push", "pull", "logs", "free", "interrupt"):
        assert f"%distributed {word}" in text
    assert "--capture" in text and "--background" in text


@pytest.mark.parametrize("verb", list(verb_parsers()))
def test_every_verb_has_help(ranks: Kernel, verb: str) -> None:
    shown = ranks.ok(f"%distributed {verb} --help").stdout
    assert f"%distributed {verb}" in shown and ranks.ok(f"%distributed help {verb}").stdout == shown


def test_a_magic_of_the_notebook_on_a_rank_says_where_it_belongs(ranks: Kernel) -> None:
    outcome = ranks.fails("%%distributed\nx = 1\n%distributed status", "RankError")
    assert "%distributed works in the notebook, not on ranks" in outcome.evalue and "line 3" in outcome.traceback


def test_restart_and_stop(own_ranks: Kernel) -> None:
    """One kernel for the whole life of a session: restarts, a stop, a new start."""
    own_ranks.ok("%%distributed\nold = 1")
    before = own_ranks.rank_pids()
    own_ranks.ok("%distributed restart")
    assert own_ranks.ok("%%distributed\nworld_size, 'old' in globals()").plain == ["[0-1] (2, False)"]
    assert not any(psutil.pid_exists(pid) for pid in before)

    assert "1 rank ready" in own_ranks.ok("%distributed restart -n 1").stdout
    own_ranks.ok("%distributed pull rank")
    assert own_ranks.value("rank") == 0  # of one rank its bare value

    assert "3 ranks ready" in own_ranks.ok("%distributed start -n 3 --replace").stdout
    last = own_ranks.rank_pids()
    own_ranks.ok("%distributed auto on")
    stopped = own_ranks.ok("%distributed stop").stdout
    assert "3 ranks stopped" in stopped and "auto is off" in stopped
    assert not any(psutil.pid_exists(pid) for pid in last)
    assert own_ranks.ok("1 + 1").plain == ["2"]

    assert "2 ranks ready" in own_ranks.ok("%distributed start -n 2").stdout
    assert own_ranks.ok("%%distributed\nrank").plain == ["[0] 0\n[1] 1"]
