"""The last collectives of ranks side by side, and the first in which they differ: `%distributed flight`.

Handles what ranks answer; independent of where they got it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist.base.ranks import ONE_NODE, RankNames
from nbdist.base.text import table
from nbdist.wire.questions.stopping import Collective, Flight

COUNT = 20
_BEFORE = 3  # collectives that are shown above the first difference
_COLUMNS = 6
_ALIKE = ("all_reduce", "allreduce", "all_gather", "broadcast", "reduce")  # called with equal tensors on all ranks

_Key = tuple[str, int]  # a group's name, and which of its collectives


@dataclass(frozen=True)
class Column:
    """Ranks whose last collectives are the same.

    Attributes:
        ranks: The ranks.
        calls: What they have entered, by group and number, in this order.
        groups: The names of the groups that they are in.
    """

    ranks: tuple[int, ...]
    calls: Mapping[_Key, Collective]
    groups: frozenset[str]

    def lacks(self, key: _Key) -> bool:
        """Return whether a collective is missing here: the ranks are in its group, and have no later ones only."""
        group, number = key
        known = [sequence for name, sequence in self.calls if name == group]
        return group in self.groups and key not in self.calls and (not known or number > min(known))


def render(flights: Mapping[int, Flight], count: int = COUNT, names: RankNames = ONE_NODE) -> str:
    """Return a table with a row for each collective and a column for each kind of rank."""
    columns = _columns(flights)
    keys = _in_order(columns)
    first = next((at for at, key in enumerate(keys) if _difference(columns, key, names)), None)
    start = max(0, len(keys) - count)
    if first is not None and first < start:
        start = max(0, first - _BEFORE)
    shown = columns[:_COLUMNS]
    rows = [
        (
            *_place(columns, key),
            *(_cell(column, key) for column in shown),
            f"<- {_difference(columns, key, names)}" if at == first else "",
        )
        for at, key in enumerate(keys[start : start + count], start)
    ]
    header = ("group", "#", *(names.describe(column.ranks) for column in shown), "")
    lines = [table(rows, header)]
    if len(columns) > len(shown):
        others = [rank for column in columns[_COLUMNS:] for rank in column.ranks]
        lines.append(f"{names.describe(sorted(others))}: not shown; `-r` chooses ranks")
    if any(not call.ended for column in columns for call in column.calls.values()):
        lines.append("…: has not ended")
    return "\n".join(lines)


def _columns(flights: Mapping[int, Flight]) -> list[Column]:
    """Return the columns, that of the lowest rank first."""
    alike: dict[tuple[tuple[Collective, ...], frozenset[str]], list[int]] = {}
    for rank in sorted(flights):
        calls = tuple(_newest(flights[rank].collectives))
        alike.setdefault((calls, frozenset(flights[rank].groups)), []).append(rank)
    return [
        Column(tuple(ranks), {(call.group, call.sequence): call for call in calls}, groups)
        for (calls, groups), ranks in alike.items()
    ]


def _newest(calls: Sequence[Collective]) -> list[Collective]:
    """Return the collectives since each group was made or rebuilt, when its count began again."""
    kept: list[Collective] = []
    first: dict[str, int] = {}
    for call in reversed(calls):
        if call.sequence < first.get(call.group, call.sequence + 1):
            first[call.group] = call.sequence
            kept.append(call)
    return kept[::-1]


def _in_order(columns: Sequence[Column]) -> list[_Key]:
    """Return all collectives in the order of the ranks."""
    order: list[_Key] = []
    for column in columns:
        at = 0
        for key in column.calls:
            if key in order:
                at = order.index(key) + 1
            else:
                order.insert(at, key)
                at += 1
    return order


def _difference(columns: Sequence[Column], key: _Key, names: RankNames) -> str:
    """Return in words how the ranks differ in a collective; "" if they don't."""
    calls = [column.calls[key] for column in columns if key in column.calls]
    if any(call.name != calls[0].name for call in calls):
        return "first difference"
    if calls[0].name.startswith(_ALIKE) and any(call.tensors != calls[0].tensors for call in calls):
        return "first difference"
    missing = sorted(rank for column in columns if column.lacks(key) for rank in column.ranks)
    return f"not yet on {names.describe(missing)}" if missing else ""


def _place(columns: Sequence[Column], key: _Key) -> tuple[str, int]:
    label = next(column.calls[key].label for column in columns if key in column.calls)
    return label.removeprefix("the ").removeprefix("group ").removesuffix(" group"), key[1]


def _cell(column: Column, key: _Key) -> str:
    call = column.calls.get(key)
    if call is None:
        return "-" if column.lacks(key) else ""
    return f"{call.name} {call.tensors}".rstrip() + (" …" if not call.ended else "")
