"""What opening a notebook costs JupyterLab's page: 200 cells that ran on ranks against 200 that ran in the kernel.

python benchmarks/lab_open.py [CELLS]    200 cells with saved output, or as many as given; needs JupyterLab and Chromium

Measured is the work of the page's main thread until nothing more comes: its processor time does not depend on what else
this machine does. The picker, badges and tabs are all there then.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import _tools
import nbformat
from _page import lab_and_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession

    from testbed.lab import Lab, Notebook

CELLS = int(sys.argv[1]) if len(sys.argv) > 1 else _tools.size(200, 20)
ROUNDS = 5
AT_MOST = 1.2
LINES = 20  # of output
QUIET = 1000  # milliseconds in which the main thread takes less than a tenth of the time
LOOKS = 120  # at most
CODE = "for step in range(20): print(f'step {step}: a line of output')"


def main() -> None:
    _tools.prepare()
    with lab_and_browser() as (lab, browser):
        measures = {
            "plain": lambda: _work_to_open(lab, browser, CODE, label=""),
            "on ranks": lambda: _work_to_open(lab, browser, f"%%distributed\n{CODE}", label="[0-3] "),
        }
        samples = _tools.rounds(ROUNDS, measures, warm_up=_tools.size(1, 0))
    _tools.header(f"a notebook of {CELLS} cells with output, opened in JupyterLab")
    _tools.row("cells of the kernel", samples["plain"])
    over = ("cells of the kernel", samples["plain"])
    _tools.row("cells that ran on ranks", samples["on ranks"], over=over, at_most=AT_MOST)


def _work_to_open(lab: Lab, browser: Browser, code: str, label: str) -> float:
    """Open a notebook of such cells, open it again, and return the seconds that the page's main thread works then."""
    from testbed.lab import Notebook

    text = "".join(f"{label}step {step}: a line of output\n" for step in range(LINES))

    def with_outputs(notebook: Any) -> None:
        for number, cell in enumerate(notebook.cells, 1):
            cell.execution_count = number
            cell.outputs = [nbformat.v4.new_output("stream", text=text)]

    with Notebook(lab, browser, [code] * CELLS, with_outputs) as notebook:
        line = notebook.page.context.new_cdp_session(notebook.page)
        line.send("Performance.enable", {"timeDomain": "threadTicks"})
        _work_until_quiet(notebook, line)
        notebook.reload()  # which counts from zero
        return _work_until_quiet(notebook, line)


def _work_until_quiet(notebook: Notebook, line: CDPSession) -> float:
    """Return the seconds that the page's main thread has spent in tasks, once it has little to do."""
    before = -1.0
    for _ in range(LOOKS):
        now = _worked(line)
        if now - before <= QUIET / 10_000:
            return now
        before = now
        notebook.page.wait_for_timeout(QUIET)
    raise TimeoutError(f"the page is still busy after {LOOKS * QUIET / 1000:g} s")


def _worked(line: CDPSession) -> float:
    metrics = line.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


if __name__ == "__main__":
    main()
