from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbdist.base import text

MIB = 1 << 20
GIB = 1 << 30

# What the panel's page writes as well (labextension/test/words.test.js), in the units in which it gets it.
SHARED: dict[str, list[tuple[Any, str]]] = json.loads((Path(__file__).parent / "figures.json").read_text())
WRITE: dict[str, Callable[[Any], str]] = {
    "size": lambda mebibytes: text.size(mebibytes * MIB),
    "part_of": lambda both: text.part_of(both[0] * MIB, both[1] * MIB),
    "duration": lambda milliseconds: text.duration(milliseconds / 1000),
    "flop_rate": lambda tflops: text.flop_rate(tflops * 1e12),
    "percent": lambda value: text.percent(value / 100),
}


@pytest.mark.parametrize(
    ("kind", "value", "shown"), [(kind, *case) for kind, cases in SHARED.items() for case in cases]
)
def test_figures_are_written_as_on_the_page(kind: str, value: Any, shown: str) -> None:
    assert WRITE[kind](value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (99.97 * MIB, "100 MiB"),
        (1010 * MIB, "1,010 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 50, "1.0 PiB"),
    ],
)
def test_sizes_have_a_unit_and_three_figures(value: float | None, shown: str) -> None:
    assert text.size(value) == shown


def test_a_change_has_a_sign_unless_there_is_none() -> None:
    assert [text.size(value * MIB, signed=True) for value in (8, -8, 0)] == ["+8.0 MiB", "-8.0 MiB", "0 B"]


def test_several_sizes_share_the_unit_of_the_largest() -> None:
    assert text.sizes([3 * GIB, 1024 * GIB]) == ["0.0", "1.0", "TiB"]


def test_a_part_names_its_unit_where_it_differs() -> None:
    assert text.part_of(298 * MIB, 24 * GIB) == "298 MiB of 24.0 GiB"
    assert text.part_of(3 * GIB, 24 * GIB) == "3.0 of 24.0 GiB"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.00001234, "0.0123 ms"),
        (0.012, "12.0 ms"),
        (0.152, "152 ms"),
        (0.9996, "1.00 s"),
        (2.314, "2.31 s"),
        (200, "3 min 20 s"),
    ],
)
def test_time_spans_have_a_unit_and_no_exponent(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (3.296e15, "3,296 TFLOPS"),
        (1.2e12, "1.20 TFLOPS"),
        (1.15e10, "11.5 GFLOPS"),
        (5.2e5, "0.520 MFLOPS"),
        (0.0, "0 MFLOPS"),
    ],
)
def test_rates_have_a_unit(rate: float, shown: str) -> None:
    assert text.flop_rate(rate) == shown


@pytest.mark.parametrize(("number", "shown"), [(0, "0 ranks"), (1, "1 rank"), (1024, "1,024 ranks")])
def test_one_thing_is_singular(number: int, shown: str) -> None:
    assert text.counted(number, "rank") == shown


def test_a_table_aligns_words_left_and_numbers_right() -> None:
    assert text.table([("a", 5), ("long", 123)], ("name", "count")) == "name  count\na         5\nlong    123"
    assert text.table([], ("name",)) == "name"


def test_a_word_that_is_not_known_gets_the_nearest() -> None:
    assert text.did_you_mean("fdsp", ["ddp", "fsdp"]) == ": did you mean 'fsdp'?"
    assert text.did_you_mean("fdsp", ["ddp", "fsdp"], "`--plan {}`") == ": did you mean `--plan fsdp`?"
    assert text.did_you_mean("xyzzy", ["ddp", "fsdp"]) == "."


def test_a_list_may_have_blanks_and_a_comma_at_its_end() -> None:
    assert text.split_commas(" 0, 2,") == ["0", "2"]
