"""Trainings by DeepSpeed's ZeRO, and the same in one process, as cells on ranks import them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import nbdist
from nbdist.plan import Plan
from nbdist.train import state
from nbdist.train.sharding.zero_engine import whole
from tests.support.train_models import Net

CLIP, WINDOW, BATCH = 0.05, 3, 8
ROWS = torch.randn(104, 4, generator=torch.Generator().manual_seed(1))  # 13 batches: the last window is shorter
WISHED = ROWS.roll(1, 1) * 2


class Stream(IterableDataset[Any]):
    """The rows, without saying how many there are."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(ROWS, WISHED, strict=True))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    weights = [each for each in model.parameters() if each.dim() > 1]
    biases = [each for each in model.parameters() if each.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": 0.02}]
    return torch.optim.AdamW(groups, 0.01)


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def model_of(seed: int = 0, kind: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return Net().to(kind)


def loss_of(model: nn.Module, rows: torch.Tensor, wished: torch.Tensor) -> torch.Tensor:
    return (model(rows) - wished).square().mean()


def prepared(plan: Plan, *, stream: bool = False, kind: torch.dtype = torch.float32) -> Any:
    """Return what `prepare` makes of a model that each rank has built with its own seed, and the rest."""
    model = model_of(state.rank(), kind)
    optimizer = optimizer_of(model)
    data = Stream() if stream else TensorDataset(ROWS.to(kind), WISHED.to(kind))
    loader = DataLoader(data, BATCH // state.world_size())
    return nbdist.prepare(model, optimizer, loader, scheduler_of(optimizer), plan=plan)


def train(model: Any, optimizer: Any, loader: Any, scheduler: Any, epochs: int = 2) -> None:
    for _ in range(epochs):
        for rows, wished in loader:
            with nbdist.accumulate(model):
                nbdist.backward(loss_of(model, rows, wished))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def alone(epochs: int = 2, kind: torch.dtype = torch.float32) -> nn.Module:
    """Return the model of one process that has trained with the same windows of whole batches, clipped."""
    model = model_of(0, kind)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    batches = list(zip(ROWS.to(kind).split(BATCH), WISHED.to(kind).split(BATCH), strict=True))
    for _ in range(epochs):
        for first in range(0, len(batches), WINDOW):
            window = batches[first : first + WINDOW]
            for rows, wished in window:
                (loss_of(model, rows, wished) / len(window)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def steps(model: Any, count: int, step: Callable[[torch.Tensor], None], first: int = 0) -> None:
    """Make steps, one for each of the first batches, of which this rank has its part."""
    for number in range(first, first + count):
        rows, wished = (own(each.split(BATCH)[number]) for each in (ROWS, WISHED))
        step(loss_of(model, rows, wished))


def own(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(state.world_size())[state.rank()]


def stepped_alone(count: int) -> nn.Module:
    """Return the model of one process that has made as many such steps."""
    model = model_of()
    optimizer = optimizer_of(model)
    for number in range(count):
        loss_of(model, ROWS.split(BATCH)[number], WISHED.split(BATCH)[number]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def apart(model: nn.Module, other: nn.Module) -> float:
    """Return how far the parameters of two models are apart at most."""
    with whole(model) as one:
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)
