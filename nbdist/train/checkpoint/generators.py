"""The random generators of this process: Python's, NumPy's, torch's on the CPU and on this rank's GPU."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


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
