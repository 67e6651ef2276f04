"""Small mixtures of experts of transformers that ranks train together, and one process by itself."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import nbdist
from nbdist.plan import Plan
from tests.support import train_tensor_parallel
from tests.support.train_tensor_parallel import CLIP, SEQUENCES, WORDS, distance, step, text, values

Kind = Literal["mixtral", "qwen3", "qwen3 tied", "qwen3 idle"]
Steps = Literal["default", "foreach", "fused"]


def make(kind: Kind, seed: int = 0, experts: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    model: Any = _model(kind, experts)
    model.set_experts_implementation("eager")  # the faster ones don't know float64
    if kind == "qwen3 idle":  # all tokens choose the same experts, so others get none
        nn.init.zeros_(model.model.layers[1].mlp.gate.weight)
    return model.double()


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
        own: dict[str, Any] = {
            "moe_intermediate_size": 24,
            "num_experts": experts,
            "head_dim": 8,
            "mlp_only_layers": [0],
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=48, **own, **sizes))
    return MixtralForCausalLM(MixtralConfig(intermediate_size=24, num_local_experts=experts, **sizes))


def optimizer_of(model: nn.Module, steps: Steps) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), 1e-3, foreach=steps == "foreach" or None, fused=steps == "fused" or None
    )


def trained_alone(kind: Kind, steps: Steps = "default", experts: int = 4) -> dict[str, torch.Tensor]:
    model = make(kind, experts=experts)
    optimizer = optimizer_of(model, steps)
    for words in text().split(SEQUENCES // 2):
        model(input_ids=words, labels=words).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def distance_from_one_process(kind: Kind, plan: Plan, steps: Steps = "default", experts: int = 4) -> float:
    """How far parameters are from those of one process, after two steps on all of the text."""
    plan = plan.replace(clip_grad_norm=CLIP)
    model = make(kind, experts=experts)
    optimizer = optimizer_of(model, steps)
    rows = SEQUENCES // 2 * plan.tp // dist.get_world_size() // plan.accumulate
    batches: Any = DataLoader(text(), rows)  # type: ignore[arg-type]
    model, optimizer, batches = nbdist.prepare(model, optimizer, batches, plan=plan)
    for words in batches:
        with nbdist.accumulate():
            step(model, optimizer, words)
    return distance(values(model), trained_alone(kind, steps, experts))


def distance_in_float32(plan: Plan) -> float:
    """How far gradients in float32, of experts as transformers computes them by default, are from one process's."""
    words = text()
    torch.manual_seed(0)
    alone = _model("mixtral", 4)
    model: Any = nbdist.prepare(copy.deepcopy(alone), plan=plan)
    alone(input_ids=words, labels=words).loss.backward()
    own = words.chunk(dist.get_world_size())[dist.get_rank()]
    nbdist.backward(model(input_ids=own, labels=own).loss)
    found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    return distance(found, {name: each.grad for name, each in alone.named_parameters() if each.grad is not None})


def norm_and_that_of_one_process(plan: Plan) -> tuple[float, float]:
    """The norm of all gradients, by `clip_grad_norm_`."""
    words, alone = text(), make("qwen3")
    model: Any = nbdist.prepare(make("qwen3"), plan=plan)
    for each in (alone, model):
        nbdist.backward(each(input_ids=words, labels=words).loss)
    norm = nbdist.clip_grad_norm_(model, 1.0)
    assert norm is not None
    return norm.item(), nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()


def training(plan: Plan) -> tuple[nn.Module, Any]:
    model = make("qwen3")
    return nbdist.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)


def fail_on_the_last_rank_where_others_exchange_tokens(model: Any, optimizer: Any) -> None:
    def fail(*called: object) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise LookupError("no token")

    with model.model.layers[1].mlp.experts.register_forward_pre_hook(fail):
        step(model, optimizer, text())


def distance_after_a_step(model: nn.Module, optimizer: Any) -> float:
    """How far a training that begins now is from one process's."""
    alone = make("qwen3")
    step(model, optimizer, text())
    alone(input_ids=text(), labels=text()).loss.backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()
    return distance(values(model), values(alone))


def distance_of_gradients(model: Any) -> float:
    """How far gradients are from those of one process whose model has the same values."""
    batch = {"input_ids": text(), "labels": text()}
    return train_tensor_parallel.distance_of_gradients(model, make("qwen3"), batch)


def loads_and_those_of_one_process(plan: Plan) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The tokens of each expert in a step of ranks with half of the text each, twice: the second time without any."""
    alone: Any = make("qwen3")
    counts: dict[str, list[int]] = {}

    def count(module: nn.Module, inputs: Any) -> None:
        counts["model.layers.1.mlp.experts"] = torch.bincount(inputs[1].flatten(), minlength=4).tolist()

    alone.model.layers[1].mlp.experts.register_forward_pre_hook(count)
    alone(input_ids=text())
    model = make("qwen3")
    model, optimizer = nbdist.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    step(model, optimizer, text().chunk(dist.get_world_size())[dist.get_rank()])
    found = nbdist.expert_load(model)
    assert set(nbdist.expert_load(model)["model.layers.1.mlp.experts"]) == {0}
    return found, counts


def prepare_uneven_experts(plan: Plan) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.ones(4, 2, 2)), nn.Parameter(torch.ones(2, 2, 2))

    class Model(nn.Module):
        ep_plan: ClassVar = {"experts": "ep_dispatch_experts", "experts.*": "grouped_gemm"}

        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

    nbdist.prepare(Model(), plan=plan)


def distance_of_generated(plan: Plan) -> int:
    """In how many words a text that goes on is another than that of one process. Ranks have prompts of their own."""
    prompt = text()[dist.get_rank() :][:1, :4]
    model: Any = nbdist.prepare(make("qwen3"), plan=plan)
    alone: Any = make("qwen3")
    found, wanted = (each.generate(prompt, max_new_tokens=4, do_sample=False) for each in (model, alone))
    return int((found != wanted).sum())


def prepared(kind: Literal["llama", "qwen3"], plan: Plan, experts: int = 4) -> None:
    nbdist.prepare(train_tensor_parallel.make("llama") if kind == "llama" else make(kind, experts=experts), plan=plan)


def mesh_of(plan: Plan) -> tuple[tuple[str, ...], list[int]]:
    """The dimensions of the mesh, and the ranks that divide experts with this one."""
    nbdist.prepare(make("qwen3"), plan=plan)
    mesh = nbdist.mesh()
    return tuple(mesh.mesh_dim_names), mesh["ep"].mesh.tolist()


def distance_after_loading(saved: Plan, loaded: Plan, folder: str) -> float:
    """How far a model of another seed is from one that was saved in another division, after a step of both."""
    batch = {"input_ids": text(), "labels": text()}
    return train_tensor_parallel.after_loading(saved, loaded, folder, partial(make, "qwen3"), batch)


def distance_after_reading(plan: Plan, folder: str) -> float:
    """How far a model that was built on the meta device is from the weights that it is given."""
    model = nbdist.prepare(make("qwen3"), plan=plan)
    nbdist.save_model(model, folder)
    with torch.device("meta"):
        other = make("qwen3")
    other = nbdist.prepare(other, plan=plan, weights=folder)
    return max(distance(values(other), values(model)), distance(values(model), values(make("qwen3"))))
