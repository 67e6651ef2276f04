"""What one who controls a job says to each of its processes, and what they say, over a connection that stays open.

Its end, for whatever reason, lets the process go on. It begins with `TakeControl`, in place of a `LookRequest`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

PrintedText: TypeAlias = tuple[Literal["stdout", "stderr"], str]


class TakeControl(msgspec.Struct, tag=True, frozen=True):
    """Let only this one decide where the process pauses. limit: seconds that it may stand still. by: who asks."""

    limit: float
    by: int


class PauseAfter(msgspec.Struct, tag=True, frozen=True):
    """Stand still after this step; if it stands still after an earlier one, go on until then."""

    step: int


class RunCode(msgspec.Struct, tag=True, frozen=True):
    """Run code where the process stands still."""

    code: str


class GoOn(msgspec.Struct, tag=True, frozen=True):
    """Train on."""


class BreakOff(msgspec.Struct, tag=True, frozen=True):
    """End the training with an error: code has left the ranks' collectives out of step. why: in words."""

    why: str


class Controlled(msgspec.Struct, tag=True, frozen=True):
    """Control is taken. steps: so far. step_seconds: of one, over the last ones; 0: not known."""

    steps: int
    step_seconds: float


class ControlRefused(msgspec.Struct, tag=True, frozen=True):
    """Control is not taken. by: the process that has it, where one has."""

    reason: Literal["forbidden", "taken"]
    by: int = 0


class StepPassed(msgspec.Struct, tag=True, frozen=True):
    """It has made the step already, after which it was to stand still. steps: so far."""

    step: int
    steps: int


class StandsStill(msgspec.Struct, tag=True, frozen=True):
    """It stands still after this step. entered: collectives so far, as `entered_collectives` counts them."""

    step: int
    entered: dict[str, list[int]] = {}


class CodeFailure(msgspec.Struct, frozen=True):
    """What code has raised. name: the class of the exception; "": none, it was stopped. traceback: as text."""

    name: str
    text: str
    traceback: str


class CodeRan(msgspec.Struct, tag=True, frozen=True):
    """Code has ended. printed: in order, with the last expression's value at the end."""

    printed: list[PrintedText]
    failure: CodeFailure | None = None


class WentOn(msgspec.Struct, tag=True, frozen=True):
    """It trains on. seconds: that it stood still. limit: whether it went on by itself, because its time was over."""

    seconds: float
    limit: bool


Order: TypeAlias = PauseAfter | RunCode | GoOn | BreakOff
Report: TypeAlias = Controlled | ControlRefused | StepPassed | StandsStill | CodeRan | WentOn
