"""What a cell cost in memory, as a value, a line and a table. Pure; independent of how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from nbdist.base.ranks import describe_ranks
from nbdist.base.text import duration, size, sizes, table
from nbdist.metrics.memory import MemoryUsage, Usage

HERE = -1  # the notebook's own process among ranks
_WORTH_SAYING = 8 << 20  # bytes that malloc keeps
_LEGEND = "min / mean / max @rank"
_CELL = "padding:1px 16px 1px 0;text-align:left;border:0;white-space:nowrap;font-weight:400"
_FIGURE = 6  # width of a number, so that lines align


class CellCost(msgspec.Struct, frozen=True):
    """What a cell cost, per process.

    Attributes:
        seconds: Wall time of the whole cell.
        usages: By rank; -1 is the notebook's own process, if the cell ran on no rank.
        missing: Ranks without figures, and why.
        notebook: The notebook's own process, where the cell ran on ranks.
        hint: What looks wrong with it; empty if nothing does.
    """

    seconds: float
    usages: dict[int, MemoryUsage] = {}
    missing: dict[int, str] = {}
    notebook: MemoryUsage | None = None
    hint: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """Return all figures, in bytes and seconds, for JSON."""
        here = self.usages.get(HERE, self.notebook)
        return {
            "seconds": self.seconds,
            "ranks": {str(rank): usage.data for rank, usage in self.usages.items() if rank != HERE},
            "missing": {str(rank): why for rank, why in self.missing.items()},
            "notebook": here.data if here is not None else None,
            "hint": self.hint,
        }

    def then(self, later: CellCost) -> CellCost:
        """Return the cost of this and of what came later in the same cell."""
        usages = dict(self.usages)
        for rank, usage in later.usages.items():
            usages[rank] = usages[rank].then(usage) if rank in usages else usage
        missing = self.missing | later.missing
        usages = {rank: usage for rank, usage in usages.items() if rank not in missing}
        return CellCost(self.seconds + later.seconds, usages, missing)

    def growths(self) -> Iterator[tuple[int, str]]:
        """Yield how much more each process holds now, in bytes, and where; without device caches."""
        for rank, usage in self.usages.items():
            who = "" if rank == HERE else f", rank {rank}"
            for kind, one in usage.kinds.items():
                if kind == "CPU" or kind.endswith("allocated"):
                    yield one.consumed, f"{kind}{who}"

    def render(self, mode: str) -> str:
        """Return the cost as text.

        Args:
            mode: "on" (a table) or "compact" (a line).
        """
        figures = self._line() if mode == "compact" else self._table()
        return "\n".join([figures, *self._remarks()])

    def html(self) -> str:
        """Return the table as HTML without scripts."""
        header, rows, below = self._cells()
        head = "".join(f'<th style="{_CELL}">{escape(each)}</th>' for each in header)
        lines = ["".join(f'<td style="{_CELL}">{escape(each.strip())}</td>' for each in row) for row in rows]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        notes = "".join(f"<div>{escape(note)}</div>" for note in [*below, *self._remarks()])
        return (
            f'<table style="border:0;margin:0;font-variant-numeric:tabular-nums"><thead><tr>{head}</tr></thead>'
            f'<tbody>{body}</tbody></table><div style="opacity:.75;font-size:90%">{notes}</div>'
        )

    def __repr__(self) -> str:
        return self.render("on")

    def _line(self) -> str:
        parts = []
        for kind, ranks in self._kinds().items():
            if kind == "CPU" or kind.endswith("allocated"):
                parts.append(f"{kind}: consumed {_consumed(ranks)}, peaked {_peaked(ranks)}, used {_largest(ranks)}")
            else:
                parts[-1] += f", {kind.split(' ', 1)[1]} {_largest(ranks)}"
        return "; ".join([*parts, self._time()])

    def _table(self) -> str:
        header, rows, below = self._cells()
        return "\n".join([table(rows, header), *below])

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]:
        """Return the table's header, its rows, and what stands below it."""
        rows = [(kind, _consumed(ranks), _peaked(ranks), _used(ranks)) for kind, ranks in self._kinds().items()]
        first, below = (self._time(), []) if len(self.usages) < 2 else (_LEGEND, [self._time()])
        return (first, "consumed", "peaked", "used"), rows, below

    def _remarks(self) -> list[str]:
        return [*self._notes(), *([f"hint: {self.hint}"] if self.hint else [])]

    def _kinds(self) -> dict[str, dict[int, Usage]]:
        """Return each kind of memory by rank. A rank's devices are added up: most ranks have one."""
        found: dict[str, dict[int, Usage]] = {}
        for rank, usage in self.usages.items():
            for kind, one in usage.kinds.items():
                what = kind.partition(" ")[2]
                name = f"GPU {what}" if what and len(self.usages) > 1 else kind
                ranks = found.setdefault(name, {})
                ranks[rank] = _sum(ranks[rank], one) if rank in ranks else one
        return found

    def _time(self) -> str:
        wall = duration(self.seconds)
        if len(self.usages) < 2:
            return wall
        slowest = max(self.usages, key=lambda rank: self.usages[rank].seconds)
        return f"{wall}, slowest rank {slowest}: {duration(self.usages[slowest].seconds)}"

    def _notes(self) -> list[str]:
        notes = [f"rank {rank}: n/a, it {why}" for rank, why in self.missing.items()]
        whys: dict[str, list[int]] = {}
        for rank, usage in self.usages.items():
            if usage.why:
                whys.setdefault(usage.why, []).append(rank)
        notes += [why if ranks == [HERE] else f"{describe_ranks(ranks)}: {why}" for why, ranks in whys.items()]
        keeper = max(self.usages, key=lambda rank: self.usages[rank].kept, default=HERE)
        kept = self.usages[keeper].kept if self.usages else 0
        if kept >= _WORTH_SAYING:
            who = "" if keeper == HERE else f" on rank {keeper}"
            notes.append(
                f"malloc keeps {size(kept)}{who} of what was freed, for later; `%distributed free` gives it back"
            )
        return notes


def _sum(one: Usage, other: Usage) -> Usage:
    peak = None if one.peak is None or other.peak is None else one.peak + other.peak
    return Usage(one.start + other.start, one.end + other.end, peak, one.sampled or other.sampled)


def _consumed(ranks: Mapping[int, Usage]) -> str:
    return _over({rank: one.consumed for rank, one in ranks.items()}, signed=True)


def _peaked(ranks: Mapping[int, Usage]) -> str:
    known = {rank: one.peaked for rank, one in ranks.items() if one.peaked is not None}
    if not known:
        return "n/a"
    mark = "≥ " if any(one.sampled for one in ranks.values()) else ""
    return mark + _over(known, signed=True)


def _used(ranks: Mapping[int, Usage]) -> str:
    return _over({rank: one.end for rank, one in ranks.items()})


def _largest(ranks: Mapping[int, Usage]) -> str:
    rank = max(ranks, key=lambda rank: ranks[rank].end)
    return size(ranks[rank].end) + (f" @{rank}" if len(ranks) > 1 else "")


def _over(values: Mapping[int, int], *, signed: bool = False) -> str:
    """Return "+1.0 / +1.5 / +2.0 MiB @3" over ranks; for a single process just its figure."""
    if len(values) == 1:
        number, unit = sizes(list(values.values()), signed=signed)
        return f"{number:>{_FIGURE}} {unit}"
    if not any(values.values()):
        return f"{0:>{_FIGURE}} B"
    last = max(values, key=lambda rank: values[rank])
    *figures, unit = sizes([min(values.values()), sum(values.values()) / len(values), values[last]], signed=signed)
    return f"{' / '.join(f'{figure:>{_FIGURE}}' for figure in figures)} {unit} @{last}"
