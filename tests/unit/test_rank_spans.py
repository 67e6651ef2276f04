"""Groups of ranks travel in few bytes, in their order."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.frames import encode

FEW = 16  # bytes


def test_all_ranks_are_one_span() -> None:
    assert len(encode(RankSpans.of(range(4096)))) <= FEW


def test_so_is_a_column_of_a_mesh() -> None:
    assert len(encode(RankSpans.of(range(3, 4096, 8)))) <= FEW


@given(st.lists(st.integers(0, 5000)))
def test_any_ranks_come_back_in_their_order(ranks: list[int]) -> None:
    came = msgspec.msgpack.decode(encode(RankSpans.of(ranks)), type=RankSpans)
    assert list(came) == ranks and len(came) == len(ranks)


def test_equal_ranks_are_equal() -> None:
    assert RankSpans.of([0, 2, 4]) == RankSpans.of(range(0, 6, 2)) and hash(RankSpans.of([1])) == hash(
        RankSpans.of((1,))
    )


def test_more_ranks_than_there_can_be_are_refused() -> None:
    frame = msgspec.msgpack.encode([[[0, 0, 1 << 16], [0, 0, 1]]])
    with pytest.raises(msgspec.ValidationError, match="more than 65,536 ranks"):
        msgspec.msgpack.decode(frame, type=RankSpans)
