"""Ranks whose kernel was killed go on for the linger time: the log takes what they print, and clients read it there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from nbdist.wire.base.keys import read_key_file
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import CLIENT_COMMANDS, CLIENT_EVENTS, connect, node_lane
from nbdist.wire.messages.handover import Attach
from nbdist.wire.messages.life import Shutdown
from nbdist.wire.messages.output import LogPart, ReadLog
from testbed.kernel import Kernel, kernel_with_ranks, wait_until
from tests.support.leftovers import files_of_sessions
from tests.support.roles import await_end, family

LIMIT_MS = 10_000


class Client:
    """Somebody with the key file, who comes when the notebook has gone."""

    def __init__(self) -> None:
        (path,) = (Path(name) for name in files_of_sessions() if name.endswith(".json"))
        keys = read_key_file(path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = connect(self._context, keys, node_lane(CLIENT_EVENTS, 1))
        self._commands = connect(self._context, keys, node_lane(CLIENT_COMMANDS, 1))
        self._commands.send(encode(Attach(os.getpid())))

    def log(self) -> dict[int, bytes]:
        """All that the newest cell printed, by rank."""
        texts: dict[int, bytes] = {}
        part = self._read(ReadLog(1))
        while True:
            for rank, _, data in part.records:
                texts[rank] = texts.get(rank, b"") + data
            if part.next is None:
                assert not part.missing and not part.dropped
                return texts
            part = self._read(ReadLog(1, part.serials, position=part.next))

    def end_session(self) -> None:
        self._commands.send(encode(Shutdown()))

    def close(self) -> None:
        self._events.close()
        self._commands.close()
        self._context.term()

    def _read(self, question: ReadLog) -> LogPart:
        self._commands.send(encode(question))
        while True:
            assert self._events.poll(LIMIT_MS), "no answer"
            for frame in self._events.recv_multipart():
                message = decode(frame)
                if isinstance(message, LogPart):
                    return message


@pytest.fixture
def lingering() -> Iterator[Kernel]:
    with kernel_with_ranks(2, "--linger 60") as kernel:
        everyone = family(kernel.pid)
        yield kernel
        client = Client()
        client.end_session()
        client.close()
        await_end(everyone)
        wait_until(lambda: not files_of_sessions(), "files to go")


def kill(kernel: Kernel) -> None:
    os.kill(kernel.pid, signal.SIGKILL)
    await_end([kernel.pid])


def run_without_notebook(kernel: Kernel, code: str, folder: Path) -> None:
    """Have ranks run code as soon as the kernel is dead, and wait until they have."""
    kernel.ok(
        "%%distributed --background\nimport os, time\n"
        f"while not os.path.exists({str(folder / 'go')!r}): time.sleep(0.01)\n"
        f"{code}\nopen(os.path.join({str(folder)!r}, f'done {{rank}}'), 'w').close()"
    )
    kill(kernel)
    (folder / "go").touch()
    wait_until(lambda: all((folder / f"done {rank}").exists() for rank in (0, 1)), "the ranks to go on", 30.0)


def test_all_that_ranks_print_without_a_notebook_is_in_the_log(lingering: Kernel, tmp_path: Path) -> None:
    run_without_notebook(lingering, "for i in range(100): print(f'{rank} {i:099990d}')", tmp_path)
    client = Client()
    log = client.log()
    client.close()
    for rank in (0, 1):
        assert log[rank].decode().splitlines() == [f"{rank} {i:099990d}" for i in range(100)]


def test_what_the_notebook_had_not_taken_when_it_died_holds_up_nobody(lingering: Kernel, tmp_path: Path) -> None:
    cell = lingering.start(
        "%%distributed\nimport os\nfor i in range(100): print(f'{i:099990d}')\n"
        f"open(os.path.join({str(tmp_path)!r}, f'done {{rank}}'), 'w').close()"
    )
    cell.wait_for("0")
    os.kill(lingering.pid, signal.SIGSTOP)
    kill(lingering)
    wait_until(lambda: all((tmp_path / f"done {rank}").exists() for rank in (0, 1)), "the ranks to go on", 30.0)


def test_displays_without_a_notebook_hold_up_nobody(lingering: Kernel, tmp_path: Path) -> None:
    code = "from IPython.display import HTML, display\nfor _ in range(30): display(HTML('x' * 100_000))\nprint('shown')"
    run_without_notebook(lingering, code, tmp_path)
    client = Client()
    assert client.log() == {0: b"shown\n", 1: b"shown\n"}
    client.close()
