"""push and pull of 1 GiB to and from one rank, beside `tensor.clone()`; and the memory that both processes take for it.

The receiver's pages are mapped when they are first read, which is why reading is measured too.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import _tools

ROUNDS = 5
SIZE = 1 << _tools.size(30, 24)


def main() -> None:
    _tools.prepare()
    import torch

    from nbdist.client.session.session import Session

    tensor = torch.ones(SIZE // 4)
    grown: dict[str, list[float]] = {}

    def push() -> None:
        session.push({"x": tensor}, ranks=[0])

    def push_and_read() -> None:
        push()
        session.run("float(x.sum())", ranks=[0])

    def pull() -> None:
        session.pull("y", ranks=0)

    def pull_and_read() -> None:
        float(session.pull("y", ranks=0).sum())

    def clone_and_read() -> None:
        float(tensor.clone().sum())

    def observed(work: Callable[[], None]) -> _tools.Measure:
        """Run the work; keep by how much both processes grew at most."""

        def measure() -> float:
            session.run("x = None", ranks=[0])
            with _tools.peak_memory(os.getpid()) as here, _tools.peak_memory(session.ranks[0].pid) as there:
                seconds = _tools.timed(work)()
                for side, growth in (("notebook", here()), ("rank", there())):
                    grown.setdefault(f"{work.__name__}, {side}", []).append(growth / SIZE)
            return seconds

        return measure

    with Session(2) as session:
        session.run(f"import torch; y = torch.ones({SIZE // 4})", ranks=[0])
        measures = {"clone": _tools.timed(tensor.clone), "clone_and_read": _tools.timed(clone_and_read)}
        measures |= {work.__name__: observed(work) for work in (push, push_and_read, pull, pull_and_read)}
        samples = _tools.rounds(ROUNDS, measures, warm_up=1)
    _tools.header("1 GiB, one rank")
    _tools.row("tensor.clone()", samples["clone"])
    _tools.row("tensor.clone() and read it", samples["clone_and_read"])
    for name in ("push", "pull"):
        _tools.row(name, samples[name], over=("tensor.clone()", samples["clone"]), at_most=1.0)
        both = f"{name}_and_read"
        _tools.row(f"{name} and read it there", samples[both], over=("the same", samples["clone_and_read"]))
        for side in ("notebook", "rank"):
            _tools.row(f"  the {side} grew by, in GiB", grown[f"{both}, {side}"][1:], "GiB")


if __name__ == "__main__":
    main()
