"""Memory of JupyterLab's page while a panel is live for hours; one of its seconds takes a hundredth of a second here.

python benchmarks/lab_panel.py [HOURS]    two hours of eight GPUs, or as many as given; needs JupyterLab and Chromium
"""

from __future__ import annotations

import sys

import _tools
from _page import Looks, notebook_in_lab

HOURS = int(sys.argv[1]) if len(sys.argv) > 1 else _tools.size(2, 1)
HOUR = _tools.size(3600, 50)  # samples
WARM_UP = _tools.size(700, 50)  # samples until the strips over the last ten minutes are full
SHOW = f"""\
import sys; sys.path.insert(0, {str(_tools.ROOT)!r})
import itertools, time
import nbdist
from testbed.panel_samples import Source, gpus
source, ticks = Source(), itertools.count()
def go_on(count):
    for tick in itertools.islice(ticks, count):
        source.show(gpus(8, tick))
        time.sleep(0.01)
panel = nbdist.Panel(source=source)
source.show(gpus(8))
panel"""


def main() -> None:
    _tools.prepare()
    with notebook_in_lab([SHOW, f"go_on({WARM_UP})", f"go_on({HOUR})"]) as notebook:
        looks = Looks(notebook)
        notebook.run(0)
        notebook.run(1)
        _tools.header("memory of a page with a live panel")
        first = looks.memory()
        elements, listeners = looks.elements()
        _tools.row("after ten minutes", [first / _tools.MB], "MB")
        for hour in range(1, HOURS + 1):
            notebook.run(2)
            _tools.row(f"more after {hour} h", [(looks.memory() - first) / _tools.MB], "MB")
            now = looks.elements()
            print(f"  {now[0] - elements:+d} elements and texts, {now[1] - listeners:+d} listeners", flush=True)


if __name__ == "__main__":
    main()
