"""Ends or stops any process of a session at any moment, by a seeded plan, and checks what has to hold after each.

`python -m tests.stress.fault_plan --faults 10000 --seed 1` prints the table of docs/reliability.md; the tests run some.

What has to hold: a cell ends within its bound; its error, or that of the next cell, names the process that was lost and
how; all that a living rank printed has come, in its order; living ranks keep their variables; a stop of a second or
two costs time and nothing else; the session works again after a heal, a restart or a start; and no process and no
file is left of what was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbdist.base.text import table
from testbed.kernel import Execution, Kernel, Outcome, wait_until
from tests.support.leftovers import MARK, files_of_sessions, processes_of_this_run
from tests.support.roles import alive, await_end, children, family, find

RANKS = 3
BOUND = 30.0  # seconds until a cell counts as hanging, however busy the machine is
PROCESSES = ("kernel", "controller", "agent", "template", "store", "rank 0", "rank 2")
PAUSE = "SIGSTOP"
KINDS = ("SIGKILL", "SIGTERM", "SIGSEGV", PAUSE)
_LATEST = 0.3  # seconds after a phase has begun
_LONGEST_PAUSE = 1.5  # seconds

SETUP = """%%distributed --setup
import os, sys, time, torch, torch.distributed as dist, nbdist
kept = rank + 10
torch.manual_seed(0)
model = nbdist.prepare(torch.nn.Linear(64, 64))
optimizer = nbdist.prepare(torch.optim.AdamW(model.parameters()))
"""
SUM = """%%distributed
total = torch.tensor([float(rank + 1)], dtype=torch.float64)
dist.all_reduce(total)
print("sum", int(total))
"""
_GO_ON = """%%distributed
nbdist.sync()
for step in range(2):
    optimizer.zero_grad()
    model(torch.full((8, 64), rank + 1.0)).square().mean().backward()
    optimizer.step()
assert nbdist.check(model, optimizer)
"""
# By phase: what runs, and, once that prints, the moment from which a fault may come.
PHASES = {
    "idle": "",
    "cell": "%%distributed\nfor line in range(200):\n    print(line)\n    time.sleep(0.002)",
    "collective": (
        "%%distributed\nprint(0)\nx = torch.ones(1000)\n"
        "for turn in range(1000):\n    dist.all_reduce(x)\n    x.fill_(1.0)"
    ),
    "step": (
        "%%distributed\nprint(0)\nfor step in range(100):\n    optimizer.zero_grad()\n"
        "    model(torch.ones(8, 64)).square().mean().backward()\n    optimizer.step()"
    ),
    "save": "%%distributed\nprint(0)\nfor turn in range(4):\n    nbdist.save_state('{folder}/step')",
    "heal": "%distributed heal",
    "start": "%distributed restart",
    "stop": "%distributed stop",
}


class Violation(AssertionError):
    """Something that has to hold does not; the text says what, and how to see it again."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        process: Which: one of PROCESSES.
        kind: What it gets: one of KINDS.
        phase: What runs then: one of PHASES.
        delay: Seconds from the beginning of the phase.
        pause: Seconds that it is stopped.
        heals: Whether dead ranks are replaced afterwards; else all are.
    """

    process: str
    kind: str
    phase: str
    delay: float
    pause: float
    heals: bool

    @property
    def rank(self) -> int | None:
        """The rank that it is about."""
        return int(self.process.removeprefix("rank ")) if self.process.startswith("rank") else None


@dataclass
class Figures:
    """What has been tried.

    Attributes:
        faults: How many, by process and kind.
        seconds: From each fatal fault to the end of what ran, by process.
        stuck: After how many another rank stayed in its collective, and had to be replaced, too.
    """

    faults: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stuck: int = 0

    def __str__(self) -> str:
        rows = [
            (
                process,
                *(str(self.faults.get((process, kind), 0)) for kind in KINDS),
                f"{statistics.median(times):.2f} s" if (times := self.seconds.get(process)) else "-",
                f"{max(times):.2f} s" if times else "-",
            )
            for process in PROCESSES
        ]
        shown = table(rows, ("process", *KINDS, "to the error, median", "slowest"))
        return f"{shown}\nranks stuck in gloo after the death of another: {self.stuck}"


@dataclass(frozen=True)
class Scope:
    """What faults are drawn from."""

    processes: Sequence[str] = PROCESSES
    kinds: Sequence[str] = KINDS
    phases: Sequence[str] = tuple(PHASES)


def draw(chance: random.Random, scope: Scope) -> Fault:
    """Return a random fault that makes sense."""
    while True:
        fault = Fault(
            chance.choice(scope.processes),
            chance.choice(scope.kinds),
            chance.choice(scope.phases),
            chance.uniform(0, _LATEST),
            chance.uniform(0.05, _LONGEST_PAUSE),
            chance.random() < 0.5,
        )
        if not (fault.process == "kernel" and fault.kind == "SIGSEGV"):  # faulthandler of ipykernel would print
            return fault


class FaultPlan:
    """A kernel with a session, and the faults that it gets.

    Args:
        seed: Of the plan.
        folder: For checkpoints.
        scope: What faults are drawn from.
        verbose: Whether to print each fault.
    """

    def __init__(self, seed: int, folder: Path, scope: Scope = Scope(), *, verbose: bool = False) -> None:
        self._scope, self._verbose = scope, verbose
        self._chance = random.Random(seed)
        self._folder = folder
        self._kernel: Kernel | None = None
        self._started = False
        self.figures = Figures()

    def run(self, faults: int) -> Figures:
        """Have so many faults happen, one after the other.

        Raises:
            Violation: Something did not hold.
        """
        try:
            for number in range(faults):
                fault = draw(self._chance, self._scope)
                if self._verbose:
                    print(number, fault, flush=True)
                try:
                    self._one(fault)
                except AssertionError as error:
                    raise Violation(f"fault {number}: {fault}: {error}") from error
        finally:
            self.close()
        wait_until(lambda: not processes_of_this_run(), lambda: f"an end of {processes_of_this_run()}")
        return self.figures

    def close(self) -> None:
        """End the kernel."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _one(self, fault: Fault) -> None:
        kernel = self._ready()
        if fault.phase == "heal":
            kernel.fails("%%distributed -r 1\nos._exit(3)", "RankDied", BOUND)
        pids = self._pids(kernel)
        running = self._begin(kernel, fault.phase)
        time.sleep(fault.delay)
        self.figures.faults[fault.process, fault.kind] += 1
        if fault.kind == PAUSE:
            self._pause(kernel, fault, pids, running)
        else:
            self._end(kernel, fault, pids, running)

    # --- before

    def _ready(self) -> Kernel:
        """Return a kernel with healthy ranks."""
        if self._kernel is None:
            self._kernel = Kernel()
            self._kernel.ok("%load_ext nbdist")
            self._started = False
        if not self._started:
            self._kernel.ok(f"%distributed start -n {RANKS} --linger 0 --replace", BOUND)
            self._kernel.ok(SETUP, BOUND)
            self._started = True
        self._check_sum(self._kernel)
        return self._kernel

    def _check_sum(self, kernel: Kernel) -> None:
        lines = kernel.ok(SUM, BOUND).lines
        assert lines == {rank: ["sum 6"] for rank in range(RANKS)}, f"a wrong sum: {lines}"

    def _pids(self, kernel: Kernel) -> dict[str, int]:
        ranks = kernel.rank_pids()
        others = {role: find(kernel.pid, role) for role in ("controller", "agent", "template")}
        strangers: list[int] = []

        def is_alone() -> bool:
            strangers[:] = [pid for pid in children(others["template"]) if pid not in ranks]
            return len(strangers) == 1

        # A rank that was given up while it came up may still be ending.
        wait_until(is_alone, lambda: f"an end of all but one of {strangers}: {processes_of_this_run()}", BOUND)
        found = {"kernel": kernel.pid, **others, **{f"rank {rank}": pid for rank, pid in enumerate(ranks)}}
        return {**found, "store": strangers[0]}

    def _begin(self, kernel: Kernel, phase: str) -> Execution | None:
        if not PHASES[phase]:
            return None
        running = kernel.start(PHASES[phase].replace("{folder}", str(self._folder)))
        if PHASES[phase].startswith("%%"):
            running.wait_until(lambda outcome: outcome.stdout != "", "the first line", BOUND)
        return running

    # --- a stop

    def _pause(self, kernel: Kernel, fault: Fault, pids: dict[str, int], running: Execution | None) -> None:
        pid = pids[fault.process]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(fault.pause)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        if running is not None:
            outcome = running.finish(BOUND)
            assert outcome.status == "ok", f"a stop of {fault.pause:.2f} s has cost more than time: {outcome}"
            self._check_lines(outcome, fault, range(RANKS))
        self._started = fault.phase != "stop"
        if fault.phase == "start":
            kernel.ok(SETUP, BOUND)
        elif self._started:
            self._check_kept(kernel, range(RANKS))

    # --- a death

    def _end(self, kernel: Kernel, fault: Fault, pids: dict[str, int], running: Execution | None) -> None:
        number = signal.Signals[fault.kind]
        everyone = [pid for pid in family(kernel.pid) if pid != kernel.pid]
        began = time.monotonic()
        try:
            os.kill(pids[fault.process], number)
        except ProcessLookupError:  # it was faster: there is nothing to see
            self._settle(kernel, fault, running)
            return
        if fault.process == "kernel":
            self._after_the_kernel(kernel, everyone, pids["kernel"])
            return
        outcome = running.finish(BOUND) if running is not None else None
        if outcome is not None:
            self.figures.seconds[fault.process].append(time.monotonic() - began)
            self._check_lines(outcome, fault, [rank for rank in range(RANKS) if rank != fault.rank])
        wait_until(lambda: not alive(pids[fault.process]), "its end")
        if fault.phase in ("start", "stop", "heal"):
            self._settle(kernel, fault, running)
            return
        said = str(outcome) if outcome is not None and outcome.status == "error" else ""
        if fault.process == "store":
            assert not said or "store" in said, f"an error for another reason: {said}"
            kernel.ok("%distributed restart", BOUND)
            kernel.ok(SETUP, BOUND)
            return
        if not said:  # it ended before, or was idle
            wait_until(lambda: kernel.run(SUM, BOUND).status == "error", "an error")
            said = str(kernel.run("%%distributed\nkept", BOUND))
        assert fault.process in said, f"{fault.process} is not named: {said}"
        assert fault.kind in said, f"{fault.kind} is not named: {said}"
        if fault.rank is None:
            stays = {pids["controller"], pids["agent"]} if fault.process == "template" else set()
            await_end([pid for pid in everyone if pid in pids.values() and pid not in stays], BOUND)
            self._started = False
        else:
            self._recover(kernel, fault.rank, fault.heals)

    def _recover(self, kernel: Kernel, dead: int, heals: bool) -> None:
        living = [rank for rank in range(RANKS) if rank != dead]
        if stuck := self._stuck(kernel, living):
            self.figures.stuck += 1
            which = ",".join(map(str, sorted([dead, *stuck])))
            refused = kernel.fails("%distributed heal", "SessionBroken", BOUND).evalue
            assert f"`%distributed heal -r {which} --kill` replaces it, too" in refused, refused
            kernel.ok(f"%distributed heal -r {which} --kill", BOUND)
            kernel.ok(_GO_ON, BOUND)
            return
        self._check_kept(kernel, living)
        kernel.ok("%distributed heal" if heals else "%distributed restart", BOUND)
        if heals:
            self._check_kept(kernel, living)
            kernel.ok(_GO_ON, BOUND)
        else:
            kernel.ok(SETUP, BOUND)

    def _settle(self, kernel: Kernel, fault: Fault, running: Execution | None) -> None:
        """Go on after a phase that may have ended well or not: a new start has to work."""
        outcome = running.outcome if running is not None else None
        if outcome is not None and not outcome.status:
            outcome = running.finish(BOUND) if running is not None else None
        if outcome is not None and outcome.status == "error":
            assert outcome.ename in ("SessionBroken", "SessionClosed", "RankDied"), str(outcome)
            assert fault.process in outcome.evalue, f"{fault.process} is not named: {outcome}"
        self._started = False

    def _after_the_kernel(self, kernel: Kernel, everyone: list[int], pid: int) -> None:
        wait_until(lambda: not alive(pid), "the kernel's end")
        await_end(everyone, BOUND)
        kernel.close()
        self._kernel = None
        wait_until(lambda: not files_of_sessions(), lambda: f"files to go: {files_of_sessions()}", BOUND)

    def _stuck(self, kernel: Kernel, living: list[int]) -> list[int]:
        """Return the ranks that stay in a collective with the dead one: gloo loses a send now and then (see docs)."""
        busy = "[row['rank'] for row in nbdist.get_session().status() if row['state'] == 'busy']"
        kernel.ok("import nbdist")
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not kernel.value(busy), "an end of the collective", 5.0)
        return [rank for rank in kernel.value(busy) if rank in living]

    # --- what has to hold

    def _check_kept(self, kernel: Kernel, ranks: list[int] | range) -> None:
        which = ",".join(map(str, ranks))
        lines = kernel.ok(f"%%distributed -r {which}\nprint(kept)", BOUND).lines
        assert lines == {rank: [str(rank + 10)] for rank in ranks}, f"variables were lost: {lines}"

    def _check_lines(self, outcome: Outcome, fault: Fault, ranks: list[int] | range) -> None:
        if fault.phase != "cell":
            return
        text = "\n".join(line for line in outcome.stdout.splitlines() if line.startswith("["))
        for rank, lines in _lines_of(text).items():
            if rank in ranks:
                assert lines == [str(number) for number in range(len(lines))], f"lines of rank {rank} are lost: {lines}"
                assert outcome.status == "error" or len(lines) == 200, f"rank {rank} printed {len(lines)} lines of 200"


def _lines_of(text: str) -> dict[int, list[str]]:
    return Outcome(stdout=text).lines


@contextlib.contextmanager
def marked_run() -> Iterator[Path]:
    """Yield a folder for files; what is started carries this run's mark, so that nothing is missed that stays."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        places = {"JUPYTER_RUNTIME_DIR": f"{folder}/runtime", "TMPDIR": f"{folder}/tmp"}
        for place in places.values():
            Path(place).mkdir()
        os.environ.update({**places, MARK: folder})
        yield Path(folder)


def main() -> None:
    """Run a plan and print its figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--process", action="append", choices=PROCESSES)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--phase", action="append", choices=tuple(PHASES))
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    with marked_run() as folder:
        began = time.monotonic()
        scope = Scope(arguments.process or PROCESSES, arguments.kind or KINDS, arguments.phase or tuple(PHASES))
        figures = FaultPlan(arguments.seed, folder, scope, verbose=arguments.verbose).run(arguments.faults)
        print(figures)
        print(f"{arguments.faults:,} faults in {time.monotonic() - began:.0f} s, seed {arguments.seed}")


if __name__ == "__main__":
    main()
