"""Which layers are divided among ranks, and which models can't be."""

from __future__ import annotations

import pytest
from torch import nn

from nbdist.errors import UsageError
from nbdist.train.structure.tensor_parallel import refuse_indivisible, styles_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 4)


class Net(nn.Module):
    def __init__(self, plan: dict[str, str] | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)
        if plan is not None:
            self.tp_plan = plan


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def test_a_star_stands_for_one_part_of_a_name() -> None:
    assert styles_of(Net(PLAN)) == {
        "blocks.0.up": "colwise",
        "blocks.1.up": "colwise",
        "blocks.0.down": "rowwise",
        "blocks.1.down": "rowwise",
    }


def test_an_embedding_that_is_tied_to_a_divided_head_is_divided_as_well() -> None:
    net = Net({"head": "colwise_gather_output"})
    net.head.weight = net.words.weight
    assert styles_of(net) == {"head": "colwise_gather_output", "words": "embedding_rowwise"}


def test_a_model_that_does_not_say_how_is_refused_with_what_to_give() -> None:
    with pytest.raises(UsageError, match="Net does not say how tensor parallelism divides its layers"):
        styles_of(Net())


def test_an_unknown_style_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown style 'colwize' of head: did you mean 'colwise'"):
        styles_of(Net({"head": "colwize"}))


def test_a_name_that_fits_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no module of Net is named 'blocks\.\*\.upp'"):
        styles_of(Net({"blocks.*.upp": "colwise"}))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (PLAN, r"blocks.0.up has a weight of \[12, 4\], and 12 can't be divided by tp \(5\): set tp to one of 1, 2, 3"),
        ({"head": "rowwise"}, r"head has a weight of \[10, 4\], and 4 can't be divided by tp \(5\)"),
    ],
)
def test_a_layer_that_can_not_be_divided_is_named_with_its_numbers(plan: dict[str, str], says: str) -> None:
    net = Net(plan)
    with pytest.raises(UsageError, match=says):
        refuse_indivisible(net, styles_of(net), 5)
