"""Turns the ranks' replies into one error that names the first cause first. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from nbdist.base.processes import describe_exit
from nbdist.base.ranks import ONE_NODE, RankNames, format_ranks
from nbdist.errors import RankDied, RankError, RankFailure, RankTimeout
from nbdist.wire.messages.cells import Reply
from nbdist.wire.messages.life import Died

_PLACE = re.compile(r"Cell In\[(\d+)\], line (\d+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LAST_WORDS = 20  # lines of a dead rank's stderr to show
_LINE_LIMIT = 300  # characters of a message to show on one line
_TRACEBACK_LIMIT = 20_000  # characters of a traceback to show


def from_reply(reply: Reply) -> RankFailure | None:
    """Return the failure in a reply, if there is one."""
    failure = reply.failure
    if failure is None:
        return None
    kind = "interrupted" if reply.status == "interrupted" else "raised"
    return RankFailure(
        reply.rank,
        kind,
        failure.name,
        failure.text,
        failure.traceback,
        failure.when,
        failure.pickled,
        lost_peer=failure.kind == "lost",
    )


def from_death(died: Died, running: str) -> RankFailure:
    """Return a death as a failure.

    Args:
        running: What the rank was running, in words.
    """
    text = f"{describe_death(died)}{running}"
    name = describe_exit(died.code).split(" ")[0]
    return RankFailure(died.rank, "died", name, text, died.stderr, died.when, exit_code=died.code)


def describe_death(died: Died) -> str:
    """Describe how a rank ended; the same for all ranks that ended with another process."""
    return died.cause or f"{describe_exit(died.code)}, pid {died.pid}"


def build(
    failures: Iterable[RankFailure],
    finished: Sequence[int] = (),
    *,
    recovered: str = "",
    launch: bool = False,
    names: RankNames = ONE_NODE,
    file: Path | None = None,
) -> RankError:
    """Return one error for all failures of a cell.

    Args:
        failures: The failures, at least one.
        finished: Ranks that finished well.
        recovered: What was repaired afterwards, in words.
        launch: Whether the ranks have ended with it, so that they can't be used any more.
        names: How to name ranks.
        file: Where everything else that is known is written.
    """
    ordered = sorted(failures, key=_causality)
    first = ordered[0]
    signature = _signature(first)
    same = [failure.rank for failure in ordered[1:] if _signature(failure) == signature]
    alike = set(same)
    lines = [_headline(first, same, names), *_details(first)]
    if same and first.kind == "raised":
        lines.append(f"{names.describe(same)}: same")
    lines += _others([failure for failure in ordered[1:] if failure.rank not in alike], first, names)
    if finished:
        lines.append(f"{names.describe(finished)}: finished")
    if file is not None:
        lines.append(f"report, to send with an issue: {file}")
    if not launch:
        lines += _advice(first, ordered, finished, names)
    if recovered and not launch:
        lines.append(f"nbdist: {recovered}")
    kinds = {"died": RankDied, "running": RankTimeout}
    error = kinds.get(first.kind, RankError)
    return error("\n".join(lines), {failure.rank: failure for failure in ordered})


def of_rank(failure: RankFailure, names: RankNames = ONE_NODE) -> str:
    """Return what went wrong on one rank, for a reader who has seen what it printed."""
    return "\n".join([_headline(failure, [], names), *(_details(failure) if failure.kind != "died" else ())])


def _causality(failure: RankFailure) -> tuple[int, float]:
    """Return a sort key: deaths and own exceptions by time, then what follows from them, then interrupted ones."""
    order = {"interrupted": 2, "running": 3, "ended": 4}.get(failure.kind, 0)
    return (1 if order == 0 and follows(failure) else order), failure.when


def follows(failure: RankFailure) -> bool:
    """Return whether this is what a rank sees when another has failed or gone."""
    return failure.kind == "raised" and failure.lost_peer


def _signature(failure: RankFailure) -> tuple[object, ...]:
    if failure.kind == "died":
        return failure.kind, failure.text
    return failure.kind, failure.name, failure.text, _place(failure)


def _place(failure: RankFailure) -> str:
    """Return where in the user's cells it was raised: " (cell 7 line 4)"; empty if unknown."""
    places = _PLACE.findall(_ANSI.sub("", failure.traceback)) if failure.kind == "raised" else []
    return f" (cell {places[-1][0]} line {places[-1][1]})" if places else ""


def _headline(first: RankFailure, same: Sequence[int], names: RankNames) -> str:
    who = names.describe([first.rank, *same])
    if first.kind == "died":
        return f"{who} died: {first.text}"
    if first.kind == "interrupted":
        return f"{who} interrupted"
    if first.kind == "running":
        return f"{who} still running, {first.text}"
    return f"{names.describe([first.rank])} raised {_one_line(first)}"


def _details(first: RankFailure) -> list[str]:
    if not first.traceback.strip():
        return []
    if first.kind == "died":
        return ["its last lines on stderr:", *("  " + line for line in _last_words(first.traceback))]
    return _fold(first.traceback.rstrip(), first.rank).splitlines()


def _last_words(stderr: str) -> list[str]:
    """Return the last lines; for a crash that Python has described, its location: the innermost frames."""
    lines = stderr.rstrip().splitlines()
    crash = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error:")), None)
    if crash is None:
        return lines[-_LAST_WORDS:]
    rest = lines[crash:]
    place = next((number for number, line in enumerate(rest) if line.startswith("Current thread")), 1)
    half = _LAST_WORDS // 2
    return [*lines[max(0, crash - half) : crash + 1], *rest[place : place + half]]


def _fold(text: str, rank: int) -> str:
    """Return the text without its middle if it is too long to show."""
    hidden = len(text) - _TRACEBACK_LIMIT
    if hidden <= 0:
        return text
    half = _TRACEBACK_LIMIT // 2
    note = f"… {hidden:,} characters omitted here; `error.failures[{rank}].traceback` of this RankError has all …"
    return f"{text[:half]}\n{note}\n{text[-half:]}"


def _others(failures: Sequence[RankFailure], first: RankFailure, names: RankNames) -> list[str]:
    groups: dict[str, list[int]] = {}
    for failure in failures:
        groups.setdefault(_one_word(failure, first), []).append(failure.rank)
    return [f"{names.describe(ranks)}: {text}" for text, ranks in groups.items()]


def _one_word(failure: RankFailure, first: RankFailure) -> str:
    if failure.kind == "died":
        return f"died: {failure.text}"
    if failure.kind == "running":
        return f"still running, {failure.text}"
    if failure.kind == "ended":
        return f"ended, because rank {first.rank} failed; it was {failure.text}"
    if failure.kind == "interrupted":
        return "interrupted" if first.kind == "running" else f"interrupted, because rank {first.rank} failed"
    if follows(failure) and not follows(first):
        return f"{_one_line(failure)}, caused by the failure of rank {first.rank}"
    return _one_line(failure) + _place(failure)


def _one_line(failure: RankFailure) -> str:
    text = failure.text.strip().split("\n", 1)[0]
    if len(text) > _LINE_LIMIT:
        text = text[:_LINE_LIMIT] + "…"
    return f"{failure.name}: {text}" if text else failure.name


def _advice(
    first: RankFailure, failures: Sequence[RankFailure], finished: Sequence[int], names: RankNames
) -> list[str]:
    dead = {failure.rank for failure in failures if failure.kind == "died"}
    if dead:
        living = sorted({failure.rank for failure in failures} - dead | set(finished))
        them = "it" if len(dead) == 1 else "them"
        if not living:
            return [
                f"`%distributed heal` replaces {them} if other ranks are alive, `%distributed restart` starts "
                "fresh ranks."
            ]
        whose = "its" if len(living) == 1 else "their"
        kept = f"R{names.describe(living)[1:]} kept {whose} variables: `%%distributed -r {format_ranks(living)}`."
        return [f"`%distributed heal` replaces {them}. {kept}"]
    running = [failure.rank for failure in failures if failure.kind == "running"]
    if running:
        they_are, them = ("it is", "it") if len(running) == 1 else ("they are", "them")
        return [
            f"Until {they_are} done, {names.describe(running)} can't run another cell; "
            f"`%distributed status` shows where {they_are}.",
            f"`%distributed interrupt` asks {them} again, `%distributed restart` starts fresh ranks.",
        ]
    return []
