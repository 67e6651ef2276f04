"""README and docs: every block of Python runs as a reader runs it, a page from its top in a fresh notebook.

The language of a fence says what its block is: `python` is a cell of a notebook, `output` is what the cell above it
prints, to the letter, `bash` is typed into a terminal, `toml` is a file, and `text` is anything else. A cell that can't
run on any machine has a comment above it, `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.kernel import Kernel, lines_by_rank

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "output", "bash", "toml", "text"}
NOT_RUN = "<!-- not run: "
FENCE = "```"


@dataclass
class Block:
    """A fenced block of a page: the number of its first line, what it is, and whether a comment above leaves it out."""

    line: int
    language: str
    left_out: bool
    text: str = ""


def blocks_of(page: Path) -> list[Block]:
    blocks: list[Block] = []
    above, inside = "", False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith(FENCE):
            if not inside:
                blocks.append(Block(number, line.strip().removeprefix(FENCE), above.startswith(NOT_RUN)))
            inside = not inside
        elif inside:
            blocks[-1].text += f"{line}\n"
        above = line
    return blocks


RUN = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_names_its_language(page: Path) -> None:
    assert [block for block in blocks_of(page) if block.language not in LANGUAGES] == []


def test_every_cell_can_run() -> None:
    """One that needs several GPUs, or a network, belongs here, with its reason above it on the page."""
    assert [(page.name, block.line) for page in PAGES for block in blocks_of(page) if block.left_out] == []


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Kernel]:
    """A notebook in a folder of its own."""
    path = os.pathsep.join([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    with Kernel(PYTHONPATH=path) as kernel:
        kernel.ok(f"%cd -q {tmp_path}")
        yield kernel


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_every_cell_of_a_page_runs(page: Path, reader: Kernel) -> None:
    printed = ""
    for block in blocks_of(page):
        if block.language == "python" and not block.left_out:
            outcome = reader.run(block.text)
            assert outcome.status == "ok", f"{page.name}:{block.line}\n{block.text}\n{outcome}"
            printed = outcome.stdout
        elif block.language == "output":
            assert (block.line, lines_by_rank(printed)) == (block.line, lines_by_rank(block.text))
