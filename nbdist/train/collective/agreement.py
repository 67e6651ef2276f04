"""Whether ranks agree: they compare what they were given, hear what each has to say, and fail together.

What is wrong on one rank, or differs between ranks, is one error on all of them. Sends values and single numbers only;
tensors are for `collectives`, and waiting for a rank that does not come for `meeting`.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from nbdist.base.ranks import describe_ranks
from nbdist.errors import CheckpointError, UsageError
from nbdist.train import state as training
from nbdist.train.collective.participants import refuse_partial

T = TypeVar("T")
_CPU = torch.device("cpu")

# --- what each rank says


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each rank says, in the order of the group's ranks.

    Args:
        value: What this rank says; anything that can be pickled.
        group: The ranks that take part; None: all. Without a process group this rank is the only one.
    """
    if not training.has_group() or dist.get_world_size(group) == 1:
        return [value]
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, value, group=group)
    return answers


def tell(value: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return what rank `src` says.

    Args:
        value: What this rank would say.
        src: The rank among all whose value counts.
        group: The ranks that take part; None: all.
    """
    if not training.has_group() or dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src, group=group)
    return box[0]


def all_numbers(number: int) -> torch.Tensor:
    """Return what whole number each rank has, on the CPU."""
    ranks = training.world_size()
    mine = torch.tensor([number], device=wire_of(_CPU) if ranks > 1 else _CPU)
    if ranks == 1:
        return mine
    result = mine.new_empty(ranks)
    all_gather(result, mine)
    return result.cpu()


def all_gather(result: torch.Tensor, mine: torch.Tensor) -> None:
    """Call `all_gather_into_tensor` by this torch's name for it: newer versions warn of the older one."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(result, mine)


def wire_of(device: torch.device, group: dist.ProcessGroup | None = None, *, to_one: bool = False) -> torch.device:
    """Return where tensors of a device are sent from: itself, if the group has a backend for it, else the CPU.

    Args:
        device: Where the tensors are.
        group: The ranks that take part; None: all.
        to_one: Whether they go to a single rank, to which gloo can't send from a GPU.
    """
    backends = _backends(dist.get_backend_config(group))
    if device.type in backends and not (to_one and backends[device.type] == "gloo"):
        return device
    return _CPU if "cpu" in backends else training.default_device()


@functools.cache
def _backends(config: str) -> Mapping[str, str]:
    """Return the backend for each type of device, of "cpu:gloo,cuda:nccl"."""
    pairs = (pair.partition(":") for pair in config.split(","))
    return {device: backend for device, _, backend in pairs}


# --- whether all were given the same


def differing(function: str, given: T, failure: str = "") -> list[T]:
    """Return what each rank was given, if that is not the same on all; else an empty list.

    Args:
        function: What the user has called.
        given: With what. Its `repr` is compared.
        failure: What is wrong on this rank, which raises on all.

    Raises:
        UsageError: Something is wrong on a rank, or a rank has called something else.
    """
    return compare(function, given, failure)[0]


def compare(
    function: str, given: T, failure: str, carried: torch.Tensor | None = None
) -> tuple[list[T], torch.Tensor | None]:
    """Compare like `differing`; also return all ranks' values of a small tensor, if one was given.

    What each rank sends first is one negative number, which nothing else begins with: a rank that is in another call is
    noticed before its bytes are taken for an answer. Its upper half tells the call; the tensor travels in the lower.
    """
    if training.world_size() == 1:
        if failure:
            raise UsageError(failure)
        return [], None
    refuse_partial(function, training.world_size())
    mine = _FAILED if failure else _digest(f"{function} {given!r}")
    words = all_numbers(mine << 32 | (0 if carried is None else _bits(carried)))
    said = [word >> 32 for word in words.tolist()]
    stranger = said.index(max(said))
    if said[stranger] >= 0:
        raise UsageError(
            f"{function} was called here while rank {stranger} is in a different collective: make the same "
            "calls on all ranks, in the same order"
        )
    if set(said) == {mine} and not failure:
        return [], None if carried is None else _from_bits(words, carried.dtype)
    told = gather((failure, function, given))
    refuse_failures([theirs for theirs, _, _ in told])
    refuse_other_calls([called for _, called, _ in told])
    return [given for _, _, given in told], None


_FAILED = -1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by their bytes


@functools.lru_cache(maxsize=1024)
def _digest(text: str) -> int:
    """Return a negative number of 32 bits other than -1."""
    return -2 - int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") % (2**31 - 1)


def is_small(tensor: torch.Tensor) -> bool:
    """Return whether it is one number of at most 32 bits, which can be read without waiting for a device."""
    is_number = tensor.numel() == 1 and tensor.itemsize in _INTEGERS and not tensor.is_complex()
    return is_number and tensor.device.type == "cpu" and type(tensor.data) is torch.Tensor


def _bits(tensor: torch.Tensor) -> int:
    return int(tensor.detach().reshape(1).view(_INTEGERS[tensor.itemsize]).item()) & 0xFFFFFFFF


def _from_bits(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that stand in the lowest bytes, which come first in memory."""
    return words.view(dtype)[:: words.itemsize // dtype.itemsize].clone()


def refuse_differing(
    function: str,
    told: Sequence[str],
    *,
    what: str = "arguments",
    advice: str = "Pass the same values on all ranks",
    ranks: Sequence[int] | None = None,
) -> None:
    """Refuse a call for which ranks were given different things.

    Args:
        function: What was called.
        told: What each rank was given, in words.
        what: What it is that differs.
        advice: What to do about it.
        ranks: Which ranks these are; None: all, from 0 on.

    Raises:
        UsageError: They differ. The text is the same on all ranks.
    """
    other = next((place for place, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        first, second = (0, other) if ranks is None else (ranks[0], ranks[other])
        raise UsageError(
            f"ranks called {function} with different {what}: rank {first} with {told[0]}; rank {second} with "
            f"{told[other]}. {advice}"
        )


def refuse_other_calls(called: Sequence[str]) -> None:
    """Refuse ranks that have called different functions.

    Raises:
        UsageError: They have. The text is the same on all ranks.
    """
    for rank, name in enumerate(called):
        if name != called[0]:
            raise UsageError(f"rank 0 called {called[0]}, rank {rank} {name}: call the same function on all ranks")


# --- what fails on one rank raises on all


def refuse_failures(failures: Sequence[str], ranks: Sequence[int] | None = None) -> None:
    """Raise on all ranks what is wrong on some.

    Args:
        failures: What is wrong on each rank; empty where nothing is.
        ranks: Which ranks these are; None: all, from 0 on.

    Raises:
        UsageError: Something is wrong.
    """
    numbers = range(len(failures)) if ranks is None else ranks
    texts = {rank: text for rank, text in zip(numbers, failures, strict=True) if text}
    if texts:
        raise UsageError(_joined(texts, training.rank()))


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise what any rank raises in the block on all of them at its end, as one error that names the ranks.

    Raises:
        UsageError: That is what was raised.
        CheckpointError: Anything else was raised.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # whatever it is, the others must hear of it
        failure = error
    answers = gather(None if failure is None else (isinstance(failure, UsageError), _text(failure)), group)
    failures = {number: answer for number, answer in enumerate(answers) if answer is not None}
    if failures:
        kind = UsageError if all(is_usage for is_usage, _ in failures.values()) else CheckpointError
        text = _joined({number: text for number, (_, text) in failures.items()}, training.rank())
        raise kind(text) from (None if failure is None or _says_all(failure) else failure)


def _joined(texts: Mapping[int, str], own: int | None = None) -> str:
    """Join what ranks report, by rank; without the ranks if all report the same, or nobody more than `own`."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for number, text in texts.items():
        ranks[text].append(number)
    if len(ranks) == 1 and (own in texts or len(texts) == training.world_size()):
        return next(iter(ranks))
    return "; ".join(f"{describe_ranks(which)}: {text}" for text, which in ranks.items())


def _says_all(error: BaseException) -> bool:
    """Return whether its text is enough, without the frames it came through."""
    if isinstance(error, CheckpointException):
        return all(_says_all(failure) for failure, _ in error.failures.values())
    return isinstance(error, UsageError | CheckpointError | OSError)


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own text holds whole tracebacks
        return _joined({number: _text(failure) for number, (failure, _) in error.failures.items()})
    if isinstance(error, UsageError | CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
