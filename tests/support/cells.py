"""Cells of tests on two ranks: what they print, what their last line is worth, what all ranks refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.kernel import Kernel, Outcome, lines_by_rank

# What cells of a training have imported, when a test runs them after this.
TRAINING = """
import copy, os, pickle, warnings, torch, nbdist
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from nbdist.plan import Plan
from nbdist.train import state
from tests.support.train_models import *
"""


def on_ranks(kernel: Kernel, code: str) -> list[str]:
    """Run it, and say what the ranks show."""
    return kernel.ok(f"%%distributed\n{code}").plain


def value(kernel: Kernel, code: str) -> str:
    """What the last line is worth, the same on both ranks."""
    (text,) = on_ranks(kernel, code)
    assert text.startswith("[0-1] "), text
    return text.removeprefix("[0-1] ").replace("\n[0-1] ", "\n")


def refused(kernel: Kernel, code: str) -> str:
    """The message of a UsageError, which all ranks have raised."""
    wrapped = "\n    ".join(code.strip().split("\n"))
    caught = f"told = None\ntry:\n    {wrapped}\nexcept nbdist.UsageError as error: told = str(error)\ntold"
    shown = on_ranks(kernel, caught)
    told = [line for text in shown for line in text.splitlines()]
    assert {line[:4] for line in told} in ({"[0-1"}, {"[0] ", "[1] "}), told
    return " ".join(told)


def usage_error(kernel: Kernel, code: str) -> str:
    """The traceback of a UsageError, which some rank has raised."""
    outcome = kernel.run(f"%%distributed\n{code}")
    assert "UsageError" in outcome.traceback, str(outcome)
    return outcome.traceback


def shown_by(kernel: Kernel, code: str) -> str:
    """What the last expression is on the ranks, as they show it."""
    return "\n".join(on_ranks(kernel, code))


def pulled(kernel: Kernel, expression: str) -> list[Any]:
    """What an expression is worth on each rank."""
    return list(kernel.value(f"__import__('nbdist').get_session().pull({expression!r})"))


def printed(kernel: Kernel, code: str) -> dict[int, list[str]]:
    """What each rank prints in a cell that may start processes."""
    return lines_by_rank(kernel.ok(code, 60).stdout)


def number_of(outcome: Outcome) -> int:
    """The number that the notebook shows beside the cell."""
    return next(int(content["execution_count"]) for kind, content in outcome.events if kind == "execute_input")


def gated(folder: Path, code: str) -> str:
    """A cell that waits for a file `go` between a first line and the code."""
    wait = f"while not os.path.exists({str(folder / 'go')!r}): time.sleep(0.005)"
    return f"%%distributed\nimport os, time\nprint('begun', flush=True)\n{wait}\n{code}"


def end_background(kernel: Kernel) -> None:
    """End the cell that runs in the background, whose handle is `handle`."""
    kernel.ok("handle.interrupt(now=True)")
    assert kernel.run("handle.wait(20)").ename == "KeyboardInterrupt"
