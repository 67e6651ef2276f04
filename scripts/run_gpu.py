"""Run what needs an NVIDIA GPU: facts, checks and benchmarks, the most telling first; write a page with the results.

Each is a process group of its own with a limit of its own, so that one that hangs costs its limit and no more. Results
are kept after each, so that a run that was cut off goes on with --resume. Needs a Python with torch 2.8 or newer and no
network: what else nbdist needs is taken from wheels that --pack has fetched before, and put on the path. Standard
library only. Knows nothing of what a check or a benchmark does: a check is a test marked `gpu`, a benchmark a program.

Exit code: 0 all that was asked for passed; 1 something failed or hung; 2 nothing could run; 3 the time was over first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import gpu_wheels
from gpu_parts import CHECK, FACTS, ROOT, Step, all_steps, chosen

FOLDER = ROOT / "build" / "gpu"
MINUTES = 9.0
PASSED, FAILED, HUNG, SKIPPED, NO_GPU = "passed", "failed", "hung", "skipped", "no GPU"
_MARK = "NBDIST_GPU_RUN"  # in the environment of all that a step starts, so that nothing of it outlives the step
_LAST_WORDS = 3.0  # seconds in which what hangs may show where
LEAST = 5.0  # seconds; with less time left no step begins
_LINES = 15  # of a failure, on the page


@dataclass
class Result:
    """What became of a step."""

    status: str
    seconds: float
    name: str
    part: str
    kind: str
    figures: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # of a benchmark, or the end of what a failure printed
    why: str = ""


@dataclass
class Run:
    """All results so far, and the machine they are of."""

    machine: dict[str, object] = field(default_factory=dict)
    day: str = field(default_factory=lambda: date.today().isoformat())
    results: dict[str, Result] = field(default_factory=dict)

    def keep(self, folder: Path) -> None:
        """Write what there is, whole or not at all."""
        for name, text in (("results.json", json.dumps(asdict(self), indent=1)), ("page.md", page(self))):
            new = folder / f".{name}"
            new.write_text(text, encoding="utf-8")
            new.replace(folder / name)

    @classmethod
    def kept(cls, folder: Path) -> Run:
        """Read what an earlier run has written; nothing where there was none."""
        with contextlib.suppress(FileNotFoundError):
            data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            results = {name: Result(**each) for name, each in data["results"].items()}
            return cls(data["machine"], data["day"], results)
        return cls()


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
    arguments.out = arguments.out.resolve()  # steps run in the repository
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # so that what runs is ended, too
    deadline = time.monotonic() + 60 * arguments.minutes
    environment = environment_for_steps(arguments.wheels)
    if lacking := gpu_wheels.absent(ROOT, [FOLDER / "site"], arguments.python):
        return unable(f"missing here: {', '.join(lacking)}. With a network type `scripts/gpu --pack` first")
    run = Run()
    if arguments.resume or arguments.failed:
        run = Run.kept(arguments.out)
    else:
        (arguments.out / "log.txt").unlink(missing_ok=True)
    if arguments.failed:
        run.results = {name: each for name, each in run.results.items() if each.status not in (FAILED, HUNG)}
    return go(run, steps, arguments, environment, deadline)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[], help="parts, or words in names of steps")
    parser.add_argument("--list", action="store_true", help="only show what there is")
    parser.add_argument("--resume", action="store_true", help="keep the results in --out and run what is left")
    parser.add_argument("--failed", action="store_true", help="like --resume, and run again what failed or hung")
    parser.add_argument("--dry", action="store_true", help="run all of it on a machine without a GPU, to test the run")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="end after so many (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where results and page go (default: build/gpu)")
    parser.add_argument("--pack", action="store_true", help="only fetch the wheels, for a machine without a network")
    python = ".".join(platform.python_version_tuple()[:2])
    parser.add_argument("--python", default=python, help="Python version of that machine (default: %(default)s)")
    parser.add_argument(
        "--wheels", type=Path, default=FOLDER / "wheels", help="their folder (default: build/gpu/wheels)"
    )
    return parser.parse_args()


def environment_for_steps(wheels: Path) -> dict[str, str]:
    """Return the variables of all steps; what this Python lacks is unpacked from the wheels and on the path."""
    site = FOLDER / "site"
    used = gpu_wheels.unpack(wheels, site, gpu_wheels.installed_version)
    if used:
        print(f"{len(used)} packages are taken from {wheels}", flush=True)
    path = [str(ROOT), *([str(site)] if used else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The machine's own pytest plugins, kernels and notebook settings play no part: results should be comparable.
    own = {name: text for name, text in os.environ.items() if name not in ("JUPYTER_PATH", "JUPYTER_CONFIG_PATH")}
    own |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "JUPYTER_NO_CONFIG": "1",
        "JUPYTER_DATA_DIR": str(FOLDER / "jupyter"),
    }
    return {**own, "PYTHONUNBUFFERED": "1", "CI": "", "PYTHONPATH": os.pathsep.join(path)}


def go(
    run: Run, steps: Sequence[Step], arguments: argparse.Namespace, environment: dict[str, str], deadline: float
) -> int:
    """Run the steps on this machine, if it is the right one; return the exit code."""
    facts = look(arguments.out, environment, deadline)
    if facts is None:
        return unable(f"{sys.executable} can't use torch: see {arguments.out / 'log.txt'}. NBDIST_PYTHON names another")
    if not facts["gpus"] and not arguments.dry:
        return unable("torch finds no GPU here. `scripts/gpu --dry` tests the run itself without one")
    if run.results and any(run.machine.get(name) != facts.get(name) for name in ("GPU", "torch", "driver")):
        return unable(f"the results in {arguments.out} are of another machine: leave out --resume")
    run.machine = run.machine if run.results else facts
    run_through(run, steps, arguments.out, environment, deadline)
    return conclude(run, steps, arguments.out)


def run_through(run: Run, steps: Sequence[Step], out: Path, environment: dict[str, str], deadline: float) -> None:
    """Run the steps that have no result yet until the deadline; what there is, is kept after each."""
    for step in steps:
        if step.target in run.results:
            continue
        left = deadline - time.monotonic()
        if left < LEAST:
            break
        result = perform(step, min(step.limit, left), out, environment, bool(run.machine.get("gpus")))
        if result.status == HUNG and left < step.limit:
            break  # it was the run's time that ended, not the step's
        run.results[step.target] = result
        run.keep(out)
        print(f"{result.status:<8} {result.seconds:6.1f} s  {step.part}: {step.name}", flush=True)
    run.keep(out)


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


# --- one step


def look(out: Path, environment: dict[str, str], deadline: float) -> dict[str, object] | None:
    """Return what this machine is; None where torch does not work."""
    step = Step("facts", "facts", FACTS, "scripts/gpu_facts.py", 60)
    code, output = execute(step, command_of(step, out), min(step.limit, deadline - time.monotonic()), out, environment)
    if code != 0:
        return None
    facts: dict[str, object] = json.loads(output.splitlines()[-1])
    return facts


def perform(step: Step, limit: float, out: Path, environment: dict[str, str], with_gpu: bool) -> Result:
    """Run a step and judge it by its exit code, and a check by pytest's own report."""
    report = out / "report.xml"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    code, output = execute(step, command_of(step, out), limit, out, environment)
    result = Result(FAILED, round(time.monotonic() - began, 1), step.name, step.part, step.kind)
    if report.exists():
        result.status, result.why, result.figures = judged(report.read_text(encoding="utf-8"))
        report.unlink()
    if code == 0 and step.kind != CHECK:
        result.status, result.lines = PASSED if with_gpu else NO_GPU, output.splitlines()
    if code != 0:
        result.status = HUNG if code is None else FAILED
        result.why = f"over {limit:.0f} s" if code is None else f"exit code {code}"
        result.lines = output.splitlines()[-_LINES:]
    if result.status == NO_GPU and with_gpu:
        result.status, result.why = FAILED, "torch finds a GPU here, and this check found none"
    return result


def command_of(step: Step, out: Path) -> list[str]:
    """Return how to run a step."""
    if step.kind != CHECK:
        return [sys.executable, step.target]
    # A warning that only this machine's versions give is for people to read, not a failure.
    pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "default", "-p", "no:cacheprovider"]
    return [*pytest, "-o", "junit_family=xunit1", f"--junitxml={out / 'report.xml'}", step.target]


def judged(report: str) -> tuple[str, str, dict[str, str]]:
    """Return status, reason and figures of tests that did not fail, from pytest's XML report."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    figures = {each.get("name", ""): each.get("value", "") for case in cases for each in case.iter("property")}
    skips = [case.find("skipped") for case in cases]
    reasons = [skip.get("message", "") for skip in skips if skip is not None]
    if len(reasons) < len(cases) or not reasons:
        return PASSED, "; ".join(dict.fromkeys(reasons)), figures
    if set(reasons) == {NO_GPU}:
        return NO_GPU, "", figures
    return SKIPPED, "; ".join(dict.fromkeys(reasons)), figures


def execute(
    step: Step, command: Sequence[str], limit: float, out: Path, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Run a command in a process group of its own; nothing that it started is left.

    Returns:
        Its exit code, None when it was ended at its limit; and what it printed.
    """
    mark = secrets.token_hex(8)
    current = out / "now.txt"
    with current.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGABRT)  # pytest shows where each thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            end_all(mark)
    text = current.read_text(encoding="utf-8", errors="replace")
    current.unlink()
    with (out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"\n===== {step.part}: {step.name}\n{text}")
    return code, text


def end_all(mark: str) -> None:
    """End the processes of a step, those that have left its process group included."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


# --- the page


def page(run: Run) -> str:
    """Return the results as a section of docs/gpu.md."""
    counts = Counter(result.status for result in run.results.values())
    summary = ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing has run"
    parts = [f"## {run.machine.get('GPU', 'no machine')}, {run.day}", f"{summary}."]
    parts.append(table(["", ""], [[name, str(value)] for name, value in run.machine.items() if name != "gpus"]))
    checks = [each for each in run.results.values() if each.kind == CHECK]
    if checks:
        rows = [[each.part, each.name, each.status, f"{each.seconds:.0f}", remarks(each)] for each in checks]
        parts.append(table(["part", "check", "result", "s", "figures"], rows))
    for each in run.results.values():
        if each.lines:
            parts += [f"### {each.name}: {each.status}", "```text\n" + "\n".join(each.lines) + "\n```"]
    return "\n\n".join(parts) + "\n"


def remarks(result: Result) -> str:
    """Return figures and reason of a check in one cell of the table."""
    return "; ".join([*(f"{name} {value}" for name, value in result.figures.items()), *filter(None, [result.why])])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(head), ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
