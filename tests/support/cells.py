"""Cells of tests on two ranks: what they print, what their last line is worth, what all ranks refuse."""

from __future__ import annotations

from testbed.kernel import Kernel

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
