"""Small language models of transformers that ranks train in stages, and one process by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import nbdist
from nbdist.plan import Plan
from tests.support import train_tensor_parallel
from tests.support.train_tensor_parallel import CLIP, SEQUENCES, Kind, distance, text
from tests.support.train_tensor_parallel import values as own_values

LAYERS = 5


def make(kind: Kind = "llama", seed: int = 0) -> nn.Module:
    return train_tensor_parallel.make(kind, seed, LAYERS)


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences, of whose tokens the first few have no label: another number in each of them."""

    def __init__(self, uneven: bool) -> None:
        self.words = text()
        self.labels = self.words.clone()
        for row in range(SEQUENCES if uneven else 0):
            self.labels[row, : row % 4 * 2] = -100

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[row], "labels": self.labels[row]}


def batches(rows: int, uneven: bool = True) -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(Text(uneven), rows)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of all stages, on all ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own_values(model))
    return {name: each for theirs in told for name, each in theirs.items()}


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
    uneven = (
        plan.accumulate == 1 and plan.pp * plan.tp == dist.get_world_size()
    )  # else one process has the mean of other means
    loader: Any = batches(SEQUENCES // 2 * plan.pp * plan.tp // dist.get_world_size() // plan.accumulate, uneven)
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


def distance_after_loading(saved: Plan, loaded: Plan, folder: str) -> float:
    """How far a model of another seed is from one that was saved in other stages, after a step of both."""
    batch = next(iter(batches(SEQUENCES, uneven=False)))
    return train_tensor_parallel.after_loading(saved, loaded, folder, partial(make, "llama tied"), batch, values)


def step(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    nbdist.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()


def distance_of_gradients(kind: Kind, model: Any) -> float:
    """How far the gradients of one batch are from those of one process whose model has the same values."""
    return train_tensor_parallel.distance_of_gradients(model, make(kind), next(iter(batches(SEQUENCES))), values(model))


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
