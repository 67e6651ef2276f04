"""The client that drives the session: who it is, what waits for it, and what holds when there is none.

Owns the lane to the client, what it owes, and when a session without one ends. Independent of ranks.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import zmq

from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.clients.unseen_cells import EndedCells, UnseenCells
from nbdist.wire.base.message import Message
from nbdist.wire.bundle import Bundle
from nbdist.wire.frames import encode
from nbdist.wire.lanes import CLIENT_EVENTS, FIRST_CLIENT, node_lane
from nbdist.wire.messages.handover import Attach, Displaced, Ending, Goodbye, Leave, Leaving
from nbdist.wire.messages.healing import Renumbered
from nbdist.wire.messages.output import Credit, Display, Output, WidgetMessage
from nbdist.wire.processes.setup import ControllerSetup


class Ledger:
    """An account for each rank's output, and one for its displays and widget messages."""

    def __init__(self) -> None:
        self._owed: Counter[tuple[int, bool]] = Counter()  # by rank, and whether for items

    def passed_on(self, message: Message) -> None:
        """Record that this was sent to the notebook."""
        if isinstance(message, Output):
            self._owed[message.rank, False] += len(message.data)
        elif isinstance(message, (Display, WidgetMessage)):
            self._owed[message.rank, True] += message.size

    def paid(self, credit: Credit) -> None:
        """Record that the notebook paid for some of it."""
        self._owed[credit.rank, credit.items] -= credit.size

    def settle(self) -> list[Credit]:
        """Return all that is owed, so that someone else can pay it: the notebook is gone."""
        owed, self._owed = self._owed, Counter()
        return [Credit(rank, size, items) for (rank, items), size in owed.items() if size > 0]


@dataclass(frozen=True)
class Client:
    """A client. number: of its lanes. end: a descriptor that is readable when its process has ended."""

    number: int
    pid: int
    end: int
    notebook: str
    seat: str

    @property
    def events(self) -> bytes:
        """Its lane."""
        return node_lane(CLIENT_EVENTS, self.number)

    def __str__(self) -> str:
        return f"{self.notebook} (pid {self.pid})" if self.notebook else f"pid {self.pid}"


class ClientSide:
    """The client's side of the controller.

    Args:
        setup: Of the first client.
        end: Its pidfd.
        router: To send by.
        poller: Which is to see the client's end.
        pay: Lets a rank print or show more.

    Attributes:
        client: The client, or the last one.
        left: How it has left; None while it is there.
        leave_at: When a session without a client ends.
        linger: Seconds that the ranks outlive a client that crashed.
        ending: What the client has announced of its end.
        unseen: What the client may not have seen.
        ended: What has ended, whoever has seen it.
    """

    def __init__(
        self,
        setup: ControllerSetup,
        end: int,
        router: MessageRouter,
        poller: zmq.Poller,
        pay: Callable[[Credit], None],
    ) -> None:
        self.client = Client(FIRST_CLIENT, setup.kernel, end, setup.notebook, setup.seat)
        self.left: Leaving | None = None
        self.leave_at: float | None = None
        self.linger = 0.0
        self.ending: Ending | None = None
        self.ended = EndedCells()
        self.unseen = UnseenCells(self.ended)
        self._left_at = 0.0
        self._router = router
        self._poller = poller
        self._pay = pay
        self._news = Bundle()
        self._first: list[bytes] = []  # what goes before them
        self._ledger = Ledger()
        self._held = False  # what it is told first is not known yet
        poller.register(end, zmq.POLLIN)

    @property
    def alone(self) -> bool:
        """Whether there is no client."""
        return self.left is not None

    @property
    def away(self) -> float:
        """Seconds since the last client has left."""
        return time.monotonic() - self._left_at if self.alone else 0.0

    @property
    def connected(self) -> bool:
        """Whether it can be reached."""
        return self._router.is_connected(self.client.events)

    def begin_set(self, linger: float) -> None:
        """Start with a fresh set of ranks."""
        self.linger = linger
        self.unseen = UnseenCells(self.ended)
        self._ledger = Ledger()

    # --- to the client

    def send(self, message: Message) -> None:
        """Send to the client, together with the rest of this round. Without one, output goes only to the log."""
        self.unseen.note(message, not self.alone)
        if isinstance(message, Renumbered):
            self._renumber(message.numbers)
        if not self.alone:
            self._ledger.passed_on(message)
            self._news.add(message)
        elif isinstance(message, (Display, WidgetMessage)):
            self._pay(Credit(message.rank, message.size, items=True))

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        """Have what the client owes paid, as it forgets that when it hears of the new numbers."""
        self.unseen.renumber(numbers)
        for credit in self._ledger.settle():
            if credit.rank in numbers:
                self._pay(msgspec.structs.replace(credit, rank=numbers[credit.rank]))

    def deliver(self) -> None:
        """Send what has gathered."""
        if (self._news or self._first) and not self._held and self.connected:
            self._router.send_together(self.client.events, [*self._first, *self._news.take()])
            self._first.clear()

    def paid(self, credit: Credit) -> None:
        """Note that the client has taken what ranks have printed or shown."""
        if not self.alone:  # else all is paid already
            self._ledger.paid(credit)
            self._pay(credit)

    # --- coming and going

    def lose(self, how: Leaving, seconds: float) -> None:
        """Go on without a client, for some seconds."""
        self.left, self._left_at = how, time.monotonic()
        self.leave_at = self._left_at + seconds
        self._give_up()

    def lose_process(self, lasts: bool) -> None:
        """Note that the client's process has ended. `lasts`: whether there are ranks that can go on without it."""
        ending = self.ending or Ending(self.linger, "crashed")
        self.lose(ending.how, ending.seconds if lasts else 0.0)

    def heed(self, message: Leave, lasts: bool) -> None:
        """Let the client go.

        Args:
            message: What it has said. Its process may have ended since.
            lasts: Whether there are ranks that can go on without it.
        """
        if not self.alone:
            self._router.send(self.client.events, Goodbye())
        self.lose(message.how, message.seconds if lasts else 0.0)

    def note_ending(self, message: Ending) -> None:
        """Note how the client is about to end."""
        self.ending = message

    def take(self, number: int, message: Attach) -> None:
        """Have another client drive. It is told nothing until `open`.

        Raises:
            OSError: Its process can't be watched.
        """
        end = os.pidfd_open(message.pid)
        newcomer = Client(number, message.pid, end, message.notebook, message.seat)
        if not self.alone:
            self._router.send(self.client.events, Displaced(str(newcomer)))
            self._give_up()
        self.client, self.left, self.leave_at, self.ending = newcomer, None, None, None
        self._ledger = Ledger()
        self._held = True
        self._poller.register(end, zmq.POLLIN)

    def open(self, first: Message) -> None:
        """Tell the client what has gathered since it came, after this."""
        self._first.append(encode(first))
        self._held = False

    def _give_up(self) -> None:
        """Forget the client: what it owes is paid, what it has not been told is not sent."""
        if self.client.end in self._poller:
            self._poller.unregister(self.client.end)
            os.close(self.client.end)
        self._router.disconnect(self.client.events)
        self._news, self._first = Bundle(), []
        self._held = False
        for credit in self._ledger.settle():
            self._pay(credit)
