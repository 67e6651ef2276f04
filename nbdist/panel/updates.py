"""What the page has been told, and the little that it has to be told next: at most 2 KB at a time.

Owns what is told when; labextension/src/state.ts puts it together again. Independent of what the values mean, or of
how they travel.

The full state goes out when ranks come or go. Afterwards an update carries the columns that differ, of the rows whose
change would be seen: `[index, columns as bits, values...]`. What does not fit waits: first come rows that deserve a
look, then those that have waited longest. A heat map draws `levels`, for each rank a character:
`[metric, first rank, characters]`; what state ranks are in is told so, too. Of 300 ranks each update brings all that
differ; of 1,024 every second one brings those of the metric that is looked at, and the others take turns.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from nbdist.panel.figures import TRENDS, clip, finite
from nbdist.panel.model import Node, Row, View, urgency
from nbdist.wire.pages.panel_messages import (
    HISTORY,
    LEVELS,
    METRICS,
    TREND_POINTS,
    HeadNews,
    HeadUpdate,
    Layer,
    Live,
    MapLevels,
    Metric,
    NodeRow,
    PanelFrame,
    PanelHead,
    PanelUpdate,
    Point,
    RankRow,
    RowDelta,
)

LIMIT = 2048  # bytes of an update, as JSON, with the widget's envelope
TREND_STEP = 2.0  # seconds between two points of what is drawn over time
_ENVELOPE = 64  # {"method": "custom", "content": {...}}
_NODES_SHARE = 0.25  # of an update that lines of nodes may take
_UNKNOWN = "."
_STATE: Final = "state"  # told like a metric, by its first letter, for those of all ranks change at once
_CHOSEN = 5  # the weight of the row that the reader looks at
_HOTTEST = 100.0  # degrees Celsius
_MIB = 1024**2

Encoded = list[Any]


class Updates:
    """What one page, or several that show the same, knows.

    Args:
        identity: Names this panel among all of a notebook.

    Attributes:
        chosen: Index of the row that the reader looks at closely; it comes first.
        metric: What the reader's heat map shows.
    """

    def __init__(self, identity: str) -> None:
        self.chosen: int | None = None
        self.metric: Metric = METRICS[0]
        self._turn = 0
        self._identity = identity
        self._head = PanelHead("", None, [], "live", 1.0)
        self._ranks = _Table()
        self._nodes = _Table()
        self._levels = _Levels()
        self._layout: list[Any] = []
        self._heat = False
        self._history: list[deque[float | None]] = []
        self._trend: deque[Encoded] = deque(maxlen=TREND_POINTS)

    def fits(self, view: View) -> bool:
        """Return whether an update can lead from what the page knows to this; else the full state has to."""
        return self._layout == _layout(view)

    def reset(self, view: View, live: Live, rate: float) -> None:
        """Note what the page knows from now on: the caller sends it the `state`."""
        if not self.fits(view):
            self._history = [deque(maxlen=HISTORY) for _ in view.rows if not view.heat]
        self._layout, self._heat = _layout(view), view.heat
        self._head = _head(view, live, rate)
        self._ranks.reset(view.rows, _encode_row, _seen_in_map if view.heat else _encode_row)
        self._nodes.reset(view.nodes, _encode_node, _seen_of_node)
        self._levels.reset(view)

    def state(self) -> PanelFrame:
        """Return all that the page knows, for a page that opens later, so that it understands updates."""
        return PanelFrame(
            id=self._identity,
            columns=list(RankRow.__struct_fields__),
            node_columns=list(NodeRow.__struct_fields__),
            heat=self._heat,
            head=self._head,
            ranks=self._ranks.told,
            nodes=self._nodes.told,
            levels=MapLevels(**self._levels.told),
            history=[list(values) for values in self._history],
            trends=list(TRENDS),
            trend=list(self._trend),
        )

    def update_head(self, live: Live, rate: float) -> HeadUpdate:
        """Return what to tell the page of that which no look brings."""
        self._head = msgspec.structs.replace(self._head, live=live, rate=rate)
        return HeadUpdate(HeadNews(live=live, rate=rate))

    def update(self, view: View, live: Live, rate: float) -> PanelUpdate:
        """Return what to tell the page next, for a view that `fits`."""
        for values, row in zip(self._history, view.rows, strict=False):
            values.append(_drawn(row))
        head = _head(view, live, rate)
        update = PanelUpdate(head=_news(self._head, head), point=self._next_point(view))
        self._head = head

        def left(key: str) -> int:
            return LIMIT - _ENVELOPE - len(_json(update)) - len(f', "{key}": []')

        update.nodes = self._nodes.changes(view.nodes, {}, int(left("nodes") * _NODES_SHARE))
        self._turn += 1
        if self._heat and self._turn % 2:
            update.levels = self._levels.changes(view, self._order_of_levels(), left("levels"))
            update.ranks = self._ranks.changes(view.rows, self._weights(view), left("ranks"))
        else:
            share = 0.5 if self._heat else 1.0
            update.ranks = self._ranks.changes(view.rows, self._weights(view), int(left("ranks") * share))
            update.levels = self._levels.changes(view, self._order_of_levels(), left("levels"))
        return update

    def _next_point(self, view: View) -> Point | UnsetType:
        """Return the next point of what is drawn over time, if it is due."""
        if self._trend and 0 <= view.at - self._trend[-1][0] < TREND_STEP:
            return UNSET
        self._trend.append(_encode_trend(view))
        return self._trend[-1]

    def _order_of_levels(self) -> list[Metric]:
        first = self._turn // 2 % len(METRICS)
        order = [*METRICS[first:], *METRICS[:first]]
        return sorted(order, key=lambda metric: metric != self.metric) if self._turn % 2 else order

    def _weights(self, view: View) -> dict[int, int]:
        """Return the weights of rows that come before others."""
        weights = {index: weight for index, row in enumerate(view.rows) if (weight := urgency(row))}
        return weights | {self.chosen: _CHOSEN} if self.chosen is not None else weights


class _Table:
    """Rows of which the page has an older copy.

    Attributes:
        told: That copy.
    """

    def __init__(self) -> None:
        self.told: list[Encoded] = []
        self._seen: list[Any] = []
        self._waiting: list[int] = []
        self._encode: Callable[[Any], Encoded] = list
        self._look: Callable[[Any], Any] = list

    def reset(self, rows: Sequence[Any], encode: Callable[[Any], Encoded], look: Callable[[Any], Any]) -> None:
        """Begin again: `encode` makes of a row what is sent, `look` what the eye tells apart."""
        self._encode, self._look = encode, look
        self.told, self._seen = [encode(row) for row in rows], [look(row) for row in rows]
        self._waiting = [0] * len(rows)

    def changes(self, rows: Sequence[Any], weights: Mapping[int, int], budget: int) -> list[RowDelta]:
        """Return the rows to send, within so many bytes; they count as told."""
        seen = [self._look(row) for row in rows]
        changed = [index for index in range(len(rows)) if seen[index] != self._seen[index]]
        changed.sort(key=lambda index: (-weights.get(index, 0), -self._waiting[index]))
        found: list[RowDelta] = []
        for index in changed:
            self._waiting[index] += 1
        for index in changed:
            row = self._encode(rows[index])
            delta = _difference(index, self.told[index], row)
            budget -= len(_json(delta)) + len(", ")
            if budget < 0:
                break
            found.append(delta)
            self.told[index], self._seen[index], self._waiting[index] = row, seen[index], 0
        return found


class _Levels:
    """What a heat map draws: of each metric a character for each rank."""

    def __init__(self) -> None:
        self.told: dict[Layer, str] = {}

    def reset(self, view: View) -> None:
        self.told = _levels(view) if view.heat else {}

    def changes(self, view: View, order: Sequence[Layer], budget: int) -> list[tuple[Layer, int, str]]:
        """Return the stretch of each metric that differs, within a limit of bytes."""
        if not self.told:
            return []
        now = _levels(view)
        found: list[tuple[Layer, int, str]] = []
        for metric in (_STATE, *order):
            old, new = self.told[metric], now[metric]
            differ = [index for index in range(len(new)) if old[index] != new[index]]
            room = budget - len(_json([metric, len(new), ""])) - len(", ")
            if not differ or room < 1:
                continue
            first = differ[0]
            stretch = new[first : min(differ[-1] + 1, first + room)]
            self.told[metric] = old[:first] + stretch + old[first + len(stretch) :]
            found.append((metric, first, stretch))
            budget = room - len(stretch)
        return found


def _difference(index: int, old: Encoded, new: Encoded) -> RowDelta:
    columns = [column for column in range(len(new)) if old[column] != new[column]]
    return [index, sum(1 << column for column in columns), *(new[column] for column in columns)]


def _layout(view: View) -> list[Any]:
    return [[(row.rank, row.node) for row in view.rows], [node.name for node in view.nodes]]


def _head(view: View, live: Live, rate: float) -> PanelHead:
    alert = view.alert and view.alert._replace(seconds=_rounded(view.alert.seconds, 3))
    return PanelHead(view.title, alert, list(view.stats), live, rate)


def _news(old: PanelHead, new: PanelHead) -> HeadNews | UnsetType:
    """Return what differs of a head; for a figure that does not, 0 stands in its place."""
    before, after = msgspec.structs.asdict(old), msgspec.structs.asdict(new)
    found = {key: value for key, value in after.items() if value != before[key]}
    if "stats" in found and len(old.stats) == len(new.stats):
        found["stats"] = [0 if one == other else other for one, other in zip(old.stats, new.stats, strict=True)]
    return HeadNews(**found) if found else UNSET


def _encode_trend(view: View) -> Point:
    """Return when, the cell, and the figures of `TRENDS`, whose scale is the page's."""
    return [round(view.at, 1), view.cell, *(_rounded(value, 3) for value in view.trend)]


# --- values, rounded to what can be seen of them


def _rounded(value: float | None, figures: int) -> float | None:
    value = finite(value)
    if value is None:
        return None
    short = float(f"{value:.{figures}g}")
    return int(short) if short.is_integer() else short


def _scaled(factor: float, figures: int) -> Callable[[float | None], float | None]:
    return lambda value: _rounded(None if value is None else value * factor, figures)


_MEMORY = ("total", "allocated", "cache", "non_torch", "process", "others", "kept", "peak", "used")
_WRITERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_MEMORY, _scaled(1 / _MIB, 4)),
    "utilization": _scaled(100, 2),
    "cpu": _scaled(100, 3),
    **dict.fromkeys(("temperature", "power", "power_limit"), _scaled(1, 3)),
    "period": _scaled(1, 3),
    **dict.fromkeys(("step", "work"), _scaled(1000, 3)),
    "flops": _scaled(1e-12, 3),
    "mfu": _scaled(100, 3),
    "badges": lambda badges: [list(badge) for badge in badges],
    **dict.fromkeys(("name", "gpu", "gpus"), clip),
}


def _encode_row(row: Row) -> Encoded:
    return _encode(RankRow, row)


def _encode_node(node: Node) -> Encoded:
    return _encode(NodeRow, node)


def _encode(kind: type[msgspec.Struct], row: Row | Node) -> Encoded:
    """Return the values of a struct of the page's, in its units."""
    values = ((name, getattr(row, name)) for name in kind.__struct_fields__)
    return [_WRITERS[name](value) if name in _WRITERS else value for name, value in values]


def _seen_in_map(row: Row) -> Any:
    """Return much less than in a row of its own, which shows whatever is sent."""
    coarse = (
        _coarse(_share(row.held if row.allocated is None else row.allocated, row.total), 20),
        _coarse(row.utilization, 20),
        _coarse(row.step, 50),
    )
    doing = row.doing if row.state in ("dead", "stuck") else ""
    return doing, row.badges, row.pid, row.gpu, row.total, row.why, coarse


def _seen_of_node(node: Node) -> Any:
    return (
        node.gpus,
        node.why,
        node.total,
        node.period,
        _coarse(node.cpu, 20),
        _coarse(_share(node.used, node.total), 100),
    )


def _levels(view: View) -> dict[Layer, str]:
    slowest = max((row.work for row in view.rows if row.work is not None), default=None)
    largest = max((row.held for row in view.rows if row.held is not None), default=None)
    return {
        "memory": "".join(_level(row.full if row.on_gpu else _share(row.held, largest)) for row in view.rows),
        "utilization": "".join(_level(row.utilization) for row in view.rows),
        "temperature": "".join(_level(_share(row.temperature, _HOTTEST)) for row in view.rows),
        "step": "".join(_level(_share(row.work, slowest)) for row in view.rows),
        _STATE: "".join(row.state[0] for row in view.rows),
    }


def _level(share: float | None) -> str:
    return _UNKNOWN if share is None else LEVELS[max(0, min(63, round(share * 63)))]


def _coarse(value: float | None, steps: int) -> int | None:
    return None if value is None else round(value * steps)


def _drawn(row: Row) -> float | None:
    """Return what a row's sparkline shows: how busy its GPU is, percent; else its memory, MiB."""
    if row.gpu:
        return _rounded(None if row.utilization is None else row.utilization * 100, 2)
    return _rounded(None if row.held is None else row.held / _MIB, 4)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _json(value: Any) -> bytes:
    """Encode like Jupyter's client library."""
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False, allow_nan=False).encode()
