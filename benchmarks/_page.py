"""What benchmarks of JupyterLab share: a page with a notebook, its memory, and how long its main thread is held."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _tools

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from testbed.lab import Lab, Notebook


@contextmanager
def lab_and_browser() -> Iterator[tuple[Lab, Browser]]:
    """Start a JupyterLab, and a browser."""
    from testbed.lab import Lab, browser_without_window

    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "lab"):
            Path(folder, name).mkdir()
            os.environ[name] = str(Path(folder, name))
        lab = Lab(Path(folder, "lab"))
        try:
            with browser_without_window() as browser:
                yield lab, browser
        finally:
            lab.close()


@contextmanager
def notebook_in_lab(cells: list[str]) -> Iterator[Notebook]:
    """Open a notebook in a JupyterLab of its own."""
    from testbed.lab import Notebook

    with lab_and_browser() as (lab, browser), Notebook(lab, browser, cells) as notebook:
        yield notebook


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

    def elements(self) -> tuple[int, int]:
        """Return how many elements and texts there are, those that are in no page too, and listeners of events."""
        counts = self._line.send("Memory.getDOMCounters")
        return counts["nodes"], counts["jsEventListeners"]

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
