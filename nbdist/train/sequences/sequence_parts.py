"""Sequences divided among ranks: which tokens each rank has, and how ranks bring their parts together.

A sequence is cut into two pieces for each rank, and each rank has one from the front and one from the back: under a
causal mask, where later tokens see more, all ranks have the same work. Independent of models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer torch warns of the older
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def order_of(length: int, ranks: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the tokens in the order of the ranks that have them, as many on each.

    Args:
        length: Tokens of a sequence, which twice the ranks divide.
        ranks: Among how many it is divided.
        device: Where the numbers are to be.
    """
    pieces = torch.arange(length, device=device).chunk(2 * ranks)
    return torch.cat([piece for rank in range(ranks) for piece in (pieces[rank], pieces[-1 - rank])])


def ends_of(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return where the two pieces of a rank end in the sequence."""
    piece = length // (2 * ranks)
    return (rank + 1) * piece, length - rank * piece


def gathered(part: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return whole sequences, in the order of tokens, of the parts that ranks have: batch, heads, tokens, features.

    Args:
        part: This rank's.
        order: As of `order_of`.
        group: The ranks.
    """
    return _applied(_Gathered, part, order, group)


def heads_for_tokens(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return some heads of whole sequences, in the order of ranks, for all heads of this rank's tokens."""
    return _applied(_Exchanged, part, 1, 2, group)


def tokens_for_heads(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all heads of this rank's tokens for some heads of whole sequences, in the order of ranks."""
    return _applied(_Exchanged, part, 2, 1, group)


def sum_of_losses(loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of what each rank's tokens add to a loss, for gradients that are averaged over ranks later."""
    return _applied(_SumOfLosses, loss, group)


def _applied(function: Any, *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


class _Gathered(torch.autograd.Function):
    """The gradient of a part is the sum over the ranks, all of which have used it."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.order, ctx.group = order, group
        ranks = dist.get_world_size(group)
        parts = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
        _GATHER(parts, part.contiguous(), group=group)
        return torch.cat(parts.chunk(ranks), 2).index_select(2, order.argsort())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ranks = dist.get_world_size(ctx.group)
        parts = torch.cat(gradients[0].index_select(2, ctx.order).chunk(ranks, 2))
        part = parts.new_empty((parts.shape[0] // ranks, *parts.shape[1:]))
        _SCATTER(part, parts, group=ctx.group)
        return part, None, None


class _Exchanged(torch.autograd.Function):
    """The gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, given: int, got: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.given, ctx.got, ctx.group = given, got, group
        return _exchanged(part, given, got, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.got, ctx.given, ctx.group), None, None, None


class _SumOfLosses(torch.autograd.Function):
    """The gradient undoes the division by the number of ranks that is to come."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.ranks = dist.get_world_size(group)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.ranks, None


def _exchanged(part: torch.Tensor, given: int, got: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Give each rank its share of one dimension, and get all ranks' shares of another."""
    ranks = dist.get_world_size(group)
    parts = torch.cat(part.chunk(ranks, given))
    exchanged = torch.empty_like(parts)
    dist.all_to_all_single(exchanged, parts, group=group)
    return torch.cat(exchanged.chunk(ranks), got)
