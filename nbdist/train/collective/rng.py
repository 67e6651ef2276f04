"""The random generators of this process: Python's, NumPy's, torch's on the CPU and on this rank's GPU.

Independent of samplers, loaders, checkpoints or process groups.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Generator:
    get: Callable[[], Any]
    set: Callable[[Any], object]
    seed: Callable[[int], object]


def take_random(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, by name."""
    return {name: generator.get() for name, generator in _generators(device).items()}


def restore_random(
    states: Mapping[str, Any], device: torch.device, seed: str | None = None, shared: Sequence[str] = ()
) -> None:
    """Put generators where they were.

    Args:
        states: What `take_random` has given.
        device: Where this rank computes.
        seed: None: the states are this rank's own. Else what new seeds are made of.
        shared: Generators that were in the same state on all ranks, and go on from it whatever `seed` is.
    """
    for name, generator in _generators(device).items():
        if name in states and (seed is None or name in shared):
            generator.set(states[name])
        else:
            generator.seed(int(_hash(f"{name} {seed}")[:12], 16))


def random_digests(states: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each generator's state: equal ones are in the same state."""
    return {name: _hash(repr(_plain(state))) for name, state in states.items()}


def _generators(device: torch.device) -> dict[str, _Generator]:
    generators = {
        "python": _Generator(random.getstate, random.setstate, random.seed),
        "numpy": _Generator(np.random.get_state, np.random.set_state, lambda seed: np.random.seed(seed % 2**32)),
        "torch": _Generator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
    }
    if device.type == "cuda":
        generators["cuda"] = _Generator(
            lambda: torch.cuda.get_rng_state(device),
            lambda state: torch.cuda.set_rng_state(state, device),
            torch.cuda.manual_seed,
        )
    return generators


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor | np.ndarray):
        return state.tolist()
    return [_plain(part) for part in state] if isinstance(state, tuple) else state


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class AgreedDraws:
    """A context in which torch (CPU), `random` and NumPy draw what `seed` says.

    A sampler that shuffles with the global generators would shuffle differently on each rank, and would move the
    numbers that dropout draws. Outside their states are as they were. Entered again, it goes on where it was left.

    Args:
        seed: The same on all ranks, from 0 to 2**64 - 1.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: dict[str, Any] | None = None
        self._outside: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outside = take_random(_CPU)
        if self._inside is not None:
            restore_random(self._inside, _CPU)
            return
        for generator in _generators(_CPU).values():
            generator.seed(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside = take_random(_CPU)
        restore_random(self._outside, _CPU)


def draw_seed() -> int:
    """Return a seed from torch's global generator, so that it follows torch.manual_seed."""
    return int(torch.randint(2**62, ()))


def seed_of_rank(seed: int, epoch: int, rank: int) -> int:
    """Return a seed for what must differ between ranks and epochs, and be the same in each run."""
    return int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))
