"""Small mixtures of experts of transformers that ranks train together, and one process by itself."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import nbdist
from nbdist.plan import Plan
from tests.support.train_tensor_parallel import CLIP, SEQUENCES, WORDS, distance, step, text, values

Kind = Literal["mixtral", "qwen3", "qwen3 tied"]
Steps = Literal["default", "foreach", "fused"]


def make(kind: Kind, seed: int = 0, experts: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    model: Any = _model(kind, experts)
    model.set_experts_implementation("eager")  # the faster ones don't know float64
    return model.double()  # type: ignore[no-any-return]


def _model(kind: Kind, experts: int) -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": kind == "qwen3 tied",
    }
    if kind != "mixtral":  # its first layer has no experts
        own = {"moe_intermediate_size": 24, "num_experts": experts, "head_dim": 8, "mlp_only_layers": [0]}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=48, **own, **sizes))
    return MixtralForCausalLM(MixtralConfig(intermediate_size=24, num_local_experts=experts, **sizes))


def optimizer_of(model: nn.Module, steps: Steps) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, **({} if steps == "default" else {steps: True}))


def trained_alone(kind: Kind, steps: Steps = "default") -> dict[str, torch.Tensor]:
    model = make(kind)
    optimizer = optimizer_of(model, steps)
    for words in text().split(SEQUENCES // 2):
        model(input_ids=words, labels=words).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def distance_from_one_process(kind: Kind, plan: Plan, steps: Steps = "default") -> float:
    """How far parameters are from those of one process, after two steps on all of the text."""
    plan = plan.replace(clip_grad_norm=CLIP)
    model = make(kind)
    optimizer = optimizer_of(model, steps)
    batches: Any = DataLoader(text(), SEQUENCES // 2 * plan.tp // dist.get_world_size())  # type: ignore[arg-type]
    model, optimizer, batches = nbdist.prepare(model, optimizer, batches, plan=plan)
    for words in batches:
        step(model, optimizer, words)
    return distance(values(model), trained_alone(kind, steps))


def distance_after_loading(saved: Plan, loaded: Plan, folder: str) -> float:
    """How far a model of another seed is from one that was saved in another division, after a step of both."""
    wanted: dict[str, torch.Tensor] = {}
    for plan, seed in ((saved, 0), (loaded, 5)):
        model = make("qwen3", seed)
        model, optimizer = nbdist.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), plan=plan)
        if plan is saved:
            step(model, optimizer, text())
            nbdist.save_state(folder)
            step(model, optimizer, text())
            wanted = values(model)
        else:
            nbdist.load_state(folder)
            step(model, optimizer, text())
    return distance(values(model), wanted)


def distance_after_reading(plan: Plan, folder: str) -> float:
    """How far a model that was built on the meta device is from the weights that it is given."""
    model = nbdist.prepare(make("qwen3"), plan=plan)
    nbdist.save_model(model, folder)
    with torch.device("meta"):
        other = make("qwen3")
    other = nbdist.prepare(other, plan=plan, weights=folder)
    return max(distance(values(other), values(model)), distance(values(model), values(make("qwen3"))))
