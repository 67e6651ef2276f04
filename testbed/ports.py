"""Ports for servers that have to be told theirs."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

_PORTS = range(10_000, 20_000)  # below what Linux gives to whoever takes any port, and to nbdist's tunnels


def free_port() -> int:
    """A port on which nobody listens. Nobody takes it by chance before its server does."""
    while True:
        port = secrets.choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
