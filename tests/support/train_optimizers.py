"""Optimizers that people try, and one training of each with what a plan adds: windows, clipping, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import nbdist
from nbdist.plan import Plan
from nbdist.train import state
from tests.support.train_models import Net, batch, values


class Lion(torch.optim.Optimizer):
    """As people write their own: plain tensor operations on parameters and on state that is made like them."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in [parameter for parameter in group["params"] if parameter.grad is not None]:
                known = self.state[parameter]
                if not known:
                    known["momentum"] = torch.zeros_like(parameter)
                update = known["momentum"].mul(0.9).add(parameter.grad, alpha=0.1).sign_()
                parameter.add_(update, alpha=-group["lr"])
                known["momentum"].lerp_(parameter.grad, 0.01)


class TwoModes(torch.optim.SGD):
    """As schedule-free optimizers do it: parameters have other values for evaluation."""

    @torch.no_grad()
    def eval(self) -> None:
        self._scale(2.0)

    @torch.no_grad()
    def train(self) -> None:
        self._scale(0.5)

    def _scale(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)


class Whole(torch.optim.Optimizer):
    """As people write it for one process: state of plain tensors, which can't be mixed with shards.

    Args:
        error: What `step` raises on its own account, if anything.
    """

    def __init__(self, params: Any, error: str = "") -> None:
        super().__init__(params, {"lr": 1e-2})
        self._error = error

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self._error:
            raise RuntimeError(self._error)
        for group in self.param_groups:
            for parameter in [parameter for parameter in group["params"] if parameter.grad is not None]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros(parameter.shape))
                parameter.sub_(momentum.add_(parameter.grad), alpha=group["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


KINDS: dict[str, Any] = {
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=1e-2),
    "Lion": lambda model: Lion(model.parameters()),
    "TwoModes": lambda model: TwoModes(model.parameters(), lr=1e-2),
    "Whole": lambda model: Whole(model.parameters()),
    "Diverging": lambda model: Whole(model.parameters(), error="the loss is NaN"),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
}


def made(kind: str, plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return nbdist.prepare(model, KINDS[kind](model), plan=plan)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(2 * count):
        with nbdist.accumulate(model):
            nbdist.backward(model(batch(state.rank())).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def resumed(kind: str, folder: str, strategy: str) -> tuple[bool, bool]:
    """Whether the parameters have moved, and whether a run that is loaded ends as the one that went on."""
    plan = Plan(strategy=strategy, accumulate=2, clip_grad_norm=0.5, replicas=2 if strategy == "hsdp" else None)  # type: ignore[arg-type]
    model, optimizer = made(kind, plan)
    before = values(model)
    steps(model, optimizer, 2)
    nbdist.save_state(folder)
    steps(model, optimizer, 2)
    expected = values(model)
    model, optimizer = made(kind, plan)
    nbdist.load_state(folder)
    steps(model, optimizer, 2)
    return torch.equal(before, expected), torch.equal(values(model), expected)
