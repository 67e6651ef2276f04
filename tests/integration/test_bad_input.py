from __future__ import annotations

import pytest

from testbed.kernel import Kernel, Outcome


def refuses(kernel: Kernel, cell: str, ename: str = "UsageError") -> str:
    """Run what can't be done: it must end in one message. Returns it."""
    outcome: Outcome = kernel.fails(cell, ename)
    assert [kind for kind, _ in outcome.events].count("error") == 1
    assert (outcome.stdout, outcome.stderr, outcome.plain) == ("", "", [])
    assert "nbdist/" not in outcome.traceback  # no frames of our own
    return outcome.evalue


@pytest.mark.parametrize(
    ("line", "says", "type_next"),
    [
        ("start -n 0", "invalid number of ranks '0'", "-n 2"),
        ("start -n x", "invalid number of ranks 'x'", "-n 2"),
        ("start -n -3", "invalid number of ranks '-3'", "-n 2"),
        ("start -n", "expected one argument", "`%distributed start --help`"),
        ("start -n 2", "a session with 2 ranks is already running", "`%distributed restart -n 2`"),
        ("start 4", "'4' is an unexpected argument", "did you mean `%distributed start -n 4`?"),
        ("start now", "'now' is an unexpected argument", "`%distributed start --help`"),
        ("start --n 4", "unknown option --n", "did you mean -n?"),
        ("start --replce", "did you mean --replace?", "--replace"),
        ("start --timeout never", "invalid duration 'never'", "for example 60"),
        ("start -n 'two", "No closing quotation", "`%distributed start --help`"),
        ("strt -n 2", "%distributed has no verb 'strt'", "did you mean `%distributed start`?"),
        ("xyzzy", "%distributed has no verb 'xyzzy'", "Available verbs: advise, attach, auto, "),
        ("restart -n 0", "invalid number of ranks '0'", "-n 2"),
        ("auto", "on|off", "`%distributed auto --help`"),
        ("auto maybe", "'maybe'", "on|off"),
        ("push", "NAME", "`%distributed push --help`"),
        ("push x=5", "'x=5' is not a variable name", "`%distributed push --help`"),
        ("push x -r 7", "can't push 'x': not defined in the notebook", "Define it in a local cell"),
        ("pull", "NAME", "`%distributed pull --help`"),
        ("pull x y --as z", "--as names one variable", "`%distributed pull loss --as first`"),
        ("pull rank --as 3x", "'3x' is not a variable name", "`%distributed pull --help`"),
        ("pull rank+1", "'rank+1' is not a variable name", "--as NAME"),
        ("pull nowhere_at_all", "ranks 0-1 have no 'nowhere_at_all'", "define it in a `%%distributed` cell"),
        ("logs --cell x", "invalid number 'x'", "`%distributed logs --help`"),
        ("logs --cell 100000", "cell 100000 printed nothing", "`%distributed logs`"),
        ("interrupt -r 9", "rank 9 isn't in this session", "-r 0-1"),
        ("status --all", "%distributed status: unknown option --all", "--help"),
    ],
)
def test_a_wrong_line_gets_one_message_that_says_what_to_type(
    ranks: Kernel, line: str, says: str, type_next: str
) -> None:
    message = refuses(ranks, f"%distributed {line}")
    assert says in message and type_next in message


@pytest.mark.parametrize(
    ("magic", "says", "type_next"),
    [
        ("%%distributed -r 5", "rank 5 isn't in this session", "it has ranks 0-1; for example -r 0-1"),
        ("%%distributed -r 1-0", "'1-0' counts down", "write 0-1"),
        ("%%distributed -r one", "'one' isn't a rank", "for example -r 0-1"),
        ("%%distributed -r ,", "a rank is missing", "for example -r 0-1"),
        ("%%distributed -r 0 -r 1", "-r is given twice", "give it once"),
        ("%%rank 2", "rank 2 isn't in this session", "for example -r 0-1"),
        ("%%rank", "%%rank needs ranks", "`%%rank 0`"),
        ("%%distributed --qiet", "did you mean --quiet?", "--quiet"),
        ("%%distributed everywhere", "'everywhere' is an unexpected argument", "--help"),
        ("%%distributed 0", "'0' is an unexpected argument", "did you mean `%%distributed -r 0`?"),
        ("%%distributed --timeout 0", "invalid duration '0'", "for example 60"),
        ("%%distributed --capture 3x", "'3x' is not a variable name", "--help"),
        ("%%distributed --tee", "--tee needs --capture", "`%%distributed --capture NAME --tee`"),
        ("%%local now", "%%local takes no arguments", "`%%local` alone"),
    ],
)
def test_a_cell_with_a_wrong_magic_runs_nowhere(ranks: Kernel, magic: str, says: str, type_next: str) -> None:
    message = refuses(ranks, f"{magic}\nran_anyway = True")
    assert says in message and type_next in message
    assert ranks.ok("%%distributed\n'ran_anyway' in globals()").plain == ["[0-1] False"]
    assert ranks.value("'ran_anyway' in globals()") is False


def test_the_session_is_as_it_was_after_all_that(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nkept = rank")
    for line in ("start -n 0", "start -n 2", "strt", "restart -n x"):
        refuses(ranks, f"%distributed {line}")
    assert ranks.ok("%%distributed\nkept").plain == ["[0] 0\n[1] 1"]


def test_without_a_session_everything_offers_to_start_one(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    cells = ["%%distributed\n1", "%%rank 0\n1", "%%dist -r 0\n1"]
    lines = ["stop", "restart", "status", "push x", "pull x", "logs", "interrupt", "auto on"]
    for cell in cells + [f"%distributed {line}" for line in lines]:
        assert "type `%distributed start -n 2` first" in refuses(kernel, cell, "SessionClosed"), cell
    assert "no session is running" in refuses(kernel, "import nbdist\nnbdist.get_session()", "SessionClosed")


def test_a_start_that_can_not_be_leaves_the_next_one_possible(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    assert "`%distributed start -n 2`" in refuses(kernel, "%distributed start")
    assert "nccl needs a GPU for each rank" in refuses(kernel, "%distributed start -n 2 --backend nccl")
    assert "did you mean `--backend gloo`?" in refuses(kernel, "%distributed start -n 2 --backend glo")
    assert "GPU 7 isn't on this machine" in refuses(kernel, "%distributed start -n 2 --gpus 7")
    kernel.ok("%distributed plan fsdp --precision fp16")
    assert "`%distributed plan --reset`" in refuses(kernel, "%distributed start -n 2")
    kernel.ok("%distributed plan --reset")
    kernel.ok("import resource\nlimits = resource.getrlimit(resource.RLIMIT_NOFILE)")
    kernel.ok("resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))")
    message = refuses(kernel, "%distributed start -n 100")
    assert "100 ranks need about 640 file descriptors" in message and "`ulimit -n 4096`" in message
    kernel.ok("%distributed start -n 2")
    assert kernel.ok("%%distributed\nrank").plain == ["[0] 0\n[1] 1"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("Session(2.0)", "the number of ranks must be a whole number of 1 or more, not 2.0"),
        ("Session(2, gpus=7)", "GPU 7 isn't on this machine"),
        ("Session(2, gpus='7,8')", "GPU 7 isn't on this machine"),
        ("Session(2, backend=3)", "backend must be a str, not 3"),
        ("Session(2, timeout=-1)", "timeout must be a number of seconds above 0, not -1"),
        ("Session(2, timeout='5')", "timeout must be a number of seconds above 0, not '5'"),
        ("Session(2, linger='long')", "linger must be a number of seconds of 0 or more, not 'long'"),
    ],
)
def test_a_session_with_a_wrong_argument_starts_nothing(ranks: Kernel, call: str, says: str) -> None:
    assert says in refuses(ranks, f"import nbdist\nnbdist.{call}")
    assert ranks.ok("%%distributed\n1").plain == ["[0-1] 1"]  # and the session there is goes on


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("run(5)", "code must be a str, not int"),
        ("run('1', grace='long')", "grace must be a number of seconds above 0, not 'long'"),
        ("run('1', timeout='5')", "timeout must be a number of seconds above 0, not '5'"),
        ("run('1', ranks=5)", "rank 5 isn't in this session: it has ranks 0-1"),
        ("run('1', ranks='0-5')", "rank 5 isn't in this session: it has ranks 0-1"),
        ("run('1', ranks='first')", "'first' isn't a rank or a range of ranks"),
        ("run_in_background('1', timeout=0)", "timeout must be a number of seconds above 0, not 0"),
        ("call(3)", "call takes a function, not 3"),
        ("push(['x'])", "push takes a dict, not list"),
        ("push({1: 2})", "1 is not a variable name"),
    ],
)
def test_work_with_a_wrong_argument_is_refused_and_the_next_goes_through(ranks: Kernel, call: str, says: str) -> None:
    assert says in refuses(ranks, f"import nbdist\nnbdist.get_session().{call}")
    assert ranks.ok("%%distributed\n1").plain == ["[0-1] 1"]


def test_the_magics_say_no_on_a_rank(ranks: Kernel) -> None:
    outcome = ranks.fails("%%distributed\n%load_ext nbdist", "RankError")
    assert "this is a rank" in outcome.evalue


def test_a_rank_starts_no_ranks_of_its_own(ranks: Kernel) -> None:
    outcome = ranks.fails("%%distributed\nimport nbdist\nnbdist.Session(2)", "RankError")
    assert "UsageError: this is rank" in outcome.evalue and "start sessions in the notebook" in outcome.evalue


def test_work_that_can_not_be_sent_leaves_its_ranks_free(ranks: Kernel) -> None:
    ranks.ok("import nbdist\nfrom tests.support.inside import submit_unsendable")
    ranks.fails("submit_unsendable(nbdist.get_session())", "OverflowError")
    assert ranks.ok("%%distributed\n1").plain == ["[0-1] 1"]
