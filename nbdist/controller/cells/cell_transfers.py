"""What cells take along to other machines, and what their values lie in there: brought before a cell begins, and
before its reply reaches the notebook.

Knows cells and replies; `transfers` moves the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from nbdist.controller.nodes.segment_transfers import SegmentTransfers
from nbdist.wire.base.message import Message
from nbdist.wire.base.parcel import Parcel, Segment
from nbdist.wire.messages.cells import Execute, Failure, Reply


class CellTransfers:
    """The parcels of all cells of a set of ranks.

    Args:
        send: Sends a message, or one that is encoded, to a node's agent, by the lane that is for this.
    """

    def __init__(self, send: Callable[[int, Message | bytes], None]) -> None:
        self._transfers = SegmentTransfers(send)
        self._parcels: dict[int, dict[int, Parcel]] = {}  # by cell, for each other node its own
        self._deliveries: dict[int, int] = {}  # by cell, what was brought for it
        self._collections: dict[int, list[int]] = {}  # by cell, what was brought from it, until the notebook has it

    # --- to other nodes

    def deliver(self, message: Execute, nodes: Iterable[int], done: Callable[[Execute, str], None]) -> None:
        """Bring what a cell takes along to nodes.

        Args:
            message: The cell, which has a parcel.
            nodes: Where its ranks are, but for this one.
            done: Called with the cell when it may begin, and why it can't; "" if it can. Not after `drop`.
        """
        whole = message.parcel
        assert whole is not None

        def arrived(there: dict[int, list[Segment]], why: str) -> None:
            if not why:
                parcels = {node: msgspec.structs.replace(whole, segments=segments) for node, segments in there.items()}
                self._parcels[message.serial] = parcels
            done(message, why and f"{whole.name} could not be sent to other nodes: {why}")

        self._deliveries[message.serial] = self._transfers.deliver(whole.segments, sorted(nodes), arrived)

    def parcels(self, serial: int) -> Mapping[int, Parcel]:
        """Return what was brought to other nodes for a cell, by node."""
        return self._parcels.get(serial, {})

    def holds(self, serial: int) -> bool:
        """Return whether something was brought for a cell."""
        return serial in self._deliveries

    def drop(self, serial: int) -> None:
        """Free what was brought for a cell, or is being brought: it has ended."""
        self._parcels.pop(serial, None)
        if (key := self._deliveries.pop(serial, None)) is not None:
            self._transfers.drop(key)

    # --- from other nodes

    def collect(self, reply: Reply, node: int, tell: Callable[[Reply], None]) -> None:
        """Bring what a value lies in to this machine, if there is one and it lies elsewhere.

        Args:
            reply: Of the rank that sends it.
            node: Where that rank is.
            tell: Called with the reply as it is here.
        """
        parcel = reply.parcel
        if parcel is None or not parcel.segments or not node:
            tell(reply)
            return

        def arrived(segments: list[Segment], why: str) -> None:
            if why:
                failure = Failure("TransferError", f"its value could not be brought here: {why}", "", time.monotonic())
                tell(msgspec.structs.replace(reply, parcel=None, status="error", failure=failure))
            else:
                tell(msgspec.structs.replace(reply, parcel=msgspec.structs.replace(parcel, segments=segments)))

        key = self._transfers.fetch(parcel.segments, node, arrived)
        self._collections.setdefault(reply.serial, []).append(key)

    def release(self, serial: int) -> None:
        """Free what a cell has sent: the notebook has it, or does not want it."""
        for key in self._collections.pop(serial, ()):
            self._transfers.drop(key)

    # --- agents

    def handle(self, node: int, message: Message) -> None:
        """Handle a part of a value that an agent sends or takes."""
        self._transfers.handle(node, message)

    def lose(self, node: int) -> None:
        """Note that a node is gone."""
        self._transfers.lose(node)

    def close(self) -> None:
        """Free everything."""
        self._transfers.close()
