"""The agent, with a stand-in for the controller and for the template."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from nbdist.wire.base.keys import Keys
from nbdist.wire.base.message import Hello, Message
from nbdist.wire.frames import AnyMessage, decode, encode
from nbdist.wire.lanes import AGENT_CONTROL, node_lane, whole
from nbdist.wire.messages.life import Shutdown, StartOptions
from nbdist.wire.messages.rank_processes import Exited, Gone, Kill, Spawn, Spawned, SpawnFailed, Spawning, StoreOpened
from nbdist.wire.processes.setup import AgentSetup, encode_line

LIMIT_MS = 30_000
_CONTROL = node_lane(AGENT_CONTROL, 0)
AGENT = """
import os, sys
from nbdist.agent import agent
from nbdist.agent.forks import warm_template
from nbdist.base.processes import allow_many_files
allow_many_files()
warm_template.python_command = lambda module, channel: [sys.executable, sys.argv[1], channel, os.getcwd()]
agent.run(warm_template.WarmTemplate(dict(os.environ)), os.getppid())
"""
# Says that it has forked what it is asked to fork, and that what it is asked to kill has ended.
TEMPLATE = """
import itertools, os, socket, sys
sys.path.insert(0, sys.argv[2])
from nbdist.wire.processes.template_messages import ChildEnded, EndChildren, Forked, Imported, decode_request, encode
channel = socket.socket(fileno=int(sys.argv[1]))
def say(report, *descriptors): socket.send_fds(channel, [encode(report)], descriptors)
say(Imported(""))
pids = itertools.count(10**8)
while (received := socket.recv_fds(channel, 1 << 16, 4))[0]:
    request = decode_request(received[0])
    if isinstance(request, EndChildren):
        for pid in request.pids: say(ChildEnded(pid, -9))
    else:
        say(Forked(request.rank, next(pids)), received[1][0])
    for descriptor in received[1]: os.close(descriptor)
"""


class Controller:
    """What the agent talks to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        public, secret = zmq.curve_keypair()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.rcvhwm = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.keys = Keys(f"tcp://127.0.0.1:{port}", public, *zmq.curve_keypair())

    def send(self, message: Message) -> None:
        self._socket.send_multipart([_CONTROL, encode(message)])

    def messages(self) -> Iterator[AnyMessage]:
        for identity, message in self.heard():
            if not isinstance(message, Hello) or identity == _CONTROL:
                yield message

    def heard(self) -> Iterator[tuple[bytes, AnyMessage]]:
        """Each message, and the lane on which it came."""
        while True:
            assert self._socket.poll(LIMIT_MS), "the agent says nothing"
            identity, *frames = self._socket.recv_multipart()
            for message in map(decode, whole(frames)):
                yield identity, message


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    """With an agent that has connected."""
    (tmp_path / "template.py").write_text(TEMPLATE)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    controller = Controller(context)
    command = [sys.executable, "-c", AGENT, str(tmp_path / "template.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        agent.stdin.write(encode_line(AgentSetup(controller.keys, b"token", leftovers=[])))
        agent.stdin.flush()
        assert isinstance(next(controller.messages()), Hello)
        yield controller
        controller.send(Shutdown())
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(10)
        agent.kill()
    context.destroy(linger=0)


def test_more_ranks_than_the_template_s_channel_has_room_for_are_forked_and_ended(controller: Controller) -> None:
    count = 1_500
    controller.send(Spawn(1, _options(count)))
    spawned = set()
    for message in controller.messages():
        if isinstance(message, Spawned):
            spawned.add(message.rank)
        if isinstance(message, Spawning):
            break
    assert spawned == set(range(count))
    controller.send(Kill(1, 0.0))
    assert any(isinstance(message, Gone) for message in controller.messages())


def test_a_port_that_is_taken_is_reported_as_such_and_not_by_its_text_alone(controller: Controller) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        controller.send(Spawn(1, _options(2, port)))
        failed = next(message for message in controller.messages() if isinstance(message, SpawnFailed))
    assert failed.obstacle == "port taken" and f"port {port} is taken by process {os.getpid()}" in failed.text


@pytest.mark.parametrize("fails", [True, False])
def test_the_end_of_a_set_overtakes_nothing_that_is_reported_of_it(controller: Controller, fails: bool) -> None:
    # Two lanes have no order between them: a start that failed would be over before its failure is known.
    with socket.create_server(("127.0.0.1", 0)) as other:
        controller.send(Spawn(1, _options(1, other.getsockname()[1] if fails else 0)))
        lanes: dict[type, bytes] = {}
        for lane, message in controller.heard():
            lanes[type(message)] = lane
            if isinstance(message, Spawning):
                controller.send(Kill(1, 0.0))
            if isinstance(message, Gone):
                break
    reports = [SpawnFailed, Gone] if fails else [StoreOpened, Spawned, Spawning, Exited, Gone]
    assert [kind for kind in lanes if kind in reports] == reports
    assert len({lanes[kind] for kind in reports}) == 1


def _options(count: int, port: int = 0) -> StartOptions:
    environment = dict(os.environ)
    return StartOptions(count, environment, cwd="/", sys_path=sys.path, argv=[], umask=0o22, open_files=1024, port=port)
