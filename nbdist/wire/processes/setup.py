"""The first lines between the notebook, its controller and its agent, on stdin and stdout, before there is a socket."""

from __future__ import annotations

import msgspec

from nbdist.base import limits
from nbdist.wire.base.keys import Keys


class ControllerSetup(msgspec.Struct, frozen=True):
    """What the notebook gives its controller.

    kernel: its process id. runtime_folder: where to write its key file. notebook: its file, "" if unknown. seat: what
    stays the same when its kernel restarts, "" if nothing does.
    """

    kernel: int
    runtime_folder: str
    notebook: str = ""
    seat: str = ""


class ControllerReady(msgspec.Struct, tag=True, frozen=True):
    """The controller listens. key_file: the keys needed to connect."""

    key_file: str


class ControllerFailed(msgspec.Struct, tag=True, frozen=True):
    """The controller could not start."""

    text: str


class AgentSetup(msgspec.Struct, frozen=True):
    """What the controller gives its agent, once it knows it itself."""

    keys: Keys
    token: bytes
    leftovers: list[str]  # files and folders to remove if the controller can't
    folder: str = ""  # one of them: the session's own, for temporary files; empty: there is none
    node: int = 0  # 0: the controller's own machine
    timeout: float = limits.NODE_TIMEOUT  # seconds without a sign of life until the other side is given up


def encode_line(first: ControllerSetup | ControllerReady | ControllerFailed | AgentSetup) -> bytes:
    """Encode a first message as a line."""
    return msgspec.json.encode(first) + b"\n"
