"""Models and small trainings that tests of `nbdist.prepare` use on ranks, as cells import them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import nbdist
from nbdist.plan import Plan
from nbdist.planning.settings import Strategy
from nbdist.train import state


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.linear(self.norm(x))


class Net(nn.Module):
    """Repeated blocks, and a weight that is tied."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Language(nn.Module):
    """Tokens in, logits out, by two weights."""

    def __init__(self, vocabulary: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Normed(nn.Module):
    """BatchNorms in blocks, in a list of their own, and one that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))
        self.extra = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        for module in [*self.blocks, *self.norms]:
            x = module(x)
        return self.extra(x) if extra else x


class Stubborn(nn.Module):
    """Cannot set its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def batch(rank: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(8, dtype=dtype).view(2, 4) / 8 + rank


def prepared(strategy: Strategy = "ddp", **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with its optimizer, both prepared; the same on all ranks."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return nbdist.prepare(model, optimizer, plan=Plan(strategy=strategy, **settings))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    with nbdist.accumulate(model):
        loss = model(batch(state.rank())).square().mean()
        nbdist.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gathered(model: nn.Module) -> list[str]:
    """The parameters that are whole on this rank now."""
    return [name for name, parameter in model.named_parameters() if not hasattr(parameter, "full_tensor")]


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, extras: list[bool]) -> list[float]:
    """Of steps with a Normed, each with its last layer or without, and of a forward without gradients after each."""
    found = []
    for extra in extras:
        loss = model(batch(state.rank()), extra).square().sum()
        nbdist.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [loss.item(), model(batch(), not extra).sum().item()]
    return found


def values(model: nn.Module) -> torch.Tensor:
    """All parameters in one row."""
    return torch.cat([whole(parameter).flatten().double() for parameter in model.parameters()])


def trained(strategy: Strategy = "ddp", steps: int = 3, **settings: Any) -> torch.Tensor:
    """All parameters after some steps."""
    model, optimizer = prepared(strategy, **settings)
    for _ in range(steps):
        step(model, optimizer)
    return values(model)
