"""A rank's rich output: results, displays, widget messages, each at its place in the rank's stdout.

A payload travels by zmq; a mark in the pipe says where it belongs, so that text and displays keep their order.
"""

from __future__ import annotations

import base64
import os
import threading
from typing import Any

import zmq

from nbdist.protocol import OUTPUT_WINDOW, STDOUT, Credit, Display, Message, WidgetMessage, decode, encode

_ENVELOPE = 1_000  # bytes of a message that are not its content


class DisplayLane:
    """Sends rich items of this rank, from any of its threads.

    Args:
        socket: A connection that nobody else uses.
        token: The session's secret that tells marks from anything a user might print.
    """

    def __init__(self, socket: zmq.Socket[bytes], rank: int, token: bytes) -> None:
        self._socket = socket
        self._rank = rank
        self._token = token
        self._sequence = 0
        self._unpaid = 0  # bytes sent that the notebook has not taken yet
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def show(
        self,
        kind: str,
        data: dict[str, Any],
        metadata: dict[str, Any],
        display_id: str = "",
        wait: bool = False,
    ) -> None:
        """Send an item and mark its place. In a forked child, which can't use the socket, print its text instead."""
        if os.getpid() != self._pid:
            print(data.get("text/plain", ""))
            return
        bundle = {mime: _encode(value) for mime, value in data.items()}
        with self._lock:
            self._sequence += 1
            # The payload goes first: an interrupt between the two leaves an item without a place, no gap to wait for.
            size = sum(len(value) for value in bundle.values() if isinstance(value, str)) + _ENVELOPE
            item = Display(self._rank, self._sequence, kind, bundle, metadata, display_id, wait, size)
            self._send(item, size)
            self.mark(0, self._sequence)

    def relay(
        self, event: str, comm_id: str, target: str, data: dict[str, Any], metadata: dict[str, Any], raw: list[bytes]
    ) -> None:
        """Send a widget's message, which has no place in the text."""
        if os.getpid() != self._pid:
            return
        size = sum(map(len, raw)) + _ENVELOPE
        with self._lock:
            self._send(WidgetMessage(self._rank, event, comm_id, target, data, metadata, raw, size), size)

    def _send(self, message: Message, size: int) -> None:
        while self._unpaid >= OUTPUT_WINDOW:
            self._collect()
        while self._socket.poll(0):
            self._collect()
        self._unpaid += size
        self._socket.send(encode(message))

    def _collect(self) -> None:
        credit = decode(self._socket.recv())
        if isinstance(credit, Credit):
            self._unpaid -= credit.size

    def mark(self, serial: int, sequence: int) -> None:
        """Write a mark into stdout: of the place of an item, or of the end of the cell `serial`."""
        os.write(STDOUT, b"%s%d;%d\a" % (self._token, serial, sequence))


def _encode(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
