"""notebook_launcher beside Accelerate's, each in a real kernel of its own: start, lines, failures, interrupt."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import _tools
import psutil

RANKS = 2
ROUNDS = _tools.size(7, 1)
THEIR_ROUNDS = _tools.size(3, 1)  # where each wants a kernel of its own
LINES = _tools.size(10_000, 200)

_AT = "if RANK == 1:\n    print('at', time.time(), flush=True)\n    "  # by the clock that the notebook has, too
_GROUP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
_FAILURES = {
    "raises while rank 0 sits in a barrier": (f"{_GROUP}{_AT}raise ValueError('why')\ndist.barrier()", 2.0),
    "ends with os._exit(3)": (f"{_AT}os._exit(3)\ntime.sleep(60)", 0.5),
    "is killed (SIGKILL)": (f"{_AT}os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", 0.5),
}
_PORTS = {  # Accelerate takes no other port by itself
    "nbdist": "options = dict",
    "accelerate": "def options():\n    import socket\n    with socket.create_server(('127.0.0.1', 0)) as free:\n"
    "        return {'use_port': str(free.getsockname()[1])}",
}
_PRINT = f"for number in range({LINES}):\n    print(f'rank {{RANK}} step {{number}} loss {{number * 0.001:.4f}}')"
_SLEEP = "print('up', flush=True)\ntime.sleep(60)"


def main() -> None:
    _tools.prepare()
    with _kernel("nbdist") as ours:
        with _kernel("accelerate") as theirs:
            _start(ours, theirs)
            _lines(ours, theirs)
        _failures(ours)
        _interrupts(ours)


@contextlib.contextmanager
def _kernel(package: str) -> Iterator[Any]:
    """A kernel that has launched once."""
    from testbed.kernel import Kernel

    with Kernel() as kernel:
        kernel.ok(f"import os, signal, sys, time, torch\nfrom {package} import notebook_launcher\n{_PORTS[package]}")
        kernel.ok(_cell("pass"))
        yield kernel


def _cell(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in ["RANK = int(os.environ['RANK'])", *body.splitlines()])
    return f"def train():\n{lines}notebook_launcher(train, (), num_processes={RANKS}, **options())"


def _start(ours: Any, theirs: Any) -> None:
    measures = {
        name: lambda kernel=kernel: float(kernel.ok(_cell("pass")).seconds)
        for name, kernel in {"nbdist": ours, "accelerate": theirs}.items()
    }
    samples = _tools.rounds(ROUNDS, measures)
    _tools.header(f"an empty launch of {RANKS} ranks, the cell's time")
    _tools.row("nbdist", samples["nbdist"], **_tools.limit(0.3))
    _tools.row("  over Accelerate's", samples["nbdist"], over=("Accelerate's", samples["accelerate"]), at_most=2.0)
    _tools.row("Accelerate", samples["accelerate"])


def _lines(ours: Any, theirs: Any) -> None:
    texts: dict[str, str] = {}

    def measure(name: str, kernel: Any) -> float:
        outcome = kernel.ok(_cell(_PRINT), limit=900.0)
        texts[name] = outcome.stdout
        return float(outcome.seconds)

    samples = [measure("nbdist", ours) for _ in range(ROUNDS)]
    once = measure("Accelerate", theirs)
    _tools.header(f"{LINES:,} lines from each of {RANKS} ranks, the cell's time")
    _tools.row("nbdist", samples, **_tools.limit(1.0))
    _tools.row("Accelerate, once", [once])
    for name, text in texts.items():
        expected = {f"rank {rank} step {n} loss {n * 0.001:.4f}" for rank in range(RANKS) for n in range(LINES)}
        whole = expected & set(re.findall(r"rank \d step \d+ loss [\d.]+$", text, re.MULTILINE))
        print(f"  {name}: {len(whole):,} of {len(expected):,} lines came whole", flush=True)


def _beside(ours: Any, measure: Callable[[Any], float]) -> dict[str, list[float]]:
    """A measure on both. Accelerate's kernel is a new one each time: after a failure its next launch often fails."""

    def theirs() -> float:
        with _kernel("accelerate") as kernel:
            return measure(kernel)

    samples = _tools.rounds(ROUNDS, {"nbdist": lambda: measure(ours)})
    return samples | _tools.rounds(THEIR_ROUNDS, {"accelerate": theirs})


def _failures(ours: Any) -> None:
    _tools.header("a failure on rank 1 to the error in the notebook")
    for what, (body, budget) in list(_FAILURES.items())[: _tools.size(len(_FAILURES), 1)]:
        samples = _beside(ours, functools.partial(_until_error, body=body))
        _tools.row(f"nbdist: {what}", samples["nbdist"], **_tools.limit(budget))
        _tools.row(f"Accelerate: {what}", samples["accelerate"])


def _until_error(kernel: Any, body: str) -> float:
    execution = kernel.start(_cell(body))
    execution.wait_until(lambda outcome: bool(outcome.ename), "an error")
    seen = time.time()
    outcome = execution.finish()
    ours = "nbdist" in kernel.value("notebook_launcher.__module__")
    assert outcome.evalue.startswith("rank 1 ") or not ours, str(outcome)
    began = re.search(r"at (\d+\.\d+)", outcome.stdout)
    assert began, str(outcome)
    return seen - float(began[1])


def _interrupts(ours: Any) -> None:
    samples = _beside(ours, _until_gone)
    _tools.header("an interrupt until nothing of a sleeping launch is left")
    _tools.row("nbdist", samples["nbdist"], **_tools.limit(1.0))
    _tools.row("Accelerate", samples["accelerate"])


def _until_gone(kernel: Any) -> float:
    before = set(_below(kernel))
    execution = kernel.start(_cell(_SLEEP))
    execution.wait_until(lambda outcome: "up" in outcome.stdout, "a word")
    launched = set(_below(kernel)) - before
    began = time.perf_counter()
    kernel.interrupt()
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in launched):
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    execution.finish()
    return seconds


def _below(kernel: Any) -> list[psutil.Process]:
    return psutil.Process(kernel.pid).children(recursive=True)


if __name__ == "__main__":
    main()
