"""What much output of ranks costs JupyterLab's page: its memory, and how long its main thread is held at a time.

python benchmarks/lab_output.py [LINES]    80,000 lines of 8 ranks, or as many as given; needs JupyterLab and Chromium

A page whose main thread is held neither draws nor hears keys. What is shown is the longest task of that thread, in its
own processor time, since other processes of this machine hold it too.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _tools

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
    from testbed.lab import Lab, Notebook, browser_without_window

    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "lab"):
            Path(folder, name).mkdir()
            os.environ[name] = str(Path(folder, name))
        lab = Lab(Path(folder, "lab"))
        try:
            with browser_without_window() as browser, Notebook(lab, browser, [START, PRINT]) as notebook:
                _measure(notebook)
        finally:
            lab.close()


def _measure(notebook: Notebook) -> None:
    notebook.run(0)
    looks = Looks(notebook)
    cell = notebook.page.locator(".jp-Cell").nth(1)
    _contains(cell.locator(".jp-Editor"), "print")  # what it takes to look at a page is there now
    before = looks.memory()
    _tools.header(f"{LINES:,} lines of {RANKS} ranks in JupyterLab")
    notebook.start(1)
    long = notebook.page.locator(".nbdist-long-text")
    looks.row("the cell, to its last line in the page", lambda: _contains(long, LAST))
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
    cell.get_by_role("searchbox").fill(words)


def _contains(locator: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(locator).to_contain_text(text, timeout=600_000)


def _has(locator: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(locator).to_have_text(text, timeout=600_000)


class Looks:
    """What Chromium tells of a page."""

    def __init__(self, notebook: Notebook) -> None:
        self._page = notebook.page
        self._line = notebook.page.context.new_cdp_session(notebook.page)
        self._events: list[dict[str, Any]] = []
        self._ended = False
        self._line.on("Tracing.dataCollected", lambda part: self._events.extend(part["value"]))
        self._line.on("Tracing.tracingComplete", self._end)

    def _end(self, _: object) -> None:
        self._ended = True

    def memory(self) -> float:
        """Return the bytes of its values and elements, without what is garbage."""
        self._line.send("HeapProfiler.collectGarbage")
        usage = self._line.send("Runtime.getHeapUsage")
        return float(usage["usedSize"] + usage["embedderHeapUsedSize"] + usage["backingStorageSize"])

    def row(self, what: str, *steps: Callable[[], object]) -> None:
        """Show how long these steps take, and the longest task of the page's main thread meanwhile."""
        self._events, self._ended = [], False
        self._line.send(
            "Tracing.start",
            {"transferMode": "ReportEvents", "traceConfig": {"includedCategories": ["toplevel", "blink.user_timing"]}},
        )
        self._page.evaluate("performance.mark('bench-begin')")
        began = time.perf_counter()
        for step in steps:
            step()
        seconds = time.perf_counter() - began
        self._page.evaluate("performance.mark('bench-end')")
        self._line.send("Tracing.end")
        while not self._ended:
            self._page.wait_for_timeout(50)
        _tools.row(what, [seconds])
        _tools.row("  longest task", [self._longest_task()], **_tools.limit(0.016))

    def _longest_task(self) -> float:
        """Return the seconds of the longest task between the marks, without those that this program gives the page."""
        marks = {event["name"]: event for event in self._events if event["name"] in ("bench-begin", "bench-end")}
        begin, end = marks["bench-begin"], marks["bench-end"]
        thread = [event for event in self._events if (event["pid"], event["tid"]) == (begin["pid"], begin["tid"])]
        ours = [event["ts"] for event in thread if "DevToolsSession" in str(event.get("args"))]
        tasks = [
            event.get("tdur", 0) / 1e6
            for event in thread
            if event["name"].endswith("RunTask") and begin["ts"] < event["ts"] < end["ts"]
            if not any(event["ts"] <= moment <= event["ts"] + event.get("dur", 0) for moment in ours)
        ]
        return max(tasks, default=0.0)


if __name__ == "__main__":
    main()
