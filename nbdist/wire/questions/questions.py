"""Questions and answers as messages: to the control threads of ranks, to the controller, to nodes' samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from nbdist.metrics.node.sample import NodeSample
from nbdist.wire.base.message import Message, Seconds
from nbdist.wire.messages.healing import SetupCell
from nbdist.wire.questions.debug_bytes import DebugBytes, OpenDebugger, TellDebugger
from nbdist.wire.questions.gathering import Arrive, AtStep, Called, CallNow, CallOff, Gather
from nbdist.wire.questions.held_variables import (
    Elements,
    Entries,
    Figures,
    Gap,
    GetElements,
    GetEntries,
    GetFigures,
    GetGap,
    GetVariables,
    Variables,
)
from nbdist.wire.questions.knowing import (
    Complete,
    Completions,
    GetFailure,
    GetMemory,
    GetMemoryFromOutside,
    GetMetrics,
    Inspect,
    Inspection,
    KnownFailure,
    Metrics,
    ProcessMemory,
    Release,
)
from nbdist.wire.questions.question import Done, NoAnswer, Question
from nbdist.wire.questions.stopping import (
    Aim,
    Arm,
    Cut,
    Disarm,
    Enter,
    Flight,
    Forbid,
    Forbidden,
    GetFlight,
    GetNativeStack,
    GetPosition,
    GetProcess,
    GetStack,
    GetState,
    Meet,
    NativeStack,
    Position,
    ProcessState,
    RankState,
    Rest,
    StepsMade,
    Strand,
    ThreadStack,
)

Asker = Literal["notebook", "controller"]

AnyQuestion = (
    Aim
    | Arm
    | Arrive
    | CallNow
    | CallOff
    | Complete
    | Cut
    | Disarm
    | Enter
    | Forbid
    | Gather
    | GetElements
    | GetEntries
    | GetFailure
    | GetFlight
    | GetGap
    | GetMemory
    | GetMemoryFromOutside
    | GetMetrics
    | GetNativeStack
    | GetPosition
    | GetProcess
    | GetStack
    | GetState
    | GetFigures
    | GetVariables
    | Inspect
    | Meet
    | OpenDebugger
    | Release
    | Rest
    | Strand
    | TellDebugger
)

AnyAnswer = (
    AtStep
    | Called
    | Completions
    | DebugBytes
    | Done
    | Elements
    | Entries
    | Flight
    | Forbidden
    | Gap
    | Inspection
    | KnownFailure
    | Metrics
    | NativeStack
    | NoAnswer
    | Position
    | ProcessMemory
    | ProcessState
    | RankState
    | Figures
    | StepsMade
    | ThreadStack
    | Variables
)


OF_AGENTS = (GetMemoryFromOutside, GetNativeStack, GetProcess)  # the questions that agents answer for their ranks


class Ask(Message, frozen=True):
    """A question to the control threads of ranks, answered at once, or to their agents (`OF_AGENTS`).

    request: counts the questions of its asker; 0 if the asker does not need the answer. ranks: who is asked; on the way
    to them [], as they know.
    """

    request: int
    ranks: list[int]
    question: AnyQuestion
    asker: Asker = "notebook"


def ask(request: int, ranks: Sequence[int], question: Question[Any], asker: Asker = "notebook") -> Ask:
    """Return a question as a message. Each question type is in `AnyQuestion`, which types alone can't express."""
    return Ask(request, list(ranks), cast("AnyQuestion", question), asker)


class Answer(Message, frozen=True):
    """A rank's answer to an Ask, with the same `request` and `asker`."""

    request: int
    rank: int
    body: AnyAnswer
    asker: Asker = "notebook"


class RankStatus(msgspec.Struct, frozen=True):
    """A rank as the controller sees it. serial: the cell it runs, 0 for none. dead: how it ended, "" if it lives."""

    rank: int
    pid: int
    device: str
    serial: int
    dead: str


class GetStatus(Message, frozen=True):
    """What is the state of the ranks? Its answer is a Status."""

    request: int


class Status(Message, frozen=True):
    """The state of the ranks, as the controller sees it. setup: the cells that newcomers run, by number."""

    request: int
    ranks: list[RankStatus]
    setup: list[int] = []


class GetCellsRun(Message, frozen=True):
    """What has run on the ranks? Its answer is a CellsRun."""

    request: int


class CellsRun(Message, frozen=True):
    """What has run on the ranks, in its order."""

    request: int
    cells: list[SetupCell]


class WatchNodes(Message, frozen=True):
    """Sample the nodes every `period` seconds from now on; 0 to stop."""

    period: Seconds


class Look(Message, frozen=True):
    """A sample of a node."""

    node: NodeSample
