"""The answers of tools as text: what an agent reads where its client passes on no structured content."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbdist.base.text import size, table
from nbdist.wire.messages.errands import CellBrief, CellNews, SessionNews, StopNews, TextPage


@dataclass(frozen=True)
class KnownSession:
    """A session on this machine. driven_by: who is attached to it. own: whether that is this server."""

    session: str
    answers: bool
    own: bool
    driven_by: str
    ranks: int = 0
    gpus: int = 0
    memory: int = 0
    running: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SessionList:
    """The user's sessions on this machine."""

    sessions: list[KnownSession]


@dataclass(frozen=True)
class StartNews:
    """A session that was started or taken over. notes: what was said on the way."""

    session: SessionNews
    notes: list[str]


def of_sessions(found: SessionList) -> str:
    """Return a table of sessions."""
    if not found.sessions:
        return "there is no session on this machine: `start` starts one"
    rows = [
        (each.session, each.ranks, each.gpus, size(each.memory), ", ".join(each.running) or "nothing", each.driven_by)
        for each in found.sessions
    ]
    return table(rows, ("session", "ranks", "GPUs", "memory", "runs", "driven by"))


def of_start(news: StartNews) -> str:
    """Return what has started, and the notes."""
    return "\n".join([of_session(news.session), *news.notes])


def of_session(news: SessionNews) -> str:
    """Return a table of ranks, and lines of cells."""
    measured = any(each.memory is not None for each in news.ranks)
    rows = [
        (
            each.rank,
            each.device,
            each.state,
            *((size(each.memory), size(each.device_memory)) if measured else ()),
            each.doing,
        )
        for each in news.ranks
    ]
    held = ("memory", "GPU memory") if measured else ()
    ranks = table(rows, ("rank", "device", "state", *held, "doing"))
    return "\n".join([f"session {news.session}, process group {news.backend}", ranks, *map(_of_brief, news.cells)])


def _of_brief(cell: CellBrief) -> str:
    return f"cell {cell.cell} by {cell.by} on ranks {cell.ranks}: {cell.state} ({cell.seconds:.1f} s): {cell.code}"


def of_cell(news: CellNews) -> str:
    """Return a cell's state, and then its output, values, waits and failure."""
    parts = [
        f"cell {news.cell} by {news.by} on ranks {news.ranks}: {news.state} ({news.seconds:.1f} s)",
        *([f"note: {news.note}"] if news.note else []),
        *([news.output.rstrip("\n")] if news.output else []),
        *([f"{news.left:,} more: call `cell` with since={news.next}"] if news.left else []),
        *(f"display {text}" for text in news.displays),
        *(f"value on ranks {ranks}: {value}" for ranks, value in news.values.items()),
        *(f"rank {rank} {text}" for rank, text in news.waits.items()),
        *([news.failure] if news.failure else []),
    ]
    return "\n".join(parts)


def of_page(page: TextPage) -> str:
    """Return the page, and how to read on."""
    if not page.text:
        return "(nothing)"
    return page.text + (f"\n{page.left:,} more: call again with since={page.next}" if page.left else "")


def of_stop(news: StopNews) -> str:
    """Return what an interrupt has reached."""
    said = [f"interrupting cell {cell}" for cell in news.running]
    said += [f"cell {cell} will not run" for cell in news.queued]
    return "; ".join(said) or "nothing to interrupt: these ranks are idle"
