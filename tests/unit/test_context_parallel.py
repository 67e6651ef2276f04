"""Which tokens each rank has, and which models' sequences can't be divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from nbdist.errors import UsageError
from nbdist.train.sequences.context_parallel import refuse_unfit
from nbdist.train.sequences.sequence_parts import ends_of, order_of

SIZES: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 24,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


class OwnLoss(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids)


def llama(**more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def test_each_rank_has_a_piece_from_the_front_and_one_from_the_back() -> None:
    assert order_of(8, 2).chunk(2)[0].tolist() == [0, 1, 6, 7]
    assert order_of(8, 2).chunk(2)[1].tolist() == [2, 3, 4, 5]
    assert order_of(6, 3).tolist() == [0, 5, 1, 4, 2, 3]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_see_the_same_number_of_tokens_under_a_causal_mask(ranks: int) -> None:
    seen = [int((part + 1).sum()) for part in order_of(24, ranks).chunk(ranks)]
    assert seen == [sum(range(1, 25)) // ranks] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_pieces_of_a_rank_end_with_its_last_tokens(ranks: int) -> None:
    for rank, part in enumerate(order_of(24, ranks).chunk(ranks)):
        assert ends_of(24, rank, ranks) == tuple(int(piece[-1]) + 1 for piece in part.chunk(2))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear(2, 2), "of Linear: only models of transformers let nbdist replace their attention"),
        (
            BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=24, n_layer=1, n_head=6)),
            "its attention can't be replaced",
        ),
        (LlamaModel(LlamaConfig(**SIZES)), "by transformers' ForCausalLMLoss"),
        (LlamaForSequenceClassification(LlamaConfig(**SIZES)), "by transformers'"),  # type: ignore[no-untyped-call]
        (OwnLoss(LlamaConfig(**SIZES)), "by transformers' ForCausalLMLoss"),
        (
            llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            r"its rotary embedding \(dynamic\) depends on the length",
        ),
        (Llama4ForCausalLM(Llama4TextConfig(**SIZES, num_local_experts=2)), r"\(chunked_attention\)"),
        (
            MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True)),
            "the loss that balances its experts",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_model_that_can_not_be_divided_is_refused_with_the_reason(model: nn.Module, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        refuse_unfit(model, 2, exchanges_heads=False)


def test_heads_that_can_not_be_divided_are_refused_with_their_numbers() -> None:
    refuse_unfit(llama(), 4, exchanges_heads=False)
    with pytest.raises(UsageError, match=r"6 attention heads can't be divided by cp \(4\).* to one of 1, 2, 3, 6, or"):
        refuse_unfit(llama(), 4, exchanges_heads=True)
    with pytest.raises(UsageError, match=r"3 attention heads that tp \(2\) leaves to each rank can't be divided by cp"):
        refuse_unfit(llama(), 2, exchanges_heads=True, tp=2)
