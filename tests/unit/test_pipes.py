"""What comes out of the pipes of ranks is what was written, with each mark at its place, however it is cut."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.agent import pipes
from nbdist.agent.live_region import LiveOutput
from nbdist.agent.pipes import PipeReader
from nbdist.wire.messages.output import END, OUTPUT_WINDOW, STDERR, STDOUT, Output

TOKEN = b"\x1b]nbdist;0123456789abcdef;"

HIDE_CURSOR, MOVE_UP = b"\x1b[?25l", b"\x1b[A"

Mark = tuple[int, int]


def written(size: int) -> st.SearchStrategy[bytes]:
    """Any bytes that draw nothing: test_live_region.py has those."""
    return st.binary(max_size=size).filter(lambda data: HIDE_CURSOR not in data and MOVE_UP not in data)


def without_cursor_codes(words: bytes) -> bytes:
    """What readers get of words that draw nothing."""
    output = LiveOutput()
    return output.feed(words) + output.end()


texts = st.one_of(
    written(20),
    st.sampled_from([b"\x1b", b"\x1b[31m", b"\a", b"\n", b"line\n", TOKEN[:5], TOKEN[:-1]]),
)
marks = st.tuples(st.integers(0, 10**9), st.integers(0, 10**9))


@contextmanager
def reading(stream: int = STDOUT) -> Iterator[tuple[PipeReader, int]]:
    """A reader with one rank, and the end that the rank writes to."""
    reader = PipeReader(TOKEN)
    read, write = os.pipe()
    reader.add(0, stream, read)
    try:
        yield reader, write
    finally:
        os.close(write)
        reader.close()


def wire(pieces: list[bytes | Mark]) -> bytes:
    return b"".join(piece if isinstance(piece, bytes) else b"%s%d;%d\a" % (TOKEN, *piece) for piece in pieces)


def joined(outputs: list[Output]) -> list[bytes | Mark]:
    """Text and marks in their order, neighboring texts as one."""
    found: list[bytes | Mark] = [b""]
    for output in outputs:
        found[-1] += output.data  # type: ignore[operator]
        if output.mark is not None:
            found += [output.mark, b""]
    return found


def expected(pieces: list[bytes | Mark]) -> list[bytes | Mark]:
    return joined([Output(0, 1, b, None) if isinstance(b, bytes) else Output(0, 1, b"", b) for b in pieces])


def read_until(reader: PipeReader, size: int) -> list[Output]:
    """Read as the agent does, until this many bytes have come out."""
    outputs: list[Output] = []
    deadline = time.monotonic() + 5
    while sum(len(output.data) for output in outputs) < size:
        assert time.monotonic() < deadline
        outputs += reader.read()
        time.sleep(min(0.01, reader.due() or 0.0))
    return outputs


@given(st.lists(st.one_of(texts, marks), max_size=12), st.lists(st.integers(1, 40), max_size=30), st.booleans())
def test_text_and_marks_come_out_in_order_however_they_are_cut(
    pieces: list[bytes | Mark], cuts: list[int], at_once: bool
) -> None:
    data, pause = wire(pieces), 0.0 if at_once else 60.0
    outputs: list[Output] = []
    with (
        reading() as (reader, write),
        mock.patch.object(pipes, "COALESCE", pause),
        mock.patch.object(pipes, "LINE_END", pause),
    ):
        for size in [*cuts, len(data)]:
            os.write(write, data[:size])
            data = data[size:]
            outputs += reader.read()
        outputs += reader.drain(0)
    assert joined(outputs) == expected(pieces)


def test_a_line_goes_out_as_soon_as_it_is_complete() -> None:
    with reading() as (reader, write), mock.patch.object(pipes, "LINE_END", 60.0):
        os.write(write, b"hello")
        assert list(reader.read()) == []
        os.write(write, b"\n")
        assert [output.data for output in reader.read()] == [b"hello\n"]


def test_the_beginning_of_a_line_goes_out_soon_without_its_end() -> None:
    with reading() as (reader, write):
        os.write(write, b"hello")
        list(reader.read())
        assert reader.due() is not None and reader.due() < 0.05  # type: ignore[operator]
        assert [output.data for output in read_until(reader, 5)] == [b"hello"]


def test_a_stream_that_keeps_printing_goes_out_in_larger_pieces() -> None:
    with reading() as (reader, write), mock.patch.object(pipes, "COALESCE", 60.0):
        os.write(write, b"first\n")
        assert [output.data for output in reader.read()] == [b"first\n"]
        for _ in range(100):
            os.write(write, b"next\n")
            assert list(reader.read()) == []
        assert b"".join(output.data for output in reader.drain(0)) == b"next\n" * 100


def test_what_is_left_in_a_pipe_that_ended_comes_out_once() -> None:
    with reading() as (reader, write), mock.patch.object(pipes, "COALESCE", 60.0):
        os.write(write, b"first\n")
        list(reader.read())
        os.write(write, b"last words\n")
        list(reader.read())
        with open(os.devnull, "wb") as elsewhere:
            os.dup2(elsewhere.fileno(), write)  # the only writer has gone, as the reader sees it
        outputs = [*reader.read(), *reader.drain(0)]
        assert [output.data for output in outputs] == [b"last words\n"]


def test_what_follows_a_mark_goes_out_at_once() -> None:
    with reading() as (reader, write), mock.patch.object(pipes, "COALESCE", 60.0):
        os.write(write, wire([b"first\n", (7, 0), b"next cell\n"]))
        assert joined(list(reader.read())) == [b"first\n", (7, 0), b"next cell\n"]


def test_text_that_looks_like_the_beginning_of_a_mark_is_kept_only_while_it_may_become_one() -> None:
    with reading() as (reader, write):
        os.write(write, b"text" + TOKEN[:10])
        outputs = read_until(reader, 4)
        assert [output.data for output in outputs] == [b"text"]
        os.write(write, b"no mark\n")
        assert [output.data for output in read_until(reader, 18)] == [TOKEN[:10] + b"no mark\n"]


def test_a_rank_that_prints_more_than_is_taken_is_not_read_until_credit_comes() -> None:
    with reading() as (reader, write):
        os.set_blocking(write, False)
        taken = 0
        for _ in range(1000):
            try:
                os.write(write, b"x" * 60_000)
            except BlockingIOError:
                break
            taken += sum(len(output.data) for output in reader.read())
        else:
            raise AssertionError("it read on and on")
        assert OUTPUT_WINDOW <= taken <= OUTPUT_WINDOW + (1 << 18)
        reader.credit(0, taken)
        assert read_until(reader, 60_000)


def test_everything_that_a_dead_rank_has_left_is_read_whatever_its_credit() -> None:
    with reading() as (reader, write):
        os.set_blocking(write, False)
        written = 0
        outputs: list[Output] = []
        try:
            while True:
                written += os.write(write, b"y" * 60_000)
                outputs += reader.read()
        except BlockingIOError:
            outputs += reader.drain(0)
        assert sum(len(output.data) for output in outputs) == written


def test_the_end_of_stderr_is_remembered() -> None:
    with reading(STDERR) as (reader, write):
        os.write(write, b"x" * 20_000 + b"last words\n")
        list(reader.read())
        tail = reader.stderr_tail(0)
        assert tail.endswith("xlast words\n") and len(tail) <= 1 << 14


def test_last_words_are_of_the_cell_that_runs_and_of_no_earlier_one() -> None:
    with reading(STDERR) as (reader, stderr):
        read, stdout = os.pipe()
        reader.add(0, STDOUT, read)
        os.write(stderr, b"a warning of cell 1\n")
        os.write(stdout, wire([(1, END)]))
        list(reader.read())
        assert reader.stderr_tail(0) == ""
        os.write(stderr, b"cell 2\n")
        list(reader.drain(0))
        assert reader.stderr_tail(0) == "cell 2\n"
        os.close(stdout)


@given(written(3000))
def test_the_end_of_a_cell_comes_after_all_that_was_written_to_stderr_before_it(words: bytes) -> None:
    with reading(STDERR) as (reader, stderr):
        read, stdout = os.pipe()
        reader.add(0, STDOUT, read)
        os.write(stderr, words)
        os.write(stdout, wire([(1, END)]))
        outputs = list(reader.read())
        os.close(stdout)
        assert outputs[-1].mark == (1, END)
        assert b"".join(output.data for output in outputs if output.stream == STDERR) == without_cursor_codes(words)


@pytest.mark.parametrize("stream", [STDOUT, STDERR])
def test_what_is_drawn_when_a_cell_ends_comes_out_before_its_end(stream: int) -> None:
    with reading(STDERR) as (reader, stderr):
        read, stdout = os.pipe()
        reader.add(0, STDOUT, read)
        os.write(stderr if stream == STDERR else stdout, HIDE_CURSOR + b"10 %")
        os.write(stdout, wire([(1, END)]))
        outputs = list(reader.read())
        os.close(stdout)
        assert outputs[-1].mark == (1, END)
        assert b"".join(output.data for output in outputs if output.stream == stream) == b"\r10 %\r10 %\n"


def test_escape_sequences_cost_no_more_than_other_text() -> None:
    colors = b"\x1b[31mx\x1b[0m" * 200_000
    with reading() as (reader, write):
        os.set_blocking(write, False)
        began, rest, size = time.monotonic(), colors, 0
        while size < len(colors):
            if rest:
                with suppress(BlockingIOError):
                    rest = rest[os.write(write, rest[:1000]) :]
            size += (taken := sum(len(output.data) for output in reader.read()))
            reader.credit(0, taken)
        assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("torn", [b"", b"7", b"7;", b"seven;0", b"7;0;0", b"9" * 400 + b";0", b"7;-"])
@pytest.mark.parametrize("end", [b"\a", b""])
def test_a_mark_that_is_torn_is_text_and_the_next_one_is_found(torn: bytes, end: bytes) -> None:
    with reading() as (reader, write):
        os.write(write, b"before\n" + TOKEN + torn + end + wire([(7, END), b"after\n"]))
        outputs = joined([*reader.read(), *reader.drain(0)])
    assert outputs == [b"before\n" + TOKEN + torn + end, (7, END), b"after\n"]


def test_lines_printed_while_the_cursor_is_hidden_come_out_soon_though_nothing_follows() -> None:
    with reading() as (reader, write):
        os.write(write, HIDE_CURSOR + b"one\ntwo\n")
        outputs = read_until(reader, len(b"one\ntwo\n"))
        os.write(write, b"three\n")
        outputs += read_until(reader, len(b"three\n"))
    lines = joined(outputs)[0].split(b"\n")  # type: ignore[union-attr]
    assert [line.rpartition(b"\r")[2] for line in lines] == [b"one", b"two", b"three", b""]


def test_lines_that_are_drawn_again_are_held_for_as_long_as_that_goes_on() -> None:
    with reading() as (reader, write):
        os.write(write, HIDE_CURSOR + b"".join(b"row %d\n" % row for row in range(8)) + b"last\x1b[2K")
        reader.read()
        assert reader.due() is None
