"""What a task needs of the session or launch that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nbdist.client.base.widget_proxies import WidgetProxies
from nbdist.client.reports.death_report import Witness
from nbdist.wire.base.message import Message
from nbdist.wire.messages.output import Display, WidgetMessage

if TYPE_CHECKING:
    from nbdist.client.ranks.task import Task


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

    def put_late(self, task: Task | None, message: Message) -> None:
        """Have a message handled that came after the end of its task."""
