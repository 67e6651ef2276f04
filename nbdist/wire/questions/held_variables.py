"""Questions about the variables of a rank: what they are, whether ranks agree, and figures of one tensor."""

from __future__ import annotations

import msgspec

from nbdist.wire.questions.question import AnswerBody, Question


class Held(msgspec.Struct, array_like=True, frozen=True):
    """A variable as one rank holds it.

    Attributes:
        name: Its name, or how it is written as an entry of another one: "state['layer.weight']".
        kind: Its type.
        shape: Of a tensor or array; None for anything else.
        dtype: Of a tensor or array; "" for anything else.
        device: Where its bytes are; "" if unknown.
        size: Bytes of its values; None: not known without running the code of its type.
        digest: A hash of its values, equal on ranks where they are equal to the bit; "": not hashed.
        why: Why it is not hashed; "" if it is.
        part: Whether it is, or holds, this rank's part of a sharded tensor, which differs from others by design.
        inside: Whether it can be looked into: `GetEntries`.
    """

    name: str
    kind: str
    shape: list[int] | None = None
    dtype: str = ""
    device: str = ""
    size: int | None = None
    digest: str = ""
    why: str = ""
    part: bool = False
    inside: bool = False


class Variables(AnswerBody, frozen=True):
    """The variables. `busy`: a cell runs, so that nothing was hashed."""

    held: list[Held]
    busy: bool


class GetVariables(Question[Variables], frozen=True):
    """Which variables does this rank have? `names`: only these, which are hashed however large they are; empty: all."""

    names: list[str]


class Entries(AnswerBody, frozen=True):
    """Entries, in their order: a container before its own, with a hash of its keys. `more`: whether that is not all."""

    held: list[Held]
    more: bool


class GetEntries(Question[Entries], frozen=True):
    """What is in this variable, at any depth?"""

    name: str


class Figures(AnswerBody, frozen=True):
    """Figures of a tensor's elements.

    count: of all elements. low, high, mean, std: of the finite ones, None if there are none. bins: how many of these
    lie in equal spans from the question's `low` to its `high`.
    """

    count: int
    low: float | None
    high: float | None
    mean: float | None
    std: float | None
    nans: int
    infinite: int
    zeros: int
    bins: list[int] = []


class GetFigures(Question[Figures], frozen=True):
    """What are the figures of this tensor? `low`, `high`: the ends of a histogram; None for none."""

    name: str
    low: float | None = None
    high: float | None = None


class Elements(AnswerBody, frozen=True):
    """Elements of a tensor as bytes; fewer than requested at its end."""

    data: bytes


class GetElements(Question[Elements], frozen=True):
    """What are the `count` elements of this tensor from `start` on, in the order of rows?"""

    name: str
    start: int
    count: int


class Gap(AnswerBody, frozen=True):
    """How elements differ: how many, the place of the first in the tensor (-1: none), and by how much at most."""

    count: int
    first: int
    most: float


class GetGap(Question[Gap], frozen=True):
    """How do these elements of another rank, from `start` on, differ from this rank's?"""

    name: str
    start: int
    data: bytes
