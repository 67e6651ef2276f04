"""What became of checks and benchmarks on a GPU: kept in a folder, as data to go on with and as a page to read.

Independent of how they are run.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from gpu_parts import CHECK

PASSED, FAILED, HUNG, SKIPPED, NO_GPU = "passed", "failed", "hung", "skipped", "no GPU"


@dataclass
class Result:
    """What became of a step."""

    status: str
    seconds: float
    name: str
    part: str
    kind: str
    figures: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # of a benchmark, or the end of what a failure printed
    why: str = ""


@dataclass
class Run:
    """All results so far, and the machine they are of."""

    machine: dict[str, object] = field(default_factory=dict)
    day: str = field(default_factory=lambda: date.today().isoformat())
    results: dict[str, Result] = field(default_factory=dict)

    def add(self, target: str, result: Result, order: Sequence[str]) -> None:
        """Note a result; all are kept in this order, whichever came first."""
        results = {**self.results, target: result}
        self.results = {name: results[name] for name in dict.fromkeys([*order, *results]) if name in results}

    def take_failed(self) -> set[str]:
        """Forget what failed or hung, and return it."""
        failed = {name for name, each in self.results.items() if each.status in (FAILED, HUNG)}
        self.results = {name: each for name, each in self.results.items() if name not in failed}
        return failed

    def keep(self, folder: Path) -> None:
        """Write what there is, whole or not at all."""
        for name, text in (("results.json", json.dumps(asdict(self), indent=1)), ("page.md", page(self))):
            new = folder / f".{name}"
            new.write_text(text, encoding="utf-8")
            new.replace(folder / name)

    @classmethod
    def kept(cls, folder: Path) -> Run:
        """Read what an earlier run has written; nothing where there was none."""
        with contextlib.suppress(FileNotFoundError):
            data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            results = {name: Result(**each) for name, each in data["results"].items()}
            return cls(data["machine"], data["day"], results)
        return cls()


# --- the page


def page(run: Run) -> str:
    """Return the results as a section of docs/gpu.md."""
    counts = Counter(result.status for result in run.results.values())
    summary = ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing has run"
    parts = [f"## {run.machine.get('GPU', 'no machine')}, {run.day}", f"{summary}."]
    parts.append(table(["", ""], [[name, str(value)] for name, value in run.machine.items() if name != "gpus"]))
    checks = [each for each in run.results.values() if each.kind == CHECK]
    if checks:
        rows = [[each.part, each.name, each.status, f"{each.seconds:.0f}", remarks(each)] for each in checks]
        parts.append(table(["part", "check", "result", "s", "figures"], rows))
    for each in run.results.values():
        if each.lines:
            parts += [f"### {each.name}: {each.status}", "```text\n" + "\n".join(each.lines) + "\n```"]
    return "\n\n".join(parts) + "\n"


def remarks(result: Result) -> str:
    """Return figures and reason of a check in one cell of the table."""
    return "; ".join([*(f"{name} {value}" for name, value in result.figures.items()), *filter(None, [result.why])])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(head), ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
