"""Whether the controller on another machine is still there."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from nbdist.wire.nodes import LOST, SILENCE

EVENTS = zmq.EVENT_DISCONNECTED
_CONNECT_LIMIT = 1.0  # seconds


class Link:
    """A watch on the connection to the controller, which is never made again: what was under way would be missing.

    Args:
        control: The connection, which reports `EVENTS`.
        url: Where the controller listens.

    Attributes:
        events: To be polled: something has happened to the connection.
    """

    def __init__(self, control: zmq.Socket[bytes], url: str) -> None:
        where = urlsplit(url)
        self._address = where.hostname or "", where.port or 0
        self._heard = time.monotonic()
        self._asked = self._heard  # when it was last looked whether anybody listens there
        self.events = control.get_monitor_socket()

    def heard(self) -> None:
        """Note a sign of life from the controller."""
        self._heard = time.monotonic()

    def is_lost(self, event: bool) -> bool:
        """Return whether the controller is gone, or unreachable for good.

        Args:
            event: Whether there is something in `events`.
        """
        if event:
            recv_monitor_message(self.events)
            return True
        now = time.monotonic()
        if now - self._heard > LOST:
            return True
        if now - self._heard > SILENCE and now - self._asked > SILENCE:
            self._asked = now
            return self._is_refused()
        return False

    def patience(self) -> float:
        """Return the seconds until `is_lost` should be called."""
        return SILENCE

    def _is_refused(self) -> bool:
        """Return whether the machine answers but nothing listens there: the controller ended, and we missed it."""
        try:
            socket.create_connection(self._address, timeout=_CONNECT_LIMIT).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False
