"""What the ranks of this node and a controller on another one say to each other, over two connections.

One thread, so that neither a rank's output nor the agent's work delays it. Knows nothing of the messages.
"""

from __future__ import annotations

import os
import threading

import zmq

from nbdist.wire.keys import Keys
from nbdist.wire.lanes import RANK_DISPLAY, RELAY_CONTROL, RELAY_OUTPUT, connect, node_lane
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
        for lane, frames, _ in self._listener.received(_AT_ONCE, set()):
            link = self._output if lane.startswith(RANK_DISPLAY.encode()) else self._control
            link.send_multipart([lane, *frames])

    def _pass_down(self, link: zmq.Socket[bytes]) -> None:
        for _ in range(_AT_ONCE):
            try:
                lanes, *frames = link.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for lane in lanes.split():
                self._listener.socket.send_multipart([lane, *frames])
