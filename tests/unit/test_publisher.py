"""How output reaches the page: complete, in order, folded in the middle, no faster than a server takes it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest

from nbdist.client.output.publisher import FOLD_LIMIT, FOLD_TAIL, Pace, Publisher

LINE = "x" * 99 + "\n"
WINDOW = 3.0  # seconds over which Jupyter's server measures
BYTES, MESSAGES = 1_000_000, 1_000  # what it lets through a second


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    """Takes what is written to a stream of the kernel, as one message at each flush."""

    def __init__(self, page: Page, name: str) -> None:
        super().__init__()
        self._page, self._name = page, name

    def flush(self) -> None:
        self._page.messages.append((self._page.clock.now, self._name, self.getvalue()))
        self.truncate(0)
        self.seek(0)


class Page:
    """What reaches the page: time, stream and text of each message."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.messages: list[tuple[float, str, str]] = []

    def publisher(self, cell: int = 7, pace: Pace | None = None) -> Publisher:
        with redirect_stdout(Stream(self, "stdout")), redirect_stderr(Stream(self, "stderr")):
            return Publisher(cell, pace)

    def paced(self) -> Publisher:
        return self.publisher(pace=Pace(self.clock))

    def shows(self, text: str, stream: str = "stdout") -> bool:
        return self.text(stream) == text

    def text(self, stream: str = "stdout") -> str:
        return "".join(text for _, name, text in self.messages if name == stream)

    def publish_all(self, *publishers: Publisher) -> float:
        """Seconds that it takes."""
        began = self.clock.now
        while dues := [due for publisher in publishers if (due := publisher.due()) is not None]:
            self.clock.now += min(dues)
            for publisher in publishers:
                publisher.pump()
        return self.clock.now - began

    def fullest_window(self) -> tuple[int, int]:
        """Bytes and messages in it."""
        sizes = [(at, len(json.dumps(text, ensure_ascii=False).encode()) + 600) for at, _, text in self.messages]
        windows = [[size for at, size in sizes if start <= at < start + WINDOW] for start, _ in sizes]
        return max(map(sum, windows)), max(map(len, windows))


@pytest.fixture
def page() -> Page:
    return Page()


def test_text_is_shown_at_once_and_as_it_is(page: Page) -> None:
    publisher = page.publisher()
    publisher.text("stdout", "a\x1b[31m\rb\n\n  c")
    publisher.pump()
    assert page.shows("a\x1b[31m\rb\n\n  c")


def test_a_cell_writes_where_its_streams_pointed_when_it_started(page: Page) -> None:
    publisher = page.publisher()
    with redirect_stdout(io.StringIO()):  # as another cell's %%capture does
        publisher.text("stdout", "mine\n")
        publisher.pump()
    assert page.shows("mine\n")


def test_the_two_streams_keep_their_order(page: Page) -> None:
    publisher = page.publisher()
    for stream, text in (("stdout", "1\n"), ("stderr", "2\n"), ("stdout", "3\n")):
        publisher.text(stream, text)
    publisher.pump()
    assert [text for _, _, text in page.messages] == ["1\n", "2\n", "3\n"]


def test_many_lines_to_both_streams_go_in_few_messages(page: Page) -> None:
    publisher = page.publisher()
    for i in range(1000):
        publisher.text("stdout", f"{i}\n")
        publisher.text("stderr", f"{i}\n")
    publisher.pump()
    expected = "".join(f"{i}\n" for i in range(1000))
    assert page.shows(expected) and page.shows(expected, "stderr")
    assert len(page.messages) < 300


@pytest.mark.parametrize("character", ["x", "é", "𝄞", "\x1b", '"'])
def test_a_server_gets_no_more_than_it_takes(character: str, page: Page) -> None:
    publisher = page.paced()
    text = (character * 99 + "\n") * 50_000
    publisher.text("stdout", text)
    page.publish_all(publisher)
    assert page.shows(text)
    size, count = page.fullest_window()
    assert size < BYTES * WINDOW and count < MESSAGES * WINDOW


def test_the_first_megabytes_do_not_wait(page: Page) -> None:
    publisher = page.paced()
    publisher.text("stdout", LINE * 20_000)
    assert page.publish_all(publisher) < 1.0


def test_items_are_paced_so_that_a_kernel_has_few_that_nobody_has_read(page: Page) -> None:
    pace = Pace(page.clock)
    for _ in range(64):
        assert pace.wait(text=False, hurried=False) == 0.0
        pace.note(False, 1_000_000)
    assert pace.wait(text=False, hurried=False) > 3.0 and pace.wait(text=True, hurried=False) == 0.0
    page.clock.now += 3.3
    for _ in range(1_500):
        assert pace.wait(text=False, hurried=False) == 0.0
        pace.note(False, 100)
    assert pace.wait(text=False, hurried=False) > 3.0


def test_all_cells_of_a_kernel_share_one_pace(page: Page) -> None:
    pace = Pace(page.clock)
    publishers = [page.publisher(number, pace) for number in range(4)]
    for publisher in publishers:
        publisher.text("stdout", LINE * 20_000)
    page.publish_all(*publishers)
    assert len(page.text()) == 4 * 2_000_000
    assert page.fullest_window()[0] < BYTES * WINDOW


def test_small_messages_are_paced_too(page: Page) -> None:
    publisher = page.paced()
    for i in range(5000):
        publisher.text("stdout" if i % 2 else "stderr", "x\n")
        page.clock.now += 0.0001
        publisher.pump()
    page.publish_all(publisher)
    assert page.fullest_window()[1] < MESSAGES * WINDOW / 2
    assert page.text().count("x") + page.text("stderr").count("x") == 5000


def test_as_much_as_the_limit_is_shown_whole(page: Page) -> None:
    publisher = page.publisher()
    publisher.text("stdout", LINE * (FOLD_LIMIT // 100))
    publisher.finish()
    publisher.pump()
    assert page.shows(LINE * (FOLD_LIMIT // 100))


@pytest.mark.parametrize("chunk", [1, 1000, 1_000_000])
def test_above_the_limit_first_and_last_are_shown_and_one_line_says_what_is_not(chunk: int, page: Page) -> None:
    publisher = page.publisher()
    lines = [f"{i:099d}\n" for i in range(200_000)]
    for start in range(0, len(lines), chunk):
        publisher.text("stdout", "".join(lines[start : start + chunk]))
    publisher.pump()
    publisher.finish()
    publisher.pump()
    found = page.text().splitlines(keepends=True)
    [note] = [line for line in found if "logs" in line]
    place = found.index(note)
    last = len(found) - place - 1
    assert found[:place] == lines[: FOLD_LIMIT // 100]
    assert FOLD_TAIL // 100 - 1 <= last <= FOLD_TAIL // 100 and found[place + 1 :] == lines[-last:]
    assert "10.5 MiB" in note and "`%distributed logs --cell 7`" in note


@pytest.mark.parametrize("chunk", [100_000, 20_000_000])
def test_one_line_above_the_limit_is_folded_too(chunk: int, page: Page) -> None:
    publisher = page.publisher()
    for _ in range(20_000_000 // chunk):
        publisher.text("stdout", "x" * chunk)
    publisher.finish()
    publisher.pump()
    first, note, last = page.text().split("\n")
    assert len(first) == FOLD_LIMIT and "logs --cell 7" in note and len(last) == FOLD_TAIL


def test_text_that_waits_is_bounded(page: Page) -> None:
    publisher = page.paced()
    for _ in range(1000):
        publisher.text("stdout", LINE * 1000)
    publisher.finish()
    assert page.publish_all(publisher) < 15.0
    assert len(page.text()) < FOLD_LIMIT + FOLD_TAIL + 1000


def test_after_an_interrupt_the_page_gets_the_end_at_once(page: Page) -> None:
    publisher = page.paced()
    lines = [f"{i:099d}\n" for i in range(60_000)]
    publisher.text("stdout", "".join(lines))
    publisher.pump()
    while (due := publisher.due()) is not None and due < 0.1:
        page.clock.now += due
        publisher.pump()
    publisher.hurry()
    publisher.finish()
    assert page.publish_all(publisher) < 0.5
    text = page.text()
    assert text.endswith(lines[-1]) and text.startswith(lines[0]) and "logs --cell 7" in text
    assert page.fullest_window()[0] < BYTES * WINDOW


def test_what_ranks_print_between_interrupt_and_end_does_not_hold_up_the_notebook(page: Page) -> None:
    publisher = page.paced()
    publisher.text("stdout", LINE * 20_000)
    page.publish_all(publisher)
    publisher.hurry()
    for i in range(50_000):
        publisher.text("stdout", f"{i:099d}\n")
    publisher.finish()
    assert page.publish_all(publisher) < 0.5
    assert page.text().endswith(f"{49_999:099d}\n") and "logs --cell 7" in page.text()


def test_after_an_interrupt_a_folded_cell_ends_at_once_too(page: Page) -> None:
    publisher = page.paced()
    publisher.text("stdout", LINE * 200_000)
    while page.clock.now < 200.0 and (due := publisher.due()) is not None:
        page.clock.now += due
        publisher.pump()
    publisher.hurry()
    publisher.finish()
    assert page.publish_all(publisher) < 0.5
    assert page.text().endswith(LINE) and "logs --cell 7" in page.text()


def test_an_interrupt_shows_what_little_waits(page: Page) -> None:
    publisher = page.paced()
    publisher.text("stdout", LINE * 100)
    publisher.hurry()
    publisher.finish()
    page.publish_all(publisher)
    assert page.shows(LINE * 100)


def test_what_is_abandoned_is_said(page: Page) -> None:
    publisher = page.paced()
    publisher.text("stdout", LINE * 60_000)
    publisher.pump()
    publisher.finish()
    publisher.abandon()
    page.publish_all(publisher)
    assert "not shown here" in page.messages[-1][2] and "logs --cell 7" in page.messages[-1][2]


def test_what_comes_late_is_shown_until_there_is_no_more_room(page: Page) -> None:
    publisher = page.publisher()
    publisher.text("stdout", "in time\n")
    publisher.finish()
    for _ in range(200):
        publisher.text("stdout", LINE * 1000)
        publisher.pump()
    text = page.text()
    assert text.startswith("in time\n" + LINE) and FOLD_LIMIT - 200_000 < len(text) < FOLD_LIMIT + 200
    assert text.count("logs --cell 7") == 1


def test_a_cleared_area_has_room_again(page: Page) -> None:
    publisher = page.publisher()
    publisher.text("stdout", LINE * 100_000)
    publisher.pump()
    page.messages.clear()
    publisher.clear(wait=True)
    publisher.text("stdout", LINE * 1000)
    publisher.finish()
    publisher.pump()
    assert page.shows(LINE * 1000)


def test_a_page_that_cannot_keep_up_with_displays_says_so(page: Page) -> None:
    publisher = page.paced()
    shown = 0
    while not publisher.crowded and shown < 10_000:
        publisher.item("display", {"image/png": ""}, {})
        publisher.pump()
        shown += 1
    assert 1_000 < shown < MESSAGES * WINDOW
    page.publish_all(publisher)
    assert not publisher.crowded
