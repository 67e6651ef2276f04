"""Lines and rich items of N ranks as one text: what is merged, when it goes out, and in which order."""

from __future__ import annotations

import pytest

from nbdist.client.output.merge import Merger
from nbdist.client.output.page import Shown, Text
from tests.support.merging import WINDOW, merged, text_of

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
