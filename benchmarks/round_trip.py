"""How long a cell that does nothing takes through client, controller, agent and ranks, beside bare sockets.

`--trace` prints where that time goes: the way of one cell, process by process.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import _tools
import _trace
import zmq

ROUNDS = 300
BUDGETS = {8: 4e-3, 2: 1.2e-3}


def main() -> None:
    _tools.prepare()
    if "--trace" in sys.argv:
        _trace.trace(BUDGETS)
        return
    from nbdist.client.session.session import Session

    _tools.header("round trip of Session.run('pass')")
    for count, budget in BUDGETS.items():
        with bare_sockets(count) as ping, Session(count) as session:
            measures = {"sockets": _tools.timed(ping), "run": _tools.timed(functools.partial(session.run, "pass"))}
            samples = _tools.rounds(ROUNDS, measures, warm_up=30)
        _tools.row(f"{count} ranks", samples["run"], **_tools.limit(budget))
        _tools.row("  over bare sockets", samples["run"], over=("bare sockets", samples["sockets"]))
        _tools.row("  bare sockets: Curve, as many hops", samples["sockets"])


@contextmanager
def bare_sockets(count: int) -> Iterator[Callable[[], object]]:
    """A router process and `count` echoing processes, encrypted: a message to each and back, and nothing else."""
    keys = zmq.curve_keypair(), zmq.curve_keypair()
    read, write = os.pipe()
    router = _fork(lambda: _route(write, keys))
    url = f"tcp://127.0.0.1:{int(os.read(read, 9))}"
    os.close(read)
    os.close(write)
    echoes = [_fork(lambda name=b"%d" % number: _echo(url, keys, name)) for number in range(count)]
    socket = _dial(url, keys, b"client")
    try:
        names = [b"%d" % number for number in range(count)]
        for name in names:  # until all have connected
            while True:
                socket.send_multipart([name, b"x"])
                if socket.poll(50):
                    socket.recv_multipart()
                    break
        while socket.poll(100):
            socket.recv_multipart()
        yield lambda: _ping(socket, names)
    finally:
        socket.close(linger=0)
        for pid in (router, *echoes):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _ping(socket: zmq.Socket[bytes], names: list[bytes]) -> None:
    for name in names:
        socket.send_multipart([name, b"x"])
    for _ in names:
        socket.recv_multipart()


def _fork(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(1)
    return pid


def _route(port: int, keys: tuple[tuple[bytes, bytes], tuple[bytes, bytes]]) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys[0]
    os.write(port, b"%d" % socket.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        sender, receiver, body = socket.recv_multipart()
        socket.send_multipart([receiver, sender, body])


def _echo(url: str, keys: tuple[tuple[bytes, bytes], tuple[bytes, bytes]], name: bytes) -> None:
    socket = _dial(url, keys, name)
    while True:
        socket.send_multipart(socket.recv_multipart())


def _dial(url: str, keys: tuple[tuple[bytes, bytes], tuple[bytes, bytes]], name: bytes) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.identity = name
    socket.curve_serverkey = keys[0][0]
    socket.curve_publickey, socket.curve_secretkey = keys[1]
    socket.connect(url)
    return socket


if __name__ == "__main__":
    main()
