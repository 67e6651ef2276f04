"""Values of all ranks brought together: gather, reduce, broadcast, pad; tensors in nested structures, and objects.

Ranks that call one of these with different shapes are told so on all ranks, instead of hanging: they compare first, on
the CPU where the backend can, so that nothing waits for the device. A lone number travels with the comparison.
Independent of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from nbdist.base.checks import is_whole
from nbdist.errors import UsageError
from nbdist.train import state as training
from nbdist.train.collective import agreement
from nbdist.train.collective.nested import rebuilt, tensors_in
from nbdist.train.collective.process_group import ensure_group

T = TypeVar("T")


def gather(data: Any) -> Any:
    """Return all ranks' tensors, joined along the first dimension in the order of ranks, on every rank.

    Args:
        data: A tensor, or lists, tuples and dicts of them, of the same shape on all ranks. A number without dimensions
            becomes one of `world_size` elements.

    Returns:
        The same structure. No gradient flows through it.

    Raises:
        UsageError: Shapes differ between ranks (pad them first), or something is not a tensor.
    """
    return _each("gather", data, _gathered, of_all=_shaped)


def gather_for_metrics(data: Any, use_gather_object: bool = False) -> Any:
    """Gather like `gather`, without samples that only fill up the last batch of a pass over a prepared loader.

    Ranks may have different numbers of samples in that batch.

    Args:
        data: Tensors as for `gather`, whose first dimension counts samples; or a list of objects, one a sample.
        use_gather_object: Whether tensors are gathered as objects: for shapes that differ otherwise.
    """
    state = training.current()
    loader = state.loader if state.plan.strategy != "none" else None  # without a strategy each rank has all of the data
    is_last = bool(getattr(loader, "end_of_loader", False))
    if use_gather_object or not _is_tensors(data):
        joined = [item for part in _of_batches(_gathered_lists(data)) for item in part]
        return joined[: _real_samples(loader, len(joined))] if is_last else joined
    if not is_last:
        return _each("gather_for_metrics", data, _gathered_of_batches, of_all=_shaped_of_batches, left="some")
    found = _each("gather_for_metrics", data, _gathered_uneven, compare=_without_first_dimension, left="none")
    return _each_alone(found, lambda tensor: tensor[: _real_samples(loader, len(tensor))])


def _real_samples(loader: Any, gathered: int) -> int:
    """Return how many of the samples in the last batch of all ranks are no fill."""
    remainder = int(getattr(loader, "remainder", -1))
    return remainder if 0 < remainder < gathered else gathered


def _is_tensors(data: Any) -> bool:
    try:
        return bool(tensors_in(data, ""))
    except UsageError:
        return False


def gather_object(items: list[T]) -> list[T]:
    """Return all ranks' lists joined into one, on every rank.

    Args:
        items: A list of any objects that can be pickled. Lengths may differ.

    Raises:
        UsageError: A rank gave no list.
    """
    return [item for part in _gathered_lists(items) for item in part]


def _gathered_lists(items: list[T]) -> list[list[T]]:
    ensure_group()
    named = f"gather_object takes a list, not {type(items).__name__}: write gather_object([value])"
    agreement.differing("gather_object", None, "" if isinstance(items, list | tuple) else named)
    return agreement.gather(list(items))


def _of_batches(parts: Sequence[T]) -> Sequence[T]:
    """Return one part for each batch of what all ranks gave: ranks that share a batch gave the same."""
    return [parts[ranks[0]] for ranks in training.batch_ranks()]


def reduce(data: Any, reduction: Literal["mean", "sum", "none"] = "sum", scale: float = 1.0) -> Any:
    """Return the sum or mean of all ranks' tensors, on every rank. The default is the sum, as in `Accelerator.reduce`.

    Args:
        data: A tensor, or lists, tuples and dicts of them, of the same shape on all ranks.
        reduction: "sum", "mean", or "none" (only scaled).
        scale: What the result is multiplied by.

    Returns:
        New tensors in the same structure.

    Raises:
        UsageError: Shapes differ between ranks, something is not a tensor, or the reduction is another.
    """
    known = reduction in ("mean", "sum", "none")
    failure = "" if known else f'reduction={reduction!r} is unknown: allowed values: "mean", "sum" and "none"'

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
        UsageError: Shapes differ between ranks, something is not a tensor, or there is no such rank.
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
        UsageError: It is not a list, lengths or sources differ between ranks, or there is no such rank.
    """
    is_list = isinstance(items, list)
    no_list = f"broadcast_object_list takes a list, not {type(items).__name__}: write [value]"
    failure = _unknown_rank("broadcast_object_list", from_process) if is_list else no_list
    count = len(items) if is_list else 0
    given = f"{count} objects, from_process={from_process}"
    told = agreement.differing("broadcast_object_list", given, failure)
    agreement.refuse_differing("broadcast_object_list", told)
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
        UsageError: Ranks hold different numbers of tensors, or something is not a tensor.
    """

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        sizes = agreement.all_numbers(tensor.shape[dim]).tolist()
        return _padded(tensor, dim % tensor.ndim, max(sizes), pad_index, pad_first)

    return _each("pad_across_processes", data, padded, compare=lambda tensor: str(tensor.ndim), dim=dim)


# --- one tensor


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor[None] if tensor.ndim == 0 else tensor
    if training.world_size() == 1:
        return tensor.clone()
    return _on_wire(tensor, _gather_bytes)


def _gathered_of_batches(tensor: torch.Tensor) -> torch.Tensor:
    gathered = _gathered(tensor)
    if training.data_size() == training.world_size():
        return gathered
    return torch.cat(list(_of_batches(gathered.chunk(training.world_size()))))


def _shaped_of_batches(numbers: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return _shaped(numbers[[ranks[0] for ranks in training.batch_ranks()]], tensor)


def _shaped(numbers: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of all ranks as `_gathered` gives them for a tensor of one."""
    return numbers.reshape(-1, *tensor.shape[1:])


def _gathered_uneven(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 0:
        return _gathered_of_batches(tensor)
    sizes = agreement.all_numbers(len(tensor)).tolist()
    longest = max(sizes)
    gathered = _gathered(_padded(tensor.detach(), 0, longest, 0, False))
    parts = [gathered[rank * longest : rank * longest + size] for rank, size in enumerate(sizes)]
    alike = min(sizes) == longest and training.data_size() == len(sizes)
    return gathered if alike else torch.cat(list(_of_batches(parts)))


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
    """Gather tensors as bytes, which every backend can send whatever the type."""
    result = tensor.new_empty((training.world_size() * tensor.shape[0], *tensor.shape[1:]))
    if tensor.numel():
        agreement.all_gather(_bytes(result), _bytes(tensor))
    return result


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
    """Return a contiguous tensor as bytes. A single element may have any stride, which torch refuses to view so."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _on_wire(tensor: torch.Tensor, exchange: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Exchange a tensor from a device that the backend can send from, and bring the result back."""
    if training.world_size() == 1:
        return exchange(tensor)
    wire = agreement.wire_of(tensor.device)
    return exchange(tensor.to(wire).contiguous()).to(tensor.device)


# --- ranks compare what they were given


def _each(
    function: str,
    data: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    of_all: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    compare: Callable[..., str] | None = None,
    failure: str = "",
    left: str = "",
    **settings: Any,
) -> Any:
    """Change all tensors, once ranks have agreed that they were given the same. What is wrong raises on all of them.

    Args:
        change: Exchanges one tensor.
        of_all: What `change` gives, made of the numbers of all ranks, and this rank's, if that is all there is.
        compare: What of a tensor must be the same on all ranks; its shape by default.
        left: How many batches this rank's loader still has, in words, if that matters.
    """
    ensure_group()
    found = []
    try:
        found = tensors_in(data, function)
    except UsageError as error:
        failure = failure or str(error)
    kind = compare or (lambda tensor: str(list(tensor.shape)))
    signature = ", ".join(f"{place or 'it'}: {kind(tensor)} {tensor.dtype}" for place, tensor in found)
    carried = found[0][1] if of_all is not None and len(found) == 1 and agreement.is_small(found[0][1]) else None
    if carried is not None:
        signature += " on the CPU"  # where a rank has it elsewhere, that one expects another exchange
    given = signature, ", ".join(f"{name}={value!r}" for name, value in settings.items()), left
    told, numbers = agreement.compare(function, given, failure, carried)
    agreement.refuse_differing(
        function,
        [batches for _, _, batches in told],
        what="numbers of batches left",
        advice="Plan even_batches=True if it is off; else collect each rank's values in a list, and call gather_object "
        "after the loop",
    )
    agreement.refuse_differing(
        function,
        [tensors or "none" for tensors, _, _ in told],
        what="tensors",
        advice="Make their shapes equal, for example with pad_across_processes",
    )
    agreement.refuse_differing(function, [others for _, others, _ in told])
    if of_all is not None and carried is not None and numbers is not None:
        return rebuilt(data, iter([of_all(numbers, carried)]))
    return rebuilt(data, iter([change(tensor) for _, tensor in found]))


def _each_alone(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return rebuilt(data, iter([change(tensor) for _, tensor in tensors_in(data, "")]))


def _without_first_dimension(tensor: torch.Tensor) -> str:
    return f"[{', '.join(['any', *map(str, tensor.shape[1:])])}]" if tensor.ndim else "[]"


def _unknown_rank(function: str, source: int) -> str:
    """Return what is wrong with a source; nothing in general."""
    ensure_group()
    ranks = training.world_size()
    if not is_whole(source) or source >= ranks:
        return f"{function}: from_process={source!r} is not a rank: there are ranks 0-{ranks - 1}"
    return ""
