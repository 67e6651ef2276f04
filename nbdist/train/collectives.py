"""Values of all ranks brought together: gather, reduce, broadcast, pad; tensors in nested structures, and objects.

Ranks that call one of these with different shapes are told so on all ranks, instead of hanging: they compare first.
Knows nothing of models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from nbdist.errors import UsageError
from nbdist.train import state as training
from nbdist.train.nested import rebuilt, tensors_in
from nbdist.train.participants import refuse_partial
from nbdist.train.process_group import ensure_group

T = TypeVar("T")


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
    return _each("gather", data, _gathered)


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
        return _each("gather_for_metrics", data, _gathered)
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
        if reduction == "mean":
            result = result / training.world_size()
        return result * scale if scale != 1.0 else result

    return _each("reduce", data, reduced, failure=failure, reduction=reduction, scale=scale)


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

    failure = _unknown_rank("broadcast", from_process)
    return _each("broadcast", data, spread, failure=failure, from_process=from_process)


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
        sizes = _all_numbers(tensor.shape[dim], tensor.device)
        return _padded(tensor, dim % tensor.ndim, max(sizes), pad_index, pad_first)

    return _each("pad_across_processes", data, padded, compare=lambda tensor: str(tensor.ndim), dim=dim)


# --- one tensor


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor[None] if tensor.ndim == 0 else tensor
    if training.world_size() == 1:
        return tensor.clone()
    return _on_wire(tensor, _gather_bytes)


def _gathered_uneven(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 0:
        return _gathered(tensor)
    sizes = _all_numbers(len(tensor), tensor.device)
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
    return tensor.reshape(-1).view(torch.uint8)


def _on_wire(tensor: torch.Tensor, exchange: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Exchange a tensor from a device that the backend can send from, and bring the result back."""
    if training.world_size() == 1:
        return exchange(tensor)
    wire = _wire(tensor.device)
    return exchange(tensor.to(wire).contiguous()).to(tensor.device)


def _wire(device: torch.device) -> torch.device:
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    if device.type in backends:
        return device
    return torch.device("cpu") if "cpu" in backends else training.default_device()


# --- ranks compare what they were given


def _each(
    function: str,
    data: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    compare: Callable[..., str] | None = None,
    failure: str = "",
    **settings: Any,
) -> Any:
    """Change all tensors, once ranks have agreed that they were given the same. What is wrong raises on all of them."""
    ensure_group()
    found = []
    try:
        found = tensors_in(data, function)
    except UsageError as error:
        failure = failure or str(error)
    kind = compare or (lambda tensor: str(list(tensor.shape)))
    signature = ", ".join(f"{place or 'it'}: {kind(tensor)} {tensor.dtype}" for place, tensor in found)
    given = signature, ", ".join(f"{name}={value!r}" for name, value in settings.items())
    if told := differing(function, given, failure):
        _refuse_differences(function, told)
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
        f"rank {other} with {tensors[other] or 'none'}. Make them alike, as with pad_across_processes"
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

    What each rank sends first is one negative number, which nothing else begins with: a rank that is in another call is
    noticed before its bytes are taken for an answer.

    Args:
        function: What the user has called.
        given: With what. Its `repr` is compared.
        failure: What is wrong on this rank, which raises on all.

    Raises:
        UsageError: Something is wrong on a rank, or a rank has called something else.
    """
    if training.world_size() == 1:
        if failure:
            raise UsageError(failure)
        return []
    refuse_partial(function, training.world_size())
    mine = _FAILED if failure else _digest(f"{function} {given!r}")
    said = _all_numbers(mine, training.default_device())
    stranger = said.index(max(said))
    if said[stranger] >= 0:
        raise UsageError(
            f"{function} was called here while rank {stranger} is in another exchange: let all ranks make the same "
            "calls in the same order"
        )
    if set(said) == {mine} and not failure:
        return []
    return _told_by_all(function, given, failure)


_FAILED = -1


def _digest(text: str) -> int:
    """A negative number other than -1."""
    return -2 - int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


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


def _all_numbers(number: int, device: torch.device) -> list[int]:
    """What whole number each rank has."""
    if training.world_size() == 1:
        return [number]
    device = _wire(device)
    result = torch.empty(training.world_size(), dtype=torch.int64, device=device)
    _all_gather(result, torch.tensor([number], dtype=torch.int64, device=device))
    return result.tolist()


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
        return f"{function}: from_process={source!r} is no rank: there are ranks 0-{ranks - 1}"
    return ""
