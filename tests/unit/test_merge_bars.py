"""Progress bars of N ranks as one: what is drawn in place, when a bar ends, and that it garbles no line."""

from __future__ import annotations

from typing import Any

import pytest
from tqdm import tqdm

from nbdist.client.output.bars import signature
from nbdist.client.output.merge import Merger
from nbdist.client.output.page import Shown, Stream, Text
from tests.support.merging import WINDOW, Page, bar, merged, text_of


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


def test_each_ranks_own_bar_is_known_by_the_line_that_is_shown() -> None:
    merger = Merger(range(2))
    start_bars(merger, 10, 30)
    assert text_of(merger.poll(WINDOW)).strip() in merger.bars
    assert list(merger.bars.values()) == [{0: bar(10, 10), 1: bar(30, 11)}]
    start_bars(merger, 20, 40)
    merger.poll(1.0)
    assert list(merger.bars.values()) == [{0: bar(20, 10), 1: bar(40, 11)}]  # in the place of the one before
    start_bars(merger, 100, 100)
    for rank in range(2):
        merger.feed(rank, "stderr", "\n", 2.0)
    shown = Page().show(merger.poll(2.0)).text[-1]
    assert merger.bars == {shown: {0: bar(100, 10), 1: bar(100, 11)}}


def test_of_a_bar_that_is_drawn_again_below_other_output_only_the_last_line_is_known() -> None:
    merger = Merger(range(2))
    start_bars(merger, 10, 30)
    merger.poll(WINDOW)
    merger.feed(0, "stdout", "text\n", 1.0)
    merger.feed(1, "stdout", "text\n", 1.0)
    merger.poll(1.0)
    start_bars(merger, 20, 40)
    merger.poll(2.0)
    assert list(merger.bars.values()) == [{0: bar(20, 10), 1: bar(40, 11)}]


def test_a_rank_that_has_begun_its_next_bar_has_that_one() -> None:
    merger = Merger(range(2))
    start_bars(merger, 10, 30)
    merger.poll(WINDOW)
    merger.feed(0, "stderr", "\r" + bar(100, 10) + "\n\r" + bar(5, 1), 1.0)
    merger.feed(1, "stderr", "\r" + bar(40, 11), 1.0)
    merger.poll(1.0 + WINDOW)
    assert list(merger.bars.values()) == [{0: bar(5, 1), 1: bar(40, 11)}]


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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_of_any_stream_leaves_no_trace_of_the_bar_above(stream: Stream) -> None:
    merger = Merger(range(2))
    page = Page()
    merger.feed(0, "stderr", "\r" + bar(10), 0.0)
    page.show(merger.poll(WINDOW))
    merger.feed(1, stream, "warning\n", 1.0)
    page.show(merger.poll(1.0 + WINDOW))
    assert page.text == ["[1] warning", f"[0] {bar(10)}"]


def test_a_bar_with_prints_on_another_stream_is_shown_once_in_its_last_state() -> None:
    merger = Merger(range(2))
    shown: list[Text | Shown] = []
    for epoch in range(3):
        for percent in (50, 100):
            now = 10.0 * epoch + percent / 20
            for rank in (0, 1):
                merger.feed(rank, "stderr", "\r" + bar(percent, 10 + rank) + "\n" * (percent == 100), now)
            shown += merger.poll(now + WINDOW)
            for rank in (0, 1):
                merger.feed(rank, "stdout", f"loss {percent}\n", now + 1)
            shown += merger.poll(now + 1)
    shown += merger.flush(99.0)
    pages = {stream: Page().show([each for each in shown if each.stream == stream]) for stream in ("stdout", "stderr")}  # type: ignore[union-attr]
    assert pages["stdout"].text == ["[0-1] loss 50", "[0-1] loss 100"] * 3
    assert pages["stderr"].text == [f"[0-1] {bar(100)}"] * 3


def test_nothing_but_text_is_left_where_a_bar_was_drawn() -> None:
    merger = Merger([0])
    merger.feed(0, "stderr", "\r" + bar(10), 0.0)
    shown = merger.poll(0.0)
    merger.put(0, "plot", "plot", 1.0)
    shown += merger.poll(1.0)
    at = next(index for index, each in enumerate(shown) if isinstance(each, Shown))
    assert Page().show(shown[:at]).lines == [[]]
    assert Page().show(shown[at:]).text == [f"[0] {bar(10)}"]


def test_bars_of_both_streams_share_the_progress_line() -> None:
    merger = Merger([0])
    page = Page()
    for step in (1, 2):
        merger.feed(0, "stdout", f"\rload {step} %", float(step))
        merger.feed(0, "stderr", f"\rsave {step} %", float(step))
        page.show(merger.poll(float(step)))
    assert page.text == ["[0] save 2 %  [0] load 2 %"]
    assert list(merger.bars.values()) == [{0: "save 2 %  load 2 %"}]


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
    bars = [tqdm(file=Stderr(rank), **made) for rank in (0, 1)]
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
        (
            "Work \x1b[90m━━━━━━━━━\x1b[0m \x1b[35m  0%\x1b[0m \x1b[36m-:--:--\x1b[0m",
            "Work \x1b[91m━━━\x1b[0m\x1b[90m╺━━━━━\x1b[0m \x1b[35m 45%\x1b[0m \x1b[36m0:00:12\x1b[0m",
            True,
        ),
        ("Train: 10%|█ | 1/10", "Valid: 10%|█ | 1/10", False),
        ("[train] 10 %", "[valid] 10 %", False),
    ],
)
def test_bars_are_the_same_when_only_numbers_and_blocks_differ(one: str, other: str, same: bool) -> None:
    assert (signature(one) == signature(other)) is same
