"""Whether the controller on another machine is still there."""

from __future__ import annotations

import errno
import select
import socket
import time
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from nbdist.base import limits

EVENTS = zmq.EVENT_DISCONNECTED
_PROBE_PERIOD = 1.0  # seconds


class Link:
    """A watch on the connection to the controller, which is never made again: what was under way would be missing.

    Args:
        control: The connection, which reports `EVENTS`.
        url: Where the controller listens.
        timeout: Seconds without a sign of life until it is given up.

    Attributes:
        events: To be polled: something has happened to the connection.
        is_silent: Whether it was given up because nothing came: the session may go on without this machine.
    """

    def __init__(self, control: zmq.Socket[bytes], url: str, timeout: float) -> None:
        where = urlsplit(url)
        self._address = where.hostname or "", where.port or 0
        self._timeout = timeout
        self._heard = time.monotonic()
        self._probe: socket.socket | None = None  # connects, to see whether anybody listens there
        self._probe_at = 0.0
        self.is_silent = False
        self.events = control.get_monitor_socket()

    def heard(self) -> None:
        """Note a sign of life from the controller."""
        self._heard = time.monotonic()
        self._end_probe()

    def is_lost(self, event: bool) -> bool:
        """Return whether the controller is gone, or unreachable for good. Does not block.

        Args:
            event: Whether there is something in `events`.
        """
        if event:
            recv_monitor_message(self.events)
            return True
        quiet = time.monotonic() - self._heard
        if quiet > self._timeout:
            self.is_silent = True
            return True
        return quiet > limits.silence(self._timeout) and self._is_refused()

    def patience(self) -> float:
        """Return the seconds until `is_lost` should be called."""
        return min(_PROBE_PERIOD, limits.silence(self._timeout))

    def _is_refused(self) -> bool:
        """Return whether the machine answers but nothing listens there: the controller ended, and we missed it."""
        now = time.monotonic()
        if self._probe is None and now >= self._probe_at:
            self._probe_at = now + limits.silence(self._timeout)
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._probe.connect_ex(self._address)
        if self._probe is None or not select.select([], [self._probe], [], 0)[1]:
            return False
        refused = self._probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        self._end_probe()
        return refused

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None
