"""How long `%distributed save` takes for variables of ranks, also while they train, and a start from a small save."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import _tools

if TYPE_CHECKING:
    from nbdist import Session

RANKS = 2
ROUNDS = 5
COUNT, ELEMENTS = _tools.size(16, 2), _tools.size(8 << 20, 1 << 10)  # tensors of 32 MiB: 512 MiB on each rank

HELD = f"""
import os, time, torch, nbdist
held = [torch.rand({ELEMENTS}) for _ in range({COUNT})]

def alone(folder):
    nbdist.wait_for_everyone()
    began = time.perf_counter()
    path = os.path.join(folder, f"held-{{rank}}.pt")
    torch.save(held, path + ".new")
    with open(path + ".new") as file:
        os.fsync(file.fileno())
    os.replace(path + ".new", path)  # and remove the one before, as a save does
    nbdist.wait_for_everyone()
    return time.perf_counter() - began
"""
TRAIN = """
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], 0.0)
weight.grad = torch.zeros(4)
while True:
    optimizer.step()
    open(f"trains-{rank}", "w").close()
    time.sleep(0.01)
"""
SMALL = """
import torch, nbdist
net = torch.nn.Linear(64, 64)
model, optimizer = nbdist.prepare(net, torch.optim.AdamW(net.parameters()))
step = 0
"""


def _in_a_cell(session: Session, directory: Path) -> list[float]:
    from nbdist import RankError

    cell = session.run_in_background(f"os.chdir({str(directory.parent)!r})\n{TRAIN}", show=False)
    while not all((directory.parent / f"trains-{rank}").exists() for rank in range(RANKS)):
        time.sleep(0.01)
    times = _tools.rounds(ROUNDS, {"save": _tools.timed(lambda: session.save(directory, keep=1))}, warm_up=1)["save"]
    cell.interrupt()
    with contextlib.suppress(KeyboardInterrupt, RankError):
        cell.wait()
    return times


def main() -> None:
    _tools.prepare()
    import nbdist

    with tempfile.TemporaryDirectory() as folder:
        with nbdist.Session(RANKS) as session:
            session.run(HELD)
            saved = _tools.rounds(
                ROUNDS,
                {
                    "torch": lambda: float(session.run(f"alone({folder!r})")[0].result or 0),
                    "save": _tools.timed(lambda: session.save(Path(folder, "large"), keep=1)),
                },
                warm_up=1,
            )
            saved["in a cell"] = _in_a_cell(session, Path(folder, "large"))
        with nbdist.Session(RANKS) as session:
            session.run(SMALL, setup=True)
            session.save(Path(folder, "small"))

        def start() -> None:
            with nbdist.Session(RANKS) as session:
                session.run(SMALL, setup=True)

        def restore() -> None:
            with nbdist.Session.restore(Path(folder, "small"), show=lambda line: None):
                pass

        began = _tools.rounds(ROUNDS, {"start": _tools.timed(start), "restore": _tools.timed(restore)}, warm_up=1)
    size = COUNT * ELEMENTS * 4 / 2**20
    _tools.header(f"a session of {RANKS} ranks that is saved, and starts again")
    _tools.row(f"torch.save of {size:.0f} MiB on each rank", saved["torch"])
    _tools.row("session.save, with these in a variable", saved["save"], over=("torch.save", saved["torch"]))
    _tools.row("the same between two steps of a cell", saved["in a cell"], over=("session.save", saved["save"]))
    _tools.row("Session(2), warm, and a setup cell that prepares a model", began["start"])
    _tools.row("Session.restore of the same", began["restore"], over=("that start", began["start"]), at_most=2.0)


if __name__ == "__main__":
    main()
