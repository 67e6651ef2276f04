"""Interrupts of a rank stuck in a collective of NCCL: how soon it is free, and whether all is right after it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

import _tools

if TYPE_CHECKING:
    from nbdist import Session

ROUNDS = _tools.size(12, 1)
LIMIT = 30.0  # seconds of each wait
_STUCK = "big = torch.ones(1 << 20, device=device)\ndist.all_reduce(big)\nprint(big.sum().item())"
_SUM = "one = torch.ones(1, device=device)\ndist.all_reduce(one)\none.item(), kept"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interrupts of each kind (default: %(default)s)")
    rounds = parser.parse_args().rounds
    _tools.gpu()
    _tools.prepare()
    from nbdist import RankError, Session
    from testbed import gpu_sharing as sharing

    os.environ |= sharing.ENVIRONMENT
    with Session(2, init=False) as session:
        try:
            sharing.make_group(session)
        except RankError as error:
            print(f"NCCL does not take two ranks on one GPU here: {error}")
            return 1
        session.run("kept = 41")
        pids = [info.pid for info in session.ranks]
        patient = [_interrupted(session, now=False) for _ in range(rounds)]
        at_once = [_interrupted(session, now=True) for _ in range(rounds)]
        whole = [info.pid for info in session.ranks] == pids
    _tools.header(f"{2 * rounds} interrupts of a stuck all_reduce, 2 ranks")
    _tools.row("Ctrl-C to usable, with grace", [each for each, _ in patient], **_tools.limit(3.0))
    _tools.row("Ctrl-C to usable, at once", [each for each, _ in at_once], **_tools.limit(0.5))
    wrong = sum(found != ["(2.0, 41)"] * 2 for _, found in patient + at_once)
    print(f"next sums or variables that were wrong: {wrong}; all ranks lived: {whole}")
    return 1 if wrong or not whole else 0


def _interrupted(session: Session, *, now: bool) -> tuple[float, list[str | None]]:
    """Seconds from the interrupt to the end of the next collective, and what that one gave."""
    from nbdist import RankError
    from testbed import gpu_sharing as sharing

    background = session.run_in_background(sharing.stuck_cell(_STUCK, "time.sleep(1000)"), show=False)
    deadline = time.monotonic() + LIMIT
    while not sharing.is_stuck(session):
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 did not get into the collective")
        time.sleep(0.01)
    began = time.perf_counter()
    background.interrupt(now=now)
    with contextlib.suppress(RankError, KeyboardInterrupt):
        background.wait(LIMIT)
    found = session.run(_SUM, timeout=LIMIT)
    return time.perf_counter() - began, [each.result for each in found.values()]


if __name__ == "__main__":
    sys.exit(main())
