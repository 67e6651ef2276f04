"""A batch of a language model of transformers, of which each rank takes some tokens of all sequences.

Labels are shifted before sequences are divided, so that a token's label is that of the next one wherever that is.
Independent of plans and loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from nbdist.errors import UsageError
from nbdist.train.sequences.divided_attention import SequenceLayout
from nbdist.train.sequences.sequence_parts import order_of
from nbdist.train.trial_ranks import have_values

_NO_LABEL = -100
_FILL = {"shift_labels": _NO_LABEL}  # of tokens that are added; 0 for all else
_DIVIDED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")


def divided(
    batch: Mapping[str, Any], group: dist.ProcessGroup, *, exchanges_heads: bool
) -> tuple[dict[str, Any], SequenceLayout]:
    """Return what a model takes so that it computes what this rank's tokens add to the loss of the whole batch.

    Sequences that can't be divided evenly get tokens at their end, which no other token sees and which have no label.

    Args:
        batch: The arguments of the model by name, with labels, not refused.
        group: The ranks among which sequences are divided.
        exchanges_heads: Whether each rank is to compute attention of some heads.

    Returns:
        The arguments, and how sequences are divided.
    """
    tokens = _tokens(batch)
    length, device = tokens.shape[1], tokens.device
    ranks = dist.get_world_size(group)
    longer = -(-length // (2 * ranks)) * 2 * ranks
    labels = batch["shift_labels"] if "shift_labels" in batch else _shifted(batch["labels"])
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    documents = None
    # Transformers looks for them just then.
    if positions is not None and mask is None and not batch.get("use_cache") and have_values(group):
        documents = _documents(positions)
    layout = SequenceLayout(
        length=longer,
        group=group,
        exchanges_heads=exchanges_heads,
        order=order_of(longer, ranks, device),
        padding=None if mask is None or (have_values(group) and mask.all()) else _lengthened(mask.bool(), longer),
        documents=None if documents is None else _lengthened(documents, longer),
    )
    by_token = {
        **{name: value for name, value in batch.items() if name in _DIVIDED},
        "shift_labels": labels,
        "position_ids": torch.arange(length, device=device)[None] if positions is None else positions,
        # Given always, as else transformers takes the cuts between pieces for those between documents.
        "attention_mask": torch.ones(tokens.shape[:2], dtype=torch.long, device=device) if mask is None else mask,
    }
    own = layout.own
    parts = {
        name: _lengthened(value, longer, _FILL.get(name, 0)).index_select(1, own) for name, value in by_token.items()
    }
    parts["labels"] = parts["shift_labels"]  # that there are any is what the model computes a loss for
    number = batch.get("num_items_in_batch")
    parts["num_items_in_batch"] = (labels != _NO_LABEL).sum() if number is None else number
    return {**batch, **parts, "use_cache": False}, layout


def _tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    tokens: torch.Tensor = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
    return tokens


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    return pad(labels[:, 1:], (0, 1), value=_NO_LABEL)


def _lengthened(by_token: torch.Tensor, length: int, fill: float = 0) -> torch.Tensor:
    """Return the tensor with so many tokens, which are its second dimension."""
    missing = length - by_token.shape[1]
    return pad(by_token, (*(0, 0) * (by_token.ndim - 2), 0, missing), value=fill) if missing else by_token


def _documents(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the number of the document that each token belongs to, from 1; None if all belong to the same.

    Where positions don't count on, another document begins.
    """
    begins = positions.diff() != 1
    return pad(begins.cumsum(1), (1, 0)) + 1 if begins.any() else None


# --- what is refused


def refuse_unknown(batch: Mapping[str, Any]) -> None:
    """Refuse a batch that has what can't be divided.

    Raises:
        UsageError: With its name.
    """
    if "input_ids" not in batch and "inputs_embeds" not in batch:
        raise UsageError("cp divides tokens, and this batch has none: give the model input_ids or inputs_embeds")
    for name in ("cache", "past_key_values"):
        if name in batch:
            raise UsageError(
                f"cp can't divide sequences that go on from earlier ones: leave {name} out, or set cp to 1"
            )
    if batch.get("output_router_logits"):
        raise UsageError(
            "cp can't divide the loss that balances experts: leave output_router_logits out, or set cp to 1"
        )
    length = _tokens(batch).shape[1]
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or name == "num_items_in_batch":
            continue
        if name not in _DIVIDED:
            raise UsageError(
                f"cp does not know how to divide {name}, of shape {list(value.shape)}: leave it out of the batch, or "
                f"set cp to 1. What it divides: {', '.join(_DIVIDED)}"
            )
        if value.ndim != (3 if name == "inputs_embeds" else 2) or value.shape[1] != length:
            raise UsageError(
                f"cp divides {name} along its second dimension, one entry for each of {length} tokens, and its shape "
                f"is {list(value.shape)}: give it that shape, or set cp to 1"
            )
