"""What each size of a product is in a model: a layer's or a head's width, or the rows of a batch. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nbdist.metrics.advice.named_weights import Weight
from nbdist.metrics.compute.products import Attention, Multiplication, Product

WIDTH, HEAD, ROWS = "width", "head", "rows"
_FORWARD, _WEIGHT_GRADIENT, _REST = (1, 2), (0, 2), (0, 1)  # where a weight's two sizes are: rows, inner, columns


class Role(NamedTuple):
    """A size that could be another one.

    Attributes:
        kind: "width" of layers, "head" (its width) or "rows" (of a batch: sequences x their length).
        size: The number.
    """

    kind: str
    size: int


class Placed(NamedTuple):
    """A product and what its sizes are.

    Attributes:
        product: The product, or the attention.
        roles: Of its rows, inner and columns; of an attention only the first. None: not known.
        weight: What it is a product with; None: with none, or not known.
    """

    product: Multiplication
    roles: tuple[Role | None, ...]
    weight: Weight | None


def placed(product: Multiplication, weights: Sequence[Weight]) -> Placed:
    """Return what the sizes of a product are.

    A weight is found by its two sizes: a forward pass and the gradient of the input have them as inner and columns, the
    gradient of the weight as rows and columns. What is multiplied without a weight, in a batch, and has one size twice
    is an attention by hand; the third size is that of a head. If no weights are known at all, because the model no
    longer exists, all that is multiplied alone is taken for a layer.
    """
    if isinstance(product, Attention):
        return Placed(product, (Role(HEAD, product.width),), None)
    first, second, weight = _weight_of(product, weights)
    if weight is not None or (product.batch == 1 and not weights):
        rows = 3 - first - second
        roles = [Role(WIDTH, size) for size in product.sizes]
        roles[rows] = Role(ROWS, product.sizes[rows])
        return Placed(product, tuple(roles), weight)
    if product.batch > 1 and len(set(product.sizes)) == 2:
        head = next(size for size in product.sizes if product.sizes.count(size) == 1)
        return Placed(product, tuple(Role(HEAD, size) if size == head else None for size in product.sizes), None)
    return Placed(product, (None, None, None), None)


def _weight_of(product: Product, weights: Sequence[Weight]) -> tuple[int, int, Weight | None]:
    """Return where the sizes of a weight are in a product, and the weight: in the likeliest order of its two sizes."""
    order = (_WEIGHT_GRADIENT, _FORWARD, _REST) if product.left_transposed else (_FORWARD, _WEIGHT_GRADIENT, _REST)
    for first, second in order:
        sizes = product.sizes[first], product.sizes[second]
        turned = (first, second) == _FORWARD and product.right_transposed
        for wanted in (sizes[::-1], sizes) if turned else (sizes, sizes[::-1]):
            weight = next((one for one in weights if one.sizes == wanted), None)
            if weight is not None:
                return first, second, weight
    return (*order[0], None)


def with_size(one: Placed, role: Role, size: int) -> Multiplication:
    """Return a product in which one size is another; heads of another width are as many as have the same width in all.

    Args:
        one: The product.
        role: What becomes another size.
        size: That size.
    """
    product = one.product
    if isinstance(product, Attention):
        heads = product.heads * product.width // size if product.heads * product.width % size == 0 else product.heads
        kv_heads = max(1, product.kv_heads * heads // product.heads)
        return product._replace(heads=heads, kv_heads=kv_heads, width=size, value_width=size)
    sizes = [size if each == role else now for now, each in zip(product.sizes, one.roles, strict=True)]
    batch = product.batch
    if role.kind == HEAD and batch * role.size % size == 0:
        batch = batch * role.size // size
    return product._replace(batch=batch, rows=sizes[0], inner=sizes[1], columns=sizes[2])
