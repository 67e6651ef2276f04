"""Attention over sequences that are divided among ranks, as a function that transformers' models can be set to.

It comes with the function that makes masks: what that returns goes through the model to attention with how sequences
are divided, also where blocks are computed again in backward. Models that are not dividing a batch compute with
PyTorch's attention as usual. Independent of plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from nbdist.errors import UsageError
from nbdist.train.sequences.sequence_parts import ends_of, gathered, heads_for_tokens, tokens_for_heads

NAME = "nbdist"  # of the functions
_USUAL_MASK: Callable[..., Any] = sdpa_mask


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """How the sequences of a batch are divided.

    Attributes:
        length: Their tokens.
        group: The ranks.
        exchanges_heads: Whether each rank computes attention of some heads; else it gathers keys and values.
        order: The tokens, in the order of the ranks that have them.
        padding: Which tokens are there, by sequence; None: all.
        documents: A number for each token, the same for those that see each other; None: all do.
    """

    length: int
    group: dist.ProcessGroup
    exchanges_heads: bool
    order: torch.Tensor
    padding: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    @property
    def ranks(self) -> int:
        """Among how many ranks they are divided."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return dist.get_rank(self.group)

    @property
    def own(self) -> torch.Tensor:
        """The tokens of this rank."""
        return self.order.chunk(self.ranks)[self.rank]


@dataclass(frozen=True, eq=False)
class _Mask:
    """What takes the place of a mask in a model that divides a batch.

    Attributes:
        layout: How sequences are divided.
        visible: Which tokens are seen by those that this rank computes attention for; None: the earlier ones.
    """

    layout: SequenceLayout
    visible: torch.Tensor | None

    def __getattr__(self, name: str) -> Any:
        """Say so where a model takes it for a tensor."""
        raise _NoTensorError(
            f"cp can't divide sequences of this model, which computes with its masks itself (.{name}): set cp to 1"
        )


class _NoTensorError(UsageError, AttributeError):
    """A mask was asked for what only tensors have."""


_layout: ContextVar[SequenceLayout | None] = ContextVar("_layout", default=None)


@contextmanager
def dividing(layout: SequenceLayout) -> Iterator[None]:
    """Let the model that is called inside have parts of sequences."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def register() -> None:
    """Have transformers know the functions by their name."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(
    *args: Any, mask_function: Callable[..., Any] = causal_mask_function, use_vmap: bool = False, **kwargs: Any
) -> Any:
    """Return the mask of a model's layers, as transformers asks for it.

    Args:
        args: As for transformers' own functions, and so are the others.
        mask_function: Whether a token sees another, by sequence, head and their places.
        use_vmap: Whether it takes one token at a time.

    Raises:
        UsageError: The model adds to the mask what may not know of parts.
    """
    layout = _layout.get()
    if layout is None:
        return _USUAL_MASK(*args, mask_function=mask_function, use_vmap=use_vmap, **kwargs)
    if use_vmap:
        raise UsageError(
            "the model adds a rule of its own to the causal mask, which can't be divided among ranks: set cp to 1"
        )
    is_causal = mask_function is causal_mask_function and layout.padding is None and layout.documents is None
    return _Mask(layout, None if is_causal else _visible(layout, mask_function))


def _visible(layout: SequenceLayout, mask_function: Callable[..., Any]) -> torch.Tensor:
    """Return which tokens see which: batch, heads, those that this rank computes attention for, and all."""
    device = layout.order.device
    seen = torch.arange(layout.length, device=device)
    seeing = seen if layout.exchanges_heads else layout.own
    batch = torch.arange(1 if layout.padding is None else len(layout.padding), device=device)
    first = torch.zeros(1, dtype=torch.long, device=device)
    visible: torch.Tensor = mask_function(
        batch[:, None, None, None], first[None, :, None, None], seeing[None, None, :, None], seen[None, None, None, :]
    )
    if layout.padding is not None:
        visible = visible & layout.padding[:, None, None, :]
    if layout.documents is not None:
        documents = layout.documents
        visible = visible & (documents[:, None, seeing, None] == documents[:, None, None, :])
    return visible


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of a part of each sequence to all of it, as transformers asks for it.

    Args:
        module: Of the model.
        query: Of this rank's tokens, as are key and value: batch, heads, tokens, features.
        key: As query, perhaps with fewer heads.
        value: As key.
        attention_mask: What `make_mask` has returned.
        dropout: Share of the weights that are dropped.
        scaling: What products are multiplied by.
        kwargs: What some models add.

    Raises:
        UsageError: The model asks for something else than plain attention.
    """
    if not isinstance(attention_mask, _Mask):
        if _layout.get() is not None:
            _refuse(module, "makes its masks itself, not by transformers' create_causal_mask")
        found, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found, None
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            _refuse(module, f"adds {name} to its products")
    options = {"dropout_p": dropout, "scale": scaling}
    compute = _attend_to_some_heads if attention_mask.layout.exchanges_heads else _attend_to_gathered
    return compute(query, key, value, attention_mask, options).transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, what: str) -> None:
    raise UsageError(f"cp can't divide sequences of {type(module).__name__}, which {what}: set cp to 1")


def _attend_to_gathered(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: _Mask, options: dict[str, Any]
) -> torch.Tensor:
    layout = mask.layout
    both = gathered(torch.cat([key, value], -1), layout.order, layout.group)
    key, value = both.split([key.shape[-1], value.shape[-1]], -1)
    if mask.visible is not None:
        return _attention(query, key, value, options, attn_mask=mask.visible)
    pieces = zip(query.chunk(2, 2), ends_of(layout.length, layout.rank, layout.ranks), strict=True)
    found = [
        _attention(piece, key[:, :, :end], value[:, :, :end], options, attn_mask=_causal(piece, end))
        for piece, end in pieces
    ]
    return torch.cat(found, 2)


def _causal(query: torch.Tensor, length: int) -> torch.Tensor:
    """Return the mask for the last tokens of so many."""
    own = query.shape[2]
    if query.is_cuda:
        return causal_lower_right(own, length)  # for which there are kernels without a mask in memory
    return torch.ones(own, length, dtype=torch.bool, device=query.device).tril(length - own)


def _attend_to_some_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: _Mask, options: dict[str, Any]
) -> torch.Tensor:
    layout = mask.layout
    if key.shape[1] % layout.ranks:
        key, value = (_repeated(each, query.shape[1] // each.shape[1]) for each in (key, value))
    sizes = [key.shape[-1], value.shape[-1]]
    back = layout.order.argsort()
    query = heads_for_tokens(query, layout.group).index_select(2, back)
    both = heads_for_tokens(torch.cat([key, value], -1), layout.group).index_select(2, back)
    key, value = both.split(sizes, -1)
    if mask.visible is None:
        found = _attention(query, key, value, options, is_causal=True)
    else:
        found = _attention(query, key, value, options, attn_mask=mask.visible)
    return tokens_for_heads(found.index_select(2, layout.order), layout.group)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any], **mask: Any
) -> torch.Tensor:
    """Compute PyTorch's attention, where several heads of queries may share one of keys."""
    key, value = (_repeated(each, query.shape[1] // each.shape[1]) for each in (key, value))
    return scaled_dot_product_attention(query, key, value, **mask, **options)


def _repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    return heads if times == 1 else heads.repeat_interleave(times, 1)
