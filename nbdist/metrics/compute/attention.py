"""FLOPs of attention, in the kernels of torch and of other libraries: flash_attn and xformers.

Counted whole under a causal mask; a sliding window, and the blocks that FlexAttention leaves out, do not count. Other
libraries' operations are known by name, whether they are there or not: arguments are those of flash_attn 2.7 and later
(flash_attn/flash_attn_interface.py), of flash_attn 3, and of xformers 0.0.28 and later (xformers/ops/fmha/flash.py).
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import torch

from nbdist.metrics.compute import graphs
from nbdist.metrics.compute.operations import Formula, OperationCall, Work

_NAMES = (("query", "q"), ("key", "k"), ("value", "v"))
# Whether it is a backward pass.
_OF_LIBRARIES = {
    "flash_attn::_flash_attn_forward": False,
    "flash_attn::_flash_attn_varlen_forward": False,
    "flash_attn::_flash_attn_backward": True,
    "flash_attn::_flash_attn_varlen_backward": True,
    "flash_attn_3::fwd": False,
    "flash_attn_3::bwd": True,
    "flash_attn_3::_flash_attn_forward": False,
    "flash_attn_3::_flash_attn_backward": True,
    "xformers_flash::flash_fwd": False,
    "xformers_flash::flash_bwd": True,
    "xformers_flash3::flash_fwd": False,
    "xformers_flash3::flash_bwd": True,
}


def _scores(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> tuple[int, int]:
    """Return FLOPs of query x key, and of scores x value, for (batch, heads, length, width)."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * int(key[-2]) * width, 2 * batch * heads * length * int(key[-2]) * int(value[-1])


def attention(call: OperationCall) -> int:
    """Count both products of (batch, heads, length, width)."""
    return sum(_scores(call.shape("query"), call.shape("key"), call.shape("value")))


def attention_backward(call: OperationCall) -> Work:
    """Return four products for the gradients; the kernel has kept no scores, so it computes them once more."""
    first, second = _scores(call.shape("query"), call.shape("key"), call.shape("value"))
    return Work(2 * (first + second), first)


def kernel_attention(call: OperationCall) -> int:
    """Count both products of the kernels below SDPA."""
    return sum(first + second for first, second in _parts(call))


def kernel_attention_backward(call: OperationCall) -> Work:
    """Count their backward pass, as that of `attention`."""
    parts = _parts(call)
    return Work(2 * sum(first + second for first, second in parts), sum(first for first, _ in parts))


def _parts(call: OperationCall) -> list[tuple[int, int]]:
    """Return the parts of the kernels below SDPA: (batch, length, heads, width), or packed sequences of any lengths."""
    query, key, value = (tuple(call.first(long, short).shape) for long, short in _NAMES)
    ends = call.first_or_none("cum_seq_q", "cu_seqlens_q")
    if ends is None:
        shapes = [(batch, heads, length, width) for batch, length, heads, width in (query, key, value)]
        return [_in_window(call, shapes[0][2], shapes[1][2], _scores(*shapes))]
    other_ends = call.first_or_none("cum_seq_k", "cu_seqlens_k")
    lengths = _lengths(ends, call.first("max_q", "max_seqlen_q"))
    others = _lengths(ends if other_ends is None else other_ends, call.first("max_k", "max_seqlen_k"))
    heads, width, value_width = int(query[-2]), int(query[-1]), int(value[-1])
    return [
        _in_window(
            call,
            length,
            other,
            _scores((1, heads, length, width), (1, heads, other, width), (1, heads, other, value_width)),
        )
        for length, other in zip(lengths, others, strict=True)
    ]


def _in_window(call: OperationCall, length: int, others: int, scores: tuple[int, int]) -> tuple[int, int]:
    """Return the part of the scores that a sliding window keeps. A causal mask alone counts whole, by convention."""
    left, right = call.get("window_size_left", -1), call.get("window_size_right", -1)
    left, right = (-1 if side is None else int(side) for side in (left, right))
    if left < 0:
        return scores
    causal = call.get("is_causal", False) or call.get("causal", False)
    share = _share_of_window(length, others, left, 0 if causal else right)
    return int(scores[0] * share), int(scores[1] * share)


def cudnn_attention(call: OperationCall) -> int:
    """Count cuDNN's kernel, whose layout depends on whether sequences are packed."""
    return attention(call) if call["cum_seq_q"] is None else kernel_attention(call)


def cudnn_attention_backward(call: OperationCall) -> Work:
    """Count its backward pass."""
    return attention_backward(call) if call["cum_seq_q"] is None else kernel_attention_backward(call)


def _lengths(ends: torch.Tensor, longest: int) -> list[int]:
    """Return the lengths of packed sequences; if no values can be read, the longest for each."""
    try:
        numbers = graphs.numbers_in(ends)
    except ValueError:
        return [int(longest)] * (ends.numel() - 1)
    return [end - start for start, end in itertools.pairwise(numbers)]


def share_of_blocks(packet: Any, args: tuple[Any, ...]) -> float:
    """Return the share of all scores that FlexAttention computes: those of blocks that its mask does not leave out."""
    if not str(packet).startswith("flex_attention"):
        return 1.0
    mask = next((arg for arg in args if isinstance(arg, tuple) and len(arg) > 8 and isinstance(arg[0], int)), None)
    if mask is None:
        return 1.0
    length, other_length, partial, _, full = mask[:5]
    rows, columns = mask[-3], mask[-2]
    blocks = sum(sum(graphs.numbers_in(each)) for each in (partial, full) if each is not None)
    heads = prod(partial.shape[:-1])  # of the mask, which batches and heads may share
    return min(1.0, float(blocks * rows * columns / (heads * length * other_length)))


def multi_head(call: OperationCall) -> int:
    """Count `nn.MultiheadAttention` in one kernel, as in evaluation."""
    batch, length, width = call.shape("query")
    others = int(call.shape("key")[1])
    projections = 2 * batch * width * width * (length + 2 * others + length)
    return projections + 4 * batch * length * others * width


def encoder_layer(call: OperationCall) -> int:
    """Count `nn.TransformerEncoderLayer` in one kernel, as in evaluation."""
    batch, length, width = call.shape("src")
    feed_forward = prod(call.shape("ffn_weight_1")) + prod(call.shape("ffn_weight_2"))
    return 2 * batch * length * (4 * width * width + feed_forward) + 4 * batch * length * length * width


def of_library(packet: Any) -> Formula | None:
    """Return the formula of another library's attention, None if it is none of those known here."""
    is_backward = _OF_LIBRARIES.get(getattr(packet, "_qualified_op_name", ""))
    return None if is_backward is None else kernel_attention_backward if is_backward else kernel_attention


def _share_of_window(length: int, others: int, left: int, right: int) -> float:
    """Return the share of all scores that a sliding window keeps.

    Args:
        length: Queries.
        others: Keys; the last query is at the last key.
        left: Keys before a query that it sees; negative: all.
        right: Keys after it; negative: all.
    """
    if (left < 0 and right < 0) or not length or not others:
        return 1.0
    kept = sum(_kept(at + others - length, others, left, right) for at in range(length))
    return kept / (length * others)


def _kept(at: int, others: int, left: int, right: int) -> int:
    first = 0 if left < 0 else max(0, at - left)
    last = others - 1 if right < 0 else min(others - 1, at + right)
    return max(0, last - first + 1)
