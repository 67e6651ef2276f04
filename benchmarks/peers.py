"""nbdist beside nbdistributed, jupyter-distributed and ipyparallel: start, round trip and lines, in the same run.

The peers live in an environment of their own under build/. Each is used as its documentation says, in a real kernel,
but for jupyter-distributed: its ranks are driven by the class behind its kernel, without its server's and proxy's hops.
A peer that can't be installed or does not work here is named with its error.

    python benchmarks/peers.py                  all of them
    python benchmarks/peers.py NAME             one, as JSON, with the interpreter that runs this
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import _tools

RANKS = 8
ROUNDS = _tools.size(2, 1)  # of everything
TRIPS = _tools.size(50, 2)  # in each round
LINES = _tools.size(10_000, 200)
LIMIT = 180.0

ENVIRONMENT = _tools.ROOT / "build" / "peers"
PEERS = {
    "nbdistributed": "nbdistributed==0.1.0",
    "jupyter-distributed": "jupyter-distributed==0.1.1",
    "ipyparallel": "ipyparallel==9.2",
}

_IMPORT = "import torch, torch.distributed"
_PRINT = f"for i in range({LINES}):\n    print(f'step {{i}} loss {{i * 0.001:.4f}} {{marker}}')"

Run = Callable[[str], str]  # runs a cell and gives what it printed


def main() -> None:
    _tools.prepare()
    if len(sys.argv) > 1:
        print(json.dumps(PROBES[sys.argv[1]]()))
        return
    pythons = {"nbdist": sys.executable}
    if not _tools.ONCE:  # the peers are gigabytes to download
        pythons |= {name: python for name in PEERS if (python := _install(name))}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for _ in range(ROUNDS):
        for name, python in pythons.items():
            result = _probe(name, python)
            if result is not None:
                results[name].append(result)
    _tools.header(f"{RANKS} ranks; nbdist is 1")
    for figure, words in {
        "start": "from nothing to torch on all ranks",
        "trip": "a cell with pass",
        "lines": f"{LINES:,} different lines from each rank",
    }.items():
        for name, rounds in results.items():
            if rounds:
                base = statistics.median(result[figure] for result in results["nbdist"])
                _tools.row(f"{words}: {name}", [result[figure] for result in rounds], over=("nbdist", base))
    for name, rounds in results.items():
        if rounds and (shown := min(result["shown"] for result in rounds)) != RANKS * LINES:
            print(f"{name} showed {shown:,.0f} of {RANKS * LINES:,} lines")


def _install(name: str) -> str | None:
    """The interpreter of the peers' environment, with this peer in it; None when that fails, which is said."""
    python = ENVIRONMENT / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(_tools.ROOT / "scripts" / "constraints.txt")]
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    command = [*pip, *constraints, "torch", "ipykernel", "psutil", PEERS[name]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return str(python)
    print(f"{PEERS[name]} does not install here: {_last_line(done.stdout)}", flush=True)
    return None


def _probe(name: str, python: str) -> dict[str, float] | None:
    # nbdistributed starts its workers with the `python` that it finds first.
    environment = {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    try:
        done = subprocess.run(
            [python, __file__, name], env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{name} does not work here: not done after {LIMIT:g} s", flush=True)
        return None
    if done.returncode:
        print(f"{name} does not work here: {_last_line(done.stderr)}", flush=True)
        return None
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no word of it")


# --- one peer


def _measure(run: Run, started: float) -> dict[str, float]:
    """Take the figures of ranks that are up. The first cells do not count."""
    run("marker = 'there'")
    for _ in range(10):
        run("pass")
    trips = [_tools.timed(lambda: run("pass"))() for _ in range(TRIPS)]
    run("print(marker)")
    began = time.perf_counter()
    printed = run(_different())
    return {
        "start": started,
        "trip": statistics.median(trips),
        "lines": time.perf_counter() - began,
        "shown": printed.count(" there"),
    }


def _different() -> str:
    """Lines that no two ranks share."""
    return f"import os\n{_PRINT.replace('step', 'process {os.getpid()} step')}"


def _in_kernel(begin: list[str], magic: str, end: str) -> dict[str, float]:
    """Figures of a package that lives in a kernel."""
    from testbed.kernel import Kernel

    with Kernel() as kernel:

        def run(code: str) -> str:
            outcome = kernel.ok(f"{magic}\n{code}", limit=LIMIT)
            return outcome.stdout + "".join(outcome.plain)

        kernel.ok(begin[0])
        began = time.perf_counter()
        for cell in begin[1:]:
            said = kernel.ok(cell, limit=LIMIT)
        run(_IMPORT)
        seconds = time.perf_counter() - began
        if "there" not in run("print('there')"):
            raise RuntimeError(f"it has no ranks: {_last_line(said.stdout)}")
        try:
            return _measure(run, seconds)
        finally:
            kernel.run(end, limit=LIMIT)


def nbdist() -> dict[str, float]:
    return _in_kernel(["%load_ext nbdist", f"%distributed start -n {RANKS}"], "%%distributed", "%distributed stop")


def nbdistributed() -> dict[str, float]:
    return _in_kernel(["%load_ext nbdistributed", f"%dist_init -n {RANKS}"], "%%distributed", "%dist_shutdown")


def ipyparallel() -> dict[str, float]:
    begin = [
        "import ipyparallel",
        f"client = ipyparallel.Cluster(n={RANKS}).start_and_connect_sync()\nclient[:].activate()",
    ]
    return _in_kernel(begin, "%%px --block", "client.shutdown(hub=True)")


def jupyter_distributed() -> dict[str, float]:
    from jupyter_distributed.kernel_group import DistributedKernelGroup  # type: ignore[import-not-found]

    group = DistributedKernelGroup(world_size=RANKS)
    loop = asyncio.new_event_loop()

    def run(code: str) -> str:
        result = loop.run_until_complete(group.execute(code))
        outputs = [output for rank in result.ranks for output in rank.outputs]
        return "".join(output.content.get("text", "") for output in outputs)

    began = time.perf_counter()
    loop.run_until_complete(group.start())
    try:
        run(_IMPORT)
        return _measure(run, time.perf_counter() - began)
    finally:
        loop.run_until_complete(group.shutdown())


PROBES: dict[str, Callable[[], dict[str, float]]] = {
    "nbdist": nbdist,
    "nbdistributed": nbdistributed,
    "ipyparallel": ipyparallel,
    "jupyter-distributed": jupyter_distributed,
}


if __name__ == "__main__":
    main()
