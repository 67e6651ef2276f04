"""`%distributed variables`: what ranks hold, and whether it is the same on all of them."""

from __future__ import annotations

import re

import pytest

from testbed.kernel import Kernel
from tests.support.cells import end_background

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
mixed = ["text", 1][rank]
shapes = torch.ones(2 + rank)
dtypes = torch.ones(2, dtype=[torch.float64, torch.int16][rank])
devices = torch.ones(2, device=["cpu", "meta"][rank])
sparse = torch.eye(2).to_sparse()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
net(torch.ones(1, 2)).sum().backward()
net[1].bias.grad += rank
optimizer.step()
state = net.state_dict()
keys = {"all": 0} if rank else {"all": 0, "first": 1}
order = {"a": 0, "b": 0} if rank else {"b": 0, "a": 0}
many = {f"entry {number}": rank for number in range(200)}
class Strange:
    def __repr__(self): raise SystemError
    @property
    def __class__(self): raise SystemError
strange = Strange()
objects = {"strange": iter([1]), "rank": rank}"""

SHARDED = """\
%%distributed
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
sharded = {"w": distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)]), "of": rank}"""


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
    assert row_of(filled, "mixed") == ["mixed", "str (rank 0), int (rank 1)", "2 different values"]
    assert row_of(filled, "only")[-1] == "only on rank 1"
    assert row_of(filled, "strange")[-1] == "same"
    shown = {row.split(" ")[0] for row in filled.ok("%distributed variables").stdout.splitlines()}
    assert not {"np", "rank", "Strange"} & shown


def test_tensors_of_another_shape_dtype_or_device_are_shown_in_all_forms_with_their_ranks(filled: Kernel) -> None:
    form = "float32 [2] (rank 0), float32 [3] (rank 1)"
    assert row_of(filled, "shapes") == ["shapes", "Tensor", form, "cpu", "8 B to 12 B", "2 different values"]
    form = "float64 [2] (rank 0), int16 [2] (rank 1)"
    assert row_of(filled, "dtypes") == ["dtypes", "Tensor", form, "cpu", "4 B to 16 B", "2 different values"]
    assert row_of(filled, "devices")[2:5] == ["float32 [2]", "cpu (rank 0), meta (rank 1)", "8 B"]


def test_a_tensor_is_shown_with_figures_of_each_rank_and_where_two_differ(filled: Kernel) -> None:
    assert row_of(filled, "0", "%distributed variables w")[1:5] == ["0", "2.5", "5", "1.70783"]
    assert row_of(filled, "1", "%distributed variables w")[1:4] == ["0", "2.83333", "7"]
    text = "w differs on ranks 0 and 1: 1 element of 6, by up to 2; the first at flat index 5"
    assert text in filled.ok("%distributed variables w --diff 0,1").stdout
    assert "array is the same on ranks 0 and 1" in filled.ok("%distributed variables array --diff 0,1").stdout


def names_in(kernel: Kernel, line: str) -> list[str]:
    """The names in the table, below its header."""
    return [re.split(r"\s{2,}", row)[0] for row in kernel.ok(line).stdout.splitlines()[1:]]


def test_what_differs_in_a_dict_is_listed_and_looked_at_as_a_variable_is(filled: Kernel) -> None:
    assert row_of(filled, "state") == ["state", "OrderedDict", "4 values", "cpu", "36 B", "2 different values"]
    assert names_in(filled, "%distributed variables state") == ["state", "state['1.bias']"]
    row = ["state['1.bias']", "Tensor", "float32 [1]", "cpu", "4 B", "2 different values"]
    assert row_of(filled, "state['1.bias']", "%distributed variables state") == row
    for name in ("state['1.bias']", "\"state['1.bias']\""):
        assert row_of(filled, "0", f"%distributed variables {name}")[0] == "0"  # figures of rank 0
        shown = filled.ok(f"%distributed variables {name} --diff 0,1").stdout
        assert "state['1.bias'] differs on ranks 0 and 1: 1 element of 1, by up to " in shown


def test_models_optimizers_and_containers_in_each_other_are_looked_into(filled: Kernel) -> None:
    assert names_in(filled, "%distributed variables net") == ["net", "net[1].bias"]
    assert names_in(filled, "%distributed variables net[1]") == ["net[1]", "net[1].bias"]
    assert names_in(filled, "%distributed variables optimizer") == [
        "optimizer",
        "optimizer.state[3]['momentum_buffer']",
    ]
    assert names_in(filled, "%distributed variables batch") == ["batch", "batch['of']"]
    assert names_in(filled, "%distributed variables loss") == ["loss"]


def test_parts_of_sharded_tensors_in_a_dict_are_not_compared_and_what_is_beside_them_is(filled: Kernel) -> None:
    filled.ok(SHARDED)
    assert row_of(filled, "sharded")[-1] == "sharded"
    shown = filled.ok("%distributed variables sharded").stdout.splitlines()
    assert [row.split()[0] for row in shown[1:]] == ["sharded", "sharded['of']"]


def test_entries_that_a_rank_lacks_or_has_in_another_order_are_listed(filled: Kernel) -> None:
    assert names_in(filled, "%distributed variables keys") == ["keys", "keys['first']"]
    assert row_of(filled, "keys['first']", "%distributed variables keys")[-1] == "only on rank 0"
    shown = filled.ok("%distributed variables order").stdout
    assert "order has the same entries on these ranks, in another order" in shown


def test_entries_that_cannot_be_compared_are_listed_after_those_that_differ(filled: Kernel) -> None:
    names = names_in(filled, "%distributed variables objects")
    assert names == ["objects", "objects['rank']", "objects['strange']"]


def test_of_many_entries_that_differ_a_hundred_are_shown(filled: Kernel) -> None:
    lines = filled.ok("%distributed variables many").stdout.splitlines()
    assert len(lines) == 2 + 100 + 1
    assert lines[-1] == "and 100 more"


def test_an_entry_that_no_rank_has_is_refused(filled: Kernel) -> None:
    outcome = filled.run("%distributed variables state['bias']")
    assert outcome.evalue.startswith("no rank has an entry state['bias']; `%distributed variables state` shows")
    outcome = filled.run("%distributed variables state --diff 0,1")
    assert "`%distributed variables state` shows its entries that differ" in outcome.evalue


def test_a_sparse_tensor_has_no_figures(filled: Kernel) -> None:
    outcome = filled.run("%distributed variables sparse")
    assert outcome.evalue == "no figures of 'sparse': sparse is a sparse (COO) tensor"


def test_while_a_cell_runs_variables_are_shown_and_not_compared(filled: Kernel) -> None:
    filled.ok("%%distributed --background\nimport time\nwhile True: time.sleep(0.01)")
    filled.ok("handle = _")
    assert row_of(filled, "loss")[-1] == "not compared: a cell is running"
    end_background(filled)
    assert row_of(filled, "loss")[-1] == "same"


def test_a_name_that_no_rank_has_is_refused(filled: Kernel) -> None:
    outcome = filled.run("%distributed variables los")
    assert "no rank has a variable 'los'; similar names: loss" in outcome.evalue
