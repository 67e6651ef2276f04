"""Random sequences of cells on the ranks of a session, after each of which a sum is right, or an error says why not.

Cells run on some of the ranks or on all, in front or in the background; they fail before or behind a collective that
others never enter, hold the GIL, or are interrupted; ranks are stopped and go on. What is random comes from one seed.
Knows of the ranks what a user sees. `python -m tests.stress.right_sums --count 500` tries many and reports how they
ended.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter

import nbdist
from nbdist.client.base.results import CellResult
from nbdist.client.ranks.background import BackgroundCell
from nbdist.client.session.session import rank_set_of

_LIMIT = 30.0  # seconds after which a cell counts as hanging
_GRACE = 0.3
_LATE = (0.5, 5.0)  # seconds for which a rank does not answer: in most cases more than it has

_SETUP = """
import ctypes, itertools, threading, time, torch, torch.distributed as dist
groups = {"world": None} | {f"{a}-{b}": dist.new_group([a, b]) for a, b in itertools.combinations(range(world_size), 2)}


def total(value, name):
    x = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(x, group=groups[name])
    return x.item()


def leave(name):
    return dist.all_reduce(torch.full((1,), 1e6, dtype=torch.float64), group=groups[name], async_op=True)


def hold(seconds):
    threading.Timer(0.05, lambda: ctypes.PyDLL(None).usleep(int(1e6 * seconds))).start()
"""


class WrongSum(AssertionError):
    """A sum that is not right, or that can't be had for no reason."""


class Sequences:
    """Sequences of cells on one session.

    Attributes:
        outcomes: How often what has happened, and how cells in front have ended.
        story: What was done in the present sequence, for whoever has to find out why it went wrong.
    """

    def __init__(self, session: nbdist.Session, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.story: list[str] = []
        self._session = session
        self._random = random.Random(seed)
        self._ranks = list(range(len(session.ranks)))
        pairs = itertools.combinations(self._ranks, 2)
        self._groups = {"world": self._ranks} | {f"{a}-{b}": [a, b] for a, b in pairs}
        self._numbers = itertools.count(1)
        self._background: list[BackgroundCell] = []
        self._sums: list[tuple[str, dict[int, int], BackgroundCell]] = []  # in the background
        self._timers: list[threading.Timer] = []
        session.run(_SETUP)

    def renew(self) -> None:
        """Go on with fresh ranks, as torch can renew a group some 230 times only."""
        self._session.restart()
        self._session.run(_SETUP)

    def run(self) -> None:
        """One sequence of cells; in the end, when all ranks are idle, there is a right sum of every group.

        Raises:
            WrongSum: There is not.
        """
        self.story = []
        steps = [self._sum, self._sum_in_background, self._fail, self._fail, self._fail_and_free, self._interrupt]
        chosen = self._random.choices(steps, k=self._random.randint(3, 6))
        if self._random.random() < 0.15:
            chosen.insert(self._random.randrange(len(chosen)), self._stop)
        for step in chosen:
            step()
        self._settle()
        for name in self._groups:
            ended = self._add_up(name)
            if ended != "right":
                raise WrongSum(f"no sum of {name} although all ranks are idle ({ended}), after {self.story}")

    def close(self) -> None:
        """Let all ranks go on."""
        for timer in self._timers:
            timer.join()

    # --- cells

    def _sum(self) -> None:
        self._add_up(self._any_group())

    def _add_up(self, name: str) -> str:
        numbers, code = self._addition(name)
        ended, result = self._run(code, self._groups[name])
        if result is not None:
            self._check(name, numbers, result)
        return ended

    def _sum_in_background(self) -> None:
        """Other cells run, and fail, before and while the numbers are added up."""
        name = self._any_group()
        numbers, code = self._addition(name)
        cell = self._start([f"time.sleep({self._random.uniform(0, 0.8):.2f})", code], self._groups[name])
        if cell is not None:
            self._sums.append((name, numbers, cell))

    def _addition(self, name: str) -> tuple[dict[int, int], str]:
        """Numbers that no sum has had before, and what adds them up."""
        numbers = {rank: next(self._numbers) for rank in self._groups[name]}
        return numbers, f"print(total({numbers}[rank], {name!r}))"

    def _check(self, name: str, numbers: dict[int, int], result: CellResult) -> None:
        sums = {float(result[rank].stdout) for rank in numbers if result[rank].stdout}
        if not sums <= {float(sum(numbers.values()))}:
            raise WrongSum(f"{sums} instead of {sum(numbers.values())} in {name}, after {self.story}")

    def _fail(self) -> None:
        """A rank raises, in most cells behind a collective that the others never enter; some do not answer then."""
        ranks = self._some_ranks()
        failing = self._random.choice(ranks)
        lines = [f"if rank == {failing}:"]
        if self._random.random() < 0.8:
            lines.append(f"    work = leave({self._any_group(failing)!r})")
        lines += [f"    time.sleep({self._random.uniform(0, 0.2):.2f})", "    raise ValueError('meant')"]
        if self._random.random() < 0.15:
            self.outcomes["a rank held the GIL"] += 1
            lines.insert(0, f"if rank == {self._random.choice(ranks)}: hold({self._random.uniform(*_LATE):.1f})")
        if self._random.random() < 0.5:
            lines.append(f"time.sleep({self._random.uniform(0, 0.6):.2f})")
        self._begin(lines, ranks)

    def _fail_and_free(self) -> None:
        """A rank raises before a collective that the others have entered."""
        ranks = self._some_ranks()
        failing = self._random.choice(ranks)
        name = self._any_group(failing)
        self._begin(
            [
                f"if rank == {failing}: raise ValueError('meant')",
                f"if rank in {self._groups[name]}: total(0, {name!r})",
            ],
            ranks,
        )

    def _begin(self, lines: list[str], ranks: list[int]) -> None:
        """Run a cell in front or in the background."""
        if self._random.random() < 0.4:
            self._run("\n".join(lines), ranks)
        else:
            self._start(lines, ranks)

    def _start(self, lines: list[str], ranks: list[int]) -> BackgroundCell | None:
        """Run a cell in the background, if its ranks are free."""
        code = "\n".join(lines)
        self.story.append(f"{ranks} in the background: {code}")
        try:
            cell = self._session.run_in_background(code, ranks, timeout=_LIMIT, grace=_GRACE, show=False)
        except nbdist.SessionBusy:
            self.outcomes["refused: a rank is busy"] += 1
            return None
        self._background.append(cell)
        self.outcomes["begun in the background"] += 1
        time.sleep(self._random.uniform(0, 0.3))  # not to wait for anything: the moment is random
        return cell

    def _run(self, code: str, ranks: list[int]) -> tuple[str, CellResult | None]:
        """Run a cell in front. Returns how it ended, and what it has printed."""
        self.story.append(f"{ranks}: {code}")
        result = None
        try:
            result = self._session.run(code, ranks, timeout=_LIMIT, grace=_GRACE)
            ended = "right"
        except nbdist.SessionBusy:
            ended = "refused: a rank is busy"
        except nbdist.RankTimeout as error:
            raise WrongSum(f"a cell hangs after {self.story}") from error
        except nbdist.RankError as error:
            ended = _explained(error)
            if not ended:
                raise WrongSum(f"an error that nobody meant, after {self.story}") from error
        self.outcomes[ended] += 1
        return ended, result

    def _interrupt(self) -> None:
        running = [cell for cell in self._background if not cell.done]
        if running:
            self.story.append("interrupt")
            self.outcomes["interrupted"] += 1
            self._random.choice(running).interrupt(now=self._random.random() < 0.5)

    def _stop(self) -> None:
        """A rank answers nothing for a while, whatever it is at."""
        rank, seconds = self._random.choice(self._ranks), self._random.uniform(*_LATE)
        pid = self._session.ranks[rank].pid
        self.story.append(f"stop {rank} for {seconds:.1f} s")
        self.outcomes["a rank was stopped"] += 1
        os.kill(pid, signal.SIGSTOP)
        self._timers.append(threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)))
        self._timers[-1].start()

    def _settle(self) -> None:
        """Wait until every rank is idle."""
        for cell in self._background:
            try:
                cell.wait(_LIMIT)
            except nbdist.RankTimeout as error:
                raise WrongSum(f"a cell in the background hangs after {self.story}") from error
            except nbdist.RankError as error:
                self.outcomes[f"in the background {_explained(error) or 'failed in consequence'}"] += 1
            except KeyboardInterrupt:
                self.outcomes["in the background interrupted"] += 1
        for name, numbers, cell in self._sums:
            self._check(name, numbers, cell.output)
        self._background, self._sums = [], []

    def _some_ranks(self) -> list[int]:
        return sorted(self._random.sample(self._ranks, self._random.randint(1, len(self._ranks))))

    def _any_group(self, rank: int | None = None) -> str:
        return self._random.choice([name for name, members in self._groups.items() if rank in (None, *members)])


def _explained(error: nbdist.RankError) -> str:
    """How a cell ended whose error was meant, or says why there is no sum; "" for any other."""
    names = {failure.name for failure in error.failures.values()}
    if "StaleGroupError" in names:
        return "explained: the group may be out of step"
    return "failed as meant" if "meant" in str(error) else ""


def main() -> None:
    """Run sequences, and say how their cells ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=3)
    given = parser.parse_args()
    began, rebuilt = time.monotonic(), 0
    with nbdist.Session(given.ranks) as session, contextlib.closing(Sequences(session, given.seed)) as sequences:
        for number in range(given.count):
            sequences.run()
            if rank_set_of(session).generation > 150:
                rebuilt += rank_set_of(session).generation - 1
                sequences.renew()
            if number % 25 == 24:
                print(
                    f"{number + 1} sequences, {time.monotonic() - began:.0f} s, {dict(sequences.outcomes)}", flush=True
                )
        print(f"process groups were rebuilt {rebuilt + rank_set_of(session).generation - 1} times")


if __name__ == "__main__":
    main()
