"""Run benchmarks/*.py one after another and show their lines; with --write, keep them in docs/performance.md.

Owns the part of docs/performance.md between its two marker comments, and nothing else of that page: a block for each
benchmark, in the order of their names. A run of some writes their blocks and keeps the others; where those are of
another machine or other versions, each says so itself. Independent of what a benchmark measures: each one is a
program that prints its results, line by line, and exits with 0.

Exit code: 0, or 1 when a benchmark failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- benchmarks begin: written by scripts/bench --write -->"
END = "<!-- benchmarks end -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks/NAME.py (default: all but gpu_*)")
    parser.add_argument("--write", action="store_true", help=f"keep the results in {PAGE.relative_to(ROOT)}")
    parser.add_argument("--once", action="store_true", help="only show that they work: one small round, no figures")
    arguments = parser.parse_args()
    if arguments.once and arguments.write:
        parser.error("--once measures nothing worth keeping: leave out --once, or --write")
    available = {path.stem: path for path in sorted((ROOT / "benchmarks").glob("[!_]*.py"))}
    for name in arguments.names:
        if name not in available:
            parser.error(f"there is no benchmark {name!r}; there are: {', '.join(available) or 'none'}")

    results: dict[str, list[str]] = {}
    usual = [name for name in available if not name.startswith("gpu_")]  # scripts/gpu runs the others
    for name in arguments.names or usual:
        lines = run(available[name], once=arguments.once)
        if lines is None:
            print(f"{name} failed", file=sys.stderr)
            return 1
        results[name] = lines
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Performance\n"
        PAGE.write_text(written(page, results, machine(), available), encoding="utf-8")
        print(f"written to {PAGE.relative_to(ROOT)}")
    return 0


def run(program: Path, *, once: bool = False) -> list[str] | None:
    """Run one benchmark and show its lines as they come.

    Args:
        program: The benchmark.
        once: Whether it takes one small round instead of measuring.

    Returns:
        The lines, or None when it failed.
    """
    print(f"== {program.stem}", flush=True)
    lines = []
    command = [sys.executable, "-u", str(program)]
    environment = os.environ | {"NBDIST_BENCH_ONCE": "1" if once else ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return lines if process.returncode == 0 else None


def written(page: str, results: Mapping[str, Sequence[str]], here: str, known: Collection[str]) -> str:
    """Return the page with these results; a page without the markers gets them at its end.

    Args:
        page: As it is.
        results: The lines of each benchmark that has run.
        here: What they were measured on, in a sentence.
        known: All benchmarks there are; blocks of others are left out.
    """
    before, _, rest = page.partition(BEGIN)
    inside, _, after = rest.partition(END)
    blocks = {name: block for name, block in blocks_in(inside).items() if name in known}
    blocks |= {name: (here, "\n".join(lines)) for name, lines in results.items()}
    machines = Counter(where for where, _ in blocks.values())
    usual = max(machines, key=lambda where: (machines[where], where))  # of two as frequent always the same
    parts = [BEGIN, usual]
    for name, (where, lines) in sorted(blocks.items()):
        parts += [f"### {name}", *([where] if where != usual else []), f"```text\n{lines}\n```"]
    return f"{before.rstrip()}\n\n" + "\n\n".join([*parts, END]) + (after or "\n")


def blocks_in(text: str) -> dict[str, tuple[str, str]]:
    """Return what each benchmark's block was measured on, and its lines."""
    usual, *blocks = text.split("\n### ")
    found = {}
    for block in blocks:
        head, lines, _ = block.split("```")
        lines = lines.removeprefix("text\n")
        name, _, where = head.partition("\n")
        found[name.strip()] = where.strip() or usual.strip(), lines.strip("\n")
    return found


def machine() -> str:
    """Return one sentence on what the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"Measured on {processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {gpus()}; "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"torch {metadata.version('torch')}, nbdist {metadata.version('nbdist')}."
    )


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def gpus() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no GPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    counts = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(counts) or "no GPU"


if __name__ == "__main__":
    sys.exit(main())
