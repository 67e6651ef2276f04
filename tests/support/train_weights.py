"""Small models of transformers, and what tests of `prepare(weights=)` ask of them on ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nbdist
from nbdist.plan import Plan
from nbdist.planning.settings import Strategy
from nbdist.train import state


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 63}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 63, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def on_meta(make: Any = llama, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return make(**changes)


def filled(make: Any = llama, **changes: Any) -> nn.Module:
    """With values that tell each tensor from the others."""
    torch.manual_seed(3)
    model = make(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
    return model


def prepared(model: nn.Module, weights: Any, strategy: Strategy = "fsdp", **settings: Any) -> nn.Module:
    state.forget()
    return nbdist.prepare(model, plan=Plan(strategy=strategy, **settings), weights=weights)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, whole."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    wholes = {name: getattr(tensor, "full_tensor", lambda t=tensor: t)().detach() for name, tensor in named}
    return {name.removeprefix("module."): tensor for name, tensor in wholes.items()}


def alike(model: nn.Module, other: nn.Module) -> bool:
    """Whether all tensors, and what the models compute, are the same to the bit."""
    ours, theirs = values(model), values(other)
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        outputs = [each.eval()(tokens, use_cache=False).logits for each in (model, other)]
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours) and torch.equal(*outputs)


def fake_hub(cache: Path, name: str, model: Any) -> Path:
    """A model in the hub's cache, as a download leaves it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    model.save_pretrained(snapshot, max_shard_size="8KB")
    return snapshot


def without_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
