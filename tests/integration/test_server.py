"""Through a real Jupyter server with its default limits, over its websocket: all output arrives, none is dropped."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from testbed.jupyter import Server
from testbed.kernel import Kernel
from tests.conftest import _shared
from tests.support.server_page import EXCEEDED, Page


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
