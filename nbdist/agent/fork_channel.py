"""The agent's end of the channel to a process that forks for it: its warm template, or the notebook itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.wire.template_messages import Report

_KILLS_AT_ONCE = 2_000  # in one request, so that a set's many ranks don't fill the channel


class ForkChannel:
    """Asks for children and for their ends; answers come when they come.

    Args:
        channel: A connected socket that keeps messages apart.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    @classmethod
    def to(cls, address: str) -> ForkChannel:
        """A channel to the process that listens at this address.

        Raises:
            OSError: Nobody does.
        """
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.connect(address)
        except OSError:
            channel.close()
            raise
        return cls(channel)

    def fileno(self) -> int:
        """The descriptor that can be read when there is an answer."""
        return self._channel.fileno()

    @property
    def is_open(self) -> bool:
        """Whether nobody has closed this end."""
        return self._channel.fileno() >= 0

    def fork(self, rank: int | None, descriptors: list[int], *, fresh: bool = False) -> None:
        """Ask for a child; the answer comes by the channel.

        Args:
            rank: Which; None: the store.
            descriptors: What the child needs.
            fresh: Whether it starts as a new Python, in the environment of the ranks.
        """
        from nbdist.wire.template_messages import Fork, encode

        socket.send_fds(self._channel, [encode(Fork(rank, fresh))], descriptors)

    def kill(self, pids: Iterable[int]) -> None:
        """End children and their process groups."""
        from nbdist.wire.template_messages import EndChildren, encode

        left = list(pids)
        with contextlib.suppress(OSError):  # whoever forked them has gone, and they with it
            while left:
                self._channel.send(encode(EndChildren(left[:_KILLS_AT_ONCE])))
                left = left[_KILLS_AT_ONCE:]

    def receive(self) -> tuple[Report | None, int | None]:
        """The next report, and the pidfd that came with it. None: the other side has gone."""
        from nbdist.wire.template_messages import decode_report

        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
        except ConnectionResetError:
            return None, None
        if not data:
            return None, None
        return decode_report(data), descriptors[0] if descriptors else None

    def close(self) -> None:
        """Let the other side end the children."""
        self._channel.close()
