"""What has to be alike on ranks so that they take their shares of the same samples, in words that can be compared.

No item of a dataset of the user's own is asked for: that may read a file, or draw random numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from nbdist.train.data.sharding import length_of, samplers_of

_INDICES = 1000  # of a subset, evenly spaced: two that were drawn differently differ nearly everywhere
_PLAIN = (
    "seed",
    "shuffle",
    "drop_last",
    "num_samples",
    "replacement",
    "num_replicas",
)  # what samplers say of themselves


def describe(loader: DataLoader[Any]) -> str:
    """Return what a loader's samples and their order depend on, in words that are the same on ranks that agree."""
    kind = type(loader).__name__
    if isinstance(loader.dataset, IterableDataset):  # a stream: it may be another on each rank on purpose
        return kind
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    parts = [_describe_data(loader.dataset), *(_describe_sampler(each) for each in samplers_of(sampler))]
    return f"{kind}({', '.join(filter(None, parts))})"


def contents(loader: DataLoader[Any]) -> str:
    """Return a digest of some of the samples that lie in memory as tensors; "" if none do."""
    found = []
    with suppress(Exception):  # it is the user's data: what can't be looked at is not compared
        found = [
            numpy.asarray(tensor[[at % len(tensor) for at in (0, len(tensor) // 2, -1)]]).tobytes()
            for part in _parts(loader.dataset)
            if isinstance(part, TensorDataset)
            for tensor in part.tensors
            if tensor.device.type == "cpu" and len(tensor)
        ]
    return _digest(found) if found else ""


def _describe_data(dataset: Any) -> str:
    length = None
    with suppress(Exception):  # the user's __len__
        length = length_of(dataset)
    known = []
    for part in _parts(dataset):
        with suppress(Exception):  # the user's data, as above
            if isinstance(part, Subset):
                known.append(("indices", _digest(_some(part.indices))))
            elif type(part).__module__.startswith("datasets.") and length_of(part):
                known.append(("rows", _digest([_rows(part)])))
    name = type(dataset).__name__
    words = [name if length is None else f"{name} of {length:,} samples", *(" ".join(pair) for pair in known)]
    return ", ".join(words)


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those that it is known to be made from."""
    yield dataset
    if isinstance(dataset, Subset):
        yield from _parts(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _parts(part)


def _some(indices: Sequence[int]) -> list[bytes]:
    step = max(1, len(indices) // _INDICES)
    return [b"%d" % int(indices[at]) for at in (*range(0, len(indices), step), -1)] if len(indices) else []


def _rows(dataset: Any) -> bytes:
    """Return some rows of a dataset of Hugging Face's as they lie on the disk, without what the user does to them."""
    return str(dataset.with_format("arrow")[[0, len(dataset) // 2, len(dataset) - 1]].to_pydict()).encode()


def _describe_sampler(sampler: Any) -> str:
    """Return a sampler and what its order depends on besides the generators that ranks agree on; "" if on nothing."""
    known = {}
    with suppress(Exception):  # the user's sampler: what can't be looked at is not compared
        own = vars(sampler)
        known = {name: own[name] for name in _PLAIN if isinstance(own.get(name), int) and (own[name] or name == "seed")}
        for name, value in own.items():
            if state := _state_of(value):
                known[name] = _digest([state])
    words = ", ".join(f"{name}={value}" for name, value in known.items())
    return f"{type(sampler).__name__}({words})" if words else ""


def _state_of(value: Any) -> bytes:
    """Return the state of a random generator that is not torch's; empty for anything else."""
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state()).encode()
    return repr(value.getstate()).encode() if isinstance(value, random.Random) else b""


def _digest(parts: Sequence[bytes]) -> str:
    return hashlib.blake2b(b"\n".join(parts), digest_size=3).hexdigest()
