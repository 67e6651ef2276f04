"""What the ranks of a task print and show: kept in its result, shown below the cell, paid for so that ranks go on.

Used by the task's own thread, and once the task is over by the thread for late output.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from nbdist.client.base.results import CellResult
from nbdist.client.output.publisher import Publisher
from nbdist.client.output.screen import Screen
from nbdist.client.ranks import observers
from nbdist.client.ranks.task_record import Carrier, CellOptions
from nbdist.wire.messages.cells import Remark
from nbdist.wire.messages.healing import Renumbered
from nbdist.wire.messages.output import Display, Notice, Output


class TaskOutput:
    """The output of one task.

    Args:
        traffic: Pays its ranks.
        result: The task's result, which keeps what was printed and shown.
        number: The number of its cell.
        options: Its options.

    Attributes:
        screen: What is shown below the cell; None if the task shows nothing.
    """

    def __init__(self, traffic: Carrier, result: CellResult, number: int, options: CellOptions) -> None:
        self._traffic = traffic
        self._result = result
        self._parts = dict(result)  # by the numbers that ranks have now
        self._number = number
        self._options = options
        self._unpaid: list[Display] = []
        self.screen = self._new_screen() if options.show else None

    def take(self, event: Output | Display, now: float) -> None:
        """Keep and show what a rank printed or displayed."""
        self._note(event)
        if self.screen is not None:
            _draw(self.screen, event, now)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Show what comes from now on under other numbers of the ranks; those without one send nothing more."""
        if all(before == now for before, now in numbers.items()):
            return
        self._parts = {numbers[rank]: part for rank, part in self._parts.items() if rank in numbers}
        if self.screen is not None:
            self.screen.settle(time.monotonic())
            self.screen = self._new_screen()

    def say(self, text: str) -> None:
        """Show a line of nbdist's own, among the output."""
        if self.screen is not None:
            self.screen.say(text)

    def remark(self, event: Remark) -> None:
        """Show the controller's line on what the ranks wait for; it replaces the last one on the same topic."""
        if self.screen is None:
            return
        text = event.text
        if event.stuck:
            in_front = threading.current_thread() is threading.main_thread()
            text += ". Interrupt the kernel to stop them." if in_front else ". `%distributed interrupt` stops them."
        self.screen.remark(text, event.topic, same=event.same)

    def show_late(self, message: Any, now: float) -> float | None:
        """Show what came after the task's end.

        Args:
            message: The message; None to only check whether something is due.

        Returns:
            Seconds until it should be called again.
        """
        if isinstance(message, (Output, Display)):
            self._note(message)
        elif isinstance(message, Renumbered):
            self.renumber(message.numbers)
        if self.screen is None:
            self.pay()
            return None
        try:
            self._draw_late(self.screen, message, now)
        except Exception:  # the cell had redirected its output to a stream that is now closed
            self.screen = self._new_screen()
            self._draw_late(self.screen, message, now)
        finally:
            self.pay()
        return self.screen.due(now)

    def pay(self) -> None:
        """Let ranks show more, if the page keeps up with them."""
        if self._unpaid and (self.screen is None or not self.screen.crowded):
            for item in self._unpaid:
                self._traffic.pay_item(item)
            self._unpaid.clear()

    def _draw_late(self, screen: Screen, message: Any, now: float) -> None:
        if isinstance(message, (Output, Display)):
            _draw(screen, message, now)
        elif isinstance(message, Notice):
            screen.say(message.text)
        elif isinstance(message, Remark):
            self.remark(message)
        screen.poll(now)

    def _new_screen(self) -> Screen:
        """Return a screen that prints where the notebook prints now."""
        key = f"{self._traffic.key}-{self._result.serial}"
        on_bars = partial(observers.bars_drawn, self._number)
        return Screen(list(self._parts), Publisher(self._number), key, self._traffic.places, on_bars)

    def _note(self, event: Output | Display) -> None:
        if isinstance(event, Output):
            if self._options.keep:
                self._parts[event.rank].add(event.stream, event.data)
            return
        self._unpaid.append(event)
        if (self._options.keep or self._options.keep_displays) and event.kind in ("display", "result"):
            self._parts[event.rank].show(event.data, event.size)


def _draw(screen: Screen, event: Output | Display, now: float) -> None:
    if isinstance(event, Output):
        screen.print(event, now)
    else:
        screen.display(event, now)
