"""What much output of ranks costs JupyterLab's page: its memory, and how long its main thread is held at a time.

python benchmarks/lab_output.py [LINES]    80,000 lines of 8 ranks, or as many as given; needs JupyterLab and Chromium

A page whose main thread is held neither draws nor hears keys. What is shown is the longest task of that thread, in its
own processor time, since other processes of this machine hold it too.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import _tools
from _page import Looks, notebook_in_lab

if TYPE_CHECKING:
    from testbed.lab import Notebook

RANKS = _tools.size(8, 2)
LINES = int(sys.argv[1]) if len(sys.argv) > 1 else _tools.size(80_000, 8_000)
START = f"%load_ext nbdist\n%distributed start -n {RANKS}"
PRINT = f"%%distributed\nfor line in range({LINES // RANKS}): print('rank', rank, 'prints line', line)"
LAST = f"prints line {LINES // RANKS - 1}"
SCROLLS = _tools.size(50, 5)


def main() -> None:
    _tools.prepare()
    with notebook_in_lab([START, PRINT]) as notebook:
        _measure(notebook)


def _measure(notebook: Notebook) -> None:
    notebook.run(0)
    looks = Looks(notebook)
    cell = notebook.page.locator(".jp-Cell").nth(1)
    _contains(cell.locator(".jp-Editor"), "print")  # what it takes to look at a page is there now
    before = looks.memory()
    _tools.header(f"{LINES:,} lines of {RANKS} ranks in JupyterLab")
    long = notebook.page.locator(".nbdist-long-text")
    looks.row("the cell, to its last line in the page", lambda: notebook.start(1), lambda: _contains(long, LAST))
    _tools.row("memory of the page for it", [(looks.memory() - before) / _tools.MB], "MB")
    lines = notebook.page.locator(".nbdist-long-text .nbdist-lines")
    scroll = """async (list, count) => {
        for (let step = 0; step < count; step++) {
            list.scrollTop = (list.scrollHeight * step) / count;
            await new Promise(requestAnimationFrame);
        }
    }"""
    looks.row(f"{SCROLLS} jumps through all that is shown", lambda: lines.evaluate(scroll, SCROLLS))

    count = cell.locator(".nbdist-tab-count").first
    looks.row("the tab of a rank", cell.get_by_role("tab", name="1").click, lambda: _contains(count, " lines"))
    looks.row("a search in it", lambda: _search(cell, count, LAST))
    differ = cell.get_by_role("button", name="Differences")
    differ.click()
    looks.row(
        "all lines of it that other ranks don't have", lambda: _fill(cell, ""), lambda: _contains(count, " lines")
    )
    differ.click()
    view = cell.locator(".nbdist-tab-view")
    looks.row("the rank's log", cell.get_by_role("button", name="Log").click, lambda: _contains(view, " line 0\n"))
    looks.row("a search in it for the rank's last line", lambda: _search(cell, count, LAST))
    _tools.row("memory of the page now", [(looks.memory() - before) / _tools.MB], "MB")


def _search(cell: Any, count: Any, words: str) -> None:
    _fill(cell, words)
    _has(count, "1 line")


def _fill(cell: Any, words: str) -> None:
    from testbed.lab import search_output

    search_output(cell, words)


def _contains(locator: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(locator).to_contain_text(text, timeout=600_000)


def _has(locator: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(locator).to_have_text(text, timeout=600_000)


if __name__ == "__main__":
    main()
