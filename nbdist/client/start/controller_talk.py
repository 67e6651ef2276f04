"""What the controller and the thread that starts, replaces or ends ranks say to each other, and Ctrl-C meanwhile."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nbdist.client.base import interruption
from nbdist.client.start.starting import StartLine, invitation
from nbdist.errors import SessionBroken, SessionBusy
from nbdist.wire.base.message import Message
from nbdist.wire.messages.life import Broken, Progress
from nbdist.wire.processes.nodes import Invited

_INTERRUPTED = "the start was interrupted; no ranks are running"

Request = Callable[[Message, tuple[type[Message], ...], Callable[[], None]], Message]  # what, answers to it, on Ctrl-C


@dataclass(frozen=True)
class _Work:
    """Work for the thread that starts the ranks to do meanwhile."""

    run: Callable[[], None]


class ControllerTalk:
    """Messages about the life of one set of ranks.

    Args:
        send: Sends one to the controller.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._busy = threading.Lock()
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()  # messages, work, KeyboardInterrupt for a Ctrl-C

    def begin(self) -> None:
        """Forget what was heard before."""
        self._heard = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """Take a message of the controller. From the listening thread."""
        self._heard.put(message)

    def interrupts(self) -> contextlib.AbstractContextManager[None]:
        """Take a Ctrl-C in the body for something that is heard."""
        return interruption.events(self._heard.put)

    def wait(
        self,
        kinds: tuple[type[Message], ...],
        limit: float | None,
        progress: Callable[[StartLine], None] = lambda line: None,
        token_file: str = "",
        on_interrupt: Callable[[], None] = lambda: None,
    ) -> Message:
        """Wait for a message about the session's life. The controller limits how long a start may take."""
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            left = interruption.HEED if deadline is None else deadline - time.monotonic()
            try:
                message = self._heard.get(timeout=max(0.0, min(left, interruption.HEED)))
            except queue.Empty:
                if left > 0:
                    continue
                raise SessionBroken(
                    "the session does not answer; type `%distributed start` to start a new one"
                ) from None
            if isinstance(message, kinds):
                return message
            if message is KeyboardInterrupt:
                on_interrupt()
            if isinstance(message, _Work):
                message.run()
            elif isinstance(message, Progress):
                progress(StartLine(message.text, message.stage))
            elif isinstance(message, Invited):
                progress(StartLine(invitation(message, token_file), "nodes"))
            elif isinstance(message, Broken):
                raise SessionBroken(message.text)

    @contextlib.contextmanager
    def dialogue(
        self, busy: str, progress: Callable[[StartLine], None] = lambda line: None, token_file: str = ""
    ) -> Iterator[Request]:
        """Yield what asks the controller about the ranks' life and waits for its answers, which all come.

        Args:
            busy: What to say if such a dialogue is under way.
            progress: Called with lines of text meanwhile.
            token_file: Where the tokens of nodes are written that are waited for; "": they are part of a line.

        Raises:
            SessionBusy: One is.
            SessionBroken: The session has ended meanwhile.
        """
        if not self._busy.acquire(blocking=False):
            raise SessionBusy(busy)
        try:
            self.begin()

            def request(
                message: Message, kinds: tuple[type[Message], ...], on_interrupt: Callable[[], None]
            ) -> Message:
                with self.interrupts():
                    self._send(message)
                    return self.wait(kinds, None, progress, token_file, on_interrupt)

            yield request
        finally:
            self._busy.release()

    def call_soon(self, run: Callable[[], None]) -> None:
        """Have the thread that starts the ranks call a function meanwhile. From any thread."""
        self._heard.put(_Work(run))

    def heed_interrupt(self) -> None:
        """Handle a Ctrl-C while the controller starts."""
        with contextlib.suppress(queue.Empty):
            if self._heard.get_nowait() is KeyboardInterrupt:
                interrupt_start()


def interrupt_start() -> None:
    """Interrupt a start.

    Raises:
        KeyboardInterrupt: Always.
    """
    raise interruption.interruption(_INTERRUPTED)


def taken_by(who: str) -> str:
    """Return what is said where another client has taken the session."""
    return (
        f"the session was taken over by {who} at {time.strftime('%H:%M')}; its ranks keep running there. "
        "`%distributed attach --take` takes it back, `%distributed start` starts another"
    )
