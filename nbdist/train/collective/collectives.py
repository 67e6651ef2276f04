"""Values of all ranks brought together: gather, reduce, broadcast, pad; tensors in nested structures, and objects.

Ranks that call one of these with different shapes are told so on all ranks, instead of hanging: they compare first, on
the CPU where the backend can, so that nothing waits for the device. A lone number travels with the comparison.
Knows nothing of models.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from nbdist.errors import UsageError
from nbdist.train import state as training
from nbdist.train.collective.nested import rebuilt, tensors_in
from nbdist.train.collective.participants import refuse_partial
from nbdist.train.collective.process_group import ensure_group

T = TypeVar("T")
_CPU = torch.device("cpu")


def gather(data: Any) -> Any:
    """All ranks' tensors, joined along the first dimension in the order of ranks, on every rank.

    Args:
        data: A tensor, or lists, tuples and dicts of them, of the same shape on all ranks. A number without dimensions
            becomes one of `world_size` elements.

    Returns:
        The same structure. No gradient flows through it.

    Raises:
        UsageError: Shapes differ between ranks (pad them first), or something is no tensor.
    """
    return _each("gather", data, _gathered, of_all=_shaped)


def gather_for_metrics(data: Any, use_gather_object: bool = False) -> Any:
    """As `gather`, without the samples that only fill up the last batch of a pass over a prepared loader.

    Ranks may have different numbers of samples in that batch.

    Args:
        data: Tensors as for `gather`, whose first dimension counts samples; or a list of objects, one a sample.
        use_gather_object: Whether tensors are gathered as objects: for shapes that differ otherwise.
    """
    state = training.current()
    loader = state.loader if state.plan.strategy != "none" else None  # without a strategy each rank has all of the data
    is_last = bool(getattr(loader, "end_of_loader", False))
    if use_gather_object or not _is_tensors(data):
        joined = gather_object(data)
        return joined[: _real_samples(loader, len(joined))] if is_last else joined
    if not is_last:
        return _each("gather_for_metrics", data, _gathered, of_all=_shaped)
    found = _each("gather_for_metrics", data, _gathered_uneven, compare=_without_first_dimension)
    return _each_alone(found, lambda tensor: tensor[: _real_samples(loader, len(tensor))])


def _real_samples(loader: Any, gathered: int) -> int:
    """How many of the samples in the last batch of all ranks are no fill."""
    remainder = int(getattr(loader, "remainder", -1))
    return remainder if 0 < remainder < gathered else gathered


def _is_tensors(data: Any) -> bool:
    try:
        return bool(tensors_in(data, ""))
    except UsageError:
        return False


def gather_object(items: list[T]) -> list[T]:
    """All ranks' lists joined into one, on every rank.

    Args:
        items: A list of any objects that can be pickled. Lengths may differ.

    Raises:
        UsageError: A rank gave no list.
    """
    ensure_group()
    named = f"gather_object takes a list, not {type(items).__name__}: type gather_object([value])"
    differing("gather_object", None, "" if isinstance(items, list | tuple) else named)
    return [item for part in all_objects(list(items)) for item in part]


def reduce(data: Any, reduction: Literal["mean", "sum", "none"] = "sum", scale: float = 1.0) -> Any:
    """The sum or the mean of all ranks' tensors, on every rank. By default the sum, as `Accelerator.reduce` does.

    Args:
        data: A tensor, or lists, tuples and dicts of them, of the same shape on all ranks.
        reduction: "sum", "mean", or "none" (only scaled).
        scale: What the result is multiplied by.

    Returns:
        New tensors in the same structure.

    Raises:
        UsageError: Shapes differ between ranks, something is no tensor, or the reduction is another.
    """
    known = reduction in ("mean", "sum", "none")
    failure = "" if known else f'reduction={reduction!r} is unknown: allowed are "mean", "sum" and "none"'

    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        if reduction != "none":
            result = _on_wire(result, _summed)
        return finished(result)

    def reduced_numbers(numbers: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        kind = torch.int64 if numbers.dtype == torch.bool else numbers.dtype
        return finished(numbers.sum(dtype=kind).reshape(tensor.shape))

    def finished(result: torch.Tensor) -> torch.Tensor:
        if reduction == "mean":
            result = result / training.world_size()
        return result * scale if scale != 1.0 else result

    of_all = reduced_numbers if reduction in ("mean", "sum") else None
    return _each("reduce", data, reduced, of_all=of_all, failure=failure, reduction=reduction, scale=scale)


def broadcast(data: Any, from_process: int = 0) -> Any:
    """Give all ranks one rank's tensors. They are written in place.

    Args:
        data: A tensor, or lists, tuples and dicts of them, of the same shape on all ranks.
        from_process: The rank whose values all get.

    Raises:
        UsageError: Shapes differ between ranks, something is no tensor, or there is no such rank.
    """

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        received = _on_wire(tensor, lambda wire: _broadcast_bytes(wire, from_process))
        return tensor.detach().copy_(received) if received is not tensor else tensor

    def spread_number(numbers: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().copy_(numbers[from_process].reshape(tensor.shape))

    failure = _unknown_rank("broadcast", from_process)
    return _each("broadcast", data, spread, of_all=spread_number, failure=failure, from_process=from_process)


def broadcast_object_list(items: list[Any], from_process: int = 0) -> list[Any]:
    """Give all ranks one rank's objects: the list is filled in place, and returned.

    Args:
        items: A list, as long on all ranks.
        from_process: The rank whose objects all get.

    Raises:
        UsageError: It is no list, lists are not as long or sources not the same on all ranks, or there is no such rank.
    """
    is_list = isinstance(items, list)
    no_list = f"broadcast_object_list takes a list, not {type(items).__name__}: type [value]"
    failure = _unknown_rank("broadcast_object_list", from_process) if is_list else no_list
    count = len(items) if is_list else 0
    if told := differing("broadcast_object_list", f"{count} objects, from_process={from_process}", failure):
        _refuse_settings("broadcast_object_list", told)
    if training.world_size() > 1:
        dist.broadcast_object_list(items, src=from_process)
    return items


def pad_across_processes(data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Let tensors be as long on all ranks as the longest, so that they can be gathered.

    Args:
        data: A tensor, or lists, tuples and dicts of them. Those with fewer dimensions than `dim` asks stay.
        dim: The dimension that is filled up.
        pad_index: What it is filled up with.
        pad_first: Whether the fill comes in front.

    Raises:
        UsageError: Ranks hold different numbers of tensors, or something is no tensor.
    """

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        sizes = _all_numbers(tensor.shape[dim]).tolist()
        return _padded(tensor, dim % tensor.ndim, max(sizes), pad_index, pad_first)

    return _each("pad_across_processes", data, padded, compare=lambda tensor: str(tensor.ndim), dim=dim)


# --- one tensor


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor[None] if tensor.ndim == 0 else tensor
    if training.world_size() == 1:
        return tensor.clone()
    return _on_wire(tensor, _gather_bytes)


def _shaped(numbers: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of all ranks as `_gathered` gives them for a tensor of one."""
    return numbers.reshape(-1, *tensor.shape[1:])


def _gathered_uneven(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 0:
        return _gathered(tensor)
    sizes = _all_numbers(len(tensor)).tolist()
    longest = max(sizes)
    gathered = _gathered(_padded(tensor.detach(), 0, longest, 0, False))
    parts = [gathered[rank * longest : rank * longest + size] for rank, size in enumerate(sizes)]
    return gathered if min(sizes) == longest else torch.cat(parts)


def _padded(tensor: torch.Tensor, dim: int, length: int, fill: float, first: bool) -> torch.Tensor:
    size = tensor.shape[dim]
    if size == length:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length
    result = tensor.new_full(shape, fill)
    result.narrow(dim, length - size if first else 0, size).copy_(tensor)
    return result


def _gather_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes, which every backend can send whatever the type."""
    result = tensor.new_empty((training.world_size() * tensor.shape[0], *tensor.shape[1:]))
    if tensor.numel():
        _all_gather(_bytes(result), _bytes(tensor))
    return result


def _all_gather(result: torch.Tensor, mine: torch.Tensor) -> None:
    """By the name that this torch has for it: newer ones warn of the older."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(result, mine)


def _broadcast_bytes(tensor: torch.Tensor, source: int) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.numel() and training.world_size() > 1:
        dist.broadcast(_bytes(tensor), src=source)
    return tensor


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    if training.world_size() == 1:
        return tensor
    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        tensor = tensor.long()
    dist.all_reduce(tensor)
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes. One of a single element may have any stride, which torch refuses to look at so."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _on_wire(tensor: torch.Tensor, exchange: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Exchange a tensor from a device that the backend can send from, and bring the result back."""
    if training.world_size() == 1:
        return exchange(tensor)
    wire = _wire(tensor.device)
    return exchange(tensor.to(wire).contiguous()).to(tensor.device)


def _wire(device: torch.device) -> torch.device:
    kinds = _device_types(dist.get_backend_config())
    if device.type in kinds:
        return device
    return _CPU if "cpu" in kinds else training.default_device()


@functools.cache
def _device_types(backends: str) -> frozenset[str]:
    """What the backends of a group send from; as torch has it in "cpu:gloo,cuda:nccl"."""
    return frozenset(pair.partition(":")[0] for pair in backends.split(","))


# --- ranks compare what they were given


def _each(
    function: str,
    data: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    of_all: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    compare: Callable[..., str] | None = None,
    failure: str = "",
    **settings: Any,
) -> Any:
    """Change all tensors, once ranks have agreed that they were given the same. What is wrong raises on all of them.

    Args:
        change: Exchanges one tensor.
        of_all: What `change` gives, made of the numbers of all ranks, and this rank's, if that is all there is.
        compare: What of a tensor must be the same on all ranks; its shape by default.
    """
    ensure_group()
    found = []
    try:
        found = tensors_in(data, function)
    except UsageError as error:
        failure = failure or str(error)
    kind = compare or (lambda tensor: str(list(tensor.shape)))
    signature = ", ".join(f"{place or 'it'}: {kind(tensor)} {tensor.dtype}" for place, tensor in found)
    carried = found[0][1] if of_all is not None and len(found) == 1 and _is_small(found[0][1]) else None
    if carried is not None:
        signature += " on the CPU"  # where a rank has it elsewhere, that one expects another exchange
    given = signature, ", ".join(f"{name}={value!r}" for name, value in settings.items())
    told, numbers = _compared(function, given, failure, carried)
    if told:
        _refuse_differences(function, told)
    if of_all is not None and carried is not None and numbers is not None:
        return rebuilt(data, iter([of_all(numbers, carried)]))
    return rebuilt(data, iter([change(tensor) for _, tensor in found]))


def _each_alone(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return rebuilt(data, iter([change(tensor) for _, tensor in tensors_in(data, "")]))


def _without_first_dimension(tensor: torch.Tensor) -> str:
    return f"[any, {str(list(tensor.shape[1:])).strip('[]')}]" if tensor.ndim else "[]"


def _refuse_differences(function: str, told: Sequence[tuple[str, str]]) -> NoReturn:
    tensors = [given[0] for given in told]
    if (other := _first_other(tensors)) is None:
        _refuse_settings(function, [given[1] for given in told])
    raise UsageError(
        f"ranks called {function} with different tensors: rank 0 with {tensors[0] or 'none'}; "
        f"rank {other} with {tensors[other] or 'none'}. Make their shapes equal, for example with pad_across_processes"
    )


def _refuse_settings(function: str, told: Sequence[str]) -> NoReturn:
    other = _first_other(told) or 0
    raise UsageError(
        f"ranks called {function} with {told[0]} on rank 0 and {told[other]} on rank {other}: give all ranks the same"
    )


def _first_other(told: Sequence[str]) -> int | None:
    """The first rank that tells something else than rank 0."""
    return next((rank for rank, text in enumerate(told) if text != told[0]), None)


def differing(function: str, given: T, failure: str = "") -> list[T]:
    """What each rank was given, if that is not the same on all; else an empty list.

    Args:
        function: What the user has called.
        given: With what. Its `repr` is compared.
        failure: What is wrong on this rank, which raises on all.

    Raises:
        UsageError: Something is wrong on a rank, or a rank has called something else.
    """
    return _compared(function, given, failure)[0]


def _compared(
    function: str, given: T, failure: str, carried: torch.Tensor | None = None
) -> tuple[list[T], torch.Tensor | None]:
    """As `differing`; with all ranks' values of a small tensor, if one was given.

    What each rank sends first is one negative number, which nothing else begins with: a rank that is in another call is
    noticed before its bytes are taken for an answer. Its upper half tells the call; the tensor travels in the lower.
    """
    if training.world_size() == 1:
        if failure:
            raise UsageError(failure)
        return [], None
    refuse_partial(function, training.world_size())
    mine = _FAILED if failure else _digest(f"{function} {given!r}")
    words = _all_numbers(mine << 32 | (0 if carried is None else _bits(carried)))
    said = [word >> 32 for word in words.tolist()]
    stranger = said.index(max(said))
    if said[stranger] >= 0:
        raise UsageError(
            f"{function} was called here while rank {stranger} is in another exchange: let all ranks make the same "
            "calls in the same order"
        )
    if set(said) == {mine} and not failure:
        return [], None if carried is None else _from_bits(words, carried.dtype)
    return _told_by_all(function, given, failure), None


_FAILED = -1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by their bytes


@functools.lru_cache(maxsize=1024)
def _digest(text: str) -> int:
    """A negative number of 32 bits other than -1."""
    return -2 - int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") % (2**31 - 1)


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether it is one number of at most 32 bits, which can be read without waiting for a device."""
    is_number = tensor.numel() == 1 and tensor.itemsize in _INTEGERS and not tensor.is_complex()
    return is_number and tensor.device.type == "cpu" and type(tensor.data) is torch.Tensor


def _bits(tensor: torch.Tensor) -> int:
    return int(tensor.detach().reshape(1).view(_INTEGERS[tensor.itemsize]).item()) & 0xFFFFFFFF


def _from_bits(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that stand in the lowest bytes, which come first in memory."""
    return words.view(dtype)[:: words.itemsize // dtype.itemsize].clone()


def _told_by_all(function: str, given: T, failure: str) -> list[T]:
    told = all_objects((failure, function, given))
    if failure:
        raise UsageError(failure)
    for rank, (theirs, called, _) in enumerate(told):
        if theirs:
            raise UsageError(f"rank {rank}: {theirs}")
        if called != told[0][1]:
            raise UsageError(f"rank 0 called {told[0][1]}, rank {rank} {called}: call the same on all ranks")
    return [given for _, _, given in told]


def _all_numbers(number: int) -> torch.Tensor:
    """What whole number each rank has, on the CPU."""
    ranks = training.world_size()
    mine = torch.tensor([number], device=_wire(_CPU) if ranks > 1 else _CPU)
    if ranks == 1:
        return mine
    result = mine.new_empty(ranks)
    _all_gather(result, mine)
    return result.cpu()


def all_objects(mine: T) -> list[T]:
    """What each rank says, by rank."""
    ensure_group()
    if training.world_size() == 1:
        return [mine]
    answers: list[Any] = [None] * training.world_size()
    dist.all_gather_object(answers, mine)
    return answers


def _unknown_rank(function: str, source: int) -> str:
    """What is wrong with a source; nothing in general."""
    ensure_group()
    ranks = training.world_size()
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < ranks:
        return f"{function}: from_process={source!r} is not a rank: there are ranks 0-{ranks - 1}"
    return ""
