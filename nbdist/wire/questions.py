"""Questions and their answers: to the control threads of ranks, to the controller, to the samplers of nodes."""

from __future__ import annotations

from typing import Any

from nbdist.metrics.node.sample import NodeSample
from nbdist.wire.message import Message, Seconds


class Ask(Message, frozen=True):
    """A question to the control threads of ranks ("complete", "inspect", "stack", "state", ...), answered at once.

    request: positive from the notebook, negative from the controller itself.
    """

    request: int
    ranks: list[int]
    question: str
    arguments: dict[str, Any] = {}


class Answer(Message, frozen=True):
    """A rank's answer to Ask, or (rank -1) the controller's to AskController."""

    request: int
    rank: int
    data: dict[str, Any]


class AskController(Message, frozen=True):
    """A question to the controller and its agent: "status"."""

    request: int
    question: str
    arguments: dict[str, Any] = {}


class Watch(Message, frozen=True):
    """Look at the nodes every `period` seconds from now on; 0: no longer."""

    period: Seconds


class Look(Message, frozen=True):
    """What a node's sampler has seen."""

    node: NodeSample
