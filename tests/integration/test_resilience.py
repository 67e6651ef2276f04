"""Models, optimizers and loops live through interrupts: a seeded sample; `scripts/bench interrupts` does the whole."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.conftest import shared_kernel
from tests.harness import Kernel, kernel_with_ranks
from tests.resilience import PHASES, WRAPPERS

SEED = random.SystemRandom().randrange(1 << 32)
INTERRUPTS = 3  # in each phase

TRAIN = """
import pathlib, tempfile
import nbdist
from tests.resilience import Training
folder = tempfile.TemporaryDirectory()
training = Training(nbdist.get_session(), {wrapper!r}, {seed}, pathlib.Path(folder.name))
"""


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[int, Kernel]]:
    """Kernels with two and with four ranks."""
    with shared_kernel(2) as two, shared_kernel(4) as four:
        yield {2: two, 4: four}


def train(kernel: Kernel, wrapper: str, seed: int) -> None:
    kernel.ok(TRAIN.format(wrapper=wrapper, seed=seed))


@pytest.mark.torch_private
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("wrapper", "count"), [(wrapper, count) for wrapper, counts in WRAPPERS.items() for count in counts]
)
def test_a_training_goes_on_after_interrupts_at_random_moments(
    wrapper: str, count: int, phase: str, kernels: dict[int, Kernel]
) -> None:
    train(kernels[count], wrapper, SEED)
    kernels[count].ok(f"result = training.interrupt({phase!r}, {INTERRUPTS})")
    wrong = kernels[count].value("result.wrong")
    assert not wrong, f"seed {SEED}: {wrong[0]}"


@pytest.mark.torch_private
@pytest.mark.parametrize("count", [2, 4])
def test_with_exact_an_interrupted_run_equals_one_never_interrupted(count: int) -> None:
    with kernel_with_ranks(count, "--exact") as kernel:
        train(kernel, "DDP static_graph", SEED)
        expected, _ = kernel.value("training.weights_after(60)")
        for phase in PHASES:
            found, interrupts = kernel.value(f"training.weights_after(60, {phase!r})")
            assert interrupts > 1
            assert found == expected, f"seed {SEED}: interrupted {interrupts} times in {phase}"
