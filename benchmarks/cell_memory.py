"""What measuring the memory of a cell adds to it: a MemoryMeter by itself, and an empty cell on ranks."""

from __future__ import annotations

import time

import _tools

ROUNDS = 300
BUDGET = 200.0  # µs


def main() -> None:
    _tools.prepare()
    import torch

    from nbdist.client.ranks import observers
    from nbdist.client.ranks.task_record import TaskRecord
    from nbdist.client.session.session import Session
    from nbdist.metrics.memory import MemoryMeter
    from nbdist.wire.messages.cells import Metered

    class Metering(observers.Observer):
        def cell_began(self, task: TaskRecord) -> None:
            task.metered = Metered(memory=True)

    def metered() -> float:
        began = time.thread_time()
        with MemoryMeter():
            pass
        return (time.thread_time() - began) * 1e6

    held = torch.ones(1 << _tools.size(26, 20))  # a process of some size
    samples = _tools.rounds(ROUNDS, {"one": metered}, warm_up=30)
    _tools.header("processor time of measuring a piece of code")
    _tools.row("MemoryMeter, begin and end", samples["one"], "µs", **_tools.limit(BUDGET))
    del held

    for count in (8, 2)[_tools.size(0, 1) :]:
        with Session(count) as session:

            def run(session: Session = session) -> None:
                session.run("pass")

            def run_metered(session: Session = session) -> None:
                stop = observers.subscribe(Metering())
                session.run("pass")
                stop()

            measures = {"plain": _tools.timed(run), "metered": _tools.timed(run_metered)}
            samples = _tools.rounds(ROUNDS, measures, warm_up=30)
        _tools.row(f"Session.run('pass'), {count} ranks, memory off", samples["plain"])
        _tools.row("  memory on", samples["metered"], over=("memory off", samples["plain"]))


if __name__ == "__main__":
    main()
