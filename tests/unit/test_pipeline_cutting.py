"""Which layers each stage of a pipeline has, and which models can be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.train.pipeline.cutting import layers_of_stages, refuse_unfit
from tests.support import train_pipeline


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(2, 2, [1, 1]), (4, 2, [2, 2]), (3, 2, [2, 1]), (6, 4, [1, 2, 2, 1]), (4, 4, [1, 1, 1, 1]), (32, 4, [7, 9, 9, 7])],
)
def test_embedding_and_head_count_as_layers(layers: int, stages: int, counts: list[int]) -> None:
    found = layers_of_stages(layers, stages)
    assert [own.stop - own.start for own in found] == counts


@pytest.mark.parametrize("layers", range(1, 20))
def test_each_layer_has_one_stage_and_each_stage_a_layer(layers: int) -> None:
    for stages in range(2, layers + 1):
        found = layers_of_stages(layers, stages)
        assert [number for own in found for number in range(own.start, own.stop)] == list(range(layers))
        assert all(own.stop > own.start for own in found)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"pp \(6\) is more than the 5 layers of LlamaForCausalLM: set pp to 5 or less"
    ):
        refuse_unfit(train_pipeline.make(), 6)


def test_models_of_ones_own_are_refused() -> None:
    with pytest.raises(UsageError, match="only models of transformers say which parts they consist of"):
        refuse_unfit(nn.Linear(2, 2), 2)


def test_models_on_the_meta_device_are_refused() -> None:
    with torch.device("meta"):
        model = train_pipeline.make()
    with pytest.raises(UsageError, match="it is on the meta device"):
        refuse_unfit(model, 2)


def test_models_that_compute_something_between_layers_are_refused() -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = GraniteConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, embedding_multiplier=2.0)
    with pytest.raises(UsageError, match="it computes something between its layers"):
        refuse_unfit(GraniteForCausalLM(config), 2)
