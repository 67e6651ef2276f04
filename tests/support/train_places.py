"""One training as users write it, for each place in which it may run: a cell, a launched function, a script."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import nbdist

SAMPLES = 30


def train(folder: str, batch_size: int) -> list[list[float]]:
    """All parameters after two epochs, and again after the second one was repeated from a checkpoint."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data: Any = torch.arange(SAMPLES * 4, dtype=torch.float64).view(SAMPLES, 4) / SAMPLES
    loader = DataLoader(data, batch_size, shuffle=True)
    parts = nbdist.prepare(net, optimizer, loader, scheduler)
    epoch(*parts)
    nbdist.save_state(folder)
    epoch(*parts)
    straight = values(parts[0])
    nbdist.load_state(folder)
    epoch(*parts)
    return [straight, values(parts[0])]


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, scheduler: Any) -> None:
    for batch in loader:
        with nbdist.accumulate(model):
            nbdist.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def values(model: nn.Module) -> list[float]:
    wholes = [getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in model.parameters()]
    return torch.cat([whole.flatten() for whole in wholes]).tolist()


if __name__ == "__main__":
    nbdist.print(json.dumps(train(sys.argv[1], int(sys.argv[2]))))
