"""Which layers are divided among ranks, and which models can't be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, MixtralConfig, MixtralForCausalLM

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


SIZES: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def mixtral(intermediate_size: int = 12) -> MixtralForCausalLM:
    with torch.device("meta"):
        return MixtralForCausalLM(MixtralConfig(intermediate_size=intermediate_size, num_local_experts=4, **SIZES))


def test_parameters_of_experts_have_styles_of_their_own() -> None:
    styles = styles_of(mixtral())
    assert {name: style for name, style in styles.items() if "experts" in name} == {
        "model.layers.0.mlp.experts": "moe_tp_experts",
        "model.layers.0.mlp.experts.gate_up_proj": "packed_colwise",
        "model.layers.0.mlp.experts.down_proj": "rowwise",
    }


def test_each_of_the_matrices_that_are_packed_must_be_divisible() -> None:
    model = mixtral(6)
    says = r"gate_up_proj is \[4, 12, 8\], and is 2 matrices of 6, and 6 can't be divided by tp \(4\): set tp to one of"
    with pytest.raises(UsageError, match=says):
        refuse_indivisible(model, styles_of(model), 4)


def test_a_model_with_a_layer_that_can_not_be_divided_yet_is_refused_with_the_layer_and_its_style() -> None:
    with torch.device("meta"):
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES))
    says = "tp can't divide DeepseekV2ForCausalLM yet: model.layers.0.self_attn.kv_a_proj_with_mqa .* 'mla_kv_a_proj'"
    with pytest.raises(UsageError, match=says):
        styles_of(model)


def test_experts_of_which_a_part_stays_whole_are_refused() -> None:
    model = mixtral()
    model.model.layers[0].mlp.experts.bias = nn.Parameter(torch.empty(4, 8, device="meta"))
    with pytest.raises(UsageError, match=r"divides the experts of model.layers.0.mlp.experts, but not .*experts\.bias"):
        styles_of(model)
