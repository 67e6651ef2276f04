"""What there is to run on a machine with an NVIDIA GPU, the most telling first: tests marked `gpu`, and benchmarks.

Reads the tests without importing them, since a machine may lack what they import. Independent of how they are run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FACTS, CHECK, BENCHMARK = "facts", "check", "benchmark"

# What there is, in order of worth: part, seconds for each check or benchmark in it, files.
PARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("start", 60, ("tests/gpu/test_start.py", "tests/integration/test_start.py")),
    ("nccl", 75, ("tests/gpu/test_nccl.py",)),
    ("train", 75, ("tests/gpu/test_train.py", "tests/unit/test_train_loader.py")),
    ("interrupt", 90, ("benchmarks/gpu_interrupt.py",)),
    ("memory", 60, ("tests/gpu/test_memory.py", "tests/unit/test_memory.py", "tests/integration/test_cell_memory.py")),
    ("measures", 60, ("tests/gpu/test_measures.py", "tests/unit/test_step_meter.py", "tests/unit/test_sample.py")),
    ("speed", 90, ("benchmarks/gpu_start.py", "benchmarks/gpu_steps.py", "benchmarks/gpu_transfer.py")),
    ("plans", 120, ("tests/gpu/test_plans.py",)),
    ("cost", 90, ("benchmarks/gpu_estimate.py", "benchmarks/gpu_save.py")),
    ("rest", 60, ("tests/unit/test_cuda_guard.py", "tests/unit/test_transfer.py", "tests/gpu/test_units.py")),
    ("snapshots", 60, ("tests/integration/test_snapshot.py",)),
)


@dataclass(frozen=True)
class Step:
    """Something to run: facts, a check, or a benchmark."""

    name: str
    part: str
    kind: str
    target: str  # a program, or a test as pytest names it
    limit: float


def all_steps() -> list[Step]:
    """Return every check and benchmark, in order of worth."""
    return [step for part, limit, files in PARTS for path in files for step in steps_in(path, part, limit)]


def steps_in(path: str, part: str, limit: float) -> Iterator[Step]:
    """The steps of one file: its tests that are marked `gpu`, or itself."""
    if path.startswith("benchmarks/"):
        yield Step(Path(path).stem, part, BENCHMARK, path, limit)
        return
    for test in marked_tests((ROOT / path).read_text(encoding="utf-8")):
        yield Step(
            test.rpartition("::")[2].removeprefix("test_").replace("_", " "), part, CHECK, f"{path}::{test}", limit
        )


def marked_tests(source: str) -> list[str]:
    """Return the tests marked `gpu`, as pytest names them in their file. Nothing is imported: it may be missing."""
    tree = ast.parse(source)
    marks_all = any(_is_mark(node.value) for node in tree.body if isinstance(node, ast.Assign))
    return list(_marked(tree.body, "", marks_all))


def _marked(body: Sequence[ast.stmt], prefix: str, inherited: bool) -> Iterator[str]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        marked = inherited or any(map(_is_mark, node.decorator_list))
        if isinstance(node, ast.ClassDef):
            yield from _marked(node.body, f"{prefix}{node.name}::", marked)
        elif marked and node.name.startswith("test_"):
            yield prefix + node.name


def _is_mark(node: ast.expr) -> bool:
    return ast.unparse(node) == "pytest.mark.gpu"


def chosen(steps: Sequence[Step], words: Sequence[str]) -> list[Step]:
    """Return the steps whose part is one of these words, or whose target has one in it; all without words.

    Raises:
        ValueError: A word fits nothing.
    """
    for word in words:
        if not any(_fits(step, word) for step in steps):
            parts = ", ".join(part for part, _, _ in PARTS)
            raise ValueError(f"--only {word} fits nothing: name a part ({parts}) or a word in what --list shows")
    return [step for step in steps if not words or any(_fits(step, word) for word in words)]


def _fits(step: Step, word: str) -> bool:
    return word == step.part if word in {part for part, _, _ in PARTS} else word in step.target
