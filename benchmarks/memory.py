"""What an idle rank takes beyond the template."""

from __future__ import annotations

import os

import _tools

RANKS = _tools.size(8, 2)
BUDGET = 30.0


def main() -> None:
    _tools.prepare()
    from nbdist.client.session.session import Session

    _tools.header("memory")
    with Session(RANKS) as session:
        pids = [info.pid for info in session.ranks]
        _rows("idle rank", pids, budget=True)
        session.run("import torch\nm = torch.nn.Linear(8, 8)\no = torch.optim.Adam(m.parameters())")
        session.run("m(torch.ones(2, 8)).sum().backward()\no.step()")
        _rows("rank after a first optimizer step", pids, budget=False)
        for role, process in _tools.session_processes(os.getpid()).items():
            if role != "kernel":
                _tools.row(f"{role}, private", [_tools.memory(process.pid)["private"] / _tools.MB], "MB")


def _rows(what: str, pids: list[int], budget: bool) -> None:
    figures = [_tools.memory(pid) for pid in pids]
    arguments: _tools.Limit = _tools.limit(BUDGET) if budget else {}
    _tools.row(f"{what}, private", [each["private"] / _tools.MB for each in figures], "MB", **arguments)
    _tools.row(f"{what}, with its share of the rest (PSS)", [each["pss"] / _tools.MB for each in figures], "MB")


if __name__ == "__main__":
    main()
