"""Questions about what a rank costs, and about the names in its shell."""

from __future__ import annotations

from typing import Any

import msgspec

from nbdist.metrics.node.sample import RankSample, StepSample
from nbdist.wire.question import AnswerBody, Done, Question


class ProcessMemory(AnswerBody, frozen=True):
    """Bytes that a rank holds: of the CPU's memory what it shares with nobody, of its GPU's, if it uses one."""

    private: int
    allocated: int | None = None
    reserved: int | None = None


class GetMemory(Question[ProcessMemory], frozen=True):
    """What does this rank hold?"""


class Metrics(AnswerBody, frozen=True):
    """A rank for the panel."""

    sample: RankSample


class GetMetrics(Question[Metrics], frozen=True):
    """What is to be shown of this rank?"""


class Lap(AnswerBody, frozen=True):
    """The training steps of what ran last; None if they are not measured."""

    steps: StepSample | None = None


class GetLap(Question[Lap], frozen=True):
    """Which training steps has what ran last made?"""


class CompletionItem(msgspec.Struct, array_like=True, frozen=True):
    """A text that fits from `start` to `end` of the code, and what it is: "function", "module", ..."""

    text: str
    kind: str | None
    start: int
    end: int


class Completions(AnswerBody, frozen=True):
    """What fits."""

    matches: list[CompletionItem]


class Complete(Question[Completions], frozen=True):
    """What fits at this position of this code?"""

    code: str
    position: int


class Inspection(AnswerBody, frozen=True):
    """The documentation of a name as MIME bundle; None: there is no such name."""

    bundle: dict[str, Any] | None


class Inspect(Question[Inspection], frozen=True):
    """What is this name? `detail`: 1 for its source."""

    name: str
    detail: int


class Release(Question[Done], frozen=True):
    """Let go of what was packed for the cell `serial`: the notebook has it, or does not want it."""

    serial: int
