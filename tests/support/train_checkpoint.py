"""A small training for tests of checkpoints, made by hand from torch's own parts. Its text runs as a cell on ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import nbdist
from nbdist.plan import Plan
from nbdist.train import state


class Net(nn.Module):
    """Tied weights, dropout, and buffers that differ between ranks: what checkpoints get wrong."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, width)
        self.unembed = nn.Linear(width, 6, bias=False)
        self.unembed.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unembed(self.head(self.drop(self.inner(self.norm(self.embed(x))))))


class Counter:
    """Something of the user's that checkpoints keep."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, kept: dict[str, int]) -> None:
        self.count = kept["count"]


class Training:
    def __init__(
        self, strategy: str = "none", seed: int = 0, width: int = 8, kind: Any = torch.optim.AdamW, **settings: Any
    ) -> None:
        state.begin(Plan(strategy="none"))
        torch.manual_seed(seed)
        self.width = width
        self.model = wrapped(Net(width), strategy)
        own = seed + 1 + state.rank()
        torch.manual_seed(own)
        random.seed(own)
        numpy.random.seed(own)
        self.optimizer = kind(self.model.parameters(), lr=0.1, **settings)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.counter = Counter()
        now = state.current()
        now.models, now.optimizers = state.Living([self.model]), state.Living([self.optimizer])
        now.schedulers = state.Living([self.scheduler])
        nbdist.register_for_checkpointing(self.counter)

    def steps(self, count: int) -> Training:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, self.width)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.counter.count += 1
            state.current().steps += 1
        return self

    def kept(self) -> dict[str, Any]:
        """Everything that training goes by, whole: equal for any number of ranks but for the random numbers."""
        model = getattr(self.model, "module", self.model)
        found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = whole(value)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {**found, "groups": groups, "scheduler": self.scheduler.last_epoch, "count": self.counter.count}

    def exact(self) -> tuple[Any, ...]:
        """The same with what belongs to this rank: its buffers, and what it draws next."""
        return (
            self.kept(),
            random.getstate(),
            numpy.random.get_state(legacy=False)["state"]["key"].tolist(),
            torch.get_rng_state().tolist(),
        )


def wrapped(net: Net, strategy: str) -> Any:
    if strategy == "ddp":
        return DistributedDataParallel(net, static_graph=True)
    if strategy == "fsdp":
        fully_shard(net.inner)
        fully_shard(net.head)
        return fully_shard(net)
    return net


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor().detach().clone() if isinstance(value, DTensor) else torch.as_tensor(value).clone()


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
