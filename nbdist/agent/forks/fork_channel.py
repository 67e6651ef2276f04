"""The agent's end of the channel to a process that forks for it: its warm template, or the notebook itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.wire.processes.template_messages import Report

_KILLS_AT_ONCE = 2_000  # in one request, so that a set with many ranks doesn't fill the channel


class ForkChannel:
    """Requests children and their ends. Answers arrive asynchronously.

    Args:
        channel: A connected socket that keeps message boundaries.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    @classmethod
    def to(cls, address: str) -> ForkChannel:
        """Return a channel to the process that listens at this address.

        Raises:
            OSError: Nothing listens there.
        """
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.connect(address)
        except OSError:
            channel.close()
            raise
        return cls(channel)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is an answer."""
        return self._channel.fileno()

    @property
    def is_open(self) -> bool:
        """Whether this end is open."""
        return self._channel.fileno() >= 0

    def fork(self, rank: int | None, descriptors: list[int], *, fresh: bool = False, spared: bool = False) -> None:
        """Request a child; the answer arrives through the channel.

        Args:
            rank: Its rank; None for the store.
            descriptors: The file descriptors the child needs.
            fresh: Whether it starts as a new Python, in the ranks' environment.
            spared: Whether SIGTERM does not end it at once, nor the process that forks it.
        """
        from nbdist.wire.processes.template_messages import Fork, encode

        socket.send_fds(self._channel, [encode(Fork(rank, fresh, spared))], descriptors)

    def kill(self, pids: Iterable[int]) -> None:
        """End children and their process groups."""
        from nbdist.wire.processes.template_messages import EndChildren, encode

        left = list(pids)
        with contextlib.suppress(OSError):  # the process that forked them is gone, and they with it
            while left:
                self._channel.send(encode(EndChildren(left[:_KILLS_AT_ONCE])))
                left = left[_KILLS_AT_ONCE:]

    def receive(self) -> tuple[Report | None, int | None]:
        """Return the next report, and the pidfd that came with it. The report is None if the other side is gone."""
        from nbdist.wire.processes.template_messages import decode_report

        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
        except ConnectionResetError:
            return None, None
        if not data:
            return None, None
        return decode_report(data), descriptors[0] if descriptors else None

    def close(self) -> None:
        """Close the channel, so that the other side ends the children."""
        self._channel.close()
