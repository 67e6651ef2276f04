"""Small language models of transformers that ranks train in stages, and one process by itself."""

from __future__ import annotations

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

SEQUENCES, LENGTH, WORDS, LAYERS = 16, 8, 64, 5
CLIP = 0.05  # below all norms that occur


def make(kind: Kind = "llama", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": kind == "llama tied",
    }
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **sizes)).double()
    return LlamaForCausalLM(LlamaConfig(**sizes)).double()


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences, of whose tokens the first few have no label: another number in each of them."""

    def __init__(self, uneven: bool) -> None:
        self.words = torch.randint(0, WORDS, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
        self.labels = self.words.clone()
        for row in range(SEQUENCES if uneven else 0):
            self.labels[row, : row % 4 * 2] = -100

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[row], "labels": self.labels[row]}


def batches(rows: int, uneven: bool = True) -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(Text(uneven), rows)


def own_values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).detach() for name, each in named}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of all stages, on all ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own_values(model))
    return {name: each for theirs in told for name, each in theirs.items()}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in wanted.items())


def trained_alone(kind: Kind, rows: int, uneven: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = make(kind), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch in batches(rows, uneven):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, own_values(model)


def distance_from_one_process(kind: Kind, plan: Plan, fused: bool = False) -> tuple[float, float]:
    """How far losses and parameters are from those of one process, after a pass over all of the text."""
    plan = plan.replace(clip_grad_norm=CLIP)
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    uneven = plan.accumulate == 1 and plan.pp == dist.get_world_size()  # else one process has the mean of other means
    loader: Any = batches(SEQUENCES // 2 * plan.pp // dist.get_world_size() // plan.accumulate, uneven)
    model, optimizer, loader = nbdist.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for batch in loader:
        with nbdist.accumulate(model):
            loss = model(**batch).loss
            nbdist.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    wanted, parameters = trained_alone(kind, SEQUENCES // 2, uneven)
    mean = nbdist.gather(torch.stack(losses).mean()).mean()
    far = abs(float(mean) - sum(wanted) / len(wanted))
    return far, distance(values(model), parameters)


def distance_of_evaluation(kind: Kind, plan: Plan) -> tuple[float, float]:
    """How far loss and logits are from those of one process, for a batch that micro-batches don't divide."""
    model: Any = nbdist.prepare(make(kind), plan=plan)
    batch = next(iter(batches(7)))
    alone: Any = make(kind)
    with torch.no_grad():
        found, wanted = model(**batch), alone(**batch)
    return abs(float(found.loss - wanted.loss)), float((found.logits - wanted.logits).abs().max())


def distance_after_loading(saved: Plan, loaded: Plan, folder: str, kind: Kind = "llama tied") -> float:
    """How far a model of another seed is from one that was saved in other stages, after a step of both."""
    batch = next(iter(batches(SEQUENCES, uneven=False)))
    for plan, seed in ((saved, 0), (loaded, 5)):
        model = make(kind, seed)
        model, optimizer = nbdist.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), plan=plan)
        if plan is saved:
            step(model, optimizer, batch)
            nbdist.save_state(folder)
            step(model, optimizer, batch)
            wanted = values(model)
        else:
            nbdist.load_state(folder)
            step(model, optimizer, batch)
    return distance(values(model), wanted)


def step(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    nbdist.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()


def distance_of_gradients(kind: Kind, model: Any) -> float:
    """How far the gradients of one batch are from those of one process whose model has the same values."""
    alone: Any = make(kind)
    alone.load_state_dict(values(model), strict=False)  # tied names are left out
    batch = next(iter(batches(SEQUENCES)))
    model.zero_grad()
    nbdist.backward(model(**batch).loss)
    alone(**batch).loss.backward()
    wanted = {name: each.grad for name, each in alone.named_parameters()}
    found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    return distance(found, {name: wanted[name] for name in found})


def distance_of_saved_model(kind: Kind, plan: Plan, folder: str) -> float:
    """How far the model that was saved whole is from the one that was cut."""
    model = nbdist.prepare(make(kind), plan=plan)
    nbdist.save_model(model, folder)
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return distance(own_values(again), own_values(make(kind)))


def distance_of_loaded_model(kind: Kind, plan: Plan, folder: str) -> float:
    """How far a model of another seed is from the one that it was loaded from."""
    whole: Any = make(kind)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    model = nbdist.prepare(make(kind, 5), plan=plan)
    nbdist.load_model(model, folder)
    return distance(values(model), own_values(whole))


def called_with_rows(plan: Plan, rows: int) -> None:
    model = nbdist.prepare(make(), plan=plan)
    model(**next(iter(batches(rows))))


def called_with_batches_of_ranks(plan: Plan) -> None:
    """Call the model with another batch on each rank, as a loader of one's own may have it."""
    model = nbdist.prepare(make(), plan=plan)
    words = Text(False).words[4 * dist.get_rank() :][:4]
    model(input_ids=words, labels=words)


def samples_seen(plan: Plan, count: int) -> list[int]:
    """What `gather_for_metrics` gives in a pass over so many samples, which the batches don't divide."""
    loader = nbdist.prepare(DataLoader(torch.arange(count), 2), plan=plan)  # type: ignore[arg-type]
    return [sample for batch in loader for sample in nbdist.gather_for_metrics(batch).tolist()]


def mesh_of(plan: Plan) -> tuple[tuple[str, ...], list[int]]:
    """The dimensions of the mesh, and the ranks of this one's pipeline."""
    nbdist.prepare(make(), plan=plan)
    mesh = nbdist.mesh()
    return tuple(mesh.mesh_dim_names), mesh["pp"].mesh.tolist()
