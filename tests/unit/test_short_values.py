"""Values as a look shows them: short, and without running code of others."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.serving.short_values import described_names, short_value


class Loud:
    """Whoever touches it is noticed."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __repr__(self) -> str:
        raise AssertionError("repr")


class LoudList(list[int]):
    def __repr__(self) -> str:
        raise AssertionError("repr")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0.5, "0.5"),
        (None, "None"),
        ("abc", "'abc'"),
        ("x" * 100, f"'{'x' * 59}…'"),
        ([1, 2], "[1, 2]"),
        ([1, 2, 3, 4, 5], "[1, 2, 3, 4, …]"),
        ((1,), "(1,)"),
        ({"ids": torch.zeros(2, 3)}, "{'ids': float32[2, 3] on cpu}"),
        ([[1], {}], "[<list of 1>, <dict of 0>]"),
        ({1, 2}, "<set of 2>"),
        (torch.zeros(2, dtype=torch.bfloat16), "bfloat16[2] on cpu"),
        (torch.nn.Parameter(torch.zeros(1)), "float32[1] on cpu"),
        (np.zeros((2, 2)), "float64[2, 2]"),
    ],
)
def test_a_value_is_short(value: object, text: str) -> None:
    assert short_value(value) == text


def test_what_is_long_or_of_others_is_its_type() -> None:
    assert short_value(10**10_000) == "<int of 33220 bits>"
    assert (short_value(Loud()), short_value([Loud()]), short_value(LoudList([1]))) == (
        "<Loud>",
        "[<Loud>]",
        "<LoudList>",
    )


def test_at_the_top_of_a_script_imports_and_definitions_are_left_out() -> None:
    code = "import os\ndef f(): ...\nthing = Loud()\nstep = 1\nlines = look(sys._getframe())"
    names: dict[str, Any] = {"sys": sys, "Loud": Loud, "look": described_names, "__name__": "__main__"}
    exec(compile(code, "/train.py", "exec"), names)
    assert names["lines"] == ["train.py:5", "thing = <Loud>", "step = 1"]


def test_names_are_those_of_the_innermost_function() -> None:
    step = 12

    def inner() -> list[str]:
        loss, own = 0.5, step
        lines = described_names(sys._getframe())
        assert (loss, own) == (0.5, 12)
        return lines

    place, *lines = inner()
    assert place.startswith("test_short_values.py:") and place.endswith(", in inner")
    assert sorted(lines) == ["loss = 0.5", "own = 12", "step = 12"]


def test_names_may_be_read_while_their_function_runs() -> None:
    stop, wrong = threading.Event(), []

    def count() -> None:
        first = second = 0
        while not stop.is_set():
            first += 1
            second += 1
            if first != second:
                wrong.append(first)

    thread = threading.Thread(target=count)
    thread.start()
    seen = set()
    try:
        for _ in range(3000):
            lines = described_names(sys._current_frames()[thread.ident or 0])
            seen |= {line.split(" = ")[0] for line in lines[1:]}
    finally:
        stop.set()
        thread.join(20)
    assert {"first", "second"} <= seen and wrong == []
