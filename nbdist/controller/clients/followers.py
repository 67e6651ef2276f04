"""What is shown to those who follow a session without driving it: what runs, what it prints, how it ends.

They ask again and again; nothing is kept for them here, and nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.controller.base.logwriter import LogWriter
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.base.outputlog import LastOutput, NewOutput
from nbdist.controller.clients.client_side import ClientSide
from nbdist.wire.messages.visitor_messages import Follow, Followed, Overtaken, Printed


class Followers:
    """Answers those who follow.

    Args:
        router: To send by.
        log: The output log.
    """

    def __init__(self, router: MessageRouter, log: LogWriter) -> None:
        self._router = router
        self._log = log

    def answer(self, visitor: bytes, question: Follow, side: ClientSide, ranks: Sequence[int]) -> None:
        """Answer as soon as the log has what was printed until now.

        Args:
            visitor: Who asks.
            question: What it has seen already.
            side: The client's side.
            ranks: Those that live.
        """
        self._router.connect(visitor)
        running, count = side.unseen.running(), side.ended.count
        ended, missed = side.ended.since(question.ended) if question.position >= 0 else ([], 0)

        def send(printed: list[Printed], new: NewOutput) -> None:
            # An end is reported behind all that was printed before it.
            ends = (ended, count, missed) if new.whole else ([], question.ended, 0)
            self._router.send(
                visitor,
                Followed(
                    side.client.pid,
                    side.client.notebook,
                    side.left,
                    list(ranks),
                    running,
                    printed,
                    ends[0],
                    new.position,
                    ends[1],
                    Overtaken(ends[2], new.dropped),
                ),
            )
            self._router.drop([visitor])  # until it asks again

        def send_tails(tails: dict[int, LastOutput], new: NewOutput) -> None:
            send([Printed(serial, *record) for serial, last in tails.items() for record in last.records], new)

        if question.position >= 0:
            self._log.follow(lambda new: send([Printed(*record) for record in new.records], new), question.position)
            return
        tails: list[dict[int, LastOutput]] = []
        self._log.tails(tails.append, [cell.serial for cell in running])
        self._log.follow(lambda new: send_tails(tails[0], new), -1)
