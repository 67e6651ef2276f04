"""A rank's rich output: results, displays, widget messages, each at its place in the rank's stdout.

A payload travels by zmq; a mark in the pipe says where it belongs, so that text and displays keep their order. Comms of
widgets that live on a rank (ipywidgets, tqdm.notebook) are relayed to the page and back.
"""

from __future__ import annotations

import base64
import fcntl
import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import comm
import msgspec
import zmq
from comm.base_comm import BaseComm

from nbdist.wire.base.message import MimeBundle
from nbdist.wire.frames import decode, encode
from nbdist.wire.messages.output import OUTPUT_WINDOW, STDERR, STDOUT, Credit, Display, ItemKind, Prompt, WidgetMessage
from nbdist.worker.lanes.streams import write_all


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
        self._lock = threading.RLock()  # a finalizer that closes a widget may run while its thread has the lock
        self._unsent: deque[Display | Prompt | WidgetMessage] = deque()
        self._sending = False
        self._pid = os.getpid()
        self._pipe = fcntl.fcntl(STDOUT, fcntl.F_DUPFD_CLOEXEC, STDERR + 1)  # a cell may redirect descriptor 1

    def show(
        self,
        kind: ItemKind,
        data: MimeBundle,
        metadata: MimeBundle,
        display_id: str = "",
        wait: bool = False,
    ) -> None:
        """Send an item and mark its place. In a forked child, which can't use the socket, print its text instead."""
        if os.getpid() != self._pid:
            print(data.get("text/plain", ""))
            return
        bundle, notes = _plain(data), _plain(metadata)
        with self._lock:
            self._sequence += 1
            self._send(Display(self._rank, self._sequence, kind, bundle, notes, str(display_id), wait))

    def prompt(self, text: str, *, password: bool) -> int:
        """Ask the user for a line, which comes by the control lane.

        Returns:
            The number of the prompt.
        """
        with self._lock:
            self._sequence += 1
            number = self._sequence
            self._send(Prompt(self._rank, number, text, password))
        return number

    def relay(
        self, event: str, comm_id: str, target: str, data: MimeBundle, metadata: MimeBundle, raw: list[bytes]
    ) -> None:
        """Send a widget's message, which has no place in the text."""
        if os.getpid() != self._pid:
            return
        content, notes = _plain(data), _plain(metadata)
        with self._lock:
            self._send(WidgetMessage(self._rank, event, str(comm_id), str(target), content, notes, raw))

    def _send(self, message: Display | Prompt | WidgetMessage) -> None:
        """Send it, and what finalizers that run meanwhile have to send: two messages must not be sent at once."""
        self._unsent.append(message)
        if self._sending:
            return
        self._sending = True
        try:
            while self._unsent:
                self._send_now(self._unsent.popleft())
        finally:
            self._sending = False

    def _send_now(self, message: Display | Prompt | WidgetMessage) -> None:
        if isinstance(message, Prompt):  # there is only one at a time, so it needs no credit
            self._socket.send(encode(message))
            self.mark(0, message.sequence)
            return
        size = len(encode(message))
        while self._unpaid >= OUTPUT_WINDOW:
            self._collect()
        while self._socket.poll(0):
            self._collect()
        self._unpaid += size
        # The payload goes first: an interrupt between the two leaves an item without a place, no gap to wait for.
        self._socket.send(encode(msgspec.structs.replace(message, size=size)))
        if isinstance(message, Display):
            self.mark(0, message.sequence)

    def _collect(self) -> None:
        credit = decode(self._socket.recv())
        if isinstance(credit, Credit):
            self._unpaid -= credit.size

    def mark(self, serial: int, sequence: int) -> None:
        """Write a mark into stdout: of the place of an item, or of the end of the cell `serial`."""
        write_all(self._pipe, b"%s%d;%d\a" % (self._token, serial, sequence))


def _plain(bundle: Mapping[Any, Any]) -> MimeBundle:
    """Return a bundle as JSON has it, so that whoever gets it can decode it."""
    return {str(key): value if isinstance(value, str) else _plain_value(value) for key, value in bundle.items()}


def _plain_value(value: object) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=repr)
        encode(plain)
    except Exception:  # a key that is a tuple, a list that holds itself, ...
        return repr(value)
    return plain


class WidgetRelay:
    """Makes this process's comms talk through the rank's display lane."""

    def __init__(self, lane: DisplayLane) -> None:
        class RankComm(BaseComm):
            def publish_msg(
                self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
            ) -> None:
                target = keys.get("target_name", "")
                raw = [bytes(buffer) for buffer in buffers or []]
                lane.relay(msg_type, self.comm_id, target, data or {}, metadata or {}, raw)

        comm.create_comm = RankComm

    def deliver(self, message: WidgetMessage) -> None:
        """Hand a message of the page to its widget. Runs on the main thread, between cells, as in a notebook."""
        content = {"comm_id": message.comm_id, "data": message.data}
        envelope = {"content": content, "metadata": message.metadata, "buffers": list(message.buffers)}
        manager = comm.get_comm_manager()
        handle: Any = manager.comm_close if message.event == "comm_close" else manager.comm_msg
        handle(None, None, envelope)
