"""What a panel tells a page of the ranks: all of it once, then what has changed; and what its reader wants.

Rows travel as lists of values, whose columns the frame names: a page makes a `RankRow` or a `NodeRow` of each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

HISTORY = 60  # looks that a sparkline shows
TREND_POINTS = 300  # that are kept of what is drawn over time
LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"  # of a heat map, from 0 to 1

_MapMetric = Literal["memory", "utilization", "temperature", "step"]
METRICS: tuple[_MapMetric, ...] = get_args(_MapMetric)

# A title becomes the type's name on the page.
Level = Annotated[Literal["warn", "bad"], Meta(title="Level")]
StatLevel = Annotated[Literal["warn", "bad", "stale"], Meta(title="StatLevel", description="stale: of past steps.")]
Live = Annotated[Literal["live", "paused", "ended"], Meta(title="Live")]
Metric = Annotated[_MapMetric, Meta(title="Metric", description="What a heat map can show.")]
Layer = Annotated[
    Literal[_MapMetric, "state"],
    Meta(title="Layer", description="What a map shows of all ranks, a character for each."),
]
Point = Annotated[
    list[float | None],
    Meta(
        title="Point",
        description="When (seconds since 1970), the cell (0: none), and the figure of each trend; null: not known.",
        min_length=2,
        extra_json_schema={"prefixItems": [{"type": "number"}, {"type": "integer"}]},
    ),
]
RowDelta = Annotated[
    list[Any],
    Meta(
        title="RowDelta",
        description="The index of a row, the columns that have changed as bits, and the value of each.",
        min_length=2,
        extra_json_schema={"prefixItems": [{"type": "integer"}, {"type": "integer"}]},
    ),
]


class RankRow(msgspec.Struct, frozen=True):
    """One rank. Memory in MiB, shares in percent, time in milliseconds, speed in TFLOPS; null: not known.

    Attributes:
        name: What it is called: its number, or "notebook".
        node: Index of its machine.
        gpu: Name of its device; empty on the CPU.
        total: Memory of the device, or of the machine.
        allocated: In tensors; on the CPU all that is the process's own.
        cache: Held by torch and empty.
        non_torch: The process's, outside of torch.
        process: The process's as the driver reports it.
        others: Used by other processes.
        kept: What the driver keeps for itself.
        peak: Largest `allocated`.
        temperature: Degrees Celsius.
        power: Watts, as is its limit.
        cpu: Cores that the process keeps busy: 100 is one.
        step: Of a training step.
        work: What it takes without collectives.
        mark: What stands before `flops`: "≥ " where operations without a formula are missing, "≈ " where steps are.
        badges: What deserves a look.
        why: What is not known and why.
    """

    rank: int
    name: str
    node: int
    device: str
    gpu: str
    pid: int
    total: float | None
    allocated: float | None
    cache: float | None
    non_torch: float | None
    process: float | None
    others: float | None
    kept: float | None
    peak: float | None
    utilization: float | None
    temperature: float | None
    power: float | None
    power_limit: float | None
    cpu: float | None
    state: str
    doing: str
    step: float | None
    work: float | None
    flops: float | None
    mark: str
    mfu: float | None
    badges: list[tuple[Level, str]]
    why: str


class NodeRow(msgspec.Struct, frozen=True):
    """One machine. Memory in MiB, shares in percent; null: not known.

    Attributes:
        period: Seconds between two looks.
        why: What else is to be said.
    """

    name: str
    gpus: str
    cpu: float | None
    used: float | None
    total: float | None
    period: float | None
    why: str


class Stat(NamedTuple):
    """One figure over all ranks, in words: its key, label, value, note, level, and action.

    Attributes:
        key: What it is, whatever its label: of a trend where it is drawn over time.
        action: What a reader may ask for beside it, "peak" or nothing.
    """

    key: str
    label: str
    value: str
    note: str = ""
    level: StatLevel | None = None
    action: str = ""


class Alert(NamedTuple):
    """What keeps ranks from going on: in a sentence, what most of them wait in, and for how many seconds.

    Attributes:
        words: In one sentence.
        doing: What most of them wait in and for whom, as in their rows.
        seconds: For how long they have been seen so.
    """

    words: str
    doing: str
    seconds: float | None


class PanelHead(msgspec.Struct, frozen=True):
    """What stands above the ranks.

    Attributes:
        rate: Seconds between two looks that are asked for.
    """

    title: str
    alert: Alert | None
    stats: list[Stat]
    live: Live
    rate: float


class HeadNews(msgspec.Struct, frozen=True):
    """What has changed of a head.

    Attributes:
        stats: 0 stands for a figure that has not changed.
    """

    title: str | UnsetType = UNSET
    alert: Alert | UnsetType | None = UNSET
    stats: list[Stat | Literal[0]] | UnsetType = UNSET
    live: Live | UnsetType = UNSET
    rate: float | UnsetType = UNSET


class MapLevels(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a heat map draws: of each layer a character for each rank."""

    memory: str = ""
    utilization: str = ""
    temperature: str = ""
    step: str = ""
    state: str = ""


class PanelFrame(msgspec.Struct, frozen=True):
    """All that a panel shows, as a page gets it that opens.

    Attributes:
        id: Names the panel among all of a notebook.
        columns: Of `ranks`: the fields of a `RankRow`.
        node_columns: Of `nodes`: the fields of a `NodeRow`.
        heat: Whether there are too many ranks for a row each.
        history: What each rank's sparkline shows.
        trends: Keys of the figures that are drawn over time.
    """

    id: str
    columns: list[str]
    node_columns: list[str]
    heat: bool
    head: PanelHead
    ranks: list[list[Any]]
    nodes: list[list[Any]]
    levels: MapLevels
    history: list[list[float | None]]
    trends: list[str]
    trend: list[Point]


class PanelUpdate(msgspec.Struct, omit_defaults=True, tag_field="type", tag="update"):
    """What a look has changed. Not frozen: it is filled until it is full.

    Attributes:
        levels: Stretches of what a heat map draws: the layer, the first rank, and a character for each.
    """

    head: HeadNews | UnsetType = UNSET
    point: Point | UnsetType = UNSET
    nodes: list[RowDelta] = []
    levels: list[tuple[Layer, int, str]] = []
    ranks: list[RowDelta] = []


class HeadUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="head"):
    """What has changed, though nothing was looked at."""

    head: HeadNews


class PanelNote(msgspec.Struct, frozen=True, tag_field="type", tag="note"):
    """Something for the reader."""

    text: str


PanelNews: TypeAlias = PanelUpdate | HeadUpdate | PanelNote


# --- from the page


class PanelOpening(msgspec.Struct, frozen=True):
    """What a widget opens a line of its own with. The answer is an empty `PanelGreeting`.

    Attributes:
        id: The panel's.
    """

    id: str


class PanelGreeting(msgspec.Struct, frozen=True, tag_field="type", tag="greeting"):
    """The panel hears the line."""


class ViewOpened(msgspec.Struct, frozen=True, tag_field="type", tag="opened"):
    """A page shows the panel."""


class ViewClosed(msgspec.Struct, frozen=True, tag_field="type", tag="closed"):
    """A page shows it no more."""


class Pause(msgspec.Struct, frozen=True, tag_field="type", tag="pause"):
    """Rest, or go on."""

    value: bool


class SetRate(msgspec.Struct, frozen=True, tag_field="type", tag="rate"):
    """Look as often.

    Attributes:
        value: Seconds between two looks.
    """

    value: float


class ChooseRow(msgspec.Struct, frozen=True, tag_field="type", tag="choose"):
    """The reader looks at a row closely.

    Attributes:
        value: Its index; null: at none.
    """

    value: int | None


class ShowMetric(msgspec.Struct, frozen=True, tag_field="type", tag="metric"):
    """The reader's heat map shows this."""

    value: Metric


class MeasurePeak(msgspec.Struct, frozen=True, tag_field="type", tag="peak"):
    """Measure the peak of matrix products on all ranks."""


class TakeSnapshot(msgspec.Struct, frozen=True, tag_field="type", tag="snapshot"):
    """Write a memory snapshot.

    Attributes:
        value: The rank; -1: the notebook's process.
    """

    value: int


PanelWish: TypeAlias = ViewOpened | ViewClosed | Pause | SetRate | ChooseRow | ShowMetric | MeasurePeak | TakeSnapshot
