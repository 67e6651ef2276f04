"""From `%distributed attach` to a session in hand, with what ranks have printed meanwhile, in a real kernel."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from pathlib import Path

import _tools

RANKS = _tools.size(8, 2)
ROUNDS = 7
BUDGET = 0.5
MISSED = {"nothing": 0, "10 MB": _tools.size(10_000_000, 1_000_000)}

_PRINT = """%%distributed --background
import os, time
while not os.path.exists({go!r}): time.sleep(0.01)
for i in range({lines}): print(f"rank {{rank}} {{i:092d}}")
open(f"{done}-{{rank}}", "w").close()"""


def main() -> None:
    _tools.prepare()
    from testbed.kernel import Kernel, kernel_with_ranks, wait_until

    printed: list[int] = []

    def measure(clients: list[Kernel], size: int) -> float:
        """The first client leaves, ranks print, and the second takes over."""
        clients.reverse()
        newcomer, holder = clients
        with tempfile.TemporaryDirectory() as folder:
            go, done = Path(folder) / "go", Path(folder) / "done"
            holder.ok(_PRINT.format(go=str(go), done=str(done), lines=size // RANKS // 100))
            holder.ok("%distributed detach")
            go.touch()
            wait_until(lambda: len(list(Path(folder).glob("done-*"))) == RANKS, "ranks to print", 120.0)
        began = time.perf_counter()
        shown = newcomer.ok("%distributed attach")
        seconds = time.perf_counter() - began
        assert f"{RANKS} ranks" in shown.stdout, str(shown)
        if size:
            log = newcomer.value("sum(map(len, __import__('nbdist').get_session().logs().values()))")
            assert log == size // RANKS // 100 * 100 * RANKS, log
            printed.append(log)
        return seconds

    with contextlib.ExitStack() as stack:
        other = stack.enter_context(Kernel(NBDIST_PREWARM="0"))
        other.ok("%load_ext nbdist")
        holder = stack.enter_context(kernel_with_ranks(RANKS, "--linger 10m"))
        clients = [holder, other]
        measures = {name: functools.partial(measure, clients, size) for name, size in MISSED.items()}
        samples = _tools.rounds(ROUNDS, measures)
    _tools.header(f"a session of {RANKS} ranks is taken over")
    for name in MISSED:
        _tools.row(f"they have printed {name} meanwhile", samples[name], **_tools.limit(BUDGET))
    print(f"{sum(printed):,} bytes printed without a client, all of them in the log")


if __name__ == "__main__":
    main()
