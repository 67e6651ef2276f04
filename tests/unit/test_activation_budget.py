"""What compiled models keep for backward under a budget of the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import nbdist
from nbdist.plan import Plan
from nbdist.train import state
from nbdist.train.prepare import environment

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # of torch's own decompositions
    pytest.mark.skipif(
        not hasattr(torch.compiler, "set_default_backend"), reason="this torch compiles with inductor only, in a minute"
    ),
]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin()
        return x


@pytest.fixture(autouse=True)
def _partitioned() -> Iterator[None]:
    torch.compiler.set_default_backend("aot_eager_decomp_partition")  # inductor's choice, without its kernels
    yield
    torch.compiler.set_default_backend(None)
    environment.apply(Plan(), torch.device("cpu"))
    state.forget()


def trained(budget: float | None) -> tuple[int, list[torch.Tensor | None]]:
    """The bytes that forward keeps for backward beside parameters, and the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plan = Plan(strategy="none", compile=True, activation_budget=budget)
    model = nbdist.prepare(Mlp(), plan=plan)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    x = torch.randn(256, 64)
    output = model(x)
    kept = {each.untyped_storage().data_ptr(): each.nbytes for each in output.grad_fn.saved_tensors}
    output.square().sum().backward()
    return sum(size for place, size in kept.items() if place not in own), [p.grad for p in model.parameters()]


def test_less_is_kept_the_smaller_the_budget_and_gradients_are_the_same_to_the_bit() -> None:
    everything, expected = trained(None)
    half, found = trained(0.5)
    nothing, others = trained(0.0)
    assert nothing < half <= 0.5 * everything + nothing
    for gradients in (found, others):
        assert all(map(torch.equal, gradients, expected))  # type: ignore[arg-type]


def test_the_next_plan_compiles_without_the_budget() -> None:
    before = trained(None)[0]
    trained(0.0)
    assert trained(None)[0] == before
