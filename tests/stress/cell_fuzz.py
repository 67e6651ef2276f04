"""Runs random sequences of odd cells in a session and checks after each what has to hold: a seed gives the sequence.

`python -m tests.stress.cell_fuzz --cells 100000 --seed 1` runs it as long as you like; the tests run a sample.

What has to hold: no cell takes longer than its bound; all that a living rank printed has come, in its order; ranks that
nobody has killed live and keep their variables; every all-reduce is right; nothing is left when the session is closed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbdist import NbdistError, RankDied, RankError, RankTimeout, Session, StaleGroupError
from nbdist.client.ranks.background import BackgroundCell
from tests.support.odd_cells import DIES, FAILS, ODD_CELLS, OddCell

RANKS = 3
_LIMIT = 60.0  # seconds until a cell counts as hanging, however busy the machine is
_INTERRUPTED = 0.25  # of the cells
_PARTIAL = 0.3  # of the cells run on some of the ranks
_BACKGROUND = 0.1  # of the cells run while another one runs on the other ranks
_GRACES = (0.02, 0.02, 0.02, 0.3)  # seconds that ranks may wait for one that has raised
_RESTART = 0.01
_DEATH = 0.02
_HEALED = 0.8  # of the deaths after which a rank lives; else all are restarted

_FUZZED = [odd for odd in ODD_CELLS if odd.fuzzed and odd.outcome != DIES]
_DEADLY = [odd for odd in ODD_CELLS if odd.fuzzed and odd.outcome == DIES]
# A part of the ranks can't meet in the default group, so these run on all.
_FOR_ALL = {
    "unwaited-collective",
    "raises-before-collective",
    "raises-after-collective",
    "new-group",
    "raises-in-new-group",
}

# What a cell leaves behind on purpose, as its table says, would change what later cells mean.
_TIDY = """
import asyncio, gc, signal, sys, warnings
import torch
warnings.resetwarnings()
torch.set_default_dtype(torch.float32)
torch.set_default_device(None)
gc.enable()
"""
_SET_UP = "path = {path!r}\nkept = rank + 10\ncells = 0\nbusy = 0.0\n" + _TIDY
_CHECK = """
import torch, torch.distributed as dist
total = torch.tensor([float(rank + 1), float({number})], device=device, dtype=torch.float64)
dist.all_reduce(total)
print("sum", int(total[0]), int(total[1]), "kept", kept)
"""


class Violation(AssertionError):
    """Something that has to hold does not; the text says what, and how to see it again."""


@dataclass
class Figures:
    """What has been run.

    Attributes:
        cells: By name of the odd cell.
        endings: How cells ended, by name of the error; "" for those that ended well.
        slowest: Seconds of the slowest cell, and its name.
        restarts: Times that all ranks were replaced.
        heals: Times that the ranks were replaced which had died.
    """

    cells: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    restarts: int = 0
    heals: int = 0

    def __str__(self) -> str:
        endings = ", ".join(f"{count:,} {name or 'ok'}" for name, count in self.endings.most_common())
        seconds, name = self.slowest
        times = f"{self.restarts} restarts, {self.heals} heals"
        return f"{self.cells.total():,} cells ({endings}), {times}; slowest {name} {seconds:.1f} s"


class CellFuzz:
    """Random cells in one session.

    Args:
        session: Ranks that nobody else uses.
        seed: Where all that is random comes from.
        folder: For the cells' files.
    """

    def __init__(self, session: Session, seed: int, folder: Path) -> None:
        self._session, self._seed, self._folder = session, seed, folder
        self._random = random.Random(seed)
        self._everyone = [info.rank for info in session.ranks]
        self._number = 0
        self._history: list[str] = []
        self.figures = Figures()
        self._set_up()

    def run(self, count: int) -> Figures:
        """Run so many odd cells, with the checks between them."""
        while self._number < count:
            self._number += 1
            chance = self._random.random()
            if chance < _RESTART:
                self._restart()
            elif chance < _RESTART + _DEATH:
                self._die()
            elif chance < _RESTART + _DEATH + _BACKGROUND:
                self._run_two()
            else:
                self._run_one()
            self._check()
        return self.figures

    # --- what happens

    def _run_one(self) -> None:
        ranks = self._some_ranks() if self._random.random() < _PARTIAL else self._everyone
        odd = self._choose(whole=ranks == self._everyone)
        self._finish(odd, self._start(odd, ranks), interrupted=self._random.random() < _INTERRUPTED)

    def _run_two(self) -> None:
        """Two cells at the same time, on different ranks."""
        first = self._some_ranks()
        parts = first, [rank for rank in self._everyone if rank not in first]
        running = [(odd, self._start(odd, ranks)) for ranks in parts for odd in [self._choose(whole=False)]]
        self._random.shuffle(running)
        for odd, cell in running:
            self._finish(odd, cell, interrupted=self._random.random() < _INTERRUPTED)

    def _die(self) -> None:
        odd = self._random.choice(_DEADLY)
        cell = self._start(odd, self._everyone)
        error = self._wait(odd, cell)
        if not isinstance(error, RankDied) or odd.shown not in str(error):
            self._violated(f"{odd.name} ended with {error!r}, where a death by {odd.shown} was to be reported")
        self._note(odd, cell, error)
        some_live = any(row["state"] != "dead" for row in self._session.status())
        if some_live and self._random.random() < _HEALED:
            self._heal()
        else:
            self._restart()

    def _heal(self) -> None:
        self._history.append("heal")
        try:
            self._session.heal()
        except NbdistError as error:
            self._violated(f"the heal failed: {_text(error)}")
        self.figures.heals += 1

    def _restart(self) -> None:
        self._history.append("restart")
        self._session.restart()
        self.figures.restarts += 1
        self._set_up()

    def _set_up(self) -> None:
        self._session.run(_SET_UP.format(path=str(self._folder)), setup=True)

    def _some_ranks(self) -> list[int]:
        return sorted(self._random.sample(self._everyone, self._random.randint(1, len(self._everyone) - 1)))

    def _choose(self, *, whole: bool) -> OddCell:
        return self._random.choice([odd for odd in _FUZZED if whole or odd.name not in _FOR_ALL])

    # --- one cell

    def _start(self, odd: OddCell, ranks: Sequence[int]) -> BackgroundCell:
        self._history.append(f"{odd.name} on {list(ranks)}")
        code = f"print('before {self._number}')\n{odd.code}"
        if not odd.silent:
            code += f"\nprint('after {self._number}')"
        grace = self._random.choice(_GRACES)
        return self._session.run_in_background(code, list(ranks), grace=grace, show=False)

    def _finish(self, odd: OddCell, cell: BackgroundCell, *, interrupted: bool) -> None:
        began = time.monotonic()
        if interrupted:
            time.sleep(self._random.expovariate(1 / 0.01))
            now = self._random.random() < 0.3
            self._history.append(f"interrupted{' now' if now else ''}")
            cell.interrupt(now=now)
        error = self._wait(odd, cell)
        self._note(odd, cell, error, time.monotonic() - began)
        failed = isinstance(error, RankError)
        if isinstance(error, RankDied):
            self._violated(f"{odd.name} took a rank with it: {_text(error)}")
        if interrupted:
            self._check_output(cell, odd, whole=False)
            return
        if failed != (odd.outcome == FAILS) or isinstance(error, KeyboardInterrupt):
            self._violated(f"{odd.name}: {odd.outcome} was to come, and it ended with {_text(error)}")
        if error is not None and odd.shown not in _text(error):
            self._violated(f"{odd.name} was to report {odd.shown}: {_text(error)}")
        self._check_output(cell, odd, whole=not failed)

    def _wait(self, odd: OddCell, cell: BackgroundCell) -> BaseException | None:
        try:
            cell.wait(_LIMIT)
        except RankTimeout as error:
            if not cell.done:
                stacks = "\n".join(f"rank {rank}: {text}" for rank, text in self._session.stacks().items())
                self._violated(f"{odd.name} hangs: {error}\n{stacks}")
            return error
        except (RankError, KeyboardInterrupt) as error:
            return error
        return None

    def _check_output(self, cell: BackgroundCell, odd: OddCell, *, whole: bool) -> None:
        """What was printed came, each line once; all of it if the cell came to its end."""
        before, after = f"before {self._number}", f"after {self._number}"
        for rank, result in cell.output.items():
            lines = result.stdout.splitlines()
            if not odd.silent and (lines.count(before) > 1 or lines.count(after) > 1):
                self._violated(f"{odd.name}: lines of rank {rank} came twice: {lines[:5]}")
            expected = [before, after]
            if whole and not odd.silent and [line for line in lines if line in expected] != expected:
                self._violated(f"{odd.name}: rank {rank} printed {expected}, and {lines[:3]} ... {lines[-3:]} came")

    def _note(self, odd: OddCell, cell: BackgroundCell, error: BaseException | None, seconds: float = 0.0) -> None:
        self.figures.cells[odd.name] += 1
        self.figures.endings[type(error).__name__ if error is not None else ""] += 1
        self.figures.slowest = max(self.figures.slowest, (seconds, odd.name))

    # --- what has to hold

    def _check(self) -> None:
        """All ranks live, their variables are kept, they print, and they agree on a sum."""
        expected = f"sum {sum(rank + 1 for rank in self._everyone)} {self._number * len(self._everyone)} kept "
        began = time.monotonic()
        try:
            result = self._session.run(_TIDY + _CHECK.format(number=self._number), timeout=_LIMIT)
        except (RankError, StaleGroupError) as error:
            self._violated(f"the next cell fails: {_text(error)}")
        for rank in self._everyone:
            if f"{expected}{rank + 10}" not in result[rank].stdout.splitlines():
                self._violated(f"rank {rank} was to print {expected}{rank + 10}, and printed {result[rank].stdout!r}")
        self.figures.slowest = max(self.figures.slowest, (time.monotonic() - began, "check"))

    def _violated(self, what: str) -> None:
        history = "\n".join(f"  {line}" for line in self._history[-12:])
        raise Violation(f"seed {self._seed}, cell {self._number}: {what}\nthe cells before it:\n{history}")


def _text(error: BaseException | None) -> str:
    return error.report if isinstance(error, RankError) else repr(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-session", type=int, default=1_000, help="cells until the session is closed")
    arguments = parser.parse_args()
    began, done = time.monotonic(), 0
    while done < arguments.cells:
        count = min(arguments.per_session, arguments.cells - done)
        with tempfile.TemporaryDirectory() as folder, Session(RANKS) as session:
            figures = CellFuzz(session, arguments.seed + done, Path(folder)).run(count)
        done += count
        print(f"{done:,} cells, {time.monotonic() - began:.0f} s: {figures}", flush=True)


if __name__ == "__main__":
    main()
