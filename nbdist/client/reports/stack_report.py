"""The stacks of ranks as text: equal ones grouped; with the frames of C code, by py-spy.

Handles what ranks and their agents answer; independent of sessions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nbdist.base.ranks import ONE_NODE, RankNames
from nbdist.errors import UsageError
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.stopping import NativeStack, ThreadStack

_WIDEST = 120  # characters: the names of C++ templates run to thousands
_IN_CELL = re.compile(r"^(\S+) \(<ipython-input-(\d+)-[^>]*>:(\d+)\)$")
_ADDRESS = re.compile(r"^0x[0-9a-f]+ ")


@dataclass(frozen=True)
class Stack:
    """The location of one rank's main thread.

    Attributes:
        lines: A line per call, the outermost first; empty when the rank runs nothing, or did not answer.
        cell: The cell it runs, in words; "" for none.
        collective: The torch.distributed call it is in, "" for none.
        still: Seconds since it was first seen exactly there.
        note: Text to show instead of lines.
        busy: Whether it runs something, as far as is known.
    """

    lines: tuple[str, ...] = ()
    cell: str = ""
    collective: str = ""
    still: float = 0.0
    note: str = ""
    busy: bool = True

    def __str__(self) -> str:
        return "\n".join(self.lines) or self.note


def line_of(answer: ThreadStack | NoAnswer | None) -> str:
    """Describe where a rank is; "" if that is unknown, or it runs nothing."""
    return answer.line if isinstance(answer, ThreadStack) else ""


def stack_of(answer: ThreadStack | NoAnswer | None, cell: str) -> Stack:
    """Return the stack from a rank's answer.

    Args:
        answer: The answer; None if there is none.
        cell: The cell it runs, in words; "" for none.
    """
    if answer is None:
        return Stack(cell=cell, note="in a call that blocks Python; `--native` shows it")
    if isinstance(answer, NoAnswer) or not answer.running:
        return Stack(note="idle", busy=False)
    lines = tuple(answer.stack.splitlines())
    return Stack(lines, cell, answer.collective, answer.still, "" if lines else "running nbdist's own code")


def render(stacks: Mapping[int, Stack], names: RankNames = ONE_NODE) -> str:
    """Return all stacks as text, equal ones once, each below a line that names its ranks."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(stacks):
        stack = stacks[rank]
        groups.setdefault((stack.lines, stack.collective, stack.note), []).append(rank)
    return "\n".join(
        _render_group(names.describe(ranks), [stacks[rank] for rank in ranks]) for ranks in groups.values()
    )


def _render_group(who: str, stacks: list[Stack]) -> str:
    first = stacks[0]
    words = [who, first.cell, _wait(stacks), first.note]
    head = ", ".join(word for word in words if word)
    return "\n".join([head, *(f"    {line}" for line in first.lines)])


def _wait(stacks: list[Stack]) -> str:
    if not stacks[0].collective:
        return ""
    seconds = min(stack.still for stack in stacks)
    return f"in {stacks[0].collective}" + (f" for {seconds:.0f} s" if seconds >= 1 else "")


# --- by py-spy


def with_native_frames(
    stacks: Mapping[int, Stack], answers: Mapping[int, NativeStack | NoAnswer], names: RankNames
) -> dict[int, Stack]:
    """Return the same stacks as seen by py-spy.

    Args:
        stacks: The ranks' answers.
        answers: Their agents' answers, for those that run something.
        names: How to name ranks.

    Raises:
        UsageError: py-spy is not installed, or can't inspect the ranks.
    """
    found = dict(stacks)
    for rank in [rank for rank, stack in stacks.items() if stack.busy]:
        native = answers.get(rank)
        if isinstance(native, NoAnswer):  # it has ended meanwhile
            continue
        if native is None or native.obstacle:
            raise UsageError(_explain(rank, native, names))
        found[rank] = replace(stacks[rank], lines=_from_cell(native.frames), note="")
    return found


def _explain(rank: int, native: NativeStack | None, names: RankNames) -> str:
    """Return what keeps py-spy from inspecting a rank, and what to do."""
    who = names.describe([rank])
    if native is None or native.obstacle == "late":
        within = f" within {native.text}" if native is not None else ""
        return f"py-spy did not finish {who}{within}: use `%distributed stacks` without --native"
    if native.obstacle == "missing":
        where = f", also where {who} runs" if names.nodes else ""
        return f"--native needs py-spy{where}: `%pip install py-spy`, then run this again"
    if native.obstacle == "refused":
        return (
            f"this system does not let py-spy inspect {who}. Allow it (`sudo sysctl kernel.yama.ptrace_scope=0`; in "
            "a container `--cap-add=SYS_PTRACE`), or use `%distributed stacks` without --native, which needs no "
            "permission"
        )
    return f"py-spy can't inspect {who}: {native.text}. `%distributed stacks` without --native works"


def _from_cell(frames: Sequence[str]) -> tuple[str, ...]:
    """Return py-spy's frames, the outermost first, from the user's cell inwards and in our words."""
    start = next((at for at, frame in enumerate(frames) if _IN_CELL.match(frame)), 0)
    return tuple(_frame(frame) for frame in frames[start:])


def _frame(frame: str) -> str:
    frame = _ADDRESS.sub("?? ", _IN_CELL.sub(_place, frame))
    return frame if len(frame) <= _WIDEST else f"{frame[: _WIDEST - 1]}…"


def _place(match: re.Match[str]) -> str:
    function = "" if match[1].startswith("<") else f", in {match[1]}"
    return f"cell {match[2]} line {match[3]}{function}"
