"""The same message from several ranks, as one."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from nbdist.wire.base.message import Message
from nbdist.wire.messages.cells import Reply
from nbdist.wire.messages.output import Output


class Alike(Message, frozen=True):
    """What several ranks have sent, which differs only in the rank. message: of one of them."""

    ranks: list[int]
    message: Output | Reply

    def each(self) -> Iterator[Output | Reply]:
        """Yield the message of each rank."""
        return (msgspec.structs.replace(self.message, rank=rank) for rank in self.ranks)
