"""What a page and the kernel say to each other; labextension/src/lab/messages.ts has the same for the page."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PROTOCOL = 1

Deed = Literal["state", "interrupt", "interrupt-now", "stacks", "why", "heal", "restart", "stop"]


class PageRequest(msgspec.Struct, frozen=True):
    """A page asks for something.

    Attributes:
        id: Its number, which the reply repeats.
        do: What.
        ranks: The ranks, as in `%%distributed -r`; empty: all.
    """

    id: int
    do: Deed
    ranks: str = ""


class PageWish(msgspec.Struct, frozen=True):
    """What the reader of a page's panel wants to see; `Feed.hear` takes it."""

    type: str
    value: Any = None


class PageCall(msgspec.Struct, frozen=True):
    """A message of a page: a request, or a wish."""

    request: PageRequest | None = None
    wish: PageWish | None = None


class PageOpening(msgspec.Struct, frozen=True):
    """What a page opens a line with.

    Attributes:
        page: Names the page; its lines belong together.
        protocol: What it speaks.
    """

    page: str
    protocol: int


class CellOnRanks(msgspec.Struct, frozen=True):
    """A cell that runs on ranks.

    Attributes:
        number: In the notebook; 0 for a function.
        ranks: How many it began on.
        done: How many of these have ended their part.
        seconds: Since it began.
    """

    number: int
    ranks: int
    done: int
    seconds: float


class SessionState(msgspec.Struct, frozen=True):
    """The notebook's session.

    Attributes:
        protocol: What this kernel speaks.
        version: Of nbdist.
        ranks: How many the session has; 0: there is none.
        devices: Of its ranks, each once.
        dead: Ranks that have died.
        broken: Why the session broke; empty: it has not.
        cells: What its ranks run.
        auto: Whether every cell runs on all ranks.
        gpus: How many GPUs this machine has.
    """

    protocol: int
    version: str
    ranks: int
    devices: list[str]
    dead: list[int]
    broken: str
    cells: list[CellOnRanks]
    auto: bool
    gpus: int


class PageReply(msgspec.Struct, frozen=True):
    """The answer to a request.

    Attributes:
        id: The request's number.
        state: How things are now.
        text: What there is to read; empty: nothing.
        failed: Whether the text is an error.
    """

    id: int
    state: SessionState
    text: str = ""
    failed: bool = False
