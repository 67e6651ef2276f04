"""`nbdist mcp --http`: on loopback, for those who know the token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from testbed.agent_client import AgentClient
from testbed.kernel import wait_until

TOKEN = "a-token-of-the-user's-own"
HELLO = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


class Listening:
    """A server that listens."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "nbdist", "mcp", "--http", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.said = self.process.stdout.readline().strip()
        self.token = self.said.removeprefix("Authorization: Bearer ")

    def status(self, **headers: str) -> int:
        """The status of an answer to a request with these headers."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        try:
            connection.request("POST", "/mcp", json.dumps(HELLO), {**HEADERS, **headers})
            return connection.getresponse().status
        finally:
            connection.close()


@contextlib.contextmanager
def listening(*arguments: str, **environment: str) -> Iterator[Listening]:
    server = Listening(*arguments, **environment)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert server.process.stdout is not None
        server.process.stdout.close()


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """Variables of a server that sees no session of other tests."""
    return {"JUPYTER_RUNTIME_DIR": str(tmp_path)}


def test_agents_with_the_token_use_the_same_session_at_once(alone: dict[str, str]) -> None:
    with listening(**alone) as server:
        assert len(server.token) >= 40
        with (
            AgentClient(url=server.url, token=server.token, name="one") as one,
            AgentClient(url=server.url, token=server.token, name="two") as two,
        ):
            one.call("start", ranks=2)
            assert "drives session" in two.fails("start", ranks=2)
            busy = one.call("run", code="import time\nprint('at it')\ntime.sleep(600)")["cell"]
            waiting = two.call("run", code="rank")
            assert waiting["state"] == "queued" and waiting["by"] == "agent two"
            assert two.call("interrupt", cell=busy)["running"] == [busy]
            assert two.finish(waiting["cell"])["values"] == {"0": "0", "1": "1"}
            assert one.finish(busy)["by"] == "agent one"
        (rank, _) = one_status(server)
        assert psutil.pid_exists(rank["pid"])  # an agent that leaves ends nothing
    wait_until(lambda: not psutil.pid_exists(rank["pid"]), "the ranks to end with the server")


def one_status(server: Listening) -> list[dict[str, int]]:
    with AgentClient(url=server.url, token=server.token) as agent:
        return list(agent.call("status")["ranks"])


def test_without_the_token_nobody_is_let_in(alone: dict[str, str]) -> None:
    with listening(NBDIST_MCP_TOKEN=TOKEN, **alone) as server:
        assert TOKEN not in server.said and "in NBDIST_MCP_TOKEN" in server.said
        assert server.status() == 401
        for wrong in ("", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "ü" * 20):
            assert server.status(Authorization=f"Bearer {wrong}".encode().decode("latin-1")) == 401, wrong
        assert server.status(Authorization=f"Basic {TOKEN}") == 401
        assert server.status(Authorization=f"Bearer {TOKEN}") not in (401, 403)
        with pytest.raises(Exception, match=r"401|nhandled"):
            AgentClient(url=server.url, token="wrong" * 8)
        with AgentClient(url=server.url, token=TOKEN) as agent:
            assert agent.call("sessions") == {"sessions": []}
            agent.call("start", ranks=1)
            assert agent.run("import os\nos.environ.get('NBDIST_MCP_TOKEN')")["values"] == {}


def test_it_listens_on_loopback_only_and_not_for_pages_of_other_hosts(alone: dict[str, str]) -> None:
    with listening(**alone) as server:
        found = psutil.Process(server.process.pid).net_connections()
        addresses = [each.laddr.ip for each in found if each.status == "LISTEN"]
        assert set(addresses) == {"127.0.0.1"}
        assert server.token not in " ".join(psutil.Process(server.process.pid).cmdline())
        authorization = f"Bearer {server.token}"
        assert server.status(Authorization=authorization, Host="evil.example") in (403, 421)
        assert server.status(Authorization=authorization, Origin="http://evil.example") in (403, 421)


def test_the_token_in_a_file(alone: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    with listening("--token-file", str(file), "--read-only", **alone) as server:
        assert server.said == f"Authorization: Bearer the token in {file}"
        with AgentClient(url=server.url, token=TOKEN) as agent:
            assert "run" not in agent.tools()


def refused(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "nbdist", "mcp", *arguments]
    variables = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=variables)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_bad_arguments_are_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert f"the token can't be read from {file}" in refused("--http", "--token-file", str(file))
    file.write_text(TOKEN)
    file.chmod(0o644)
    assert f"type `chmod 600 {file}`" in refused("--http", "--token-file", str(file))
    file.chmod(0o600)
    assert "--token-file is for --http" in refused("--token-file", str(file))
    assert "is too short or has spaces" in refused("--http", NBDIST_MCP_TOKEN="short")
    assert "can't listen on port 70000" in refused("--http", "70000")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"can't listen on port {port}: Address already in use" in refused("--http", str(port))
