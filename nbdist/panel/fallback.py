"""The panel without JavaScript: text for a terminal, and HTML that stays in a saved notebook.

Independent of notebooks. The HTML carries its own look and no script, so that it survives what cleans outputs;
without its style it is a plain table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from nbdist.base.text import duration, flop_rate, part_of, percent, size, span
from nbdist.panel.figures import min_mean_max
from nbdist.panel.model import Row, View, urgency
from nbdist.wire.pages.panel_messages import Alert, Stat

_BAR = 22  # characters
_LINES = 32  # of nodes and of ranks in a summary of many
_MARKS = {"busy": "●", "idle": "○", "stuck": "◐", "dead": "✕"}
_COLUMNS = ("rank", "device", "memory", "", "peak", "util", "temp", "power", "CPU", "state", "")
_AMOUNT = 3  # the column of what is used, of the total
_RIGHT = frozenset({_AMOUNT, 4, 5, 6, 7, 8})  # columns of numbers


# --- text


def text(view: View, *, ended: bool = False) -> str:
    """Return a table for a terminal.

    Args:
        view: What it shows.
        ended: Whether the session is over, so that this is the last of it.
    """
    head = " · ".join([view.title, *_status(ended), time.strftime("%H:%M:%S", time.localtime(view.at))])
    figures = _aligned([[stat.label, stat.value, _remark(stat)] for stat in view.stats])
    nodes = [_text_node(view, index) for index in range(len(view.nodes))]
    more = [f"… and {len(nodes) - _LINES} more machines"] if len(nodes) > _LINES else []
    chosen = _worth_a_look(view)
    rest = [f"worth a look:\n{_text_table(chosen[:_LINES])}", *_beyond(chosen)] if chosen else []
    legend = [_legend(view)] if chosen or not view.heat else []
    alert = [f"⚠ {sentence(view.alert)}"] if view.alert is not None else []
    return "\n".join([head, *alert, figures, *nodes[:_LINES], *more, *rest, *legend])


def _text_node(view: View, index: int) -> str:
    rows = [row for row in view.rows if row.node == index]
    if not rows:
        return _node_line(view, index)
    return f"{_node_line(view, index)}\n{_summary(rows) if view.heat else _text_table(rows)}"


def _text_table(rows: Sequence[Row]) -> str:
    cells = [_headings(rows), *(_text_cells(row) for row in rows)]
    kept = [column for column in range(len(_COLUMNS)) if any(row[column] for row in cells[1:])]
    return _aligned([[row[column] for column in kept] for row in cells], {kept.index(c) for c in _RIGHT if c in kept})


def _headings(rows: Sequence[Row]) -> list[str]:
    headings = list(_COLUMNS)
    if any(row.on_gpu for row in rows):
        headings[_AMOUNT] = "as nvidia-smi"
    return headings


def _text_cells(row: Row) -> list[str]:
    return [
        row.name,
        row.device,
        _text_bar(row),
        _used_of_total(row),
        *_gauges(row),
        _cores(row),
        _state(row),
        _remarks(row),
    ]


def _text_bar(row: Row) -> str:
    if not row.total or row.used is None:
        return f"[{'?' * _BAR}]"
    bar, at = "", 0.0
    for mark, part in zip("#=-+.~", (getattr(row, field) for field, *_ in _PARTS), strict=True):
        at += (part or 0) / row.total
        bar = bar.ljust(min(_BAR, round(at * _BAR)), mark)
    return f"[{bar.ljust(_BAR)}]"


def _legend(view: View) -> str:
    if any(row.on_gpu for row in view.rows):
        hidden = any(row.cache is not None and row.non_torch is None for row in view.rows)
        others = "outside torch (CUDA, NCCL, other processes)" if hidden else "other processes"
        own = "  + this rank, as the driver reports it" if any(row.process is not None for row in view.rows) else ""
        return f"# tensors  = torch's cache  - CUDA and NCCL{own}  . {others}  ~ kept by the driver"
    return "# this rank's own  . everything else in use"


def _aligned(cells: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    if not cells:
        return ""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    to_right = set(right)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in to_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


# --- HTML


_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:middle;border:0;white-space:nowrap"
_NUMBER = _CELL.replace("text-align:left", "text-align:right")
_QUIET = "opacity:.7;font-size:90%"
_TRACK = (
    "display:block;width:180px;height:10px;background-color:rgba(128,128,128,.2);white-space:nowrap;overflow:hidden"
)
_PARTS = (
    ("allocated", "tensors", "#4477aa"),
    ("cache", "torch's cache", "#99bbdd"),
    ("non_torch", "CUDA and NCCL", "#9970ab"),
    ("process", "this rank, as the driver reports it", "#6f8fae"),
    ("others", "other processes", "#c2a05c"),
    ("kept", "kept by the driver", "#888888"),
)


def html(view: View, identity: str = "", *, ended: bool = False) -> str:
    """Return what stands in a saved notebook: the last values.

    Args:
        view: Them.
        identity: The panel's, by which the living view finds this copy and hides it.
        ended: As for `text`.
    """
    title = " · ".join([view.title, *_status(ended)])
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.at))
    stats = "".join(map(_html_stat, view.stats))
    parts = [_html_node(view, index) for index in range(min(_LINES, len(view.nodes)))]
    if len(view.nodes) > _LINES:
        parts.append(f"<p>… and {len(view.nodes) - _LINES} more machines</p>")
    if chosen := _worth_a_look(view):
        parts.append(f"<p><b>worth a look</b></p>{_html_table(chosen[:_LINES])}")
        parts += [f"<p>{words}</p>" for words in _beyond(chosen)]
    return (
        f'{_style(identity)}<div class="nbdist-static" data-nbdist-panel="{escape(identity)}">'
        f'<p><b>{escape(title)}</b> <span style="{_QUIET}">saved copy, as of {when}</span></p>'
        f'{_html_alert(view)}<table style="border:0">{stats}</table>{"".join(parts)}{_html_legend(view)}</div>'
    )


def _style(identity: str) -> str:
    """Return CSS that hides the line JupyterLab shows for a widget whose kernel is gone."""
    below = f'.jp-OutputArea-child:has([data-nbdist-panel="{escape(identity)}"]) + .jp-OutputArea-child'
    return f"<style>{below} > .jupyter-widgets:not(:has(*)){{display:none}}</style>"


def _html_alert(view: View) -> str:
    return f"<p><b>⚠ {escape(sentence(view.alert))}</b></p>" if view.alert is not None else ""


def _html_stat(stat: Stat) -> str:
    value = f"{_CELL};{_QUIET}" if stat.level == "stale" else _CELL
    styled = ((stat.label, _CELL), (stat.value, value), (_remark(stat), f"{_CELL};{_QUIET}"))
    return "<tr>" + "".join(f'<td style="{style}">{escape(words)}</td>' for words, style in styled) + "</tr>"


def _html_node(view: View, index: int) -> str:
    rows = [row for row in view.rows if row.node == index]
    body = f"<p>{escape(_summary(rows))}</p>" if view.heat else _html_table(rows)
    return f"<p>{escape(_node_line(view, index))}</p>{body}"


def _html_table(rows: Sequence[Row]) -> str:
    cells = [_text_cells(row) for row in rows]
    kept = [column for column in range(len(_COLUMNS)) if any(row[column] for row in cells)]
    headings = _headings(rows)
    head = "".join(f'<th style="{_column_style(column)};{_QUIET}">{headings[column]}</th>' for column in kept)
    lines = "".join(
        "<tr>" + "".join(_html_cell(row, column, words[column]) for column in kept) + "</tr>"
        for row, words in zip(rows, cells, strict=True)
    )
    return f'<table style="border:0"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'


def _html_cell(row: Row, column: int, words: str) -> str:
    body = _html_bar(row) if _COLUMNS[column] == "memory" else escape(words)
    return f'<td style="{_column_style(column)}">{body}</td>'


def _column_style(column: int) -> str:
    if column == len(_COLUMNS) - 1:
        return _CELL.replace("nowrap", "normal")
    return _NUMBER if column in _RIGHT else _CELL


def _html_bar(row: Row) -> str:
    if not row.total or row.used is None:
        return f'<span style="{_TRACK};font-size:8px">n/a</span>'
    parts = "".join(
        f'<span style="display:inline-block;height:10px;background-color:{color};'
        f'width:{100 * part / row.total:.1f}%"></span>'
        for field, _, color in _PARTS
        if (part := getattr(row, field))
    )
    return f'<span style="{_TRACK}">{parts}</span>'


def _html_legend(view: View) -> str:
    on_gpu = any(row.on_gpu for row in view.rows)
    alone = any(row.process is not None for row in view.rows)
    colors = {field: color for field, _, color in _PARTS}
    keys = [(name, color) for field, name, color in _PARTS if field != "process" or alone]
    if not on_gpu:
        keys = [("this rank's own", colors["allocated"]), ("everything else in use", colors["others"])]
    words = "".join(f'<span style="color:{color}">■</span> {escape(name)} &nbsp; ' for name, color in keys)
    return f'<p style="{_QUIET}">{words}</p>'


# --- what both say


def sentence(alert: Alert) -> str:
    """Return why ranks are stuck, and for how long."""
    return alert.words if alert.seconds is None else f"{alert.words} ({span(alert.seconds)})"


def _remark(stat: Stat) -> str:
    """Return the note, marked where it is a warning."""
    return f"⚠ {stat.note}" if stat.level in ("warn", "bad") else stat.note


def _status(ended: bool) -> list[str]:
    return ["session ended"] if ended else []


def _node_line(view: View, index: int) -> str:
    node = view.nodes[index]
    parts = [node.gpus, node.why]
    parts.append(f"CPU {percent(node.cpu)}" if node.cpu is not None else "")
    if node.used is not None and node.total:
        parts.append(f"memory {part_of(node.used, node.total)}")
    return f"{node.name or 'this machine'}: {' · '.join(part for part in parts if part)}"


def _summary(rows: Sequence[Row]) -> str:
    """Return a line for many ranks."""
    held = [row.held for row in rows if row.held is not None]
    busy = [row.utilization for row in rows if row.utilization is not None]
    states = [f"{count} {state}" for state in _MARKS if (count := sum(row.state == state for row in rows))]
    parts = [f"{', '.join(states)}"]
    if held:
        parts.append(f"memory {min_mean_max(held)}")
    if busy:
        parts.append(f"util {percent(min(busy))} to {percent(max(busy))}")
    return f"  ranks {rows[0].name}-{rows[-1].name}: {'; '.join(parts)}" if rows else ""


def _worth_a_look(view: View) -> list[Row]:
    """Return the rank that has died before those that wait for it."""
    return sorted(filter(urgency, view.rows), key=urgency, reverse=True) if view.heat else []


def _beyond(rows: Sequence[Row]) -> list[str]:
    return [f"… and {len(rows) - _LINES} more worth a look"] if len(rows) > _LINES else []


def _used_of_total(row: Row) -> str:
    used = row.used if row.on_gpu else row.held
    if used is None:
        return "n/a"
    return part_of(used, row.total) if row.total else f"{size(used)} of n/a"


def _gauges(row: Row) -> list[str]:
    """Return peak, utilization, temperature, power; empty where there is no such thing, n/a where it is not known."""
    if not row.on_gpu:
        return ["", "", "", ""]
    return [
        size(row.peak),
        "n/a" if row.utilization is None else percent(row.utilization),
        "n/a" if row.temperature is None else f"{row.temperature:.0f} °C",
        "n/a" if row.power is None else f"{row.power:.0f} W",
    ]


def _cores(row: Row) -> str:
    return "" if row.cpu is None else percent(row.cpu)


def _state(row: Row) -> str:
    return f"{_MARKS.get(row.state, '?')} {row.state}"


def _remarks(row: Row) -> str:
    remarks = [f"⚠ {words}" for _, words in row.badges]
    remarks += [row.doing] if row.state in ("dead", "stuck") else []
    remarks += [f"{duration(row.step)} a step"] if row.step is not None else []
    remarks += [row.mark + flop_rate(row.flops)] if row.flops is not None else []
    return "; ".join(words for words in [*remarks, row.why] if words)
