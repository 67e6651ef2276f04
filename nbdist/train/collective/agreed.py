"""Draws that come out the same on every rank. Knows random generators; nothing of samplers, loaders or process groups.

A sampler that shuffles with the global generators would shuffle differently on each rank, and would move the numbers
that dropout draws. Inside of `AgreedDraws` it does neither.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy
import torch


class AgreedDraws:
    """A context in which torch (CPU), `random` and NumPy draw what `seed` says.

    Outside of it their states are as they were. Entered again, it goes on where it was left.

    Args:
        seed: The same on all ranks, from 0 to 2**64 - 1.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: _States | None = None
        self._outside: _States | None = None

    def __enter__(self) -> None:
        self._outside = _States()
        if self._inside is None:
            torch.default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            numpy.random.seed(self._seed % 2**32)
        else:
            self._inside.restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._outside is not None
        self._inside = _States()
        self._outside.restore()


class _States:
    """The states of the global generators."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state(legacy=False)

    def restore(self) -> None:
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)


def draw_seed() -> int:
    """Return a seed from torch's global generator, so that it follows torch.manual_seed."""
    return int(torch.randint(2**62, ()))


def seed_of_rank(seed: int, epoch: int, rank: int) -> int:
    """Return a seed for what must differ between ranks and epochs, and be the same in each run."""
    return int(numpy.random.SeedSequence([seed, epoch, rank]).generate_state(1, numpy.uint64)[0] >> numpy.uint64(1))
