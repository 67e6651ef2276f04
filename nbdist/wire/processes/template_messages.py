"""Messages between the agent and its warm template, over their own socket, which also passes descriptors.

A notebook that forks ranks itself speaks the same protocol in the template's place.
The template must not import this before torch, nor the agent before the template has started.
"""

from __future__ import annotations

import msgspec


class TemplateMessage(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all of them."""


# --- agent to template


class Fork(TemplateMessage, frozen=True):
    """Fork a rank with the descriptors of its stdout, stderr and setup; None for the store (socket, stderr).

    fresh: start it as a new Python, in the ranks' environment. spared: whether SIGTERM does not end it at once, nor the
    template.
    """

    rank: int | None
    fresh: bool = False
    spared: bool = False


class EndChildren(TemplateMessage, frozen=True):
    """End children and their process groups."""

    pids: list[int]


# --- template to agent


class Imported(TemplateMessage, frozen=True):
    """All imports are done. origin: the file that torch was imported from."""

    origin: str


class ImportFailed(TemplateMessage, frozen=True):
    """The imports failed, and the template ends."""

    text: str


class Forked(TemplateMessage, frozen=True):
    """A child exists; its pidfd comes with this message. rank: as in Fork."""

    rank: int | None
    pid: int


class ForkFailed(TemplateMessage, frozen=True):
    """A child could not be forked."""

    error: str


class ChildEnded(TemplateMessage, frozen=True):
    """A child has ended. code: as in subprocess."""

    pid: int
    code: int


Request = Fork | EndChildren
Report = Imported | ImportFailed | Forked | ForkFailed | ChildEnded

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
