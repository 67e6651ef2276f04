"""What several ranks send alike travels as one message, and each rank's own order stays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from nbdist.wire.base.message import Message
from nbdist.wire.bundle import Bundle, unbundled
from nbdist.wire.messages.cells import Remark, Reply
from nbdist.wire.messages.output import PLAIN_END, STDOUT, Output

CELL = 7  # a serial number
RANKS = range(64)


def sent(*messages: Message) -> list[list[Message]]:
    """The messages that come out of each frame."""
    bundle = Bundle()
    for message in messages:
        bundle.add(message)
    return [list(unbundled(frame)) for frame in bundle.take()]


def end(rank: int) -> Output:
    return Output(rank, STDOUT, b"", (CELL, PLAIN_END))


def line(rank: int, data: bytes = b"a line\n") -> Output:
    return Output(rank, STDOUT, data)


def test_the_end_of_a_cell_on_all_ranks_is_one_frame() -> None:
    assert sent(*map(end, RANKS)) == [[end(rank) for rank in RANKS]]


def test_replies_that_say_only_that_all_went_well_are_one_frame() -> None:
    replies = [Reply(CELL, rank, "ok") for rank in RANKS]
    assert sent(*replies) == [replies]


def test_a_reply_with_a_result_is_a_frame_of_its_own() -> None:
    replies = [Reply(CELL, rank, "ok", result="1") for rank in range(2)]
    assert sent(*replies) == [[replies[0]], [replies[1]]]


def test_different_lines_are_frames_of_their_own() -> None:
    assert sent(line(0, b"a\n"), line(1, b"b\n")) == [[line(0, b"a\n")], [line(1, b"b\n")]]


def test_lines_and_ends_that_come_rank_by_rank_are_two_frames() -> None:
    came = [message for rank in RANKS for message in (line(rank), end(rank))]
    assert sent(*came) == [[line(rank) for rank in RANKS], [end(rank) for rank in RANKS]]


def test_a_rank_that_prints_a_line_twice_has_it_twice() -> None:
    assert sent(line(0), line(0), line(1)) == [[line(0)], [line(0), line(1)]]


def test_nothing_goes_before_a_message_of_another_kind_that_came_first() -> None:
    remark = Remark(CELL, "rank 1 waits")
    assert sent(line(0), remark, line(1)) == [[line(0)], [remark], [line(1)]]


def test_a_bundle_that_was_taken_is_empty() -> None:
    bundle = Bundle()
    bundle.add(line(0))
    assert bundle and len(bundle.take()) == 1
    assert not bundle and bundle.take() == []


KINDS = (line(0, b"a\n"), line(0, b"b\n"), end(0), Reply(CELL, 0, "ok"), Reply(CELL, 0, "ok", result="1"))


def test_what_each_rank_has_sent_arrives_whole_and_in_its_order() -> None:
    for kinds in itertools.product(KINDS, repeat=5):
        came = [msgspec.structs.replace(message, rank=place % 2) for place, message in enumerate(kinds)]
        arrived = [message for frame in sent(*came) for message in frame]
        for rank in (0, 1):
            assert of_rank(rank, arrived) == of_rank(rank, came)


def of_rank(rank: int, messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if getattr(message, "rank", None) == rank]
