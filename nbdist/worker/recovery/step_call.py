"""A call that ranks make together after the same step of a cell, in between two turns of its loop.

The control thread asks, and the main thread, which is in the cell, calls. They share no lock: an interrupt could leave
it locked.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from nbdist.wire.questions.gathering import AtStep, Called
from nbdist.wire.questions.question import NoAnswer

Tell = Callable[[AtStep | Called | NoAnswer], None]  # sends an answer that was not known at once

_TOO_LATE = "the rank no longer waits at the step"


class StepCall:
    """One such call.

    Args:
        patience: Seconds that the rank waits for the others.
        arrived: Told when the rank is there, or why it does not come.

    Attributes:
        patience: As above.
    """

    def __init__(self, patience: float, arrived: Tell) -> None:
        self.patience = patience
        self._arrived: Tell | None = arrived
        self._orders: queue.SimpleQueue[tuple[Callable[[], Called], Tell] | None] = queue.SimpleQueue()
        self._gone = False

    def attend(self) -> None:
        """Wait for what to call, and call it. On the main thread; the cell may be interrupted in here."""
        try:
            self._tell(AtStep())
            if (order := self._next_order()) is not None:
                _carry_out(*order)
        finally:
            self._gone = True
            self._refuse()

    def order(self, work: Callable[[], Called], tell: Tell) -> None:
        """Have the main thread call it. In the control thread.

        Args:
            work: Returns the answer.
            tell: Told the answer.
        """
        self._orders.put((work, tell))
        if self._gone:
            self._refuse()

    def call_off(self, why: str) -> None:
        """Let the rank go on without a call. From any thread."""
        self._tell(NoAnswer(why))
        self._orders.put(None)

    def _next_order(self) -> tuple[Callable[[], Called], Tell] | None:
        try:
            return self._orders.get(timeout=self.patience)
        except queue.Empty:
            return None

    def _tell(self, answer: AtStep | NoAnswer) -> None:
        tell, self._arrived = self._arrived, None
        if tell is not None:
            tell(answer)

    def _refuse(self) -> None:
        """Answer what has come too late: whichever thread finds it."""
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            if order is not None:
                order[1](NoAnswer(_TOO_LATE))


def _carry_out(work: Callable[[], Called], tell: Tell) -> None:
    try:
        answer = work()
    except BaseException as error:  # whatever the function raises is the answer
        tell(NoAnswer(f"{type(error).__name__}: {error}".rstrip(": ")))
        if not isinstance(error, Exception):
            raise
    else:
        tell(answer)
