"""How well the sizes of a matrix product suit a GPU, and which sizes near them are worth a try. Arithmetic only.

cuBLAS computes the result in tiles, all multiprocessors (SMs) at a time. A tile that reaches over the edge, or a last
wave with few tiles, takes as long as a full one; and tensor cores read fastest what is aligned to 128 bytes (A100 and
later; 16 bytes before). Source: NVIDIA, "Matrix Multiplication Background User's Guide" (tile 128 x 256, k by 64;
wave quantization; alignment table), as in stas00/ml-engineering, "Vector and matrix size divisibility".
"""

from __future__ import annotations

import math

from nbdist.metrics.compute.products import Product

TILE = (128, 64, 256)  # rows, inner, columns
_LINE = 128  # bytes
_NEAR = 1.25  # times a size, beyond which another one is another model
_FULL = 0.9  # share of the SMs at work, above which waves are not worth a word
_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def tile_efficiency(product: Product) -> float:
    """Return the share of the computed tiles that is part of the result."""
    return math.prod(size / _next_multiple(size, tile) for size, tile in zip(product.sizes, TILE, strict=True))


def wave_efficiency(product: Product, multiprocessors: int) -> float:
    """Return the share of the SMs' time in which they have a tile to compute."""
    tiles = product.batch * math.ceil(product.rows / TILE[0]) * math.ceil(product.columns / TILE[2])
    return tiles / _next_multiple(tiles, multiprocessors)


def alignment(product: Product) -> int:
    """Return the bytes that rows of both factors and of the result are aligned to, at most 128."""
    left = product.rows if product.left_transposed else product.inner
    right = product.inner if product.right_transposed else product.columns
    lines = (size * _ITEM.get(product.dtype, 1) for size in (left, right, product.columns))
    return min(_LINE, math.gcd(*lines, _LINE))


def next_sizes(size: int) -> list[int]:
    """Return larger sizes that are worth a try in place of one; none where it is good already.

    64 numbers are 128 bytes or more in all dtypes that training multiplies in.
    """
    if size % 64 == 0:
        return []
    near = {_next_multiple(size, multiple) for multiple in (64, 128)}
    return sorted(other for other in near if other <= _NEAR * size)


def next_rows(product: Product, multiprocessors: int) -> list[int]:
    """Return numbers of rows near a product's whose last wave is fuller; none where it is full enough already.

    Args:
        product: Whose rows are those of a batch.
        multiprocessors: Of the GPU.
    """
    now = wave_efficiency(product, multiprocessors)
    if now >= _FULL:
        return []
    low, high = int(product.rows / _NEAR), int(product.rows * _NEAR)
    tried = range(_next_multiple(low, TILE[0]), high + 1, TILE[0])
    shares = {rows: wave_efficiency(product._replace(rows=rows), multiprocessors) for rows in tried}
    best = max(shares, key=lambda rows: (shares[rows], -abs(rows - product.rows)), default=None)
    return [] if best is None or shares[best] <= now else [best]


def other_heads(heads: int, width: int) -> list[tuple[int, int]]:
    """Return heads and widths of heads that are worth a try in place of these; none where 64 divides the width.

    The whole width stays the same if 64 or 128 divides it. Otherwise heads become as much wider as the fused kernels
    ask for: a multiple of 8.
    """
    if width % 64 == 0:
        return []
    whole = heads * width
    same = [(whole // other, other) for other in (64, 128) if whole % other == 0]
    return same or ([] if width % 8 == 0 else [(heads, _next_multiple(width, 8))])


def _next_multiple(size: int, of: int) -> int:
    return -(-size // of) * of
