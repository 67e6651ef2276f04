"""Uses one session for a long time, and reports what its processes hold from minute to minute.

`python -m tests.stress.soak --minutes 30` prints the table of docs/reliability.md. Memory is what only the process has
(USS); a rank that was replaced is compared from its replacement on.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbdist.base.text import size, table
from testbed.kernel import Kernel, kernel_with_ranks
from tests.stress.fault_plan import marked_run
from tests.support.roles import find

RANKS = 3
INTERRUPTED = 0.01  # of all cells
WARM_UP = 0.2  # of the time, in which caches fill
_SETUP = """%%distributed --setup
import os, sys, time, torch, torch.distributed as dist, nbdist
from IPython.display import HTML, display
torch.manual_seed(0)
model = nbdist.prepare(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)))
optimizer = nbdist.prepare(torch.optim.AdamW(model.parameters()))
def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
"""


@dataclass(frozen=True)
class Held:
    """What a process holds. memory: bytes that only it has."""

    memory: int
    descriptors: int
    threads: int


class Soak:
    """A session in use.

    Args:
        kernel: A kernel with ranks and a panel.
        seed: Of what it runs.
        folder: For checkpoints.
    """

    def __init__(self, kernel: Kernel, seed: int, folder: Path) -> None:
        self._kernel = kernel
        self._chance = random.Random(seed)
        self._folder = folder
        self._uses: tuple[Callable[[], object], ...] = (
            self._train,
            self._print,
            self._display,
            self._fail,
            self._exchange,
            self._save,
            self._make_group,
        )
        self.cells = 0

    def use(self) -> None:
        """Run something; now and then, interrupt it."""
        chosen = self._interrupt if self._chance.random() < INTERRUPTED else self._chance.choice(self._uses)
        chosen()
        self.cells += 1

    def heal(self) -> None:
        """Have a rank die and be replaced."""
        rank = self._chance.randrange(RANKS)
        self._kernel.fails(f"%%distributed -r {rank}\nos._exit(3)", "RankDied")
        self._kernel.ok("%distributed heal")
        self._kernel.ok("%%distributed\nnbdist.sync()\nassert nbdist.check(model, optimizer)")

    def _train(self) -> None:
        self._kernel.ok(f"%%distributed\ntrain({self._chance.randrange(5, 50)})")

    def _print(self) -> None:
        self._kernel.ok(f"%%distributed\nfor line in range({self._chance.randrange(2000)}): print(rank, line)")

    def _display(self) -> None:
        self._kernel.ok("%%distributed\nfor each in range(5): display(HTML(f'<b>{rank} {each}</b>'))\nrank")

    def _fail(self) -> None:
        self._kernel.fails("%%distributed -r 1\nlocal = torch.zeros(1000)\n1 / 0", "RankError")

    def _interrupt(self) -> None:
        running = self._kernel.start("%%distributed\nprint('begun')\ntrain(100_000)")
        running.wait_for("begun")
        self._kernel.interrupt()
        assert running.finish().ename == "KeyboardInterrupt"

    def _exchange(self) -> None:
        self._kernel.ok("sent = torch.ones(100_000)\n%distributed push sent\n%distributed pull sent")

    def _save(self) -> None:
        self._kernel.ok(f"%%distributed\nnbdist.save_state('{self._folder}/checkpoint')")

    def _make_group(self) -> None:
        self._kernel.ok(
            "%%distributed\ngroup = dist.new_group([0, 1])\nx = torch.ones(10)\n"
            "if rank < 2: dist.all_reduce(x, group=group)\ndist.destroy_process_group(group) if rank < 2 else None\n"
            "del group"
        )

    @property
    def renewals(self) -> int:
        """How often the process groups have been renewed so far."""
        return int(self._kernel.value("nbdist.get_session().status()[0]['generation']"))

    def held(self) -> dict[str, Held]:
        """Return what each process holds, but what IPython keeps of all output (it does so for `%notebook`)."""
        self._kernel.ok("get_ipython().history_manager.outputs.clear()")
        pids = {role: find(self._kernel.pid, role) for role in ("controller", "agent", "template")}
        pids |= {"kernel": self._kernel.pid}
        pids |= {f"rank {rank} (pid {pid})": pid for rank, pid in enumerate(self._kernel.rank_pids())}
        return {name: _held(pid) for name, pid in sorted(pids.items())}


def _held(pid: int) -> Held:
    process = psutil.Process(pid)
    return Held(process.memory_full_info().uss, process.num_fds(), process.num_threads())


def run(soak: Soak, seconds: float, heals: int) -> Iterator[dict[str, Held]]:
    """Use a session for a time, with so many deaths in its warm-up. Yield what is held after that, minute by minute."""
    began = time.monotonic()
    for number in range(heals):
        while time.monotonic() < began + seconds * WARM_UP * (number + 1) / (heals + 1):
            soak.use()
        soak.heal()
    while time.monotonic() < began + seconds * WARM_UP:
        soak.use()
    yield soak.held()
    due = time.monotonic() + 60.0
    while (now := time.monotonic()) < began + seconds:
        soak.use()
        if now >= due:
            due = now + 60.0
            yield soak.held()
    yield soak.held()


def main() -> None:
    """Use a session, and print what its processes hold at the beginning and at the end."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with marked_run() as folder, kernel_with_ranks(RANKS, "--replace") as kernel:
        kernel.ok("import nbdist, torch")
        kernel.ok(_SETUP)
        kernel.ok("%distributed panel")
        soak = Soak(kernel, arguments.seed, folder)
        looks, renewals = [], 0
        for look in run(soak, arguments.minutes * 60, heals=3):
            looks.append(look)
            renewals = renewals or soak.renewals
            print(
                {name: (held.memory >> 10, held.descriptors, held.threads) for name, held in look.items()}, flush=True
            )
        first, last = looks[0], looks[-1]
        rows = [
            (
                name,
                *(size(held.memory) for held in (first[name], last[name])),
                *(str(held.descriptors) for held in (first[name], last[name])),
                *(str(held.threads) for held in (first[name], last[name])),
            )
            for name in last
        ]
        heads = ("process", "memory", "at the end", "descriptors", "at the end", "threads", "at the end")
        print(table(rows, heads))
        print(f"{soak.renewals - renewals} renewals of process groups between them")
        print(f"{soak.cells:,} cells in {arguments.minutes:g} minutes, seed {arguments.seed}")


if __name__ == "__main__":
    main()
