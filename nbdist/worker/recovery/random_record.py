"""The random state of a rank after its last steps, in a file that outlives its process (`--exact`).

A rank that takes a dead one's place goes on with its random numbers. Independent of steps but for their number.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SLOT = 64 << 10  # bytes; Python, NumPy and torch on a CPU need 13,000 together, each GPU 16
_HEADER = struct.Struct("<qq")  # steps, bytes
_TORN = -1


class RandomRecord:
    """Two slots, written in turn, so that one is whole whenever the rank dies. On the main thread.

    Args:
        path: The file.
        new: Whether to forget what is there.
    """

    def __init__(self, path: Path, *, new: bool) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if new else 0), 0o600)
        try:
            os.ftruncate(descriptor, 2 * _SLOT)
            self._memory = mmap.mmap(descriptor, 2 * _SLOT)
        finally:
            os.close(descriptor)

    def write(self, steps: int, states: Mapping[str, Any]) -> None:
        """Keep the states after so many steps; the ones after one step less stay, too."""
        data = pickle.dumps({name: _plain(state) for name, state in states.items()})
        start = steps % 2 * _SLOT
        if len(data) > _SLOT - _HEADER.size:
            return
        _HEADER.pack_into(self._memory, start, steps, _TORN)
        self._memory[start + _HEADER.size : start + _HEADER.size + len(data)] = data
        _HEADER.pack_into(self._memory, start, steps, len(data))

    def read(self, steps: int) -> tuple[int, dict[str, Any]] | None:
        """Return the states after so many steps, else the last ones, and after how many; None if there are none."""
        slots = [(start, *_HEADER.unpack_from(self._memory, start)) for start in (0, _SLOT)]
        whole = [slot for slot in slots if slot[2] > 0]
        if not whole:
            return None
        start, found, length = max(whole, key=lambda slot: (slot[1] == steps, slot[1]))
        begin = start + _HEADER.size
        states = pickle.loads(self._memory[begin : begin + length])
        return found, {name: _tensors(state) if name in ("torch", "cuda") else state for name, state in states.items()}


def _plain(state: object) -> Any:
    """Return a state with bytes for torch's tensors, which take a hundred times as long."""
    if isinstance(state, list):
        return [_plain(each) for each in state]
    return state.numpy().tobytes() if hasattr(state, "numpy") else state


def _tensors(state: Any) -> Any:
    import torch

    if isinstance(state, list):
        return [_tensors(each) for each in state]
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
