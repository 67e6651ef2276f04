"""Small language models of transformers that ranks train with their layers divided, and one process by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import nbdist
from nbdist.plan import Plan

Kind = Literal["llama", "llama tied", "qwen3"]

SEQUENCES, LENGTH, WORDS = 16, 8, 64
CLIP = 0.05  # below all norms that occur


def make(kind: Kind, seed: int = 0, layers: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": kind == "llama tied",
    }
    if kind == "qwen3":  # its queries and keys have norms of their own
        return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **sizes)).double()
    return LlamaForCausalLM(LlamaConfig(**sizes)).double()


def text() -> torch.Tensor:
    return torch.randint(0, WORDS, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).detach() for name, each in named}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in wanted.items())


def step(model: nn.Module, optimizer: Any, words: torch.Tensor) -> None:
    _step(model, optimizer, {"input_ids": words, "labels": words})


def _step(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    nbdist.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()


def distance_of_gradients(
    model: Any, alone: Any, batch: dict[str, torch.Tensor], whole: dict[str, torch.Tensor] | None = None
) -> float:
    """How far gradients of what a rank has are from those of one process.

    Args:
        model: Of this rank.
        alone: A model of this process, which gets the values of the other.
        batch: Of both.
        whole: The values, if this rank has a part of the model only.
    """
    alone.load_state_dict(whole or values(model), strict=False)  # tied names are left out
    model.zero_grad()
    for each in (model, alone):
        nbdist.backward(each(**batch).loss)
    wanted = {name: each.grad for name, each in alone.named_parameters()}
    found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    return distance(found, {name: wanted[name] for name in found})


def trained_alone(kind: Kind, fused: bool = False) -> dict[str, torch.Tensor]:
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    for words in text().split(SEQUENCES // 2):
        model(input_ids=words, labels=words).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def distance_from_one_process(kind: Kind, plan: Plan, fused: bool = False) -> float:
    """How far parameters are from those of one process, after two steps on all of the text."""
    plan = plan.replace(clip_grad_norm=CLIP)
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    batches: Any = DataLoader(text(), SEQUENCES // 2 * plan.tp // dist.get_world_size())  # type: ignore[arg-type]
    model, optimizer, batches = nbdist.prepare(model, optimizer, batches, plan=plan)
    for words in batches:
        step(model, optimizer, words)
    return distance(values(model), trained_alone(kind, fused))


def distance_of_plans(kind: Kind, *plans: Plan) -> float:
    """How far parameters are after two steps by one plan from those after two by another."""
    found: list[dict[str, torch.Tensor]] = []
    for plan in plans:
        model = make(kind)
        if plan.precision != "fp32":
            model.float()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)  # shows a gradient that is too large or small
        model, optimizer = nbdist.prepare(model, optimizer, plan=plan)
        for words in text().split(SEQUENCES // 2):
            step(model, optimizer, words)
        found.append(values(model))
    return distance(*found)


def prepare_own_model(plan: Plan) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    model.tp_plan = {"0": "colwise_gather_output"}  # type: ignore[assignment]
    nbdist.prepare(model, plan=plan)


def tokens_of_norms(plan: Plan, length: int) -> dict[str, int]:
    """How many tokens each norm of a model is called with in training."""
    model = nbdist.prepare(make("llama"), plan=plan)
    found = {}
    for name, module in model.named_modules():
        if name.endswith("norm"):
            own = name.rpartition(".")[2]
            module.register_forward_hook(lambda _, inputs, output, own=own: found.update({own: output.shape[1]}))
    words = text()[:, :length]
    nbdist.backward(model(input_ids=words, labels=words).loss)
    return found


def generates_as_one_process(plan: Plan) -> bool:
    prompt = text()[:2, :5]
    found: Any = nbdist.prepare(make("llama"), plan=plan)
    alone: Any = make("llama")
    with torch.no_grad():
        words, wanted = (each.generate(input_ids=prompt, max_new_tokens=4, do_sample=False) for each in (found, alone))
    return bool(torch.equal(words, wanted))


def logits_of(plan: Plan) -> dict[str, list[int] | float]:
    """What a model returns as logits: this rank's part in training, all of them in evaluation, and how far they are."""
    model, alone, words = nbdist.prepare(make("llama"), plan=plan), make("llama"), text()
    in_training = model(input_ids=words, labels=words).logits
    with torch.no_grad():
        wanted = alone(input_ids=words).logits
        found = [model(input_ids=words, labels=words).logits, model(input_ids=words).logits]
    found.append(in_training.full_tensor())
    return {
        "part": list(in_training.to_local().shape),
        "whole": list(found[0].shape),
        "distance": max(float((each - wanted).detach().abs().max()) for each in found),
    }


def warnings_of_a_step(kind: Kind, plan: Plan) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nbdist.prepare(make(kind), plan=plan)
        nbdist.backward(model(input_ids=text(), labels=text()).loss)
    return [str(each.message) for each in caught]


def type_of_embedded(kind: Kind, plan: Plan) -> str:
    """The type of what the embedding returns; of a sum that is under way it is another than a tensor's."""
    model: Any = nbdist.prepare(make(kind), plan=plan)
    found = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: found.append(type(output)))
    model(input_ids=text())
    return f"{found[0].__module__}.{found[0].__name__}"


def called_with_batches_of_ranks(plan: Plan) -> None:
    """Call the model with another batch on each rank, as a loader of one's own may have it."""
    model = nbdist.prepare(make("llama"), plan=plan)
    words = text()[4 * dist.get_rank() :][:4]
    model(input_ids=words, labels=words)


def train_on_words(plan: Plan, steps: int = 6) -> None:
    model = make("llama")
    model, optimizer = nbdist.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    random = torch.Generator().manual_seed(dist.get_rank() // plan.tp)
    for _ in range(steps):
        step(model, optimizer, torch.randint(0, WORDS, (4, LENGTH), generator=random))


def samples_seen(plan: Plan, count: int) -> list[int]:
    """What `gather_for_metrics` gives in a pass over so many samples, which the batches don't divide."""
    loader = nbdist.prepare(DataLoader(torch.arange(count), 2), plan=plan)  # type: ignore[arg-type]
    return [sample for batch in loader for sample in nbdist.gather_for_metrics(batch).tolist()]


def objects_seen(plan: Plan, count: int) -> list[int]:
    loader = nbdist.prepare(DataLoader(torch.arange(count), 2), plan=plan)  # type: ignore[arg-type]
    return [sample for batch in loader for sample in nbdist.gather_for_metrics(batch.tolist())]


def distance_after_loading(saved: Plan, loaded: Plan, folder: str) -> float:
    """How far a model of another seed is from one that was saved in another division, after a step of both."""
    return after_loading(saved, loaded, folder, partial(make, "llama tied"), {"input_ids": text(), "labels": text()})


def after_loading(
    saved: Plan,
    loaded: Plan,
    folder: str,
    made: Callable[[int], nn.Module],
    batch: dict[str, torch.Tensor],
    values: Callable[[nn.Module], dict[str, torch.Tensor]] = values,
) -> float:
    """How far a model of another seed is from one that was saved in another division, after a step of both.

    Args:
        saved: The plan of the first.
        loaded: The plan of the second.
        folder: For the checkpoint.
        made: Returns the model of a seed.
        batch: Of all steps.
        values: Returns the parameters of a whole model.
    """
    kept = []  # a training that is over must not be in the way of the next
    wanted: dict[str, torch.Tensor] = {}
    for plan, seed in ((saved, 0), (loaded, 5)):
        model = made(seed)
        model, optimizer = nbdist.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), plan=plan)
        kept.append((model, optimizer))
        if plan is loaded:
            nbdist.load_state(folder)
        else:
            _step(model, optimizer, batch)
            nbdist.save_state(folder)
        _step(model, optimizer, batch)
        wanted = wanted or values(model)
    return distance(values(model), wanted)


def distance_after_reading(plan: Plan, folder: str) -> float:
    """How far a model that was built on the meta device is from the weights that it is given."""
    model = nbdist.prepare(make("llama"), plan=plan)
    nbdist.save_model(model, folder)
    with torch.device("meta"):
        other = make("llama")
    other = nbdist.prepare(other, plan=plan, weights=folder)
    return distance(values(other), values(model))


def mesh_of(plan: Plan) -> tuple[tuple[str, ...], list[int]]:
    """The dimensions of the mesh, and the ranks that divide layers with this one."""
    nbdist.prepare(make("llama"), plan=plan)
    mesh = nbdist.mesh()
    return tuple(mesh.mesh_dim_names), mesh["tp"].mesh.tolist()
