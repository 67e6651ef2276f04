"""Mixtures of experts of transformers whose experts are divided among ranks, with what belongs to a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel

FSDP = "Plan('fsdp')"
TP = "Plan('fsdp', tp=2)"
TP_OF_REPLICAS = "Plan('hsdp', tp=2, replicas=2)"


@pytest.fixture(scope="module")
def four() -> Iterator[Kernel]:
    """A kernel with four ranks."""
    with shared_kernel(4) as kernel:
        kernel.ok(
            "import nbdist\nfrom nbdist import Plan\nfrom tests.support import train_experts as experts\n"
            "call = nbdist.get_session().call"
        )
        yield kernel


def on_ranks(kernel: Kernel, function: str, arguments: str) -> list[Any]:
    return list(kernel.value(f"call(experts.{function}, {arguments})"))


@pytest.mark.parametrize("plan", [TP, TP_OF_REPLICAS], ids=["tp", "tp of replicas"])
@pytest.mark.parametrize("steps", ["default", "fused"])
def test_divided_experts_train_as_one_process_does(four: Kernel, plan: str, steps: str) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'qwen3', {plan}, {steps!r}")) < 1e-12


def test_so_they_do_to_the_precision_of_a_router_that_computes_in_float32(four: Kernel) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'mixtral', {TP}")) < 1e-6


def test_so_they_do_with_tied_weights_and_checkpointed_blocks(four: Kernel) -> None:
    plan = TP.replace(")", ", activation_checkpointing='full')")
    assert max(on_ranks(four, "distance_from_one_process", f"'qwen3 tied', {plan}")) < 1e-12


@pytest.mark.parametrize(("saved", "loaded"), [(TP, FSDP), (FSDP, TP), (TP, TP_OF_REPLICAS)])
def test_a_checkpoint_fits_another_division_of_experts(four: Kernel, saved: str, loaded: str, tmp_path: Path) -> None:
    arguments = f"{saved}, {loaded}, {str(tmp_path / 'saved')!r}"
    assert max(on_ranks(four, "distance_after_loading", arguments)) < 1e-12


def test_experts_that_are_built_nowhere_read_their_parts(four: Kernel, tmp_path: Path) -> None:
    assert max(on_ranks(four, "distance_after_reading", f"{TP}, {str(tmp_path / 'weights')!r}")) == 0
