"""Run what needs an NVIDIA GPU: facts, checks and benchmarks, the most telling first; write a page with the results.

Each has a limit of its own, so that one that hangs costs its limit and no more. With --lanes, checks run side by side.
Results are kept after each, so that a run that was cut off goes on with --resume. Needs a Python with torch 2.8 or
newer and no network: what else nbdist needs is taken from wheels that --pack has fetched before, and put on the path.
Standard library only. Independent of what a check or a benchmark does: a check is a test marked `gpu`, a benchmark a
program.

Exit code: 0 all that was asked for passed; 1 something failed or hung; 2 nothing could run; 3 the time was over first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_wheels
from gpu_parts import CHECK, FACTS, ROOT, Step, all_steps, chosen
from gpu_results import FAILED, HUNG, Run
from gpu_step import Runner

FOLDER = ROOT / "build" / "gpu"
MINUTES = 9.0


def main() -> int:
    """Do what the command line asks for."""
    arguments = parse()
    if arguments.pack:
        size = gpu_wheels.pack(ROOT, arguments.wheels, arguments.python)
        print(f"{size / 1e6:.0f} MB of wheels for Python {arguments.python} in {arguments.wheels}")
        return 0
    try:
        steps = chosen(all_steps(), arguments.only)
    except ValueError as error:
        return unable(str(error))
    if arguments.list:
        print("\n".join(f"{step.part:<10} {step.limit:>4.0f} s  {step.target}" for step in steps))
        return 0
    deadline = time.monotonic() + 60 * arguments.minutes
    arguments.out = arguments.out.resolve()  # steps run in the repository
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    with contextlib.ExitStack() as held:
        if not reserve(arguments.out, held):
            return unable(f"another run writes to {arguments.out}: give this one another folder with --out")
        run = Run.kept(arguments.out) if arguments.resume or arguments.failed else Run()
        again = run.take_failed() if arguments.failed else set()
        try:
            return go(run, first(again, steps), arguments, deadline)
        except KeyboardInterrupt:
            print("ended early", file=sys.stderr)
            return conclude(run, steps, arguments.out)


def interrupt(*_: object) -> None:
    """End the run as Ctrl-C does, whatever the signal; the next signal does not cut off the end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def reserve(folder: Path, held: contextlib.ExitStack) -> bool:
    """Have the folder to this run alone, for as long as it is held; return whether that is so."""
    descriptor = os.open(folder, os.O_RDONLY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[], help="parts, or words in names of steps")
    parser.add_argument("--list", action="store_true", help="only show what there is")
    parser.add_argument("--resume", action="store_true", help="keep the results in --out and run what is left")
    parser.add_argument("--failed", action="store_true", help="like --resume, and run again what failed or hung")
    parser.add_argument("--dry", action="store_true", help="run all of it on a machine without a GPU, to test the run")
    parser.add_argument(
        "--lanes", type=number_of_lanes, default=1, help="run so many checks side by side (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="end after so many (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where results and page go (default: build/gpu)")
    parser.add_argument("--pack", action="store_true", help="only fetch the wheels, for a machine without a network")
    python = ".".join(platform.python_version_tuple()[:2])
    parser.add_argument("--python", default=python, help="Python version of that machine (default: %(default)s)")
    parser.add_argument(
        "--wheels", type=Path, default=FOLDER / "wheels", help="their folder (default: build/gpu/wheels)"
    )
    return parser.parse_args()


def number_of_lanes(text: str) -> int:
    """Read a number of lanes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"invalid number of lanes {text!r}: use a whole number, 1 or more, as in --lanes 4"
        )
    return int(text)


def environment_for_steps(site: Sequence[Path]) -> dict[str, str]:
    """Return the variables of all steps, with these folders of packages on the path."""
    path = [str(ROOT), *map(str, site), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The machine's own pytest plugins, kernels and notebook settings play no part: results should be comparable.
    own = {name: text for name, text in os.environ.items() if name not in ("JUPYTER_PATH", "JUPYTER_CONFIG_PATH")}
    own |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "JUPYTER_NO_CONFIG": "1",
        "JUPYTER_DATA_DIR": str(FOLDER / "jupyter"),
    }
    return {**own, "PYTHONUNBUFFERED": "1", "CI": "", "PYTHONPATH": os.pathsep.join(path)}


def go(run: Run, steps: Sequence[Step], arguments: argparse.Namespace, deadline: float) -> int:
    """Run the steps on this machine, if that is possible; return the exit code."""
    used = gpu_wheels.needed(arguments.wheels, gpu_wheels.installed_version)
    if used:
        print(f"{len(used)} packages are taken from {arguments.wheels}", flush=True)
    site = [gpu_wheels.unpack(used, FOLDER / "site")] if used else []
    if lacking := gpu_wheels.absent(ROOT, site, arguments.python):
        return unable(f"missing here: {', '.join(lacking)}. With a network type `scripts/gpu --pack` first")
    if not arguments.resume and not arguments.failed:
        (arguments.out / "log.txt").unlink(missing_ok=True)
    runner = Runner(arguments.out, environment_for_steps(site), deadline)
    with runner.ended_on_error():
        return run_here(run, steps, arguments, runner)


def first(targets: set[str], steps: Sequence[Step]) -> list[Step]:
    """Return the steps with these before all others."""
    return sorted(steps, key=lambda step: step.target not in targets)


def run_here(run: Run, steps: Sequence[Step], arguments: argparse.Namespace, runner: Runner) -> int:
    """Look at this machine, and run the steps if it is the right one; return the exit code."""
    code, output = runner.ask(Step("facts", "facts", FACTS, "scripts/gpu_facts.py", 60))
    if code is None and not runner.left():
        return conclude(run, steps, arguments.out)
    if code != 0:
        log = arguments.out / "log.txt"
        return unable(f"{sys.executable} can't use torch: see {log}. NBDIST_PYTHON names another")
    facts: dict[str, object] = json.loads(output.splitlines()[-1])
    if not facts["gpus"] and not arguments.dry:
        return unable("torch finds no GPU here. `scripts/gpu --dry` tests the run itself without one")
    if run.results and any(run.machine.get(name) != facts.get(name) for name in ("GPU", "torch", "driver")):
        return unable(f"the results in {arguments.out} are of another machine: leave out --resume")
    run.machine = run.machine if run.results else facts
    run_through(run, steps, runner, arguments.lanes)
    return conclude(run, steps, arguments.out)


def run_through(run: Run, steps: Sequence[Step], runner: Runner, lanes: int = 1) -> None:
    """Run the steps that have no result yet until the deadline; what there is, is kept after each."""
    order = [step.target for step in (*all_steps(), *steps)]
    keeping = threading.Lock()

    def perform(step: Step) -> None:
        result = runner.perform(step, bool(run.machine.get("gpus")))
        if result is None:
            return
        with keeping:
            run.add(step.target, result, order)
            run.keep(runner.out)
            print(f"{result.status:<8} {result.seconds:6.1f} s  {step.part}: {step.name}", flush=True)

    for together, width in turns([step for step in steps if step.target not in run.results], lanes):
        with ThreadPoolExecutor(width) as pool, runner.ended_on_error():
            list(pool.map(perform, together))
    run.keep(runner.out)


def turns(steps: Sequence[Step], lanes: int) -> list[tuple[list[Step], int]]:
    """Return which steps run after which others, and in how many lanes: a benchmark runs beside nothing else."""
    if lanes == 1:
        return [(list(steps), 1)]
    checks = [step for step in steps if step.kind == CHECK]
    return [(checks, lanes), ([step for step in steps if step.kind != CHECK], 1)]


def unable(why: str) -> int:
    """Say why nothing could run."""
    print(why, file=sys.stderr)
    return 2


def conclude(run: Run, steps: Sequence[Step], out: Path) -> int:
    """Say how it went, and return the exit code."""
    counts = Counter(run.results[step.target].status for step in steps if step.target in run.results)
    left = len(steps) - counts.total()
    words = [f"{count} {status}" for status, count in counts.items()]
    words += [f"{left} not reached: --resume"] if left else []
    print(f"{', '.join(words)}. Page: {out / 'page.md'}; all output: {out / 'log.txt'}")
    return 1 if counts[FAILED] or counts[HUNG] else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
