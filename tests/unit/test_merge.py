"""The output of N ranks as one text: what is merged, when it goes out, and that nothing is lost."""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from nbdist.client.merge import Merger
from nbdist.client.page import Shown, Stream, Text
from nbdist.client.progress import signature
from nbdist.ranks import parse_ranks

WINDOW = 0.05
PREFIX = re.compile(r"\[([0-9,-]+)\] ")

Emitted = list[Text | Shown]


def text_of(emitted: Emitted) -> str:
    return "".join(each.text for each in emitted if isinstance(each, Text))


def merged(chunks: dict[int, str], ranks: int, at: float = 0.0) -> str:
    """What goes out at once when each rank has printed its chunk."""
    merger = Merger(range(ranks))
    for rank, text in chunks.items():
        merger.feed(rank, "stdout", text, at)
    return text_of(merger.poll(at))


class Page:
    """A cell's output area that shows text as front ends do: what follows a carriage return overwrites."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = [[]]
        self.column = 0

    def show(self, emitted: Emitted) -> Page:
        for each in emitted:
            if isinstance(each, Shown):
                assert self.column == 0, "a rich item in the middle of a line"
                continue
            for character in each.text:
                self._put(character)
        return self

    def _put(self, character: str) -> None:
        if character == "\n":
            self.lines.append([])
            self.column = 0
        elif character == "\r":
            self.column = 0
        else:
            self.lines[-1][self.column : self.column + 1] = [character]
            self.column += 1

    @property
    def text(self) -> list[str]:
        lines = ["".join(line).rstrip() for line in self.lines]
        return lines if lines[-1] else lines[:-1]


def by_rank(emitted: Emitted) -> dict[int, list[tuple[str, Any]]]:
    """What each rank printed, in order: (stream, line) and ("item", item). For texts that rewrite nothing."""
    printed: dict[int, list[tuple[str, Any]]] = defaultdict(list)
    opened: tuple[tuple[int, ...], str, str] | None = None
    for each in emitted:
        if isinstance(each, Shown):
            assert opened is None, "a rich item in the middle of a line"
            for rank in each.ranks:
                printed[rank].append(("item", each.item))
            continue
        rest = each.text
        while rest:
            part, newline, rest = rest.partition("\n")
            if opened is None:
                prefix = PREFIX.match(part)
                assert prefix, f"a line without ranks: {part!r}"
                opened = parse_ranks(prefix[1], 100), each.stream, ""
                part = part[prefix.end() :]
            assert opened[1] == each.stream or not part, "a line of two streams"
            opened = opened[0], opened[1], opened[2] + part
            if newline:
                for rank in opened[0]:
                    printed[rank].append(opened[1:])
                opened = None
    assert opened is None, "the last line is open"
    return printed


# When lines go out, and under which ranks.


def test_a_line_that_all_ranks_have_goes_out_at_once_and_once() -> None:
    assert merged(dict.fromkeys(range(8), "epoch 1\n"), ranks=8) == "[0-7] epoch 1\n"


def test_a_line_waits_for_the_other_ranks_until_the_window_has_passed() -> None:
    merger = Merger(range(4))
    for rank in (0, 2, 3):
        merger.feed(rank, "stdout", "a\n", 0.0)
    assert merger.poll(0.049) == []
    assert merger.poll(WINDOW) == [Text("stdout", "[0,2-3] a\n")]


def test_a_latecomer_gets_a_line_of_its_own() -> None:
    merger = Merger(range(4))
    for rank in (0, 1, 2):
        merger.feed(rank, "stdout", "a\n", 0.0)
    merger.poll(WINDOW)
    merger.feed(3, "stdout", "a\n", 0.1)
    assert merger.poll(0.1 + WINDOW) == [Text("stdout", "[3] a\n")]


def test_a_line_before_one_that_all_ranks_have_goes_out_at_once() -> None:
    chunks = {0: "setup\nepoch 1\n", 1: "epoch 1\n", 2: "epoch 1\n", 3: "epoch 1\n"}
    assert merged(chunks, ranks=4) == "[0] setup\n[0-3] epoch 1\n"


def test_equal_lines_before_one_that_all_ranks_have_are_merged() -> None:
    chunks = {0: "setup\nepoch 1\n", 1: "epoch 1\n", 2: "setup\nepoch 1\n"}
    assert merged(chunks, ranks=3) == "[0,2] setup\n[0-2] epoch 1\n"


def test_different_lines_do_not_keep_equal_ones_behind_them_from_merging() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "I am 0\nsame\nI was 0\n", 0.0)
    merger.feed(1, "stdout", "I am 1\nsame\nI was 1\n", 0.0)
    assert text_of(merger.poll(WINDOW)) == "[0] I am 0\n[1] I am 1\n[0-1] same\n[0] I was 0\n[1] I was 1\n"


def test_long_equal_stretches_merge_whatever_their_chunks() -> None:
    lines = [f"step {step}\n" for step in range(1000)]
    merger = Merger(range(3))
    for rank, size in ((0, 7), (1, 300), (2, 1000)):
        for start in range(0, 1000, size):
            merger.feed(rank, "stdout", "".join(lines[start : start + size]), 0.0)
    assert text_of(merger.poll(0.0)) == "".join("[0-2] " + line for line in lines)


def test_a_difference_deep_in_a_long_stretch_splits_only_there() -> None:
    lines = [f"step {step}\n" for step in range(1000)]
    other = [*lines[:700], "step 700 again\n", *lines[700:]]
    assert merged({0: "".join(lines), 1: "".join(other)}, ranks=2) == "".join(
        ("[1] " if line == "step 700 again\n" else "[0-1] ") + line for line in other
    )


def test_one_rank_in_all_waits_for_nobody() -> None:
    merger = Merger([3])
    merger.feed(3, "stdout", "a\nb", 0.0)
    assert merger.poll(0.0) == [Text("stdout", "[3] a\n[3] b")]


def test_a_line_that_has_gone_out_is_not_waited_for_again() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "epoch\n", 0.0)
    merger.poll(WINDOW)
    merger.feed(0, "stdout", "new\n", 1.0)
    merger.feed(1, "stdout", "epoch\n", 1.0)
    assert merger.poll(1.0) == []


def test_nobody_waits_for_a_finished_rank() -> None:
    merger = Merger(range(3))
    merger.finish(1, 0.0)
    merger.feed(0, "stdout", "a\n", 0.0)
    merger.feed(2, "stdout", "a\n", 0.0)
    assert merger.poll(0.0) == [Text("stdout", "[0,2] a\n")]


def test_a_line_of_a_finished_rank_still_merges() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "a\n", 0.0)
    merger.finish(0, 0.0)
    merger.feed(1, "stdout", "a\n", 0.01)
    assert merger.poll(0.01) == [Text("stdout", "[0-1] a\n")]


def test_a_line_meets_one_that_stands_deeper_on_a_rank_that_has_finished() -> None:
    merger = Merger(range(2))
    merger.feed(1, "stdout", "rank 1\nhello\n", 0.0)
    merger.finish(1, 0.0)
    merger.feed(0, "stdout", "rank 0\nhello\n", 0.01)
    assert text_of(merger.poll(0.01)) == "[0] rank 0\n[1] rank 1\n[0-1] hello\n"


def test_lines_that_are_due_together_go_out_in_the_order_of_ranks() -> None:
    merger = Merger(range(2))
    merger.feed(1, "stdout", "one\n", 0.0)
    merger.feed(0, "stdout", "zero\n", 0.01)
    assert text_of(merger.flush(0.02)) == "[0] zero\n[1] one\n"


def test_nothing_waits_when_all_ranks_have_finished() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "a\n", 0.0)
    for rank in (0, 1):
        merger.finish(rank, 0.0)
    assert merger.poll(0.0) == [Text("stdout", "[0] a\n")]


def test_stdout_and_stderr_are_never_merged() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "a\n", 0.0)
    merger.feed(1, "stderr", "a\n", 0.0)
    assert merger.flush(0.0) == [Text("stdout", "[0] a\n"), Text("stderr", "[1] a\n")]


def test_flush_gives_all_that_is_left() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "a\nb", 0.0)
    assert merger.flush(0.0) == [Text("stdout", "[0] a\n[0] b\n")]
    assert merger.deadline() is None


# Exactness.


@pytest.mark.parametrize(
    "line",
    [
        "",
        " ",
        "\tindented\t ",
        "\x1b[31mred\x1b[0m",
        "windows\r",
        "\U0001f680 \U00020bb7",
        "[1] a",
        "\x0b\x0c\x1c\x85\u2028",
    ],
)
def test_a_line_arrives_as_it_was_printed(line: str) -> None:
    assert merged({0: line + "\n"}, ranks=1) == f"[0] {line}\n"


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_windows_line_end_is_kept_wherever_it_is_cut(cut: int) -> None:
    merger = Merger([0])
    merger.feed(0, "stdout", "ab\r\ncd\r\n"[:cut], 0.0)
    merger.feed(0, "stdout", "ab\r\ncd\r\n"[cut:], 0.0)
    assert text_of(merger.flush(0.0)) == "[0] ab\r\n[0] cd\r\n"


def test_millions_of_characters_without_a_newline_arrive() -> None:
    text = "0123456789" * 500_000
    merger = Merger(range(2))
    for start in range(0, len(text), 4096):
        merger.feed(0, "stdout", text[start : start + 4096], start / 1e6)
        merger.poll(start / 1e6)
    merger.feed(1, "stdout", text, 9.0)
    emitted = merger.poll(10.0)
    assert emitted[-1] == Text("stdout", f"\n[1] {text}")


# Incomplete lines.


def test_an_incomplete_line_is_shown_after_the_window_and_continued_in_place() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "loading", 0.0)
    assert merger.poll(0.04) == []
    assert merger.poll(WINDOW) == [Text("stdout", "[0] loading")]
    merger.feed(0, "stdout", " ...", 0.1)
    assert merger.poll(0.1) == [Text("stdout", " ...")]
    merger.feed(0, "stdout", " done\nnext\n", 0.2)
    assert merger.poll(0.2) == [Text("stdout", " done\n")]


def test_equal_incomplete_lines_are_shown_and_continued_as_one() -> None:
    merger = Merger(range(3))
    for part, now in (("loading", 0.0), (" ...", 1.0), (" done\n", 2.0)):
        for rank in range(3):
            merger.feed(rank, "stdout", part, now)
        page = merger.poll(now + WINDOW)
        assert page == [Text("stdout", part if now else "[0-2] loading")]


def test_ranks_that_go_on_differently_part_on_new_lines() -> None:
    merger = Merger(range(2))
    for rank in (0, 1):
        merger.feed(rank, "stdout", "loading", 0.0)
    merger.poll(WINDOW)
    merger.feed(0, "stdout", " done\n", 1.0)
    merger.feed(1, "stdout", " failed\n", 1.0)
    assert text_of(merger.poll(1.0 + WINDOW)) == "\n[0]  done\n[1]  failed\n"


def test_an_incomplete_line_is_closed_when_another_rank_prints() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "loading", 0.0)
    merger.poll(WINDOW)
    merger.feed(1, "stdout", "hello\n", 0.1)
    assert text_of(merger.poll(0.1 + WINDOW)) == "\n[1] hello\n"
    merger.feed(0, "stdout", " done\n", 0.2)
    assert text_of(merger.poll(0.2 + WINDOW)) == "[0]  done\n"


def test_an_incomplete_line_is_closed_before_the_other_stream_is_shown() -> None:
    merger = Merger([0])
    merger.feed(0, "stdout", "loading", 0.0)
    merger.poll(0.0)
    merger.feed(0, "stderr", "warning\n", 0.1)
    assert merger.poll(0.1) == [Text("stdout", "\n"), Text("stderr", "[0] warning\n")]


def test_a_line_cut_by_output_on_the_other_stream_stays_whole() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "first half, ", 0.0)
    merger.feed(0, "stderr", "warning\n", 0.0)
    merger.feed(0, "stdout", "second half\n", 0.0)
    assert "[0] first half, second half\n" in text_of(merger.flush(0.0))


def test_the_end_of_a_rank_completes_its_line() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "bye", 0.0)
    merger.feed(1, "stdout", "bye\n", 0.0)
    merger.finish(0, 0.0)
    assert merger.poll(0.0) == [Text("stdout", "[0-1] bye\n")]


def test_flush_ends_a_line_that_is_shown_already() -> None:
    merger = Merger([0])
    merger.feed(0, "stderr", "bye", 0.0)
    assert merger.poll(0.0) + merger.flush(0.0) == [Text("stderr", "[0] bye"), Text("stderr", "\n")]


# Rich items.


def test_equal_items_of_all_ranks_go_out_once() -> None:
    merger = Merger(range(2))
    for rank in (0, 1):
        merger.put(rank, "figure", f"item of rank {rank}", 0.0)
    assert merger.poll(0.0) == [Shown((0, 1), "item of rank 0")]


def test_different_items_go_out_by_rank() -> None:
    merger = Merger(range(2))
    for rank in (0, 1):
        merger.put(rank, rank, f"item of rank {rank}", 0.0)
    assert merger.poll(WINDOW) == [Shown((0,), "item of rank 0"), Shown((1,), "item of rank 1")]


def test_an_item_keeps_its_place_between_lines() -> None:
    merger = Merger([0])
    merger.feed(0, "stdout", "before\nlast", 0.0)
    merger.put(0, "figure", "item", 0.0)
    merger.feed(0, "stdout", "after\n", 0.0)
    assert merger.poll(0.0) == [
        Text("stdout", "[0] before\n[0] last\n"),
        Shown((0,), "item"),
        Text("stdout", "[0] after\n"),
    ]


def test_an_item_and_a_line_of_the_same_name_are_different() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stdout", "figure\n", 0.0)
    merger.put(1, "figure", "item", 0.0)
    assert merger.flush(0.0) == [Text("stdout", "[0] figure\n"), Shown((1,), "item")]


# Progress bars.


def bar(percent: int, rate: float = 10.0) -> str:
    filled = "█" * (percent // 10)
    return f"Train: {percent:3d}%|{filled:10}| {percent}/100 [00:03<00:06, {rate:.2f}it/s]"


def start_bars(merger: Merger, *percents: int) -> None:
    for rank, percent in enumerate(percents):
        merger.feed(rank, "stderr", "\r" + bar(percent, 10 + rank), 0.0)


def test_only_the_last_state_of_a_complete_line_counts() -> None:
    assert merged({0: "a\rbb\rc\n"}, ranks=1) == "[0] c\n"


def test_a_line_that_rewrites_itself_is_shown_in_place_and_padded() -> None:
    merger = Merger([0])
    merger.feed(0, "stdout", "\rstep 10", 0.0)
    assert merger.poll(0.0) == [Text("stdout", "\r[0] step 10")]
    merger.feed(0, "stdout", "\rstep", 1.0)
    assert merger.poll(1.0) == [Text("stdout", "\r[0] step   ")]


def test_a_line_that_ends_in_a_carriage_return_is_rewritten_in_place() -> None:
    merger = Merger([0])
    page = Page()
    for step in range(3):
        merger.feed(0, "stdout", f"step {step}\r", float(step))
        page.show(merger.poll(float(step)))
    assert page.text == ["[0] step 2"]


def test_text_that_becomes_a_progress_line_later_is_overwritten() -> None:
    merger = Merger(range(2))
    page = Page()
    for now, text in ((0.0, "starting up"), (1.0, "\r10 %"), (2.0, "\rdone\n")):
        merger.feed(0, "stdout", text, now)
        page.show(merger.poll(now)).show(merger.poll(now + WINDOW))
    assert page.text == ["[0] done"]


def test_a_shown_text_is_overwritten_by_the_line_that_replaces_it() -> None:
    merger = Merger([0])
    page = Page()
    for now, text in ((0.0, "starting up"), (1.0, "\rdone\n")):
        merger.feed(0, "stdout", text, now)
        page.show(merger.poll(now))
    assert page.text == ["[0] done"]


def test_what_one_rank_overwrites_stays_for_the_others() -> None:
    merger = Merger(range(2))
    page = Page()
    for rank in (0, 1):
        merger.feed(rank, "stdout", "starting up", 0.0)
    page.show(merger.poll(WINDOW))
    merger.feed(0, "stdout", "\rdone\n", 1.0)
    assert page.show(merger.poll(1.0 + WINDOW)).text == ["[0-1] starting up", "[0] done"]


def test_a_bar_waits_for_the_same_bar_of_other_ranks_before_it_is_first_drawn() -> None:
    merger = Merger(range(2))
    merger.feed(0, "stderr", "\r" + bar(10), 0.0)
    assert merger.poll(0.04) == []


def test_a_progress_line_is_drawn_at_most_ten_times_a_second() -> None:
    merger = Merger([0])
    drawn = 0
    for step in range(1000):
        merger.feed(0, "stderr", "\r" + bar(step // 10), step / 1000)
        drawn += len(merger.poll(step / 1000))
    assert 9 <= drawn <= 10


def test_the_same_bar_on_all_ranks_is_one_line_with_the_rank_furthest_behind() -> None:
    merger = Merger(range(3))
    start_bars(merger, 45, 31, 40)
    assert text_of(merger.poll(WINDOW)) == f"\r[0-2] {bar(31, 11)} (31-45 %)"


def test_a_bar_without_differences_has_no_span() -> None:
    merger = Merger(range(2))
    start_bars(merger, 50, 50)
    assert text_of(merger.poll(WINDOW)) == f"\r[0-1] {bar(50, 10)}"


def test_different_bars_share_the_progress_line() -> None:
    merger = Merger(range(3))
    for rank, name in enumerate(("load", "save", "load")):
        merger.feed(rank, "stderr", f"\r{name} 1{rank} %", 0.0)
    assert text_of(merger.poll(WINDOW)) == "\r[0,2] load 10 % (10-12 %)  [1] save 11 %"


def test_a_bar_ends_once_when_all_its_ranks_have_ended_it() -> None:
    merger = Merger(range(2))
    page = Page()
    start_bars(merger, 90, 80)
    page.show(merger.poll(WINDOW))
    merger.feed(0, "stderr", "\r" + bar(100) + "\n", 1.0)
    page.show(merger.poll(1.0)).show(merger.poll(5.0))
    assert page.text == [f"[0-1] {bar(80, 11)} (80-100 %)"]
    merger.feed(1, "stderr", "\r" + bar(100, 12) + "\n", 6.0)
    assert page.show(merger.poll(6.0)).text == [f"[0-1] {bar(100)}"]
    assert page.column == 0


def test_a_bar_of_some_ranks_ends_the_window_after_the_last_of_them() -> None:
    merger = Merger(range(3))
    start_bars(merger, 90, 90)
    merger.poll(WINDOW)
    for rank in (0, 1):
        merger.feed(rank, "stderr", "\r" + bar(100) + "\n", 1.0)
    assert "\n" not in text_of(merger.poll(1.04))
    assert Page().show(merger.poll(1.0 + WINDOW)).text == [f"[0-1] {bar(100)}"]


def test_a_bar_ends_when_the_rank_it_waits_for_has_died() -> None:
    merger = Merger(range(2))
    start_bars(merger, 90, 80)
    merger.feed(0, "stderr", "\r" + bar(100) + "\n", 1.0)
    merger.poll(1.0)
    merger.finish(1, 2.0)
    assert Page().show(merger.poll(2.0)).text == [f"[0-1] {bar(80, 11)} (80-100 %)"]


def test_a_bar_ends_when_the_rank_it_waits_for_shows_it_no_longer() -> None:
    merger = Merger(range(2))
    page = Page()
    start_bars(merger, 100, 80)
    merger.feed(0, "stderr", "\n", 1.0)
    page.show(merger.poll(1.0))
    merger.feed(1, "stderr", "\r" + " " * 60 + "\r", 2.0)
    assert page.show(merger.poll(2.0)).text == [f"[0] {bar(100)}"]


def test_a_rank_whose_bar_has_ended_goes_on_printing_above_it() -> None:
    merger = Merger(range(2))
    page = Page()
    start_bars(merger, 100, 80)
    merger.feed(0, "stderr", "\nsaved\n", 1.0)
    page.show(merger.poll(1.0)).show(merger.poll(1.0 + WINDOW)).show(merger.poll(2.0))
    assert page.text == ["[0] saved", f"[0-1] {bar(80, 11)} (80-100 %)"]


def test_a_rank_one_epoch_ahead_does_not_pull_the_bar_back() -> None:
    merger = Merger(range(2))
    start_bars(merger, 100, 90)
    merger.feed(0, "stderr", "\n\r" + bar(5), 1.0)
    assert f"[0-1] {bar(90, 11)} (90-100 %)" in text_of(merger.poll(2.0))


def test_two_epochs_ahead_no_bar_is_lost() -> None:
    merger = Merger(range(2))
    start_bars(merger, 100, 90)
    page = Page()
    for now in (1.0, 2.0, 3.0):
        merger.feed(0, "stderr", f"\n\r{bar(100, now)}", now)
        page.show(merger.poll(now)).show(merger.poll(now + WINDOW))
    page.show(merger.flush(4.0))
    assert [line for line in page.text if line.startswith("[0] ")] == [f"[0] {bar(100, rate)}" for rate in (10, 1, 2)]


def test_a_line_is_shown_above_an_open_bar() -> None:
    merger = Merger([0])
    page = Page()
    merger.feed(0, "stderr", "\r" + bar(10), 0.0)
    page.show(merger.poll(0.0))
    merger.feed(0, "stdout", "loss 0.5\n", 1.0)
    page.show(merger.poll(1.0))
    assert page.text == [f"[0] {bar(10)}", "[0] loss 0.5", f"[0] {bar(10)}"]


def test_a_line_of_the_bars_own_stream_leaves_no_trace_of_the_bar_above() -> None:
    merger = Merger(range(2))
    page = Page()
    merger.feed(0, "stderr", "\r" + bar(10), 0.0)
    page.show(merger.poll(WINDOW))
    merger.feed(1, "stderr", "warning\n", 1.0)
    page.show(merger.poll(1.0 + WINDOW))
    assert page.text == ["[1] warning", f"[0] {bar(10)}"]


def test_a_bar_that_wipes_itself_out_disappears() -> None:
    merger = Merger(range(2))
    page = Page()
    start_bars(merger, 90, 90)
    page.show(merger.poll(WINDOW))
    for rank in (0, 1):
        merger.feed(rank, "stderr", "\r" + " " * 60 + "\r", 1.0)
    assert page.show(merger.poll(1.0)).text == []


def test_text_after_a_wiped_bar_is_a_line_of_its_own() -> None:
    merger = Merger(range(2))
    start_bars(merger, 90, 90)
    for rank in (0, 1):
        merger.feed(rank, "stderr", f"\r{' ' * 60}\raccuracy {rank} %\n", 1.0)
    assert Page().show(merger.flush(1.0)).text == ["[0] accuracy 0 %", "[1] accuracy 1 %"]


def test_a_message_printed_over_a_bar_is_never_taken_for_the_bar() -> None:
    merger = Merger(range(2))
    start_bars(merger, 90, 90)
    merger.feed(0, "stderr", "WARNING: low on memory\n", 1.0)
    merger.feed(1, "stderr", "\r" + bar(100) + "\n", 1.0)
    assert Page().show(merger.flush(1.0)).text == [f"[0] {bar(90)}WARNING: low on memory", f"[1] {bar(100)}"]


def test_last_states_that_are_no_bars_are_shown_for_each_rank() -> None:
    merger = Merger(range(2))
    for rank in (0, 1):
        merger.feed(rank, "stdout", f"\rloss 1.0\rloss 0.{rank}\n", 0.0)
    assert text_of(merger.flush(0.0)) == "[0] loss 0.0\n[1] loss 0.1\n"


def test_a_carriage_return_before_a_flood_of_data_loses_nothing() -> None:
    merger = Merger([0])
    merger.feed(0, "stdout", "10 %\r", 0.0)
    emitted = merger.poll(0.0)
    for _ in range(100):
        merger.feed(0, "stdout", "x" * 1000, 1.0)
        emitted += merger.poll(1.0)
    merger.feed(0, "stdout", "y\n", 1.0)
    assert Page().show(emitted + merger.flush(1.0)).text == ["[0] " + "x" * 100_000 + "y"]


@pytest.mark.parametrize("options", [{"ascii": True}, {"unit": "B", "unit_scale": True}, {"total": float("inf")}])
@pytest.mark.parametrize("leave", [True, False])
def test_real_tqdm_bars_of_two_ranks_are_one_line(options: dict[str, Any], leave: bool) -> None:
    merger = Merger(range(2))
    page = Page()

    class Stderr:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def write(self, text: str) -> None:
            merger.feed(self.rank, "stderr", text, now)

        def flush(self) -> None: ...

    now = 0.0
    made = {"total": 5000, "desc": "Train", "mininterval": 0, "leave": leave, "position": 0, **options}
    bars = [tqdm(file=Stderr(rank), **made) for rank in (0, 1)]  # type: ignore[arg-type]
    for step in range(1, 10):
        for rank, each in enumerate(bars):
            now = step + rank / 100
            each.update(500 + 10 * rank)
            page.show(merger.poll(now))
        page.show(merger.poll(step + 0.5))
        assert len(page.text) == 1
        assert page.text[0].startswith("[0-1] Train: ")
    now = 20.0
    for each in bars:
        each.close()
    page.show(merger.poll(20.0))
    assert len(page.text) == (1 if leave else 0)
    assert page.column == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (
            "Train:   0%|          | 0/4 [00:00<?, ?it/s]",
            "Train: 75%|#####5 | 3/4 [00:01<00:00, 9it/s, loss=0.5]",
            True,
        ),
        ("0it [00:00, ?it/s]", "31it [1:00:03,  1.5s/it, loss=nan]", True),
        ("  0%|  | 0.00/10.0M [00:00<?, ?B/s]", " 10%|▉ | 999k/10.0M [00:00<00:01, 1.2MB/s]", True),
        ("loss 1e-05", "loss 0.3", True),
        ("Train: 10%|█ | 1/10", "Valid: 10%|█ | 1/10", False),
        ("[train] 10 %", "[valid] 10 %", False),
    ],
)
def test_bars_are_the_same_when_only_numbers_and_blocks_differ(one: str, other: str, same: bool) -> None:
    assert (signature(one) == signature(other)) is same


# Whatever is printed, however it is cut, whenever it comes.

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
    for (rank, stream), text in printed.items():
        out = "".join(line + "\n" for where, line in shown[rank] if where == stream)
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
