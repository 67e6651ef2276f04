"""Batches on their way to the device, and how long the training waits for them. Independent of samplers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbdist.train.collective.nested import map_tensors

WINDOW = 20  # batches
_SHARE = 0.25  # of the time between two batches
_LEAST = 0.005  # seconds for each batch: less is not worth a word
_START = 2  # batches that wait for workers to start


class DeviceFeed:
    """Copies batches to a device while it computes: sent a batch ahead, on a stream of their own.

    Args:
        device: None or the CPU: batches are left as they are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type != "cpu" else None
        cuda = self._device is not None and self._device.type == "cuda"
        self._stream = copy_stream(self._device) if cuda else None

    def send(self, batch: Any) -> Any:
        """Begin to copy a batch."""
        return batch if self._device is None else map_tensors(self._sent, batch, _has_to)

    def arrive(self, batch: Any) -> Any:
        """Make what is computed from now on wait for the copies."""
        if self._stream is None:
            return batch
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        map_tensors(lambda tensor: _used_on(current, tensor), batch)
        return batch

    def _sent(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):  # no stream of ours: `arrive` does not see what it holds
            return thing.to(self._device)
        pin = self._stream is not None and thing.device.type == "cpu" and thing.layout == torch.strided
        with torch.cuda.stream(self._stream):  # does nothing if there is none
            return (thing.pin_memory() if pin else thing).to(self._device, non_blocking=True)


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for this process's copies to a device: memory freed on a stream is reused only there."""
    return torch.cuda.Stream(device)


def _has_to(value: Any) -> bool:
    """Return whether it is a tensor, or an object that moves to a device as a whole. Mappings are searched."""
    return callable(getattr(value, "to", None)) and not isinstance(value, Mapping | type)


def _used_on(stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)  # else its memory is given away while it is still read
    return tensor


class LoadingWatch:
    """Notes how much of the time between two batches is spent waiting for the second.

    Args:
        clock: Tells the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seen = 0
        self._waited = 0.0
        self._window_began = 0.0
        self._asked = 0.0
        self._told = False

    def ask(self) -> None:
        """Request a batch."""
        self._asked = self._clock()

    def arrived(self) -> tuple[float, float] | None:
        """Note that the batch has arrived.

        Returns:
            Seconds of waiting, and seconds in all, for each of the last 20 batches, if the waiting is too long. Said
            once.
        """
        now = self._clock()
        self._seen += 1
        if self._seen <= _START:
            self._window_began = now
            return None
        self._waited += now - self._asked
        if (self._seen - _START) % WINDOW:
            return None
        waited, total = self._waited / WINDOW, (now - self._window_began) / WINDOW
        self._waited, self._window_began = 0.0, now
        if self._told or waited < _LEAST or waited < _SHARE * total:
            return None
        self._told = True
        return waited, total
