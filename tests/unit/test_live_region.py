"""What a page shows of what moves a terminal's cursor up: live displays of rich, and tqdm's bars below bars."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from tqdm import tqdm

from nbdist.agent.live_region import LiveOutput
from nbdist.client.output.merge import Merger
from tests.support.merging import Page

Work = Callable[[Console], Iterator[None]]


BAR = "{desc}: {percentage:3.0f}% [00:00<00:01]"
HIDE = b"\x1b[?25l"  # written at once


CODES = [
    b"a",
    b"10 %",
    b"\n",
    b"\r",
    b"\x1b[A",
    b"\x1b[2A",
    b"\x1b[1A\x1b[2K",
    b"\x1b[2K",
    HIDE,
    b"\x1b[?25h",
    b"\x1b[31m",
]


class Written:
    """A terminal's file, which keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, text: str) -> None:
        self.data += text.encode()

    def flush(self) -> None: ...


def drawn(work: Work) -> list[bytes]:
    """What rich writes for each step of some work."""
    written, pieces = Written(), []
    console = Console(file=written, force_terminal=True, width=60, color_system=None)  # type: ignore[arg-type]
    for _ in work(console):
        pieces.append(written.data)
        written.data = b""
    return [*pieces, written.data]


def two_bars(console: Console) -> Iterator[None]:
    columns = TextColumn("{task.description}"), BarColumn(10), TaskProgressColumn()
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        yield
        epoch = progress.add_task("epoch", total=2)
        progress.refresh()
        yield
        step = progress.add_task("step", total=4)
        for done in range(4):
            progress.advance(step)
            if done == 1:
                progress.advance(epoch)
                console.print("half")
            progress.refresh()
            yield
        progress.advance(epoch)


def table(console: Console) -> Iterator[None]:
    with Live(console=console, auto_refresh=False) as live:
        for epoch in range(3):
            rows = Table("epoch", "loss")
            for row in range(epoch + 1):
                rows.add_row(str(row), "0.1")
            live.update(rows, refresh=True)
            yield


def passing(console: Console) -> Iterator[None]:
    with Live("reading", console=console, auto_refresh=False, transient=True) as live:
        live.refresh()
        yield
    yield
    console.print("read")


def nested(console: Console, *, leave: bool) -> Iterator[None]:
    options: dict[str, Any] = {"mininterval": 0, "bar_format": BAR, "file": console.file, "ncols": 40}
    for _ in tqdm(range(2), desc="epoch", **options):
        for _ in tqdm(range(4), desc="step", leave=leave, **options):
            yield
    console.file.write("done\n")


class Reader:
    """One that shows what ranks write: as agent, notebook and page do together."""

    def __init__(self, ranks: int = 1) -> None:
        self._outputs = [LiveOutput() for _ in range(ranks)]
        self._merger = Merger(range(ranks))
        self._page = Page()
        self._now = 0.0

    def read(self, data: bytes) -> list[str]:
        """The lines that are on the page a second after each rank has written this."""
        for rank, output in enumerate(self._outputs):
            self._merger.feed(rank, "stdout", output.feed(data).decode(errors="replace"), self._now)
        self._now += 1.0
        return self._page.show(self._merger.poll(self._now)).text

    def end(self) -> list[str]:
        """The lines that are on the page when the cell has ended."""
        for rank, output in enumerate(self._outputs):
            self._merger.feed(rank, "stdout", output.end().decode(), self._now)
            self._merger.finish(rank, self._now)
        return self._page.show(self._merger.flush(self._now)).text


ENDED = ["[0] half", "[0] epoch ━━━━━━━━━━ 100%", "[0] step  ━━━━━━━━━━ 100%"]


def test_bars_are_one_line_as_long_as_they_change_and_stay_as_lines() -> None:
    reader = Reader()
    pages = [reader.read(piece) for piece in drawn(two_bars)]
    assert pages[0] == []
    assert pages[1] == ["[0] epoch              0%"]
    assert pages[2] == ["[0] epoch              0%  step  ━━╸         25%"]
    assert pages[4] == ["[0] half", "[0] epoch ━━━━━       50%  step  ━━━━━━━╸    75%"]
    assert pages[-1] == reader.end() == ENDED


def test_the_bars_of_two_ranks_are_one_line() -> None:
    reader = Reader(ranks=2)
    pages = [reader.read(piece) for piece in drawn(two_bars)]
    assert pages[2] == ["[0-1] epoch              0%  step  ━━╸         25%"]
    assert reader.end() == [line.replace("[0]", "[0-1]") for line in ENDED]


def test_a_table_comes_out_at_its_end() -> None:
    reader = Reader()
    pages = [reader.read(piece) for piece in drawn(table)]
    assert pages[2] == []
    assert reader.end() == pages[-1] and len(pages[-1]) == 7 and "loss" in pages[-1][1]


def test_what_is_not_to_stay_is_wiped() -> None:
    reader = Reader()
    pages = [reader.read(piece) for piece in drawn(passing)]
    assert pages[0] == ["[0] reading"]
    assert pages[1] == []
    assert reader.end() == ["[0] read"]


@pytest.mark.parametrize("work", [two_bars, table])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=50, deadline=None)
def test_wherever_it_is_cut_the_same_lines_stay(work: Work, data: st.DataObject) -> None:
    whole = b"".join(drawn(work))
    cuts = sorted(data.draw(st.lists(st.integers(len(HIDE), len(whole)), max_size=20)))
    output, page, merger = LiveOutput(), Page(), Merger([0])
    shown = b"".join(output.feed(whole[a:b]) for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True))
    merger.feed(0, "stdout", shown.decode(errors="replace"), 0.0)
    expected = Reader()
    expected.read(whole)
    assert page.show(merger.flush(1.0)).text == expected.end()


def test_what_is_drawn_when_a_cell_ends_stays() -> None:
    reader = Reader()
    for piece in drawn(two_bars)[:4]:
        reader.read(piece)
    assert reader.end() == ["[0] half", "[0] epoch ━━━━━       50%", "[0] step  ━━━━━       50%"]
    assert reader.read(b"next cell\n")[-1] == "[0] next cell"


@pytest.mark.parametrize("data", [b"plain\n", b"\r 10 %\r 20 %\n", b"\x1b[1mbold\x1b[0m\x1b[2K"])
def test_what_moves_no_cursor_is_left_as_it_is(data: bytes) -> None:
    assert LiveOutput().feed(data) == data


@pytest.mark.parametrize("code", [b"\x1b[?25h", b"\x1b[2J\x1b[H", b"\x1b[?1049h", b"\x1b[3;1f", b"\x1b[s\x1b[u"])
def test_codes_for_a_cursor_that_nobody_draws_with_are_dropped(code: bytes) -> None:
    assert LiveOutput().feed(b"done" + code + b"\n") == b"done\n"


@pytest.mark.parametrize("leave", [True, False])
def test_bars_of_tqdm_in_a_loop_of_another_are_one_line(leave: bool) -> None:
    reader = Reader(ranks=2)
    pages = [reader.read(piece) for piece in drawn(partial(nested, leave=leave))]
    ended = ["[0-1] step: 100% [00:00<00:01]"] * leave
    assert pages[2] == ["[0-1] epoch:   0% [00:00<00:01]  step:  50% [00:00<00:01]"]
    assert pages[5] == [*ended, "[0-1] epoch:  50% [00:00<00:01]  step:  25% [00:00<00:01]"]
    assert pages[-1] == reader.end() == [*ended, *ended, "[0-1] epoch: 100% [00:00<00:01]", "[0-1] done"]


@hypothesis.given(st.lists(st.sampled_from(CODES)), st.lists(st.integers(0, 100), max_size=5))
def test_a_line_that_no_cursor_comes_back_to_comes_out(codes: list[bytes], cuts: list[int]) -> None:
    data, output = b"".join(codes), LiveOutput()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(bounds):
        output.feed(data[begin:end])
    output.end()
    assert output.feed(b"last words\n") == b"last words\n"


@pytest.mark.parametrize("begin", [HIDE, b"\x1b[A"])
def test_no_more_is_held_than_a_page_can_use(begin: bytes) -> None:
    output = LiveOutput()
    shown = sum(len(output.feed(begin + b"x" * 1000)) for _ in range(1000))
    assert shown > 900_000


def test_lines_printed_without_a_cursor_do_not_wait_for_its_return() -> None:
    output = LiveOutput()
    shown = output.feed(b"\x1b[?25l") + output.feed(b"".join(b"line %d\n" % number for number in range(1000)))
    assert shown.count(b"\n") > 800
