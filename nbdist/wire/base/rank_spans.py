"""Ranks in few bytes: those of most groups are consecutive, or as far apart as a mesh has them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import msgspec

from nbdist.wire.base.message import Whole

Span = tuple[Whole, int, Whole]  # the first rank, the distance from each to the next, and how many there are

_MOST = 1 << 16  # ranks: as many as a message can count


class RankSpans(msgspec.Struct, array_like=True, frozen=True):
    """Ranks in an order, like the tuple of them."""

    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if sum(count for _, _, count in self.spans) > _MOST:
            raise ValueError(f"more than {_MOST:,} ranks")

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSpans:
        """Return these ranks."""
        return _packed(tuple(ranks))

    def __iter__(self) -> Iterator[int]:
        return iter(_unpacked(self))

    def __contains__(self, rank: object) -> bool:
        return rank in _unpacked(self)

    def __len__(self) -> int:
        return sum(count for _, _, count in self.spans)


@functools.lru_cache(256)
def _packed(ranks: tuple[int, ...]) -> RankSpans:
    spans: list[Span] = []
    for rank in ranks:
        if spans:
            first, step, count = spans[-1]
            if count == 1 or rank == first + count * step:
                spans[-1] = first, rank - first if count == 1 else step, count + 1
                continue
        spans.append((rank, 0, 1))
    return RankSpans(tuple(spans))


@functools.lru_cache(1024)  # the same few for all ranks of a session
def _unpacked(ranks: RankSpans) -> tuple[int, ...]:
    return tuple(first + place * step for first, step, count in ranks.spans for place in range(count))
