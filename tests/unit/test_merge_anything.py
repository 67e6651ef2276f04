"""Whatever ranks print, however it is cut, whenever it comes: nothing is lost, split or late."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nbdist.base.ranks import parse_ranks
from nbdist.client.output.merge import Merger
from nbdist.client.output.page import Stream
from tests.support.merging import PREFIX, Emitted, Page, bar, by_rank

LINES = st.sampled_from(["a", "b", "c", "", "  x\t", "[0] a", "\x1b[1mé\x1b[0m", "\U0001f680"])
STREAMS: st.SearchStrategy[Stream] = st.sampled_from(["stdout", "stderr"])
STEPS = st.sampled_from([0.0, 0.01, 0.03, 0.05, 0.2])


def cut(data: st.DataObject, text: str) -> list[str]:
    at = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=5)))
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]


@given(st.data(), st.integers(1, 4))
def test_each_rank_is_recovered_exactly_from_whole_lines_at_any_time(data: st.DataObject, ranks: int) -> None:
    merger, now = Merger(range(ranks)), 0.0
    printed: dict[int, list[tuple[str, Any]]] = defaultdict(list)
    emitted: Emitted = []
    for _ in range(data.draw(st.integers(1, 20))):
        rank, now = data.draw(st.integers(0, ranks - 1)), now + data.draw(STEPS)
        if data.draw(st.integers(0, 4)) == 0:
            item = data.draw(st.integers(0, 1))
            merger.put(rank, item, item, now)
            printed[rank].append(("item", item))
        else:
            stream, lines = data.draw(STREAMS), data.draw(st.lists(LINES, min_size=1, max_size=5))
            merger.feed(rank, stream, "".join(line + "\n" for line in lines), now)
            printed[rank].extend((stream, line) for line in lines)
        if data.draw(st.booleans()):
            emitted += merger.poll(now)
    emitted += merger.flush(now)
    assert by_rank(emitted) == printed


@given(st.data(), st.integers(1, 4))
def test_no_line_is_split_however_it_is_cut_within_the_window(data: st.DataObject, ranks: int) -> None:
    merger = Merger(range(max(2, ranks)))
    printed: dict[int, list[tuple[str, str]]] = {}
    chunks: dict[int, list[str]] = {}
    for rank in range(ranks):
        lines = data.draw(st.lists(LINES, min_size=1, max_size=8))
        printed[rank] = [("stdout", line) for line in lines]
        chunks[rank] = cut(data, "".join(line + "\n" for line in lines))
    emitted: Emitted = []
    while chunks:
        rank = data.draw(st.sampled_from(sorted(chunks)))
        merger.feed(rank, "stdout", chunks[rank].pop(0), 0.0)
        emitted += merger.poll(0.0)
        if not chunks[rank]:
            del chunks[rank]
    emitted += merger.flush(0.0)
    assert by_rank(emitted) == printed


@given(st.data(), st.integers(1, 3))
def test_lines_cut_anywhere_at_any_time_lose_nothing_but_gain_newlines(data: st.DataObject, ranks: int) -> None:
    merger, now = Merger(range(ranks)), 0.0
    printed: dict[tuple[int, str], str] = defaultdict(str)
    emitted: Emitted = []
    for _ in range(data.draw(st.integers(1, 20))):
        rank, stream, now = data.draw(st.integers(0, ranks - 1)), data.draw(STREAMS), now + data.draw(STEPS)
        text = data.draw(st.text("ab\n", max_size=4))
        merger.feed(rank, stream, text, now)
        printed[rank, stream] += text
        emitted += merger.poll(now)
    emitted += merger.flush(now)

    def ends(text: str) -> Counter[int]:
        """Where lines end, in characters from the start without counting newlines."""
        return Counter(len(before.replace("\n", "")) for before in (text[:i] for i, c in enumerate(text) if c == "\n"))

    shown = by_rank(emitted)
    for (rank, name), text in printed.items():
        out = "".join(line + "\n" for where, line in shown[rank] if where == name)
        assert out.replace("\n", "") == text.replace("\n", "")
        assert ends(text) <= ends(out)


PIECES = st.one_of(
    st.builds("{}\n".format, LINES),
    st.text("ab\n", max_size=3),
    st.builds("\r{}".format, st.integers(0, 100).map(bar)),
    st.builds("\rload {} %".format, st.integers(0, 100)),
    st.builds("\r{}\n".format, st.integers(0, 100).map(bar)),
    st.just("\r" + " " * 60 + "\r"),
    st.sampled_from(["\r", "\n", "x\r", "\r\n"]),
)


@given(st.data(), st.integers(1, 3))
def test_the_deadline_is_exactly_when_more_goes_out(data: st.DataObject, ranks: int) -> None:
    merger, now = Merger(range(ranks)), 0.0
    for _ in range(data.draw(st.integers(1, 15))):
        rank, now = data.draw(st.integers(0, ranks - 1)), now + data.draw(STEPS)
        what = data.draw(st.integers(0, 9))
        if what == 0:
            merger.put(rank, "key", "item", now)
        elif what == 1:
            merger.finish(rank, now)
        else:
            merger.feed(rank, data.draw(STREAMS), data.draw(PIECES), now)
        merger.poll(now)
        assert merger.poll(now) == []
        deadline = merger.deadline()
        if deadline is None:
            assert copy.deepcopy(merger).poll(now + 1000) == []
            continue
        assert deadline > now
        assert copy.deepcopy(merger).poll(max(now, deadline - 1e-6)) == []
        assert copy.deepcopy(merger).poll(deadline) != []


@given(st.data(), st.integers(1, 3))
def test_bars_never_garble_the_lines_of_any_rank(data: st.DataObject, ranks: int) -> None:
    merger, page, now = Merger(range(ranks)), Page(), 0.0
    printed: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    for _ in range(data.draw(st.integers(1, 25))):
        rank, now = data.draw(st.integers(0, ranks - 1)), now + data.draw(STEPS)
        if data.draw(st.booleans()):
            line = data.draw(st.sampled_from(["a", "b", "c"]))
            merger.feed(rank, "stdout", line + "\n", now)
            printed[rank].append(line)
        else:
            state = data.draw(st.one_of(st.integers(0, 100).map(bar), st.just("load 5 %"), st.just(" " * 60)))
            end = "\r" if state.isspace() else data.draw(st.sampled_from(["", "", "\n"]))
            merger.feed(rank, "stderr", f"\r{state}{end}", now)
        page.show(merger.poll(now))
    page.show(merger.flush(now))
    shown: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    for text in filter(None, page.text):
        prefix = PREFIX.match(text)
        assert prefix
        if text[prefix.end() :] in ("a", "b", "c"):
            for rank in parse_ranks(prefix[1], ranks):
                shown[rank].append(text[prefix.end() :])
        else:
            assert "%" in text
    assert shown == printed
    assert page.column == 0
