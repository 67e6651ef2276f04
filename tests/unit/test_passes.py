"""What backward passes look like: those that take the same work are known again, at little cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nbdist.metrics.compute.counting import Counting
from nbdist.metrics.events.passes import PassReader
from testbed.closed_forms import Gpt, indices, loss_of

pytestmark = pytest.mark.torch_private

DEPTH = 30


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])


def test_passes_of_other_shapes_and_depths_look_different() -> None:
    reader = PassReader()

    def of(model: nn.Module, batch: int, length: int) -> object:
        return reader.read([loss_of(model, indices(batch, length))])

    model = Gpt()
    assert of(model, 2, 16) == of(model, 2, 16)
    assert len({of(model, 2, 16), of(model, 4, 16), of(model, 4, 8), of(Gpt(layers=1), 2, 16)}) == 4


@pytest.mark.parametrize(
    "run",
    [
        lambda inputs: inputs[:, :2].reshape(2, -1),
        lambda inputs: inputs @ inputs.transpose(1, 2),
        lambda inputs: torch.einsum("bij,bkj->bik", inputs, inputs),
        nn.TransformerEncoderLayer(8, 2, 16),
    ],
    ids=["reshape", "product", "einsum", "attention"],
)
def test_a_pass_looks_the_same_while_it_is_counted(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    reader, inputs = PassReader(), torch.randn(2, 4, 8, requires_grad=True)
    found = {reader.read([run(inputs).sum()])}
    with Counting(eagerly=False):
        found.add(reader.read([run(inputs).sum()]))
    assert len(found) == 1


def test_what_differs_far_from_the_loss_is_found_and_what_was_read_before_is_distrusted() -> None:
    reader, body, head = PassReader(), layers(2), layers(DEPTH)
    rows = [4] * 40 + [8] * 256
    found = []
    for count in rows:
        found.append(reader.read([head(body(torch.randn(count, 8)).mean(0)).sum()]))
        if reader.suspects:
            break
    assert 40 < len(found) < len(rows) and reader.suspects >= len(found) - 41
    assert found[-1] != found[0]


def test_a_step_that_takes_another_time_has_the_next_pass_read_whole() -> None:
    reader, body, head = PassReader(), layers(2), layers(DEPTH)
    for _ in range(30):
        reader.read([head(body(torch.randn(4, 8)).mean(0)).sum()])
    reader.doubt()
    reader.read([head(body(torch.randn(8, 8)).mean(0)).sum()])
    assert reader.suspects


def test_where_reading_takes_next_to_nothing_what_differs_far_from_the_loss_is_found_at_once() -> None:
    reader, body, head = PassReader(), layers(2), layers(DEPTH)

    def read(rows: int) -> object:
        return reader.read([head(body(torch.randn(rows, 8)).mean(0)).sum()])

    reader.is_cheap = True
    usual = [read(4) for _ in range(100)][-1]
    assert read(8) != usual and not reader.suspects


def test_frozen_layers_show_in_how_many_nodes_are_made() -> None:
    reader, model = PassReader(), layers(DEPTH)
    inputs = torch.randn(4, 8)
    for _ in range(10):
        reader.read([model(inputs).sum()])
    model[:20].requires_grad_(False)
    reader.read([model(inputs).sum()])
    assert reader.suspects


def test_work_beside_the_graph_makes_no_other_shape() -> None:
    reader, model = PassReader(), layers(4)
    inputs = torch.randn(4, 8)
    found = set()
    for at in range(20):
        loss = model(inputs).sum()
        if at % 5 == 4:
            model(inputs).sum()  # a validation that forgot no_grad
        found.add(reader.read([loss]))
    assert len(found) == 1


def test_a_change_after_many_passes_that_looked_alike_is_seen_soon_and_the_few_before_it_are_distrusted() -> None:
    reader = PassReader()

    def read(rows: int) -> object:
        scores = torch.ones(rows, 4, requires_grad=True)
        return reader.read([nn.functional.cross_entropy(scores, torch.zeros(rows, dtype=torch.int64))])

    usual = [read(8) for _ in range(100)][-1]
    looks = [read(4)]
    while looks[-1] == usual:
        looks.append(read(4))
    assert len(looks) <= 8 and reader.suspects >= len(looks) - 1
    assert read(8) == usual


def test_rare_passes_of_another_shape_are_all_seen_once_one_has_been() -> None:
    reader, chance = PassReader(), random.Random(1)
    found = []
    for _ in range(6000):
        rows = 4 if chance.random() < 0.02 else 8
        scores = torch.ones(rows, 4, requires_grad=True)
        looks = reader.read([nn.functional.cross_entropy(scores, torch.zeros(rows, dtype=torch.int64))])
        found.append((rows, looks))
    usual = found[100][1]
    odd = [looks != usual for rows, looks in found[100:] if rows == 4]
    assert all(odd[odd.index(True) :])
