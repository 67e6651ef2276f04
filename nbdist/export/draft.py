"""The script while it is written: its blocks, what was left out, and what its head has to provide."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from nbdist.export.sorted_cells import SortedCell
from nbdist.plan import Plan


@dataclass
class RankStart:
    """How the notebook started its ranks.

    Attributes:
        count: Number of ranks on each machine, as it was typed; "": one for each GPU.
        nodes: Number of machines.
        gpus: Which GPUs; "": all.
        backend: Of the process group; "": what suits the device.
        init: Whether there is a process group from the start.
        restarts: Whether ranks that die are replaced.
    """

    count: str = ""
    nodes: int = 1
    gpus: str = ""
    backend: str = ""
    init: bool = True
    restarts: bool = False


@dataclass
class ScriptDraft:
    """What has been written so far, and what is known of the names in it.

    Attributes:
        others: Other names for those of the notebook that mean something else on ranks.
        start: How the ranks were started; None: they were not.
        blocks: The finished cells.
        lines: The code of the cell at hand.
        noted: What was left out or changed, each with its cell.
        helpers: The functions that the head has to define.
        modules: What the head has to import.
        plan: The plan in effect.
        local: Names that have a value on rank 0 only.
        of_ranks: Names that the ranks' own cells set.
        everywhere: Names of the notebook that all ranks have.
        mutable: Those among them whose value rank 0 may change.
        definitions: The names that a function or class of the notebook uses.
        imported: The top package of each imported name.
        sessions: Names of sessions.
        gone: The cell of each name that only left-out code sets.
        after_ranks: Whether ranks may be at work when the next line begins.
        after_notebook: Whether rank 0 may be at work alone.
    """

    others: dict[str, str] = field(default_factory=dict)
    start: RankStart | None = None
    blocks: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    noted: list[tuple[int, str]] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    plan: Plan = field(default_factory=Plan)
    local: set[str] = field(default_factory=set)
    of_ranks: set[str] = field(default_factory=set)
    everywhere: set[str] = field(default_factory=set)
    mutable: set[str] = field(default_factory=set)
    definitions: dict[str, frozenset[str]] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    gone: dict[str, int] = field(default_factory=dict)
    after_ranks: bool = False
    after_notebook: bool = False

    def note(self, cell: SortedCell, text: str) -> None:
        """Tell the user of something in a cell that is not as in the notebook."""
        self.noted.append((cell.cell.number, text))

    @property
    def notes(self) -> list[str]:
        """What is not as in the notebook, from its top to its end."""
        return [f"cell {number}: {text}" for number, text in sorted(self.noted, key=itemgetter(0))]

    def leave_out(self, cell: SortedCell, why: str, names: Iterable[str] = (), source: str = "") -> None:
        """Leave out a cell or a part of it, see `omitted`."""
        self.lines.append(self.omitted(cell, why, names, source))

    def omitted(self, cell: SortedCell, why: str, names: Iterable[str] = (), source: str = "") -> str:
        """Return the comments that stand for a cell or a part of it that is left out.

        Args:
            cell: The cell.
            why: The reason, after "left out: ".
            names: What it would have set.
            source: The part; "": all of it.
        """
        self.note(cell, f"left out: {why}" if not source else f"left out: {_first_line(source)}: {why}")
        self.gone.update({name: cell.cell.number for name in names if not self._has(name)})
        return f"# left out: {why}\n{commented(source or cell.cell.source)}"

    def _has(self, name: str) -> bool:
        return name in self.everywhere or name in self.local or name in self.of_ranks

    def add_for_all(self, text: str) -> None:
        """Write code that all ranks run together."""
        self._wait("after_notebook")
        self.lines.append(text)
        self.after_ranks = True

    def add_together(self, text: str) -> None:
        """Write code in which ranks wait for each other."""
        self.lines.append(text)
        self.after_notebook = self.after_ranks = False

    def add_for_notebook(self, text: str, *, quick: bool) -> None:
        """Write code that only rank 0 runs.

        Args:
            text: The code.
            quick: Whether it has no effect that ranks could see, nor sees theirs.
        """
        if not quick:
            self._wait("after_ranks")
        self.lines.append(text)
        self.after_notebook = self.after_notebook or not quick

    def _wait(self, why: str) -> None:
        if getattr(self, why) and self.start is not None and self.start.init:
            self.lines.append("dist.barrier()  # as the notebook, which runs one cell after another")
            self.after_notebook = self.after_ranks = False

    def give_to_all(self, names: Iterable[str]) -> None:
        """Write that all ranks get what names mean on rank 0, and what functions among them use."""
        for name in sorted(self.reached(names) & self.local - self.others.keys()):
            self.helpers.add("from_rank_0")
            self.add_together(f"{name} = from_rank_0({name} if rank == 0 else None)")
            self.local.discard(name)
            self.everywhere.add(name)

    def reached(self, names: Iterable[str]) -> set[str]:
        """Return names, and those that the notebook's functions among them use."""
        seen: set[str] = set()
        waiting = list(names)
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += self.definitions.get(name, ())
        return seen

    def end_cell(self, title: str) -> None:
        """Finish the cell at hand."""
        if self.lines:
            self.blocks.append(f"# %% {title}\n" + "\n".join(self.lines).strip("\n"))
        self.lines = []


def commented(text: str) -> str:
    """Return text as comments."""
    return "\n".join(f"# {line}".rstrip() for line in text.strip("\n").splitlines())


def _first_line(source: str) -> str:
    line = next((line for line in source.splitlines() if line.strip() and not line.startswith("#")), "")
    return f"`{line.strip()[:60]}`"


def ranks_test(text: str) -> str:
    """Return the condition for ranks that are written as in `-r 0,2-3`."""
    ranks: list[int] = []
    for piece in re.sub(r"\s", "", text).split(","):
        first, _, last = piece.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in {tuple(sorted(set(ranks)))}"
