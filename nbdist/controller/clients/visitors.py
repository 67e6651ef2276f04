"""Those who have the session's key file and do not drive it: they may ask, interrupt and end it."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.controller.base.logwriter import LogWriter
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.clients.client_side import ClientSide
from nbdist.controller.clients.descriptions import Descriptions
from nbdist.controller.clients.followers import Followers
from nbdist.controller.ranks.members import Members
from nbdist.wire.base.message import Message
from nbdist.wire.messages.cells import Interrupt
from nbdist.wire.messages.life import Broken, Shutdown
from nbdist.wire.messages.visitor_messages import Describe, Follow, InterruptAll

_STOPPED = "the session was ended by `nbdist stop`; all ranks ended with it. `%distributed start` starts one"


class Visitors:
    """The visitors of a session.

    Args:
        router: To send by.
        side: The client's side.
        log: The output log.

    Attributes:
        descriptions: Descriptions that are being made.
    """

    def __init__(self, router: MessageRouter, side: ClientSide, log: LogWriter) -> None:
        self._router = router
        self._side = side
        self._followers = Followers(router, log)
        self.descriptions = Descriptions(router)

    def receive(self, visitor: bytes, message: Message, members: Members | None, hosts: Sequence[str]) -> bool:
        """Answer a visitor.

        Args:
            visitor: Its lane.
            message: What it asks.
            members: The ranks.
            hosts: The names of the machines.

        Returns:
            Whether it wants the session to end.
        """
        if isinstance(message, InterruptAll) and members is not None:
            for serial, ranks in members.cells.left().items():
                members.stop(Interrupt(serial, ranks))
        if isinstance(message, Describe | InterruptAll):
            self.descriptions.make(visitor, self._side, members, list(hosts))
            return False
        if isinstance(message, Follow):
            living = [rank for rank in members.everyone() if members.lives(rank)] if members is not None else []
            self._followers.answer(visitor, message, self._side, living)
            return False
        self._router.disconnect(visitor)
        if not isinstance(message, Shutdown):
            return False
        self._side.send(Broken(_STOPPED, wanted=True))
        return True
