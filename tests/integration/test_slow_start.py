"""A start may take as long as it gets on, and what it has reached outlives one that does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.support.roles import find

HANG = 60.0

# Runs in each Python of the session before anything else; holds up those of one role.
SITE = """
import os, sys, time
if {role!r} in " ".join(sys.orig_argv) and not os.path.exists({go!r}):
    {hold}
"""
IN_VAIN = "open({fifo!r}).read()"
STEADILY = "while not os.path.exists({go!r}): time.sleep(0.01)"

Held = Callable[[str, str], Kernel]


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """The file that lets everybody through."""
    return tmp_path / "go"


@pytest.fixture
def held(tmp_path: Path, go: Path) -> Iterator[Held]:
    """Makes a kernel whose controller or template is held up."""
    kernels = []
    os.mkfifo(tmp_path / "fifo")

    def make(role: str, hold: str) -> Kernel:
        words = {"fifo": str(tmp_path / "fifo"), "go": str(go)}
        (tmp_path / "sitecustomize.py").write_text(SITE.format(role=role, hold=hold.format(**words), **words))
        path = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        kernel = Kernel(PYTHONPATH=os.pathsep.join(path), NBDIST_PREWARM="0", NBDIST_START_PATIENCE="4")
        kernels.append(kernel)
        kernel.ok("%load_ext nbdist")
        return kernel

    yield make
    for kernel in kernels:
        kernel.close()


def test_a_start_that_makes_no_progress_is_given_up_and_the_next_goes_on_with_its_template(
    held: Held, go: Path, tmp_path: Path
) -> None:
    kernel = held("nbdist.agent.forks.template", IN_VAIN)
    failed = kernel.fails("%distributed start -n 1", "SessionBroken", HANG)
    assert "no progress for 4 s (importing torch" in failed.evalue and "NBDIST_START_PATIENCE" in failed.evalue
    template = find(kernel.pid, "template")
    go.touch()
    (tmp_path / "fifo").write_text("")
    kernel.ok("%distributed start -n 1", HANG)
    assert find(kernel.pid, "template") == template != 0


def test_a_start_that_is_slow_but_gets_on_is_waited_for_and_says_how_long(held: Held, go: Path) -> None:
    kernel = held("nbdist.agent.forks.template", STEADILY)
    start = kernel.start("%distributed start -n 1")
    start.wait_for("importing torch, 10 s")
    go.touch()
    assert start.finish(HANG).status == "ok"


def test_an_interrupt_is_heard_while_the_controller_comes_up(held: Held, go: Path) -> None:
    kernel = held("nbdist.controller.controller_boot", STEADILY)
    kernel.ok("import os, signal, threading")
    kernel.ok("threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()")
    interrupted = kernel.fails("%distributed start -n 1", "KeyboardInterrupt", HANG)
    assert interrupted.evalue == "the start was interrupted; no ranks are running"


@pytest.mark.parametrize(
    ("variable", "text", "error"),
    [
        ("NBDIST_START_PATIENCE", "long", "is not a number of seconds: set it to 600, for example"),
        ("NBDIST_START_PATIENCE", "0", "is not a number of seconds: set it to 600, for example"),
        ("NBDIST_SLACK", "much", "is not 0 to 5 seconds: set it to 1, for example"),
        ("NBDIST_SLACK", "60", "is not 0 to 5 seconds: set it to 1, for example"),
    ],
)
def test_an_invalid_limit_is_refused(notebook: Kernel, variable: str, text: str, error: str) -> None:
    notebook.ok(f"import nbdist, os; os.environ[{variable!r}] = {text!r}")
    refused = notebook.fails("nbdist.Session(1)", "UsageError")
    assert refused.evalue == f"{variable}={text!r} {error}"
    notebook.ok(f"del os.environ[{variable!r}]")
