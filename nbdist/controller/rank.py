"""What the controller knows of one rank, and the order of what it sends.

A rank's reply, its displays and its output come by three lanes, the output by way of the agent. Marks in its stdout say
where each display belongs and where the cell ends; here they come together again. Knows no sockets and no other ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nbdist.protocol import END, PLAIN_END, STDOUT, Died, Display, Message, Notice, Output, Reply


@dataclass
class Rank:
    """A rank.

    Args:
        rank: Its number.
        tell: Gives the notebook a message.
        keep: Writes output to the log: cell, rank, stream, bytes. Returns a line for the user, if there is one.
        over: Called with the reply when a cell is over on it: the reply and the mark behind its output have come.
    """

    rank: int
    tell: Callable[[Message], None]
    keep: Callable[[int, int, int, bytes], str | None]
    over: Callable[[Reply], None]
    pid: int = 0
    device: str = ""
    ready: bool = False
    dead: Died | None = None
    serial: int = 0  # the cell it runs
    since: float = 0.0
    _last: int = 0  # the newest cell it was given
    _reply: Reply | None = None
    _printed: bool = False  # the mark at the end of the cell has come
    _displays: dict[int, Display] = field(default_factory=dict)
    _shown_early: set[int] = field(default_factory=set)
    _held: deque[Output] = field(default_factory=deque)  # stdout that waits for a display's payload

    def begin(self, serial: int) -> None:
        """It is given a cell."""
        self.serial = self._last = serial
        self.since = time.time()
        self._reply, self._printed = None, False

    def answer(self, reply: Reply) -> None:
        """It has finished a cell; the output may still be on its way."""
        self._reply = reply
        self._check_over()

    def display(self, message: Display) -> None:
        """It shows something; the mark that says where may still be on its way."""
        self._displays[message.sequence] = message
        self._advance()

    def print(self, message: Output) -> None:
        """It has printed something, or a mark has come."""
        if message.stream != STDOUT:
            self._pass_on(message)
            return
        self._held.append(message)
        self._advance()

    def die(self, died: Died) -> None:
        """Its process has ended; what waited for a display waits no longer."""
        self.serial, self.dead = 0, died
        self._advance()

    def _advance(self) -> None:
        """Pass on stdout and displays in their order; stop where a display's payload has not come yet."""
        while self._held:
            mark = self._held[0].mark
            sequence = mark[1] if mark is not None else END
            if sequence > END and not (sequence in self._displays or sequence in self._shown_early or self.dead):
                return
            self._pass_on(self._held.popleft())
            self._shown_early.discard(sequence)
            display = self._displays.pop(sequence, None)
            if display is not None:
                self.tell(display)

    def _pass_on(self, message: Output) -> None:
        if message.data:
            notice = self.keep(self._last, self.rank, message.stream, message.data)
            if notice is not None:
                self.tell(Notice(notice))
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
