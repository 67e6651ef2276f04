"""Errors that IPython shows instead of raising them, as `%run` does: on a rank they fail the cell, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import Kernel, Outcome

SCRIPT = "def train():\n    raise ValueError('no data')  # the cause\n\n\ntrain()\n"
NOTEBOOK = (
    '{"cells": [{"cell_type": "code", "execution_count": null, "metadata": {}, "outputs": [], "source": ["%s"]}], '
    '"metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
)
FAILING_CALLBACK = "def fail(*_):\n    raise ValueError('in the callback')\n"


def fails(kernel: Kernel, code: str, first: str) -> Outcome:
    """Run a cell on rank 0 that must fail with this as the first error."""
    outcome = kernel.fails(f"%%rank 0\n{code}", "RankError")
    assert outcome.status == "error"
    assert outcome.evalue == f"rank 0 raised {first}", outcome
    return outcome


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("options", ["", "-i", "-p", "-t"])
def test_a_script_that_raises_fails_the_cell_with_its_own_lines(ranks: Kernel, script: Path, options: str) -> None:
    outcome = fails(ranks, f"%run {options} {script}", "ValueError: no data")
    assert f"File {script}:5\n" in outcome.traceback
    assert "----> 2     raise ValueError('no data')  # the cause" in outcome.traceback
    assert "IPython/" not in outcome.traceback and "nbdist/" not in outcome.traceback


def test_a_module_that_raises_fails_the_cell(ranks: Kernel, script: Path) -> None:
    outcome = fails(
        ranks, f"import sys\nsys.path.insert(0, {str(script.parent)!r})\n%run -m train_it", "ValueError: no data"
    )
    assert f"File {script}:2" in outcome.traceback
    ranks.ok("%%rank 0\nsys.path.pop(0)")


def test_a_notebook_whose_cell_raises_fails_the_cell_once(ranks: Kernel, tmp_path: Path) -> None:
    (tmp_path / "steps.ipynb").write_text(NOTEBOOK % "1/0")
    outcome = fails(ranks, f"%run {tmp_path / 'steps.ipynb'}", "ZeroDivisionError: division by zero")
    assert outcome.traceback.count("ZeroDivisionError: division by zero") == 2  # the headline and the traceback


def test_a_script_that_can_not_be_compiled_fails_the_cell(ranks: Kernel, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = = 2\n")
    outcome = fails(ranks, f"%run {tmp_path / 'broken.py'}", "SyntaxError: invalid syntax (broken.py, line 2)")
    assert "y = = 2" in outcome.traceback and "interactiveshell" not in outcome.traceback


def test_behind_a_script_that_raises_the_cell_does_not_go_on(ranks: Kernel, script: Path) -> None:
    assert "went on" not in fails(ranks, f"%run {script}\nprint('went on')", "ValueError: no data").stdout


@pytest.mark.parametrize(("code", "name"), [("sys.exit(3)", "SystemExit: 3"), ("sys.exit('bad')", "SystemExit: bad")])
def test_a_script_that_exits_with_a_code_fails_the_cell(ranks: Kernel, tmp_path: Path, code: str, name: str) -> None:
    (tmp_path / "leaves.py").write_text(f"import sys\n{code}\n")
    fails(ranks, f"%run {tmp_path / 'leaves.py'}", name)
    ranks.ok(f"%%rank 0\n%run -e {tmp_path / 'leaves.py'}")  # asked to ignore it


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit(0)"])
def test_a_script_that_ends_well_does_not(ranks: Kernel, tmp_path: Path, code: str) -> None:
    (tmp_path / "leaves.py").write_text(f"import sys\nprint('done')\n{code}\n")
    assert ranks.ok(f"%%rank 0\n%run {tmp_path / 'leaves.py'}").lines == {0: ["done"]}


def test_a_cell_run_from_a_cell_fails_it_with_lines_of_its_own(ranks: Kernel) -> None:
    outcome = fails(ranks, "get_ipython().run_cell('x = 1\\n1/0')", "ZeroDivisionError: division by zero")
    assert ", line 2\n      1 x = 1\n----> 2 1/0" in outcome.traceback
    assert "SyntaxError" in ranks.fails("%%rank 0\nget_ipython().run_cell('x = = 1')", "RankError").evalue


@pytest.mark.parametrize("magic", ["%%capture", "%%time", "%%timeit -n 1 -r 1", "%%prun", "%%capture --no-stderr"])
def test_the_body_of_a_cell_magic_that_raises_fails_the_cell(ranks: Kernel, magic: str) -> None:
    fails(ranks, f"{magic}\n1/0", "ZeroDivisionError: division by zero")


def test_a_program_of_a_cell_magic_that_fails_fails_the_cell_and_a_shell_command_does_not(ranks: Kernel) -> None:
    assert "CalledProcessError" in ranks.fails("%%rank 0\n%%bash\nexit 3", "RankError").evalue
    assert ranks.ok("%%rank 0\n!exit 3\n_exit_code").plain == ["[0] 3"]


def test_what_is_shown_first_comes_first_and_nothing_is_left_out(ranks: Kernel) -> None:
    shell = "get_ipython().run_cell"
    outcome = fails(
        ranks, f"{shell}('1/0')\n{shell}('int(\"x\")')\nraise KeyError('own')", "ZeroDivisionError: division by zero"
    )
    names = ("ZeroDivisionError: ", "ValueError: invalid literal", "KeyError: 'own'")
    places = [outcome.traceback.rindex(name) for name in names]
    assert places == sorted(places)


def test_of_many_only_the_first_are_shown_and_the_one_that_ends_the_cell(ranks: Kernel) -> None:
    loop = "for number in range(1000):\n    get_ipython().run_cell('raise ValueError(number)')\n"
    outcome = fails(ranks, f"{loop}raise KeyError('own')", "ValueError: 0")
    assert outcome.traceback.count("Traceback (most recent call last)") == 11
    assert "KeyError: 'own'" in outcome.traceback


def test_an_error_that_comes_from_one_that_was_shown_is_shown_with_it_once(ranks: Kernel) -> None:
    outcome = fails(ranks, "get_ipython().run_cell('1/0').raise_error()", "ZeroDivisionError: division by zero")
    assert outcome.traceback.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("event", ["pre_run_cell", "post_run_cell", "post_execute"])
def test_a_callback_that_raises_fails_the_cell(ranks: Kernel, event: str) -> None:
    events = "get_ipython().events"
    ranks.run(f"%%rank 0\n{FAILING_CALLBACK}{events}.register({event!r}, fail)")  # post events come at once
    outcome = fails(ranks, "print('body')", "ValueError: in the callback")
    assert "[0] body" in outcome.stdout and f"(for {event})" in outcome.stdout
    ranks.run(f"%%rank 0\n{events}.unregister({event!r}, fail)")
    ranks.ok("%%rank 0\n1")


@pytest.mark.parametrize("method", ["__repr__", "_repr_html_"])
def test_a_value_that_can_not_be_shown_fails_the_cell(ranks: Kernel, method: str) -> None:
    code = f"class Mute:\n    def {method}(self):\n        raise ValueError('no picture')\n\nMute()"
    assert "raise ValueError('no picture')" in fails(ranks, code, "ValueError: no picture").traceback


def test_an_error_that_a_handler_of_the_user_s_takes_keeps_its_traceback(ranks: Kernel) -> None:
    handler = "def handler(shell, kind, error, traceback, tb_offset=None):\n    print('handled')\n"
    ranks.ok(f"%%rank 0\n{handler}get_ipython().set_custom_exc((ValueError,), handler)")
    outcome = fails(ranks, "x = 1\nint('x')", "ValueError: invalid literal for int() with base 10: 'x'")
    assert outcome.lines == {0: ["handled"]} and "----> 3 int('x')" in outcome.traceback
    ranks.ok("%%rank 0\nget_ipython().set_custom_exc((), None)")


def test_an_input_transformer_that_raises_fails_the_cell(ranks: Kernel) -> None:
    transformers = "get_ipython().input_transformers_cleanup"
    refuse = "def refuse(lines):\n    if 'x9' in lines[0]:\n        raise SyntaxError('not this')\n    return lines\n"
    ranks.ok(f"%%rank 0\n{refuse}{transformers}.append(refuse)")
    assert "not this" in ranks.fails("%%rank 0\nx9 = 1", "RankError").evalue
    ranks.ok(f"%%rank 0\n{transformers}.remove(refuse)")


def test_what_the_user_s_own_code_shows_is_printed_and_no_failure(ranks: Kernel) -> None:
    code = "try:\n    1/0\nexcept ZeroDivisionError:\n    get_ipython().showtraceback()\nprint('went on')"
    outcome = ranks.ok(f"%%rank 0\n{code}")
    assert outcome.lines == {0: ["went on"]} and "ZeroDivisionError" in outcome.stderr


def test_without_an_error_there_is_no_traceback_to_show(ranks: Kernel) -> None:
    assert "No traceback available to show." in ranks.ok("%%rank 0\n%tb").stderr


@pytest.mark.parametrize(
    "code",
    [
        "import threading\nthread = threading.Thread(target=lambda: 1/0)\nthread.start()\nthread.join()",
        "class Last:\n    def __del__(self): 1/0\nlast = Last()\ndel last",
        "import asyncio\nasync def fail(): 1/0\n_ = asyncio.create_task(fail())\nawait asyncio.sleep(0.01)\ndel _",
    ],
    ids=["thread", "finalizer", "task"],
)
def test_what_fails_beside_the_cell_is_printed(ranks: Kernel, code: str) -> None:
    assert "ZeroDivisionError" in ranks.ok(f"%%rank 0\n{code}").stderr


def test_a_cell_that_shows_an_error_in_a_function_fails_the_call(ranks: Kernel) -> None:
    code = (
        "import nbdist\n"
        "def work():\n    import IPython\n    IPython.get_ipython().run_cell('1/0')\n"
        "try:\n    nbdist.get_session().call(work, ranks=0)\n"
        "except nbdist.RankError as error:\n    told = str(error)"
    )
    ranks.ok(code)
    assert ranks.value("told") == "rank 0 raised ZeroDivisionError: division by zero"


@pytest.mark.parametrize("way", ["warm", "fork"])
def test_a_script_that_raises_in_a_launched_function_fails_the_launch(notebook: Kernel, script: Path, way: str) -> None:
    notebook.ok("import nbdist")
    code = f"def train():\n    import IPython\n    IPython.get_ipython().run_line_magic('run', {str(script)!r})\n"
    failed = notebook.fails(f"{code}nbdist.notebook_launcher(train, (), 2, start_method={way!r})", "LaunchError")
    assert "raised ValueError: no data" in failed.evalue and f"File {script}:2" in failed.traceback


def test_an_error_that_reads_like_a_stop_at_a_step_is_an_error(ranks: Kernel) -> None:
    fails(ranks, "raise RuntimeError('stopped after step 9 of 12')", "RuntimeError: stopped after step 9 of 12")


@pytest.mark.parametrize(
    "code",
    [
        "raise opening(RuntimeError('connection closed by the data server'), gate)",
        "raise opening(RuntimeError('timed out waiting for the store'), gate)",
        "class KeyboardInterrupt(Exception): pass\nraise opening(KeyboardInterrupt('connection reset'), gate)",
    ],
)
def test_an_error_that_reads_like_a_lost_rank_is_the_cause(ranks: Kernel, code: str, tmp_path: Path) -> None:
    code = "\n    ".join(code.split("\n"))
    outcome = ranks.fails(
        "%%distributed\nfrom tests.support.gates import await_gate, opening\n"
        f"gate = {str(tmp_path / 'gate')!r}\n"
        f"if rank == 0:\n    {code}\nawait_gate(gate)\nraise ValueError('later')",
        "RankError",
    )
    assert outcome.evalue.startswith("rank 0 raised "), outcome
    ranks.ok("%%rank 0\nglobals().pop('KeyboardInterrupt', None)")


def test_the_comment_behind_a_failing_line_is_shown(ranks: Kernel) -> None:
    outcome = fails(
        ranks,
        "def work():\n    x = 1/0  # of the last line\n\nwork()  # of the call",
        "ZeroDivisionError: division by zero",
    )
    assert "x = 1/0  # of the last line\n" in outcome.traceback and "work()  # of the call\n" in outcome.traceback
