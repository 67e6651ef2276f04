from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from testbed.kernel import Kernel, both
from tests.support.leftovers import files_of_sessions
from tests.support.roles import alive, family, find, open_files

SECRETS = ("server_key", "public_key", "secret_key")
SILENCE_MS = 400  # that an intruder waits for an answer


@pytest.fixture
def key_file(ranks: Kernel) -> Path:
    (found,) = (Path(name) for name in files_of_sessions() if name.endswith(".json"))
    return found


@pytest.fixture
def keys(key_file: Path) -> dict[str, str]:
    return dict(json.loads(key_file.read_text()))


@pytest.fixture(autouse=True)
def unharmed(ranks: Kernel) -> Iterator[None]:
    """Whatever a test does: the same processes live, and the session works."""
    ranks.ok("%%distributed\nkept = rank")
    before = [pid for pid in family(find(ranks.pid, "controller")) if alive(pid)]
    yield
    assert ranks.ok("%%distributed\nprint('works')").lines == both("works")
    assert ranks.value("__import__('nbdist').get_session().pull('kept')") == [0, 1]
    assert not [pid for pid in before if not alive(pid)]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:  # it ends when all that was sent has gone out
        yield context


def message(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(list(fields))


def port(keys: dict[str, str]) -> int:
    return int(keys["url"].rpartition(":")[2])


# --- keys


def test_the_key_file_is_its_owners_alone_and_lies_in_jupyters_runtime_folder(key_file: Path) -> None:
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert key_file.parent == Path(os.environ["JUPYTER_RUNTIME_DIR"]) and key_file.parent.stat().st_mode & 0o077 == 0


def test_the_key_file_holds_no_secret_of_the_server(keys: dict[str, str]) -> None:
    assert set(keys) == {"url", *SECRETS, "host", "version", "kernel"}
    assert zmq.curve_public(keys["secret_key"].encode()).decode() == keys["public_key"] != keys["server_key"]


def test_no_file_but_the_key_file_holds_a_key(ranks: Kernel, key_file: Path, keys: dict[str, str]) -> None:
    ranks.ok("%%distributed\nprint('so that there is a log')")
    others = [path for name in files_of_sessions() for path in Path(name).rglob("*") if path.is_file()]
    assert others, "the log"
    for path in others:
        assert not any(keys[name].encode() in path.read_bytes() for name in ("url", *SECRETS))
        assert path.parent.stat().st_mode & 0o077 == 0


def test_no_key_stands_in_an_environment_or_an_argument(ranks: Kernel, keys: dict[str, str]) -> None:
    # Keys are 40 characters of Z85; the agent's and ranks' key pair is in no file, so look for anything like it.
    z85 = re.compile(
        rb"(?<![0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-])[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}(?![0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-])"
    )
    for pid in family(ranks.pid):
        for name in ("environ", "cmdline"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not any(key.encode() in text for key in (keys[each] for each in SECRETS))
            assert b"]nbdist;" not in text and b"CURVE" not in text.upper()
            likely = [word for word in z85.findall(text) if _is_a_key(word)]
            assert not likely, f"{name} of {pid}: {likely}"


def _is_a_key(word: bytes) -> bool:
    """Words of 40 characters are often hashes or paths, which lack the signs that a key nearly always has."""
    return bool(re.search(rb"[^0-9a-zA-Z/._=:+-]", word)) and bool(re.search(rb"[A-Z]", word)) and b"/" not in word


SET_BY_TESTS = ("NBDIST_LINGER", "NBDIST_SLACK")


def test_the_ranks_environment_as_python_sees_it_has_no_key_either(ranks: Kernel, keys: dict[str, str]) -> None:
    environments = ranks.value("__import__('nbdist').get_session().pull('dict(__import__(\"os\").environ)')")
    for environment in environments:
        assert not [
            name for name in environment if "NBDIST" in name and "TEST" not in name and name not in SET_BY_TESTS
        ]
        assert not set(environment.values()) & {keys[name] for name in SECRETS}


# --- descriptors


LINKS = """import subprocess
shown = subprocess.run("ls -l /proc/self/fd", shell=True, close_fds=False, capture_output=True, text=True, check=True)
links = shown.stdout.splitlines()[1:]"""


@pytest.mark.parametrize("before", ["", "import torch.distributed as dist\ndist.new_group()\n"])
def test_programs_that_a_rank_starts_inherit_no_descriptor(before: str, ranks: Kernel) -> None:
    ranks.ok(f"%%distributed\n{before}{LINKS}")
    for links in ranks.value("__import__('nbdist').get_session().pull('links')"):
        inherited = [link for link in links if "/proc/" not in link.rpartition("-> ")[2]]
        assert [link.split()[-3] for link in inherited] == ["0", "1", "2"], links


def test_programs_that_the_notebook_starts_inherit_nothing_of_ours(ranks: Kernel) -> None:
    with Kernel(NBDIST_PREWARM="0") as plain:
        plain.ok(LINKS)
        expected = len(plain.value("links"))
    ranks.ok(LINKS)
    assert len(ranks.value("links")) == expected, ranks.value("links")


def test_ranks_have_no_descriptor_of_the_template_s_or_of_each_other(ranks: Kernel) -> None:
    template = find(ranks.pid, "template")
    channel = {file for file in open_files(template) if "socket" in file}
    for pid in ranks.rank_pids():
        links = open_files(pid)
        assert not channel & set(links)
        assert not [link for link in links if "memfd:nbdist-setup" in link or "pidfd" in link]


# --- intruders


def _curve(socket_: zmq.Socket[bytes], keys: dict[str, str], public: bytes, secret: bytes) -> None:
    socket_.curve_serverkey, socket_.curve_publickey, socket_.curve_secretkey = (
        keys["server_key"].encode(),
        public,
        secret,
    )


def _stranger(socket_: zmq.Socket[bytes], keys: dict[str, str]) -> None:
    _curve(socket_, keys, *zmq.curve_keypair())


def _wrong_server(socket_: zmq.Socket[bytes], keys: dict[str, str]) -> None:
    _curve(
        socket_,
        {"server_key": zmq.curve_keypair()[0].decode()},
        keys["public_key"].encode(),
        keys["secret_key"].encode(),
    )


def _plain(socket_: zmq.Socket[bytes], keys: dict[str, str]) -> None:
    socket_.plain_username, socket_.plain_password = b"root", keys["public_key"].encode()


def _null(socket_: zmq.Socket[bytes], keys: dict[str, str]) -> None:
    pass


@pytest.mark.parametrize("credentials", [_null, _plain, _stranger, _wrong_server])
@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.SUB])
def test_a_client_without_the_right_keys_reads_nothing(
    ranks: Kernel, context: zmq.Context[zmq.Socket[bytes]], keys: dict[str, str], credentials: Any, kind: int
) -> None:
    with context.socket(kind) as intruder:
        intruder.linger = 0
        credentials(intruder, keys)
        if kind == zmq.SUB:
            intruder.subscribe(b"")
        else:
            intruder.identity = b"client.events/0"
        intruder.connect(keys["url"])
        if kind == zmq.DEALER:
            intruder.send(message("Hello", 1, os.getpid()), zmq.NOBLOCK)
            intruder.send(message("Shutdown"), zmq.NOBLOCK)
        ranks.ok("%%distributed\nprint('for the notebook only')")
        assert not intruder.poll(SILENCE_MS)


GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + b"\0" * 47
GARBAGE = {
    "nothing": b"",
    "random bytes": os.urandom(1 << 16),
    "HTTP": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),
    "a greeting of NULL": b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL" + b"\0" * 48 + b"\x04\x19\x05READY",
    "half a greeting": GREETING[:20],
    "a greeting and garbage": GREETING + os.urandom(4096),
    "a frame of 2**62 bytes": GREETING + b"\x02" + struct.pack(">Q", 1 << 62) + b"x" * 4096,
    "a command of 2**31 bytes": GREETING + b"\x06" + struct.pack(">Q", 1 << 31) + b"x" * 4096,
    "an old protocol's frame": b"\xff" + struct.pack(">Q", 1 << 40) + b"\x00",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_at_the_port_gets_no_answer_but_the_greeting(keys: dict[str, str], garbage: str) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", port(keys)), timeout=5) as intruder:
        intruder.settimeout(SILENCE_MS / 1000)
        try:
            intruder.sendall(GARBAGE[garbage])
            while data := intruder.recv(4096):
                answer += data
        except OSError:  # silence, or thrown out
            pass
    assert len(answer) <= 64 + 200, "no more than the greeting and an error"
    assert b"secret" not in answer and b"for the notebook" not in answer


def test_a_hundred_connections_that_say_nothing_keep_nobody_out(ranks: Kernel, keys: dict[str, str]) -> None:
    idle = [socket.create_connection(("127.0.0.1", port(keys)), timeout=5) for _ in range(100)]
    try:
        assert ranks.ok("%%distributed\nprint(1)").lines == both("1")
    finally:
        for connection in idle:
            connection.close()


# --- who has the keys, but speaks nonsense


NONSENSE = {
    "no bytes": b"",
    "random bytes": os.urandom(1000),
    "a pickle": b"\x80\x05cos\nsystem\n\x94\x8c\x04true\x94\x85\x94R\x94.",
    "no list": msgspec.msgpack.encode({"type": "Hello"}),
    "an unknown message": message("Explode", 1),
    "a message cut short": message("Execute", 1)[:-1],
    "too few fields": message("Execute"),
    "wrong types": message("Execute", "one", "two", 3, 4),
    "another version": message("Hello", 99, 1),
    "ranks that are not there": message("Execute", 1 << 40, [99, -7], "cell", "1"),
    "a question about a rank that is not there": message("Ask", 1 << 40, [99], ["GetStack"]),
    "an unknown question": message("Ask", 1 << 40, [0], ["GetSecrets"]),
    "a log that is not there": message("ReadLog", 1 << 40, [1, 2, 3], None, None, 1 << 60),
    "a log before its beginning": message("ReadLog", 1 << 40, [], None, [-1], -1),
    "a question in the controller's name": message("Ask", 1, [0], ["GetStack"], "controller"),
    "an answer to another question": message("Answer", 1, 0, ["Done"], "controller"),
    "an unknown rank's widget": message("WidgetMessage", 99, "msg", "x", "y", {}, {}, []),
    "credit for an unknown rank": message("Credit", 99, 10),
    "an agent's message": message("Exited", 1, 99, 1, 0, "", 0.0),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("identity", [b"intruder", b"rank.cell/x/y", b"rank.cell/1/99", b"agent.other", b"\xff\xfe"])
def test_nonsense_from_somebody_with_the_keys_costs_nothing(
    context: zmq.Context[zmq.Socket[bytes]], keys: dict[str, str], nonsense: str, identity: bytes
) -> None:
    with context.socket(zmq.DEALER) as friend:
        friend.identity, friend.linger = identity, 1000
        _curve(friend, keys, keys["public_key"].encode(), keys["secret_key"].encode())
        friend.connect(keys["url"])
        friend.send(NONSENSE[nonsense])
        friend.send_multipart([NONSENSE[nonsense], b"", b"more"])


# --- what anybody may cost


def test_a_flood_from_somebody_without_keys_fills_no_memory(ranks: Kernel, keys: dict[str, str]) -> None:
    controller = psutil.Process(find(ranks.pid, "controller"))
    before = controller.memory_info().rss
    flood = GREETING + b"\x06" + struct.pack(">Q", 1 << 30) + b"x" * (64 << 20)
    for _ in range(3):
        intruder = socket.create_connection(("127.0.0.1", port(keys)), timeout=20)
        with intruder, contextlib.suppress(ConnectionError):  # it is thrown out
            intruder.sendall(flood)
    assert controller.memory_info().rss < before + (20 << 20)


def test_a_connection_that_does_not_authenticate_is_closed(keys: dict[str, str]) -> None:
    intruders = [socket.create_connection(("127.0.0.1", port(keys)), timeout=20) for _ in range(20)]
    for intruder in intruders:
        with intruder:
            while intruder.recv(4096):  # the greeting, and then the end
                pass


def test_lies_of_strangers_friends_and_ranks_cost_nothing(ranks: Kernel, key_file: Path) -> None:
    ranks.ok("import nbdist\nfrom tests.stress import fuzz\nfuzz.tell(1, nbdist.get_session(), 300)")


def test_a_display_that_is_larger_than_a_frame_arrives_whole(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed -r 1\nfrom IPython.display import HTML\ndisplay(HTML('x' * 3_000_000))")
    assert [len(data["text/html"]) for data in outcome.displays if "xxx" in data.get("text/html", "")] == [3_000_000]
