"""The controller's state for one rank, and the order of what that rank sends.

A rank's reply, displays and output come by three lanes, the output through the agent. Marks in its stdout show where
each display belongs and where the cell ends; here they are put back in order. Independent of sockets and other ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nbdist.wire.base.message import Message
from nbdist.wire.messages.cells import Reply
from nbdist.wire.messages.life import Died
from nbdist.wire.messages.output import END, PLAIN_END, STDOUT, Display, Notice, Output, Prompt

_DISPLAY_LIMIT = 10.0  # seconds after the end of a cell during which its displays may still arrive


@dataclass
class Rank:
    """A rank.

    Args:
        rank: Its number.
        tell: Sends a message to the notebook.
        keep: Writes output to the log: the cell's serial and number, rank, stream, bytes.
        over: Called with the reply when a cell is over on it: the reply and the mark after its output are here.
        slot: By which its lanes and its agent know it; it stays when ranks are renumbered.
        life: How many processes have had its slot before.

    Attributes:
        names: Numbers by which it may know itself: all that it had, and the one that it is to have.
        due: When to call `give_up`: the cell has ended, but some of its displays have not arrived.
    """

    rank: int
    tell: Callable[[Message], None]
    keep: Callable[[int, int, int, int, bytes], None]
    over: Callable[[Reply], None]
    slot: int
    life: int = 0
    names: set[int] = field(default_factory=set)
    pid: int = 0
    device: str = ""
    ready: bool = False
    dead: Died | None = None
    serial: int = 0  # the cell it runs
    due: float | None = None
    _last: tuple[int, int] = (0, 0)  # the newest cell it was given: serial and number
    _reply: Reply | None = None
    _printed: bool = False  # the mark at the end of the cell has arrived
    _displays: dict[int, Display | Prompt] = field(default_factory=dict)  # payloads whose marks have not arrived yet
    _marked: int = 0  # number of the newest mark that arrived
    _passed: int = 0  # number of the newest mark that was passed on
    _given_up: int = 0  # payloads up to this number are no longer waited for
    _shown_early: set[int] = field(default_factory=set)
    _unreadable: dict[int, str] = field(default_factory=dict)  # why payloads are missing
    _told: int = 0  # the cell for which the notebook was told of a missing display
    _held: deque[Output] = field(default_factory=deque)  # stdout that waits for a display's payload

    def renumber(self, rank: int) -> None:
        """Be another rank from now on. Its process has yet to hear of it."""
        self.names.add(self.rank)
        self.rank = rank

    def begin(self, serial: int, number: int) -> None:
        """Give the rank a cell, which has a number in the notebook."""
        self.serial = serial
        self._last = serial, number
        self._reply, self._printed = None, False

    def answer(self, reply: Reply) -> None:
        """Take its reply to a cell; the output may still be on its way."""
        self._reply = reply
        self._check_over()

    def display(self, message: Display | Prompt) -> None:
        """Take a display, or a prompt; the mark for its position may still be on its way."""
        if message.sequence <= self._passed:  # `give_up` was called before it arrived
            self.tell(message)
            return
        self._displays[message.sequence] = message
        self._advance()

    def miss_display(self, sequence: int, why: str) -> None:
        """Record that a display could not be read."""
        self._unreadable[sequence] = why
        self._advance()

    def print(self, message: Output) -> None:
        """Take printed output, or a mark."""
        if message.stream != STDOUT:
            self._pass_on(message)
            return
        self._held.append(message)
        if message.mark is not None:
            self._marked = max(self._marked, message.mark[1])
        self._advance()
        if self._held and self.due is None and message.mark is not None and message.mark[1] <= END:
            self.due = time.monotonic() + _DISPLAY_LIMIT

    def give_up(self) -> None:
        """Stop waiting for the displays of a cell that has ended."""
        self._given_up = self._marked
        self._advance()

    def die(self, died: Died) -> None:
        """Handle the end of its process; output that waited for a display is released."""
        self.serial, self.dead = 0, died
        self._advance()

    def _advance(self) -> None:
        """Pass on stdout and displays in order, up to the first display whose payload has not arrived."""
        while self._held:
            mark = self._held[0].mark
            sequence = mark[1] if mark is not None else END
            if sequence > END and self._is_to_come(sequence):
                return
            self._pass_on(self._held.popleft())
            if sequence > END:
                self._passed = sequence
                self._show(sequence)
        self.due = None

    def _is_to_come(self, sequence: int) -> bool:
        """Return whether a payload is still on its way.

        A rank sends a payload before its mark, and payloads in the order of their marks: once that of a later mark is
        here, this one is lost. A payload without a mark proves nothing, since its number may be wrong.
        """
        if self.dead or sequence <= self._given_up or sequence in self._shown_early:
            return False
        if sequence in self._displays or sequence in self._unreadable:
            return False
        return not any(sequence < number <= self._marked for number in (*self._displays, *self._unreadable))

    def _show(self, sequence: int) -> None:
        """Show a display at its place."""
        display = self._displays.pop(sequence, None)
        why = self._unreadable.pop(sequence, "it was lost on its way to the notebook")
        if display is not None:
            self.tell(display)
        elif sequence in self._shown_early:
            self._shown_early.discard(sequence)
        elif not self.dead and self._told != self._last[0]:
            self._told = self._last[0]
            self.tell(Notice(f"rank {self.rank} displayed something that is missing here: {why}"))

    def _pass_on(self, message: Output) -> None:
        if message.data:
            self.keep(*self._last, self.rank, message.stream, message.data)
            self.tell(Output(self.rank, message.stream, message.data))
        if message.mark is not None and message.mark[1] <= END and message.mark[0] == self.serial:
            self._printed = True
            if message.mark[1] == PLAIN_END:
                self._reply = Reply(self.serial, self.rank, "ok")
            self._check_over()

    def _check_over(self) -> None:
        if self._reply is None or not self._printed:
            return
        for sequence in sorted(self._displays):  # an interrupt fell between the payload and its mark
            self._shown_early.add(sequence)
            self.tell(self._displays.pop(sequence))
        reply, self.serial, self._reply, self._printed = self._reply, 0, None, False
        self.over(reply)
