"""What goes between the agent and its warm template, by a socket of their own that carries descriptors too.

A notebook that forks ranks itself speaks the same, in the template's place.
Not imported before torch by the template, nor by the agent before the template has started.
"""

from __future__ import annotations

import msgspec


class TemplateMessage(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all of them."""


# --- agent to template


class Fork(TemplateMessage, frozen=True):
    """Fork a rank, which gets the descriptors of its stdout, stderr and setup; None: the store (socket, stderr).

    fresh: it starts as a new Python, in the environment of the ranks.
    """

    rank: int | None
    fresh: bool = False


class EndChildren(TemplateMessage, frozen=True):
    """End children and their process groups."""

    pids: list[int]


# --- template to agent


class Imported(TemplateMessage, frozen=True):
    """All is imported. `origin`: the file that torch came from."""

    origin: str


class ImportFailed(TemplateMessage, frozen=True):
    """The imports have failed, and the template ends."""

    text: str


class Forked(TemplateMessage, frozen=True):
    """A child lives, whose pidfd comes with this. rank: as in Fork."""

    rank: int | None
    pid: int


class ForkFailed(TemplateMessage, frozen=True):
    """A child could not be forked."""

    error: str


class ChildEnded(TemplateMessage, frozen=True):
    """A child has ended. code: as subprocess has it."""

    pid: int
    code: int


Request = Fork | EndChildren
Report = Imported | ImportFailed | Forked | ForkFailed | ChildEnded

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
