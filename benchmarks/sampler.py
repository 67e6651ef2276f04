"""Processor time of looking once a second at a node with eight GPUs and eight ranks, by who takes it.

The driver is a stand-in whose answers cost nothing but Python: what a real one's calls take comes on top.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import _tools
import psutil

RANKS = _tools.size(8, 2)
GPUS = 8
SECONDS = _tools.size(20, 1)
BUDGET = 0.5


def main() -> None:
    _tools.prepare()
    from nbdist.client.costs.monitor import Monitor
    from nbdist.client.session.session import Session
    from testbed.nvml import as_module, machine

    with tempfile.TemporaryDirectory() as folder:
        as_module(Path(folder), machine(GPUS))
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
        with Session(RANKS) as session:
            processes = _tools.session_processes(os.getpid())
            ranks = [psutil.Process(info.pid) for info in session.ranks]
            measured = {**processes, **{f"rank {number}": rank for number, rank in enumerate(ranks)}}
            _tools.header(f"processor time over {SECONDS:g} s, in % of a core, {GPUS} GPUs, {RANKS} ranks")
            _rows("while nobody watches", _shares(measured))
            unsubscribe = Monitor.of(session).subscribe(lambda sample: None)
            _rows("at one look a second", _shares(measured))
            unsubscribe()


def _rows(when: str, shares: dict[str, float]) -> None:
    for role in ("agent", "controller", "kernel"):
        arguments: _tools.Limit = _tools.limit(BUDGET) if role == "agent" else {}
        _tools.row(f"{role} {when}", [shares[role]], "%", **arguments)
    _tools.row(f"each rank {when}", [share for role, share in shares.items() if role.startswith("rank")], "%")


def _shares(processes: dict[str, psutil.Process]) -> dict[str, float]:
    _tools.wait_until_quiet([process for role, process in processes.items() if role not in ("kernel", "agent")])
    return _tools.shares(processes, SECONDS)


if __name__ == "__main__":
    main()
