"""What the ranks of this node and a controller on another one say to each other, over two connections.

One thread, so that neither a rank's output nor the agent's work delays it. Independent of the messages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import zmq

from nbdist.wire.base.keys import Keys
from nbdist.wire.lanes import (
    LARGEST_FRAME,
    PACKED,
    RANK_DISPLAY,
    RELAY_CONTROL,
    RELAY_OUTPUT,
    TOGETHER,
    connect,
    node_lane,
    pack,
)
from nbdist.wire.listener import Listener

_AT_ONCE = 256  # messages before the other side is looked at


class Relay:
    """Listens on loopback for ranks, and passes on what they send and get.

    Args:
        context: Of the process.
        keys: Of this node.
        node: Its number.

    Attributes:
        keys: What ranks connect with.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, node: int) -> None:
        self._listener = Listener(context)
        self.keys = self._listener.admit("rank", self._listener.listen())
        self._control = connect(context, keys, node_lane(RELAY_CONTROL, node))
        self._output = connect(context, keys, node_lane(RELAY_OUTPUT, node))
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, name="nbdist-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass on nothing more."""
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        poller = zmq.Poller()
        ends = (self._listener.socket, self._control, self._output)
        for source in (*ends, self._stop):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                break
            if self._listener.socket in ready:
                self._pass_up()
            for link in (self._control, self._output):
                if link in ready:
                    self._pass_down(link)
        for link in (self._control, self._output):
            link.close(linger=500)
        self._listener.close()

    def _pass_up(self) -> None:
        small: list[tuple[bytes, bytes]] = []
        for lane, frames, _ in self._listener.received(_AT_ONCE, set()):
            if lane.startswith(RANK_DISPLAY.encode()):
                self._output.send_multipart([lane, *frames])
            elif len(frames) == 1 and len(frames[0]) <= PACKED:
                small.append((lane, frames[0]))
            else:
                self._send_together(small)
                small = []
                self._control.send_multipart([lane, *frames])
        self._send_together(small)

    def _send_together(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Send as one what ranks have sent at the same time, as they do at the end of a cell."""
        most = LARGEST_FRAME // (2 * PACKED)
        for first in range(0, len(messages), most):
            some = messages[first : first + most]
            self._control.send_multipart([TOGETHER, pack(some)] if len(some) > 1 else some[0])

    def _pass_down(self, link: zmq.Socket[bytes]) -> None:
        for _ in range(_AT_ONCE):
            try:
                lanes, *frames = link.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for lane in lanes.split():
                self._listener.socket.send_multipart([lane, *frames])
