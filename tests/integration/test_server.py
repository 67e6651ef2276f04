"""Through a real Jupyter server with its default limits, over its websocket: all output arrives, none is dropped."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import websocket

from testbed.jupyter import Server
from testbed.kernel import LIMIT, Kernel
from tests.conftest import _shared

EXCEEDED = "rate exceeded"


class Page:
    """A notebook's page: its kernel, and all that reaches it over the websocket."""

    def __init__(self, server: Server) -> None:
        notebook = {"path": "x.ipynb", "type": "notebook", "name": "x", "kernel": {"name": "python3"}}
        self._server = server
        self._kernel = server.call("/api/sessions", notebook)["kernel"]["id"]
        url = f"{server.url.replace('http', 'ws')}/api/kernels/{self._kernel}/channels?token={server.token}"
        self._socket = websocket.create_connection(url, timeout=LIMIT)
        self.texts: dict[str, str] = {}  # by cell: stdout, and stderr, where the server complains
        self.errors: dict[str, str] = {}
        self.displays: dict[str, int] = {}
        self._idle: set[str] = set()

    def start(self, code: str) -> str:
        cell = secrets.token_hex(8)
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        header = {"msg_id": cell, "msg_type": "execute_request", "username": "", "session": "page", "version": "5.3"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self.texts[cell] = self.errors[cell] = ""
        self.displays[cell] = 0
        self._socket.send(json.dumps(message))
        return cell

    def finish(self, cell: str) -> str:
        """Until a cell has ended; what it has shown."""
        while cell not in self._idle:
            self.receive()
        return self.texts[cell]

    def run(self, code: str) -> str:
        return self.finish(self.start(code))

    def wait_for(self, cell: str, text: str) -> None:
        while text not in self.texts[cell]:
            self.receive()

    def interrupt(self) -> None:
        self._server.call(f"/api/kernels/{self._kernel}/interrupt", {})

    def receive(self) -> None:
        message = json.loads(self._socket.recv())
        cell, content = message["parent_header"].get("msg_id"), message["content"]
        if message["channel"] != "iopub" or cell not in self.texts:
            return
        if message["msg_type"] == "stream":
            assert EXCEEDED not in content["text"], content["text"]
            self.texts[cell] += content["text"]
        elif message["msg_type"] == "error":
            self.errors[cell] = content["ename"]
        elif message["msg_type"] == "display_data":
            self.displays[cell] += 1
        elif content.get("execution_state") == "idle":
            self._idle.add(cell)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page with two ranks."""
    server = Server(tmp_path_factory.mktemp("server"))
    _shared.append(cast(Kernel, server))  # its kernel is its child
    page = Page(server)
    page.run("%load_ext nbdist")
    assert "2 ranks ready" in page.run("%distributed start -n 2")
    yield page
    page.close()
    server.close()
    _shared.remove(cast(Kernel, server))


def test_without_pacing_the_server_would_drop_output(page: Page) -> None:
    with pytest.raises(AssertionError, match=EXCEEDED):
        page.run("for _ in range(50): print('x' * 99_999, flush=True)")
    page.run("pass")


def test_five_megabytes_in_eighty_thousand_lines_arrive(page: Page) -> None:
    text = page.run("%%distributed\nfor i in range(40_000): print(f'{rank} {i:060d}')")
    lines = text.splitlines()
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[{rank}] ")] == [
            f"[{rank}] {rank} {i:060d}" for i in range(40_000)
        ]


def test_five_megabytes_in_one_string_arrive(page: Page) -> None:
    text = page.run("%%distributed -r 0\nprint('0123456789' * 500_000)")
    assert text == "[0] " + "0123456789" * 500_000 + "\n"


def test_the_first_line_does_not_wait(page: Page, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = page.start(
        f"%%distributed\nimport os, time\nprint('first')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    )
    page.wait_for(cell, "] first\n")
    go.touch()
    page.finish(cell)


def test_cells_at_the_same_time_share_what_the_server_takes(page: Page) -> None:
    code = "%%distributed --background -r {0}\nfor i in range(25_000): print(f'{{i:094d}}')"
    cells = [page.start(code.format(rank)) for rank in (0, 1)]
    for rank, cell in enumerate(cells):
        page.wait_for(cell, f"[{rank}] {24_999:094d}\n")
        assert page.texts[cell].splitlines() == [f"[{rank}] {i:094d}" for i in range(25_000)]


def test_a_log_is_shown_at_a_pace_that_the_server_takes(page: Page) -> None:
    page.run("%%distributed --quiet\nfor i in range(25_000): print(f'{rank} {i:092d}')")
    lines = page.run("%distributed logs").splitlines()
    assert lines == [f"[{rank}] {rank} {i:092d}" for rank in (0, 1) for i in range(25_000)]


def test_above_the_limit_the_middle_is_folded_and_captures_and_logs_are_whole(page: Page, tmp_path: Path) -> None:
    text = page.run("%%distributed -r 0 --capture got --tee\nfor i in range(200_000): print(f'{i:094d}')")
    lines = text.splitlines()
    [place] = [index for index, line in enumerate(lines) if not line.startswith("[0] ")]
    rest = len(lines) - place - 1
    assert lines[:place] == [f"[0] {i:094d}" for i in range(place)] and place * 99 > 7_900_000
    assert lines[place + 1 :] == [f"[0] {i:094d}" for i in range(200_000 - rest, 200_000)] and rest * 99 > 900_000
    command = re.search(r"`(%distributed logs --cell \d+)`", lines[place])
    assert command is not None
    page.run(f"{command[1]} -r 0 --save {tmp_path / 'log'}")
    assert (tmp_path / "log").read_text().splitlines() == [f"[0] {i:094d}" for i in range(200_000)]
    assert "19000000 True" in page.run(
        "text = got[0].stdout\nprint(len(text), text == ''.join(f'{i:094d}\\n' for i in range(200_000)))"
    )


def test_a_flood_that_is_interrupted_ends_with_its_middle_in_the_log(page: Page) -> None:
    cell = page.start("%%distributed\nwhile True: print('x' * 100)")
    end = time.monotonic() + 4
    while time.monotonic() < end:
        page.receive()
    page.interrupt()
    text = page.finish(cell)
    assert page.errors[cell] == "KeyboardInterrupt"
    assert "%distributed logs --cell" in text
    assert "well" in page.run("%%distributed\nprint('well')")


def test_many_displays_arrive(page: Page) -> None:
    cell = page.start(
        "%%distributed\nfrom IPython.display import HTML\nfor i in range(900): display(HTML(f'{rank} {i}'))"
    )
    page.finish(cell)
    assert page.displays[cell] == 2 * 900 * 2  # each with its label
