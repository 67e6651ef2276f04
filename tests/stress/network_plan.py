"""Disturbs the network between two machines, and ends or stops what runs on the other one, by a seeded plan.

`python -m tests.stress.network_plan --faults 300 --seed 1` prints the table of docs/reliability.md; the tests run some.

What has to hold: packets that are lost or late, and a cable that is out for less than the node's timeout, cost time and
nothing else; a machine that is lost is named, with the reason, and its own processes end; the others keep their
variables, and go on with right sums after a `shrink`, or a `heal` with another machine in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nbdist.base.text import table
from testbed.kernel import Execution, Kernel, Outcome, wait_until
from tests.multinode.cable import Cable
from tests.multinode.hosts import Host, two_hosts_by_cable
from tests.multinode.nodes import Node, invitations, joined, start, without_nodes
from tests.stress.fault_plan import PHASES as CELLS
from tests.stress.fault_plan import SETUP, SUM, Violation, marked_run
from tests.support.leftovers import processes_of_this_run
from tests.support.roles import alive, await_end, family

BOUND = 60.0  # seconds until a cell counts as hanging, however busy the machine is
TIMEOUT = 4  # seconds that the node may be silent
HERE, THERE = (0, 1), (2, 3)  # ranks
DISTURBANCES = ("late packets", "lost packets", "cable out", "SIGSTOP")  # which cost time and nothing else
LOSSES = ("cable out for good", "SIGKILL", "SIGTERM")
KINDS = (*DISTURBANCES, *LOSSES)
PROCESSES = ("join", "agent", "rank 3")  # on the other machine
_LATEST = 0.3  # seconds after a phase has begun
_LONGEST = 1.5  # seconds

PHASES = {
    **{phase: CELLS[phase] for phase in ("idle", "cell", "collective", "step")},
    "push": "value = bytes(60_000_000)\n%distributed push value",
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: One of KINDS.
        process: What gets the signal, if the kind is one.
        phase: What runs then: one of PHASES.
        delay: Seconds from the beginning of the phase.
        seconds: How long what passes lasts.
        share: How bad it is, from 0 to 1.
        heals: Whether what is lost is replaced.
    """

    kind: str
    process: str
    phase: str
    delay: float
    seconds: float
    share: float
    heals: bool

    @property
    def dead(self) -> list[int]:
        """The ranks that are lost."""
        return [3] if self.where == "rank 3" else [2, 3]

    @property
    def where(self) -> str:
        """What it is about."""
        return self.process if self.kind.startswith("SIG") else "network"


@dataclass
class Figures:
    """What has been tried: how often, by kind and what it was about, and the seconds from the fault to the error."""

    faults: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def __str__(self) -> str:
        rows = []
        for key in sorted(self.faults):
            times = self.seconds.get(key)
            median, slowest = (f"{statistics.median(times):.2f} s", f"{max(times):.2f} s") if times else ("-", "-")
            rows.append((*key, str(self.faults[key]), median, slowest))
        return table(rows, ("what", "fault", "times", "to the error, median", "slowest"))


def draw(chance: random.Random, kinds: Sequence[str] = KINDS) -> Fault:
    """Return a random fault."""
    return Fault(
        chance.choice(kinds),
        chance.choice(PROCESSES),
        chance.choice(tuple(PHASES)),
        chance.uniform(0, _LATEST),
        chance.uniform(0.1, _LONGEST),
        chance.random(),
        chance.random() < 0.5,
    )


Join = Callable[[str, str], Node]  # an address and a token


class NetworkPlan:
    """A session over two machines, and the faults that it gets.

    Args:
        seed: Of the plan.
        kinds: What faults are drawn from.
        verbose: Whether to print each fault.
    """

    def __init__(self, seed: int, kinds: Sequence[str] = KINDS, *, verbose: bool = False) -> None:
        self._chance, self._kinds, self._verbose = random.Random(seed), kinds, verbose
        self.figures = Figures()

    def run(self, faults: int) -> Figures:
        """Have so many faults happen, one after the other.

        Raises:
            Violation: Something did not hold.
        """
        plan = [draw(self._chance, self._kinds) for _ in range(faults)]
        with two_hosts_by_cable() as (one, two, cable), contextlib.closing(Kernel(one.command)) as kernel:
            kernel.ok("%load_ext nbdist")
            while plan:
                self._with_one_session(kernel, one, two, cable, plan)
        wait_until(lambda: not processes_of_this_run(), lambda: f"an end of {processes_of_this_run()}")
        return self.figures

    def _with_one_session(self, kernel: Kernel, one: Host, two: Host, cable: Cable, plan: list[Fault]) -> None:
        """Have faults happen until the session has no other machine any more."""
        with contextlib.ExitStack() as nodes:

            def join(address: str, token: str) -> Node:
                return nodes.enter_context(joined(address, token, two))

            node: Node | None = nodes.enter_context(_session(kernel, one, two))
            while plan and node is not None:
                node = self._one(kernel, node, cable, plan.pop(0), join)

    def _one(self, kernel: Kernel, node: Node, cable: Cable, fault: Fault, join: Join) -> Node | None:
        """Have one fault happen. Return the other machine that the session has then; None: it goes on without one."""
        if self._verbose:
            print(fault, flush=True)
        self.figures.faults[fault.where, fault.kind] += 1
        try:
            if fault.kind in DISTURBANCES:
                _disturb(kernel, node, cable, fault)
                return node
            self.figures.seconds[fault.where, fault.kind].append(_lose(kernel, node, cable, fault))
            return _recover(kernel, node, fault, join)
        except AssertionError as error:
            raise Violation(f"{fault}: {error}") from error


@contextlib.contextmanager
def _session(kernel: Kernel, one: Host, two: Host) -> Iterator[Node]:
    """Two ranks on each machine."""
    cell = start(kernel, one.address, f"-n 2 --node-timeout {TIMEOUT}")
    where, (token,) = invitations(cell)
    with joined(where, token, two) as node:
        outcome = cell.finish(BOUND)
        assert "4 ranks on 2 nodes ready" in outcome.stdout, str(outcome)
        kernel.ok(SETUP, BOUND)
        yield node
        kernel.ok("%distributed stop", BOUND)


def _disturb(kernel: Kernel, node: Node, cable: Cable, fault: Fault) -> None:
    """Have something happen that passes, and check that it costs only time."""
    pid = _pid(kernel, node, fault)
    running = _begin(kernel, fault)
    if fault.kind == "SIGSTOP":
        _stop_for_a_while(pid, fault.seconds)
    else:
        bad = {
            "late packets": {"delay": 0.2 * fault.share},
            "lost packets": {"loss": 0.3 * fault.share},
            "cable out": {"out": True},
        }[fault.kind]
        with cable.disturbed(**bad):  # type: ignore[arg-type]
            time.sleep(fault.seconds)
    if running is not None:
        outcome = running.finish(BOUND)
        assert outcome.status == "ok", f"it has cost more than time: {outcome}"
        _check_lines(outcome, fault, [*HERE, *THERE])
    _check(kernel, [*HERE, *THERE])


def _lose(kernel: Kernel, node: Node, cable: Cable, fault: Fault) -> float:
    """End the node, or a rank there, and check what is left.

    Returns:
        Seconds to the error.
    """
    pid, everyone = _pid(kernel, node, fault), family(node.pid)
    running = _begin(kernel, fault)
    began = time.monotonic()
    with contextlib.ExitStack() as meanwhile:
        if fault.kind == "cable out for good":
            meanwhile.enter_context(cable.disturbed(out=True))
        else:
            os.kill(pid, signal.Signals[fault.kind])
        outcome = running.finish(BOUND) if running is not None else None
        if outcome is not None:
            _check_lines(outcome, fault, HERE)
        if outcome is None or outcome.status == "ok":  # it ended before, or was idle
            outcome = kernel.run(f"{SUM}time.sleep({BOUND})", BOUND)
        seconds = time.monotonic() - began
        assert outcome.ename in ("RankDied", "UsageError"), f"an error for another reason: {outcome}"
        assert "rank 3" in outcome.evalue or "ranks 2-3" in outcome.evalue, f"the ranks are not named: {outcome}"
        if len(fault.dead) > 1:
            await_end(everyone, BOUND)
    return seconds


def _recover(kernel: Kernel, node: Node, fault: Fault, join: Join) -> Node | None:
    """Replace what was lost, or go on without it, and check what the others have."""
    living = [rank for rank in (*HERE, *THERE) if rank not in fault.dead]
    if not fault.heals:
        kernel.ok("%distributed shrink", BOUND)
        _check(kernel, living)
        return None
    cell = kernel.start("%distributed heal")
    if len(fault.dead) > 1:
        where, (token,) = invitations(cell)
        node = join(where, token)
    outcome = cell.finish(BOUND)
    assert outcome.status == "ok", str(outcome)
    _check(kernel, [*HERE, *THERE])
    return node


def _begin(kernel: Kernel, fault: Fault) -> Execution | None:
    """Begin what runs in the fault's phase, and wait for the fault's moment."""
    running = kernel.start(PHASES[fault.phase]) if PHASES[fault.phase] else None
    if running is not None and PHASES[fault.phase].startswith("%%"):
        running.wait_until(lambda outcome: outcome.stdout != "", "the first line", BOUND)
    time.sleep(fault.delay)
    return running


def _pid(kernel: Kernel, node: Node, fault: Fault) -> int:
    return {"join": node.pid, "agent": node.agent(), "rank 3": kernel.rank_pids()[3]}[fault.process]


def _stop_for_a_while(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert alive(pid), "a stop has ended it"


def _check(kernel: Kernel, living: list[int]) -> None:
    """Check that these ranks, as they were numbered, have their variables, and that their sums are right."""
    shown = without_nodes(kernel.ok(f"{SUM}print(kept)", BOUND).stdout)
    total = sum(range(1, len(living) + 1))
    expected = {number: [f"sum {total}", str(rank + 10)] for number, rank in enumerate(living)}
    assert Outcome(stdout=shown).lines == expected, f"variables or sums are wrong: {shown}"


def _check_lines(outcome: Outcome, fault: Fault, ranks: Sequence[int]) -> None:
    if fault.phase != "cell":
        return
    text = "\n".join(line for line in without_nodes(outcome.stdout).splitlines() if line.startswith("["))
    for rank, lines in Outcome(stdout=text).lines.items():
        if rank in ranks:
            assert lines == [str(number) for number in range(len(lines))], f"lines of rank {rank} are lost: {lines}"
            assert outcome.status == "error" or len(lines) == 200, f"rank {rank} printed {len(lines)} lines of 200"


def main() -> None:
    """Run a plan and print its figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    with marked_run():
        began = time.monotonic()
        print(NetworkPlan(arguments.seed, arguments.kind or KINDS, verbose=arguments.verbose).run(arguments.faults))
        print(f"{arguments.faults:,} faults in {time.monotonic() - began:.0f} s, seed {arguments.seed}")


if __name__ == "__main__":
    main()
