"""What a notebook knows of one Execute: its options, how it goes, and who carries its messages.

For what observes tasks, and for what a task is made of: neither imports the task itself.
"""

from __future__ import annotations

import contextvars
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from nbdist import shells
from nbdist.client.base.results import CellResult
from nbdist.client.base.widget_proxies import WidgetProxies
from nbdist.client.reports.death_report import Witness
from nbdist.errors import RankFailure
from nbdist.wire.base.message import Message
from nbdist.wire.messages.cells import Kind, Metered, Recovered, Reply
from nbdist.wire.messages.output import Display, WidgetMessage


@dataclass(frozen=True)
class CellOptions:
    """The options that are the same on all ranks of a cell.

    Attributes:
        number: The cell's number in the notebook; 0 for the running cell's.
        offset: Lines of the notebook's cell above the code.
        grace: Seconds that ranks may wait in a collective for one that raised; then they are freed.
        show: Whether output is shown in the notebook.
        keep: Whether output is kept in the task's result.
        keep_displays: Whether only displays and last values are.
        profile: The folder for the ranks' traces; empty for no profile.
        setup: Whether ranks that replace dead ones run it first.
        file: What debuggers know the cell's code by; empty while none is on.
    """

    number: int = 0
    offset: int = 0
    grace: float = 1.0
    show: bool = False
    keep: bool = False
    keep_displays: bool = False
    profile: str = ""
    setup: bool = False
    file: str = ""


class TaskRecord(ABC):
    """One Execute, as far as others than its own thread deal with it.

    Args:
        serial: Its number on the wire.
        ranks: The ranks it runs on.
        code: Its code, for messages.
        options: Its options.
        kind: The kind of Execute.

    Attributes:
        number: Its cell's.
        result: What its ranks have printed and shown.
        replies: Of the ranks that have ended their part.
        failures: What went wrong, by rank.
        left: The ranks that still run it.
        started: When it began, by `time.monotonic`.
        context: Of the code that started it.
        recovered: What was repaired after it failed.
        waits: What ranks that have not moved for seconds wait in, and for which ranks.
        metered: What its ranks measure of it. Set by observers when the task begins.
        broken: Why all of its ranks are gone; None: they are not.
    """

    def __init__(self, serial: int, ranks: list[int], code: str, options: CellOptions, kind: Kind) -> None:
        self.serial = serial
        self.number = options.number or shells.cell_number()
        self.ranks = ranks
        self.code = code
        self.kind = kind
        self.result = CellResult(ranks, serial)
        self.replies: dict[int, Reply] = {}
        self.failures: dict[int, RankFailure] = {}
        self.left = set(ranks)
        self.started = time.monotonic()
        self.context = contextvars.copy_context()
        self.recovered: Recovered | None = None
        self.waits: dict[int, str] = {}
        self.metered = Metered()
        self.broken: str | None = None

    @property
    def runs_users_code(self) -> bool:
        """Whether it runs the user's code: a cell, or a function."""
        return self.kind in ("cell", "call", "launch")

    @property
    def status(self) -> str:
        """Its state: "ok", "error", "died", "interrupted", "running" as long as a rank still runs it, "lost"."""
        kinds = {failure.kind for failure in self.failures.values()}
        if self.broken is not None:
            return "lost"
        if kinds & {"died", "raised"}:
            return "died" if "died" in kinds else "error"
        return "running" if self.left else "interrupted" if kinds else "ok"

    @property
    def bereaved(self) -> bool:
        """Whether one of its ranks has died, so that the others have been stopped."""
        return any(failure.kind == "died" for failure in self.failures.values())

    def describe(self) -> str:
        """Describe what this is and how long it has run."""
        what = self.code if self.kind == "launch" else f"cell {self.number}"
        return f"{what} ({time.monotonic() - self.started:.0f} s)"

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a line of nbdist's own, among the output. In the task's thread, or once the task is over."""

    @abstractmethod
    def show_late(self, message: Any, now: float) -> float | None:
        """Show what came after the end. In the thread for late output, with this task's context.

        Args:
            message: The message; None to only check whether something is due.

        Returns:
            Seconds until it should be called again.
        """


class Carrier(Witness, Protocol):
    """Carries a task's messages: the `Traffic` of a session, or its counterpart in a launch.

    Attributes:
        key: A unique name.
        slack: Seconds that answers of ranks may take beyond their limits.
        is_stopping: Whether its ranks are ended on request.
    """

    key: str
    slack: float
    is_stopping: bool
    widgets: WidgetProxies

    def send(self, message: Message) -> None:
        """Send a message to the ranks."""

    def pay(self, rank: int, size: int) -> None:
        """Note that output of a rank has been taken."""

    def pay_item(self, item: Display | WidgetMessage) -> None:
        """Note that a rich item of a rank has been taken."""

    def put_late(self, task: TaskRecord | None, message: Message) -> None:
        """Have a message handled that came after the end of its task."""
