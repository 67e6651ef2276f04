"""This machine becomes a node of a session on another one: `nbdist join 10.0.0.1:29500`.

Owns the agent that it starts, and ends with it. Independent of ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from nbdist.base import network
from nbdist.base.processes import describe_exit, python_command
from nbdist.cluster.launchers import job_end, without_place
from nbdist.devices import visible_gpus
from nbdist.errors import UsageError
from nbdist.wire.base.keys import Keys
from nbdist.wire.base.message import VERSION
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import AGENT_END, GUEST, connect, node_lane
from nbdist.wire.processes.nodes import SILENT, TOKEN_VARIABLE, Join, NodeLeft, Refused, Token, Versions, Welcome
from nbdist.wire.processes.setup import AgentSetup, encode_line

_CONNECT_LIMIT = 5.0  # seconds for one attempt
_ANSWER_LIMIT = 20.0  # seconds for the controller to answer; it may be busy
_BROKEN_OFF = 5  # handshakes that the other side breaks off: it has another key than the token's session
_LAST_WORDS = 1.0  # seconds
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# What the agent heeds itself: it announces the end, and perhaps leaves time for it.
_PASSED_ON = (signal.SIGUSR1, signal.SIGTERM)
_LET_GO = "the connection that started it has ended"
_AGAIN = "Paste the line that `%distributed start` prints in the notebook"


class CannotJoin(UsageError):
    """This machine can't become a node; nothing is left running."""


class TokenUsed(CannotJoin):
    """The token is not valid: another node has joined with it, or it is another session's."""


def join(target: str, tokens: Sequence[str], patience: float, leash: int | None = None) -> int:
    """Become a node, and stay one until the session ends.

    Args:
        target: Where the session's controller listens: `10.0.0.1:29500`.
        tokens: What to join with: the first that nobody has used.
        patience: Seconds to wait for it to listen.
        leash: A descriptor; when nothing can come from it any more, the node leaves.

    Returns:
        The exit code: 0 if the session has ended, or this node was asked to leave.

    Raises:
        CannotJoin: Why not, and what to do.
    """
    host, port = network.parse_endpoint(target)
    try:
        parsed = [Token.parse(token) for token in tokens]
    except ValueError:
        raise CannotJoin(f"{TOKEN_VARIABLE} does not contain an nbdist token. {_AGAIN}") from None
    address = _reach(host, port, patience)
    welcome = _introduce_with_any(parsed, f"tcp://{network.endpoint(address, port)}")
    return _serve(welcome, target, leash)


def _introduce_with_any(tokens: Sequence[Token], url: str) -> Welcome:
    for token in tokens[:-1]:
        with contextlib.suppress(TokenUsed):
            return _introduce(token, url)
    return _introduce(tokens[-1], url)


def _reach(host: str, port: int, patience: float) -> str:
    """Wait until something listens there, and return its address."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_LIMIT) as connection:
                return str(connection.getpeername()[0])
        except socket.gaierror as error:
            raise CannotJoin(f"{host!r} is not a known host ({error.strerror}): use its address instead") from None
        except OSError as error:
            why = "nothing listens there" if isinstance(error, ConnectionRefusedError) else str(error)
            if time.monotonic() > deadline:
                where = network.endpoint(host, port)
                raise CannotJoin(
                    f"{where} can't be reached: {why}. Check that `%distributed start` printed this address and that "
                    f"no firewall blocks this machine. `nc -vz {host} {port}` tests the connection; `--wait 600` "
                    "waits until it works"
                ) from None
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def _introduce(token: Token, url: str) -> Welcome:
    """Be a guest, and ask to be a node."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = Keys(url, token.server_key, zmq.curve_public(token.secret_key), token.secret_key)
    lane = f"{GUEST}/{secrets.randbelow(1 << 60)}".encode()
    guest = connect(context, keys, lane, _REFUSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    events = guest.get_monitor_socket()
    try:
        who = Join(VERSION, socket.gethostname(), Versions.here(), len(visible_gpus()), job_end(os.environ))
        with contextlib.suppress(zmq.Again):  # the keys were refused already, and nothing takes it
            guest.send(encode(who), zmq.NOBLOCK)
        answer = _answer(guest, events, url)
    finally:
        guest.disable_monitor()
        context.destroy(linger=0)
    if isinstance(answer, Refused):
        raise (TokenUsed if answer.used else CannotJoin)(
            f"this machine ({socket.gethostname()}) can't join: {answer.text}"
        )
    if not isinstance(answer, Welcome):
        raise CannotJoin(f"the session at {url} sent an unexpected answer; does it run another version of nbdist?")
    # By the way that has just worked, which may be a tunnel.
    return msgspec.structs.replace(answer, keys=msgspec.structs.replace(answer.keys, url=url))


def _answer(guest: zmq.Socket[bytes], events: zmq.Socket[bytes], url: str) -> object:
    broken_off = 0
    poller = zmq.Poller()
    poller.register(guest, zmq.POLLIN)
    poller.register(events, zmq.POLLIN)
    deadline = time.monotonic() + _ANSWER_LIMIT
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(int(left * 1000) + 1))
        if guest in ready:
            return decode(guest.recv())
        if events in ready:
            if recv_monitor_message(events)["event"] & _REFUSED:
                raise TokenUsed(f"this token is no longer valid, or belongs to another session. {_AGAIN}")
            broken_off += 1
            if broken_off == _BROKEN_OFF:
                raise TokenUsed(f"what listens at {url} is not the session that this token is from. {_AGAIN}")
    raise CannotJoin(f"the session did not answer within {_ANSWER_LIMIT:g} s; is it still running? {_AGAIN}")


def _serve(welcome: Welcome, target: str, leash: int | None) -> int:
    """Run the agent of this node."""
    with _own_folder() as folder, _signals() as asked:
        command = python_command("nbdist.agent.agent_boot", "urgent", str(os.getpid()))
        environment = {name: value for name, value in without_place(os.environ).items() if name != TOKEN_VARIABLE}
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        setup = AgentSetup(
            keys=welcome.keys,
            token=b"\x1b]nbdist;%s;" % secrets.token_hex(8).encode(),
            leftovers=[str(folder)],
            folder=str(folder),
            node=welcome.node,
            timeout=welcome.timeout,
        )
        assert agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is about to be noticed
            agent.stdin.write(encode_line(setup))
            agent.stdin.close()
        print(f"joined the session of {welcome.host} at {target} as node {welcome.node}; Ctrl-C leaves", flush=True)
        code, let_go = _await_end(agent, asked, leash)
    if any(number != signal.SIGUSR1 for number in asked) or let_go:
        _say_last(welcome, _LET_GO if let_go else "it was stopped on that machine, by Ctrl-C or a signal")
        print("left the session", flush=True)
        return 0
    if code == SILENT:
        _say_last(welcome, f"nothing from the session has reached it for {welcome.timeout:g} s")
        print(
            f"{welcome.host}, where the session runs, has not answered for {welcome.timeout:g} s: that machine or the "
            "network may have failed. This node has left, and its ranks have ended",
            flush=True,
        )
        return 0
    if code:
        how = describe_exit(code)
        _say_last(welcome, f"its agent has ended, {how}")
        print(f"the agent has ended: {how}", flush=True)
        return 1
    _say_last(welcome, "its connection has ended")  # if the session is still there
    print("the session has ended", flush=True)
    return 0


def _await_end(agent: subprocess.Popen[bytes], asked: list[int], leash: int | None) -> tuple[int, bool]:
    """Return the agent's exit code, and whether it was ended because the leash was let go of."""
    heeded = 0
    while True:
        try:
            return agent.wait(0.2), False
        except subprocess.TimeoutExpired:
            let_go = leash is not None and _has_ended(leash)
            heeded, new = len(asked), asked[heeded:]
            for number in new:
                agent.send_signal(number if number in _PASSED_ON else signal.SIGKILL)
            if let_go:
                agent.kill()
                return agent.wait(), True
            if any(number not in _PASSED_ON for number in new):
                return agent.wait(), False


def _has_ended(leash: int) -> bool:
    ready, _, _ = select.select([leash], [], [], 0)
    return bool(ready) and not os.read(leash, 1 << 12)


def _say_last(welcome: Welcome, why: str) -> None:
    """Let the session know that this node has gone, so that it need not find out."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        lane = connect(context, welcome.keys, node_lane(AGENT_END, welcome.node))
        lane.send(encode(NodeLeft(why)))
        lane.close(linger=int(_LAST_WORDS * 1000))
    finally:
        context.term()


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nbdist-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask this process to end, or announce that."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda received, frame: asked.append(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
