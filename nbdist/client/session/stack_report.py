"""The stacks of ranks as text: equal ones grouped; with the frames of C code, by py-spy.

Handles what ranks answer and what py-spy prints; independent of sessions.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from nbdist.errors import UsageError
from nbdist.ranks import describe_ranks
from nbdist.wire.question import NoAnswer
from nbdist.wire.stopping import ThreadStack

_WIDEST = 120  # characters: the names of C++ templates run to thousands
_DUMP_LIMIT = 60.0  # seconds: py-spy reads the symbols of all of torch's libraries
_MAIN_THREAD = re.compile(r'^Thread .*: "MainThread"\n((?: .*\n?)*)', re.MULTILINE)
_IN_CELL = re.compile(r"^(\S+) \(<ipython-input-(\d+)-[^>]*>:(\d+)\)$")
_ADDRESS = re.compile(r"^0x[0-9a-f]+ ")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REFUSED = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)


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
    return Stack(lines, cell, answer.collective, answer.still, "" if lines else "at work for nbdist")


def render(stacks: Mapping[int, Stack]) -> str:
    """Return all stacks as text, equal ones once, each below a line that names its ranks."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(stacks):
        stack = stacks[rank]
        groups.setdefault((stack.lines, stack.collective, stack.note), []).append(rank)
    return "\n".join(_render_group(ranks, [stacks[rank] for rank in ranks]) for ranks in groups.values())


def _render_group(ranks: list[int], stacks: list[Stack]) -> str:
    first = stacks[0]
    words = [describe_ranks(ranks), first.cell, _wait(stacks), first.note]
    head = ", ".join(word for word in words if word)
    return "\n".join([head, *(f"    {line}" for line in first.lines)])


def _wait(stacks: list[Stack]) -> str:
    if not stacks[0].collective:
        return ""
    seconds = min(stack.still for stack in stacks)
    return f"in {stacks[0].collective}" + (f" for {seconds:.0f} s" if seconds >= 1 else "")


# --- by py-spy


def with_native_frames(stacks: Mapping[int, Stack], pids: Mapping[int, int]) -> dict[int, Stack]:
    """Return the same stacks as seen by py-spy.

    Args:
        stacks: The ranks' answers.
        pids: Their processes.

    Raises:
        UsageError: py-spy is not installed, or can't inspect the ranks.
    """
    program = shutil.which("py-spy", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if program is None:
        raise UsageError("--native needs py-spy: `%pip install py-spy`, then run this again")
    busy = [rank for rank, stack in stacks.items() if stack.busy]
    with ThreadPoolExecutor() as pool:
        dumps = dict(zip(busy, pool.map(lambda rank: _dump(program, rank, pids[rank]), busy), strict=True))
    return {
        rank: replace(stack, lines=dumps[rank], note="") if rank in dumps else stack for rank, stack in stacks.items()
    }


def _dump(program: str, rank: int, pid: int) -> tuple[str, ...]:
    command = [program, "dump", "--native", "--pid", str(pid)]
    keywords: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, check=False, timeout=_DUMP_LIMIT, **keywords)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"py-spy did not finish rank {rank} within {_DUMP_LIMIT:.0f} s: use `%distributed stacks` without --native"
        ) from None
    if _REFUSED.search(done.stderr):
        raise UsageError(
            "this system does not let py-spy inspect the ranks. Allow it (`sudo sysctl kernel.yama.ptrace_scope=0`; in "
            "a container `--cap-add=SYS_PTRACE`), or use `%distributed stacks` without --native, which needs no "
            "permission"
        )
    found = _MAIN_THREAD.search(_COLOURS.sub("", done.stdout))  # a notebook's environment asks for colors
    if done.returncode or found is None:
        what = next((line for line in done.stderr.splitlines() if line.strip()), "it gave no reason")
        raise UsageError(
            f"py-spy can't inspect rank {rank} (pid {pid}): {what}. `%distributed stacks` without --native works"
        )
    return _from_cell([line.strip() for line in reversed(found[1].splitlines())])


def _from_cell(frames: list[str]) -> tuple[str, ...]:
    """Return py-spy's frames, the outermost first, from the user's cell inwards and in our words."""
    start = next((at for at, frame in enumerate(frames) if _IN_CELL.match(frame)), 0)
    return tuple(_frame(frame) for frame in frames[start:])


def _frame(frame: str) -> str:
    frame = _ADDRESS.sub("?? ", _IN_CELL.sub(_place, frame))
    return frame if len(frame) <= _WIDEST else f"{frame[: _WIDEST - 1]}…"


def _place(match: re.Match[str]) -> str:
    function = "" if match[1].startswith("<") else f", in {match[1]}"
    return f"cell {match[2]} line {match[3]}{function}"
