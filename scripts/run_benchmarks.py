"""Run benchmarks/*.py one after another and show their lines; with --write, keep them in docs/performance.md.

Owns the block of docs/performance.md between its two marker comments, and nothing else of that page. Knows
nothing of what a benchmark measures: each one is a program that prints its results, line by line, and exits
with 0.

Exit code: 0, or 1 when a benchmark failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- benchmarks begin: written by scripts/bench --write -->"
END = "<!-- benchmarks end -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks/NAME.py (default: all)")
    parser.add_argument("--write", action="store_true", help=f"keep the results in {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.write and arguments.names:
        parser.error("--write keeps the results of all benchmarks of one run: leave out the names")

    available = {path.stem: path for path in sorted((ROOT / "benchmarks").glob("[!_]*.py"))}
    for name in arguments.names:
        if name not in available:
            parser.error(f"there is no benchmark {name!r}; there are: {', '.join(available) or 'none'}")

    results: dict[str, list[str]] = {}
    for name in arguments.names or available:
        lines = run(available[name])
        if lines is None:
            print(f"{name} failed", file=sys.stderr)
            return 1
        results[name] = lines
    if arguments.write:
        write(results)
    return 0


def run(program: Path) -> list[str] | None:
    """Run one benchmark and show its lines as they come.

    Returns:
        The lines, or None when it failed.
    """
    print(f"== {program.stem}", flush=True)
    lines = []
    command = [sys.executable, "-u", str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return lines if process.returncode == 0 else None


def write(results: dict[str, list[str]]) -> None:
    """Replace the block between the markers of the page; a page without one gets it at its end."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Performance\n"
    blocks = [f"### {name}\n\n```\n" + "\n".join(lines) + "\n```" for name, lines in results.items()]
    block = "\n\n".join([BEGIN, machine(), *blocks, END])
    if BEGIN in page and END in page:
        before, rest = page.split(BEGIN, 1)
        page = before + block + rest.split(END, 1)[1]
    else:
        page = f"{page.rstrip()}\n\n{block}\n"
    PAGE.write_text(page, encoding="utf-8")
    print(f"written to {PAGE.relative_to(ROOT)}")


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
