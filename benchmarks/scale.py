"""A session of 1,024 ranks on 128 nodes: the real notebook and controller, stub nodes whose ranks do nothing.

The first node is real, with ranks of its own. All other nodes are in one process, join as real ones do, and answer for
their ranks at once: what is left is the cost of the controller, the wire and the notebook. With numbers as arguments,
such as `python benchmarks/scale.py 512`, it has as many nodes.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable

import _tools
import psutil

RANKS = 8  # on each node
NODES = (16, 128)
BUDGETS = {1024: 0.1, 4096: 0.5}
START_BUDGET = 5.0
MEMORY_BUDGET = 100e6
TIME_OF_CONTROLLER = "    ... processor time of the controller"


def main() -> None:
    _tools.prepare()
    from nbdist.base.processes import allow_many_files

    allow_many_files()
    _tools.header("many nodes")
    wanted = tuple(map(int, sys.argv[1:])) or NODES
    for count in wanted[:1] if _tools.ONCE else wanted:
        _measure(count)


def _measure(nodes: int) -> None:
    from nbdist import RankError
    from nbdist.client.session.session import Session

    stub: list[subprocess.Popen[str]] = []

    def progress(line: str) -> None:
        if "NBDIST_TOKEN" in line:
            stub.append(_start_stub(line))

    began = time.perf_counter()
    with Session(RANKS, num_nodes=nodes, master_addr="127.0.0.1", init=False, progress=progress) as session:
        up = time.perf_counter() - began
        controller = _tools.child(psutil.Process(), "nbdist.controller")

        def fail() -> None:
            try:
                session.run(f"if rank >= {RANKS}: raise ValueError('boom')")
            except RankError:
                return
            raise AssertionError("nobody failed")

        used: dict[str, list[float]] = {}

        def counted(name: str, work: Callable[[], object]) -> _tools.Measure:
            """Time the work; keep what processor time of the controller it takes."""

            def measure() -> float:
                before = _tools.processor_time(controller)
                seconds = _tools.timed(work)()
                used.setdefault(name, []).append(_tools.processor_time(controller) - before)
                return seconds

            return measure

        measures = {
            "nothing": counted("nothing", functools.partial(session.run, "pass")),
            "line": counted("line", functools.partial(session.run, "print('a line')")),
            "fail": counted("fail", fail),
        }
        starting = _tools.processor_time(controller)
        samples = _tools.rounds(10, measures, warm_up=2)
        memory = float(controller.memory_info().rss)
    ranks = nodes * RANKS
    limit = _tools.limit(BUDGETS[ranks]) if ranks in BUDGETS else {}
    _tools.row(f"{ranks} ranks on {nodes} nodes: a cell that does nothing", samples["nothing"], **limit)
    _tools.row(TIME_OF_CONTROLLER, used["nothing"])
    _tools.row("  a line from each", samples["line"])
    _tools.row(TIME_OF_CONTROLLER, used["line"])
    _tools.row("  all raise, and are compared", samples["fail"], **(_tools.limit(0.5) if ranks <= 1024 else {}))
    _tools.row(TIME_OF_CONTROLLER, used["fail"])
    _tools.row("  start", [up], **(_tools.limit(START_BUDGET) if ranks >= 1024 else {}))
    _tools.row(TIME_OF_CONTROLLER, [starting])
    print(f"  controller {memory / 1e6:.0f} MB")
    for process in stub:
        process.wait(30)


def _start_stub(line: str) -> subprocess.Popen[str]:
    """Have a process be all the nodes that are invited."""
    process = subprocess.Popen([sys.executable, __file__, "stub"], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.close()
    return process


# --- the stub nodes


def be_nodes() -> None:
    """Join with every token that stands on standard input, and answer for the ranks."""
    _tools.prepare()
    from nbdist.base.processes import allow_many_files

    allow_many_files()
    words = [line.split() for line in sys.stdin.read().splitlines() if "NBDIST_TOKEN" in line]
    tokens = [(assignment.partition("=")[2], address) for assignment, _, _, address in words]
    nodes = [_StubNode(token, address) for token, address in tokens]  # they come at the same time, as real ones do
    for node in nodes:
        node.come_in()
    _serve(nodes)


class _StubNode:
    def __init__(self, token: str, address: str) -> None:
        import zmq

        from nbdist.wire.base.keys import Keys
        from nbdist.wire.base.message import VERSION
        from nbdist.wire.frames import encode
        from nbdist.wire.lanes import GUEST, connect
        from nbdist.wire.processes.nodes import Join, Token, Versions

        parsed = Token.parse(token)
        keys = Keys(f"tcp://{address}", parsed.server_key, zmq.curve_public(parsed.secret_key), parsed.secret_key)
        self._guest = connect(_context(), keys, f"{GUEST}/{id(self)}".encode())
        self._guest.send(encode(Join(VERSION, "stub", Versions.here(), 0)))

    def come_in(self) -> None:
        """Become a node, once the controller has answered."""
        from nbdist.wire.frames import decode
        from nbdist.wire.lanes import (
            AGENT_CONTROL,
            AGENT_OUTPUT,
            RELAY_CONTROL,
            RELAY_OUTPUT,
            connect,
            node_lane,
        )
        from nbdist.wire.processes.nodes import Welcome

        welcome = decode(self._guest.recv())
        assert isinstance(welcome, Welcome), welcome
        self._guest.close(linger=0)
        names = (AGENT_CONTROL, AGENT_OUTPUT, RELAY_CONTROL, RELAY_OUTPUT)
        lanes = [connect(_context(), welcome.keys, node_lane(name, welcome.node)) for name in names]
        self.control, self.output, self.relay, self.displays = lanes

    def handle_agent(self, frame: bytes) -> bool:
        """Do what the controller says to the agent. False: the session is over."""
        from nbdist.wire.frames import decode, encode
        from nbdist.wire.messages.life import Shutdown
        from nbdist.wire.messages.rank_processes import Gone, Kill, Spawn, Spawned, Spawning
        from nbdist.wire.processes.nodes import Ping, Pong

        message = decode(frame)
        if isinstance(message, Spawn):
            for rank in message.options.ranks:
                self.control.send(encode(Spawned(message.incarnation, rank, 100_000 + rank)))
                self._introduce(message.incarnation, rank)
            self.control.send(encode(Spawning(message.incarnation, [])))
        elif isinstance(message, Kill):
            self.output.send(encode(Gone(message.incarnation)))
        elif isinstance(message, Ping):
            self.control.send(encode(Pong(message.sent, time.monotonic())))
        return not isinstance(message, Shutdown)

    def _introduce(self, incarnation: int, rank: int) -> None:
        from nbdist.wire.base.message import VERSION, Hello
        from nbdist.wire.frames import encode
        from nbdist.wire.lanes import RANK_CELL, RANK_CONTROL, RANK_DISPLAY, lane
        from nbdist.wire.messages.rank_processes import Ready

        hello = encode(Hello(VERSION, 0))
        self.relay.send_multipart([lane(RANK_CELL, incarnation, rank), hello])
        self.relay.send_multipart([lane(RANK_CONTROL, incarnation, rank), hello])
        self.displays.send_multipart([lane(RANK_DISPLAY, incarnation, rank), hello])
        self.relay.send_multipart([lane(RANK_CELL, incarnation, rank), encode(Ready(rank, "cpu", "none"))])

    def handle_ranks(self, lanes: list[bytes], frame: bytes) -> None:
        """Answer for ranks that are all sent the same."""
        from nbdist.wire.bundle import Bundle
        from nbdist.wire.frames import decode, encode
        from nbdist.wire.lanes import TOGETHER, pack, parse_lane
        from nbdist.wire.messages.cells import Execute, Failure, InOrder, Recover, Reply
        from nbdist.wire.messages.output import END, PLAIN_END, STDOUT, Output
        from nbdist.wire.questions.questions import Answer, Ask

        message = decode(frame)
        outputs, replies = Bundle(), []
        for name in lanes:
            rank = parse_lane(name)[2]
            if isinstance(message, Execute):
                printed = b"a line\n" if "print" in message.code else b""
                if failed := "raise" in message.code:
                    failure = Failure("ValueError", "boom", "ValueError: boom", time.monotonic())
                    reply = Reply(message.serial, rank, "error", failure)
                    replies.append((name, encode(reply)))
                mark = message.serial, END if failed else PLAIN_END
                outputs.add(Output(rank, STDOUT, printed, mark))
            elif isinstance(message, Ask) and message.request:
                answer = Answer(message.request, rank, _answer(message.question), message.asker)
                replies.append((name, encode(answer)))
            elif isinstance(message, Recover):
                replies.append((name, encode(InOrder())))
        if replies:  # as the relay does it
            self.relay.send_multipart([TOGETHER, pack(replies)] if len(replies) > 1 else replies[0])
        if outputs:
            self.output.send_multipart(outputs.take())


def _answer(question: object):  # type: ignore[no-untyped-def]
    from nbdist.wire.questions.question import Done, NoAnswer
    from nbdist.wire.questions.stopping import GetPosition, GetState, Position, RankState

    if isinstance(question, GetState):
        return RankState({}, 0, True)
    if isinstance(question, GetPosition):
        return Position(0, time.monotonic())
    return NoAnswer("a stub") if type(question).__name__.startswith("Get") else Done()


@functools.cache
def _context():  # type: ignore[no-untyped-def]
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8192)
    return context


def _serve(nodes: list[_StubNode]) -> None:
    import zmq

    poller = zmq.Poller()
    owners = {}
    for node in nodes:
        for socket in (node.control, node.relay, node.displays):
            poller.register(socket, zmq.POLLIN)
            owners[socket] = node
    while owners:
        for socket, _ in poller.poll():
            if socket not in owners:
                continue
            node = owners[socket]
            if socket is not node.control:
                lanes, frame = socket.recv_multipart()
                node.handle_ranks(lanes.split(), frame)
            elif not node.handle_agent(socket.recv()):
                for other in (node.control, node.relay, node.displays):
                    poller.unregister(other)
                    del owners[other]


if __name__ == "__main__":
    if sys.argv[1:] == ["stub"]:
        be_nodes()
    else:
        main()
