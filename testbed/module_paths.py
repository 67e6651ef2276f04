"""Which modules a cell and a Ctrl-C pass, in all processes: those of which a function runs, and would not run anyway.

`python -m testbed.module_paths` prints them, and how many there are.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from testbed.kernel import Kernel

_TRACING = Path(__file__).with_name("tracing")
_REST = 1


class Trace:
    """A record of the functions of nbdist that run in a kernel and what it starts.

    Args:
        folder: Where to keep it.

    Attributes:
        environment: For the kernel.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "traced"
        self._file.write_bytes(b"\0")
        path = os.pathsep.join([str(_TRACING), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {"NBDIST_TRACED": str(self._file), "PYTHONPATH": path}
        with self._file.open("r+b") as opened:
            self._switch = mmap.mmap(opened.fileno(), 1)

    @contextlib.contextmanager
    def during(self, number: int) -> Iterator[None]:
        """Record what runs in the body, under a number; under 1, what runs anyway."""
        self._switch[0] = number
        try:
            yield
        finally:
            self._switch[0] = 0

    def modules(self, number: int) -> list[str]:
        """Return the files of which something ran, but for what also runs anyway."""
        ran: dict[int, set[tuple[str, str]]] = defaultdict(set)
        for line in self._file.with_suffix(".lines").read_text().splitlines():
            during, _, module, function = line.split(" ", 3)
            ran[int(during)].add((module, function))
        return sorted({module for module, _ in ran[number] - ran[_REST]})


def modules_passed() -> dict[str, list[str]]:
    """Return the modules that a cell on two ranks passes, and those of a Ctrl-C that ends one."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace(Path(folder))
        with Kernel(**trace.environment) as kernel:
            kernel.ok("%load_ext nbdist\n%distributed start -n 2")
            kernel.ok("%%distributed\nimport time")  # what only a first cell does
            with trace.during(_REST):
                kernel.ok("import time\ntime.sleep(1.5)")
            with trace.during(2):
                kernel.ok("%%distributed\nprint('hello')")
            waiting = kernel.start("%%distributed\nprint('begun')\ntime.sleep(300)")
            waiting.wait_for_ranks(2, "begun")
            with trace.during(3):
                kernel.interrupt()
                waiting.finish()
        return {"a cell": trace.modules(2), "a Ctrl-C": trace.modules(3)}


if __name__ == "__main__":
    for walk, modules in modules_passed().items():
        print(f"{walk} passes {len(modules)} modules:", *modules, sep="\n  ")
