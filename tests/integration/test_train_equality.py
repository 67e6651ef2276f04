"""N ranks train as one process does on the same global batch, and as PyTorch's own recipes do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel

STRATEGIES = ["none", "ddp", "fsdp", "hsdp"]


@pytest.fixture(scope="module", params=[2, 4])
def some_ranks(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel with two ranks, then one with four."""
    with shared_kernel(request.param) as kernel:
        kernel.ok(
            "import nbdist\nfrom tests.support import train_equality as equality\ncall = nbdist.get_session().call"
        )
        yield kernel


def on_ranks(kernel: Kernel, function: str, arguments: str) -> list[Any]:
    return list(kernel.value(f"call(equality.{function}, {arguments})"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_train_as_one_process_does(some_ranks: Kernel, strategy: str, accumulate: int, clip: bool) -> None:
    plan = f"equality.plan_of({strategy!r}, {accumulate}, {clip})"
    assert max(on_ranks(some_ranks, "distance_from_one_process", f"{plan}, 'float64'")) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_they_do_in_float32(some_ranks: Kernel, strategy: str) -> None:
    plan = f"equality.plan_of({strategy!r}, 3, True)"
    assert max(on_ranks(some_ranks, "distance_from_one_process", f"{plan}, 'float32'")) < 1e-6


@pytest.mark.parametrize(("accumulate", "more"), [(1, ""), (3, ", activation_checkpointing='full'")])
def test_ranks_that_divide_layers_train_as_one_process_does(some_ranks: Kernel, accumulate: int, more: str) -> None:
    plan = f"equality.plan_of('fsdp', {accumulate}, True, tp=2{more})"
    assert max(on_ranks(some_ranks, "distance_from_one_process", f"{plan}, 'float64'")) < 1e-12


@pytest.mark.slow
def test_so_they_do_with_compiled_blocks(ranks: Kernel) -> None:
    ranks.ok("import nbdist\nfrom tests.support import train_equality as equality\ncall = nbdist.get_session().call")
    plan = "equality.plan_of('fsdp', 1, True, tp=2, compile=True)"
    found = ranks.value(f"call(equality.distance_from_one_process, {plan}, 'float32')", limit=300)
    assert max(found) < 1e-6
    assert ranks.value("call(equality.graph_breaks)") == [0, 0]


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_ranks_that_exchange_gradients_in_each_micro_batch_train_as_one_process_does(
    some_ranks: Kernel, strategy: str
) -> None:
    plan = f"equality.plan_of({strategy!r}, 3, True, exchange='each')"
    assert max(on_ranks(some_ranks, "distance_from_one_process", f"{plan}, 'float64'")) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("accumulate", "dtype", "limit"), [(1, "float32", 1e-6), (3, "float64", 1e-12)])
def test_averaged_weights_are_those_of_one_process(
    some_ranks: Kernel, strategy: str, accumulate: int, dtype: str, limit: float
) -> None:
    plan = f"equality.plan_of({strategy!r}, {accumulate}, True, ema=0.9)"
    assert max(on_ranks(some_ranks, "averages_apart", f"{plan}, {dtype!r}")) < limit


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, False), (3, True)], ids=["1", "3-clip"])
def test_bf16_is_bit_for_bit_the_recipe_of_pytorch(
    some_ranks: Kernel, strategy: str, accumulate: int, clip: bool
) -> None:
    plan = f"equality.plan_of({strategy!r}, {accumulate}, {clip}, 'bf16')"
    assert not any(on_ranks(some_ranks, "differing_from_recipe", plan))
