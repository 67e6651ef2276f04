"""Lint and format all notebooks, the bodies of our cell magics included.

Ruff reads notebooks, but passes over every cell whose magic it does not know, and it can't be told of others.
So each notebook is given to it with the magic's line as a comment: the lines keep their numbers, and what it
finds is named by notebook, cell and line as usual. Owns nothing else; the rules are those of pyproject.toml.

Exit code: 0, or 1 when something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAGIC = re.compile(r"^%%(?=(distributed|dist|local|rank)\b)")
DISGUISE = "# %%"
RANK_NAMES = ["rank", "local_rank", "world_size", "device"]  # in every rank's namespace from the start
NOTEBOOK_NAMES = ["_"]  # the last value
BUILTINS = f"builtins={json.dumps(RANK_NAMES + NOTEBOOK_NAMES)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="write what ruff can mend back into the notebooks")
    arguments = parser.parse_args()
    notebooks = sorted((ROOT / "notebooks").rglob("*.ipynb"))
    if arguments.fix:
        for notebook in notebooks:
            mend(notebook)
    results = [passes(notebook) for notebook in notebooks]
    return 0 if all(results) else 1


def passes(notebook: Path) -> bool:
    """Print what ruff finds in one notebook.

    Returns:
        True when it finds nothing.
    """
    text = disguised(notebook.read_text(encoding="utf-8"))
    lint = ruff(notebook, text, "check", "--output-format", "concise", "--quiet", "--config", BUILTINS)
    layout = ruff(notebook, text, "format", "--diff", "--quiet")
    for found in (lint, layout):
        sys.stdout.write(found.stdout)
        sys.stderr.write(found.stderr)
    return lint.returncode == 0 and layout.returncode == 0


def mend(notebook: Path) -> None:
    """Write a notebook back as ruff would have it."""
    before = notebook.read_text(encoding="utf-8")
    linted = ruff(notebook, disguised(before), "check", "--fix-only", "--quiet", "--config", BUILTINS).stdout
    formatted = ruff(notebook, linted, "format", "--quiet")
    if formatted.returncode != 0:
        return  # it does not parse; `passes` says where
    after = undisguised(formatted.stdout)
    if after != before:
        notebook.write_text(after, encoding="utf-8")


def ruff(notebook: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ruff on `text` under the name of `notebook`."""
    command = [sys.executable, "-m", "ruff", *arguments]
    command += ["--stdin-filename", os.path.relpath(notebook, ROOT), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, check=False)


def disguised(text: str) -> str:
    """Return the notebook's JSON with our cell magics as comments."""
    return with_first_lines(text, lambda line: MAGIC.sub(DISGUISE, line))


def undisguised(text: str) -> str:
    """Return the notebook's JSON with our cell magics as they were."""
    magic = re.compile("^" + re.escape(DISGUISE))
    return with_first_lines(text, lambda line: magic.sub("%%", line))


def with_first_lines(text: str, change: Callable[[str], str]) -> str:
    """Return a notebook's JSON with the first line of each code cell changed, as Jupyter writes it."""
    document = json.loads(text)
    for cell in document["cells"]:
        if cell["cell_type"] != "code" or not cell["source"]:
            continue
        lines = cell["source"]
        if isinstance(lines, str):
            lines = lines.splitlines(keepends=True)
        cell["source"] = [change(lines[0]), *lines[1:]]
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
