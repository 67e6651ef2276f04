"""How long until 8 ranks with a process group are there: cold, and from a warm template."""

from __future__ import annotations

import subprocess
import sys

import _tools

RANKS = _tools.size(8, 2)
ROUNDS = 5
WARM_UP = _tools.size(1, 0)  # rounds

# Cold: a fresh process that has imported what `%load_ext nbdist` imports, but has warmed nothing up.
_COLD = f"""
import time
from nbdist.client.session.session import Session
began = time.perf_counter()
with Session({RANKS}):
    print(time.perf_counter() - began)
"""

# Warm: `%load_ext nbdist`, then nothing until the template has imported all.
_WARM = f"""
import os, time
import _tools
from nbdist.client.session.session import Session
from nbdist.client.start.connection import prewarm
prewarm()
while len(processes := _tools.psutil.Process().children(recursive=True)) < 3:  # controller, agent, template
    time.sleep(0.1)
_tools.wait_until_quiet(processes)
began = time.perf_counter()
with Session({RANKS}) as ranks:
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    ranks.restart()
    print(seconds, time.perf_counter() - began)
"""


def main() -> None:
    _tools.prepare()
    again: list[float] = []

    def warm() -> float:
        first, second = _python(_WARM)
        again.append(second)
        return first

    samples = _tools.rounds(
        ROUNDS,
        {
            "import": _tools.timed(lambda: _python("import torch")),
            "cold": lambda: _python(_COLD)[0],
            "warm": warm,
        },
        warm_up=WARM_UP,
    )
    _tools.header("start")
    _tools.row("python -c 'import torch'", samples["import"])
    name = "python -c 'import torch'"
    _tools.row(f"{RANKS} ranks, group ready, cold", samples["cold"], over=(name, samples["import"]), at_most=1.5)
    _tools.row(f"{RANKS} ranks, group ready, warm", samples["warm"], **_tools.limit(0.5))
    _tools.row(f"restart of {RANKS} ranks", again[WARM_UP:])


def _python(code: str) -> list[float]:
    prefix = f"import sys; sys.path.insert(0, {str(_tools.ROOT / 'benchmarks')!r})\n" if "_tools" in code else ""
    done = subprocess.run([sys.executable, "-c", prefix + code], check=True, stdout=subprocess.PIPE, text=True)
    return [float(word) for word in done.stdout.split()]


if __name__ == "__main__":
    main()
