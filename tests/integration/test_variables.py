"""`%distributed variables`: what ranks hold, and whether it is the same on all of them."""

from __future__ import annotations

import re

import pytest

from testbed.kernel import Kernel

SET = """\
%%distributed
import numpy as np
import torch
w = torch.arange(6.0).reshape(2, 3)
w[1, 2] += 2 * rank
loss = 0.25
batch = {"ids": [1, 2], "of": rank}
array = np.ones(3, dtype=np.int32)
model = torch.nn.Linear(2, 2)
if rank: only = 1
class Strange:
    def __repr__(self): raise SystemError
    @property
    def __class__(self): raise SystemError
strange = Strange()"""


@pytest.fixture
def filled(ranks: Kernel) -> Kernel:
    ranks.ok(SET)
    return ranks


def row_of(kernel: Kernel, name: str, line: str = "%distributed variables") -> list[str]:
    """The columns of a variable, as they are separated by two spaces or more."""
    rows = [re.split(r"\s{2,}", row.strip()) for row in kernel.ok(line).stdout.splitlines()]
    return next(row for row in rows if row[0] == name)


def test_each_variable_is_shown_with_whether_ranks_agree(filled: Kernel) -> None:
    assert row_of(filled, "w") == ["w", "Tensor", "float32 [2, 3]", "cpu", "24 B", "2 different values"]
    assert row_of(filled, "loss") == ["loss", "float", "same"]
    assert row_of(filled, "batch") == ["batch", "dict", "2 values", "2 different values"]
    assert row_of(filled, "array") == ["array", "ndarray", "int32 [3]", "cpu", "12 B", "same"]
    assert row_of(filled, "only")[-1] == "only on rank 1"
    assert row_of(filled, "strange")[-1] == "not compared: values of this type are not compared"
    shown = {row.split(" ")[0] for row in filled.ok("%distributed variables").stdout.splitlines()}
    assert not {"np", "rank", "Strange"} & shown


def test_a_tensor_is_shown_with_figures_of_each_rank_and_where_two_differ(filled: Kernel) -> None:
    assert row_of(filled, "0", "%distributed variables w")[1:5] == ["0", "2.5", "5", "1.70783"]
    assert row_of(filled, "1", "%distributed variables w")[1:4] == ["0", "2.83333", "7"]
    text = "w differs on ranks 0 and 1: 1 element of 6, by up to 2; the first at flat index 5"
    assert text in filled.ok("%distributed variables w --diff 0,1").stdout
    assert "array is the same on ranks 0 and 1" in filled.ok("%distributed variables array --diff 0,1").stdout


def test_while_a_cell_runs_variables_are_shown_and_not_compared(filled: Kernel) -> None:
    filled.ok("%%distributed --background\nimport time\nwhile True: time.sleep(0.01)")
    assert row_of(filled, "loss")[-1] == "not compared: a cell is running"
    filled.ok("%distributed interrupt --now")
    filled.run("%%distributed\npass")
    assert row_of(filled, "loss")[-1] == "same"


def test_a_name_that_no_rank_has_is_refused(filled: Kernel) -> None:
    outcome = filled.run("%distributed variables los")
    assert "no rank has a variable 'los'; similar names: loss" in outcome.evalue
