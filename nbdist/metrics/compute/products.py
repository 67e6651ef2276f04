"""What a step multiplies: the sizes of its matrix products and attentions, for those who judge shapes.

Has no formula of FLOPs (`formulas`) and no opinion on sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addmm_": 1, "baddbmm_": 1, "_addmm_activation": 1}
_ATTENTION = "_scaled_dot_product_"


class Product(NamedTuple):
    """Matrix products of one size: `batch` times (rows x inner) by (inner x columns).

    Attributes:
        batch: How many at once.
        rows: Of the left factor.
        inner: What both share.
        columns: Of the right factor.
        left_transposed: Whether the left factor lies in memory by columns.
        right_transposed: Likewise the right one, as a linear layer's weight in a forward pass.
        dtype: Of the factors, as torch names it.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    left_transposed: bool
    right_transposed: bool
    dtype: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, inner and columns."""
        return self.rows, self.inner, self.columns

    @property
    def flops(self) -> int:
        """A multiply-add is 2."""
        return 2 * self.batch * self.rows * self.inner * self.columns


class Attention(NamedTuple):
    """Fused attentions of one size.

    Attributes:
        batch: Sequences.
        heads: Of queries.
        kv_heads: Of keys and values.
        length: Queries.
        others: Keys.
        width: Of a head.
        value_width: Of a head's values.
        causal: Whether the kernel masks what comes later.
        dtype: As torch names it.
        backward: Whether it is the backward pass.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    others: int
    width: int
    value_width: int
    causal: bool
    dtype: str
    backward: bool

    @property
    def flops(self) -> int:
        """Products of queries with keys and of scores with values; twice that, and the scores again, backward."""
        scores = 2 * self.batch * self.heads * self.length * self.others
        forward = scores * (self.width + self.value_width)
        return 2 * forward + scores * self.width if self.backward else forward


Multiplication: TypeAlias = "Product | Attention"


def product_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Multiplication | None:
    """Return what an operation multiplies.

    Args:
        func: The overload.
        args: As it was called.
        kwargs: As it was called.

    Returns:
        The sizes; None for an operation that is not a matrix product or attention of torch's.
    """
    name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
    first = _FACTORS.get(name)
    if first is not None:
        left, right = args[first : first + 2]
        return _product(left, right) if left.layout == right.layout == torch.strided else None
    if name.startswith(_ATTENTION):
        return _attention(func, name, args, kwargs)
    return None


def _product(left: torch.Tensor, right: torch.Tensor) -> Product:
    batch = int(left.shape[0]) if left.dim() == 3 else 1
    rows, inner = (int(size) for size in left.shape[-2:])
    dtype = str(left.dtype).removeprefix("torch.")
    return Product(batch, rows, inner, int(right.shape[-1]), _by_columns(left), _by_columns(right), dtype)


def _attention(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention | None:
    """Return the sizes of (batch, heads, length, width), which all of these operations take first."""
    backward = name.endswith("_backward") or "_backward_" in name
    query, key, value = args[1:4] if backward else args[:3]
    if query.dim() != 4 or query.is_nested:
        return None
    batch, heads, length, width = (int(size) for size in query.shape)
    dtype = str(query.dtype).removeprefix("torch.")
    kv_heads, others = int(key.shape[1]), int(key.shape[2])
    causal = _is_causal(func, args, kwargs)
    return Attention(batch, heads, kv_heads, length, others, width, int(value.shape[-1]), causal, dtype, backward)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(kwargs.get("is_causal", args[number] if number < len(args) else argument.default_value))
    return False


def _by_columns(matrix: torch.Tensor) -> bool:
    return bool(matrix.stride(-1) != 1 and matrix.stride(-2) == 1)
