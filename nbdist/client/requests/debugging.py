"""Looks into what has failed on a rank: IPython's debugger in the notebook's input field, or VS Code's.

The frames are on the rank; nothing is kept here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from nbdist.base import limits
from nbdist.base.ranks import describe_ranks
from nbdist.client.base import interruption
from nbdist.client.ranks.rank_set import Ranks, RankSet
from nbdist.client.ranks.task_record import CellOptions
from nbdist.errors import InteractionError, RankError, UsageError
from nbdist.wire.questions.knowing import GetFailure, KnownFailure
from nbdist.wire.questions.question import NoAnswer

_ORDER = {"raised": 0, "lost": 1}  # then interrupts: what fails because of another rank comes after it


def debug(rank_set: RankSet, rank: int | None = None) -> None:
    """Open the debugger on a rank; the arguments are those of `Session.debug`."""
    known = _known(rank_set, None if rank is None else [rank])
    chosen = rank if rank is not None else _first(known)
    found = known.get(chosen, KnownFailure()) if chosen is not None else KnownFailure()
    who = rank_set.traffic.places.describe([chosen]) if chosen is not None else "any rank"
    if chosen is None or not found.name:
        raise UsageError(
            f"nothing has failed on {who}, so there is nothing to debug. To stop in a cell, call `breakpoint()` in it"
        )
    what = f"{found.name}: {found.text}".splitlines()[0].rstrip(": ")
    if found.gone:
        raise UsageError(
            f"the frames of {what} on {who} are gone, because another cell has started there: run the failing cell "
            "again, then `%distributed debug`"
        )
    print(f"{who} raised {what} (`q` leaves the debugger)", flush=True)
    with interruption.deferred():
        task = rank_set.submit("debug", "", [chosen], CellOptions(show=True))
        try:
            task.wait()
        except RankError as error:
            failure = error.failures[chosen]
            if failure.name == InteractionError.__name__:
                raise InteractionError(failure.text) from None
            raise
        except KeyboardInterrupt:
            if task.failures:  # else it has left the debugger
                raise


def _known(rank_set: RankSet, ranks: Ranks) -> dict[int, KnownFailure]:
    """Return what has failed last on each rank that lives and answers.

    Raises:
        SessionBusy: All of them run something.
    """
    chosen = rank_set.choose(rank_set.living() if ranks is None else ranks)
    busy = rank_set.traffic.running(chosen)
    if len(busy) == len(chosen):
        raise rank_set.busy(busy)
    answers = rank_set.traffic.ask(chosen, GetFailure(), timeout=limits.STATUS_ANSWER)
    return {rank: answer for rank, answer in answers.items() if rank not in busy and not isinstance(answer, NoAnswer)}


def _first(known: Mapping[int, KnownFailure]) -> int | None:
    """Return the rank that failed first; one whose frames are there, if any are. None: nothing has failed."""
    failed = [rank for rank, failure in known.items() if failure.name]
    return min(
        failed, key=lambda rank: (known[rank].gone, _ORDER.get(known[rank].kind, 2), known[rank].when), default=None
    )


def serve_debugpy(rank_set: RankSet, ranks: Ranks) -> str:
    """Have ranks listen for VS Code.

    Returns:
        What to do, with the configurations.
    """
    with interruption.deferred():
        task = rank_set.submit("debugpy", "", ranks)
        task.wait()
    ports = {rank: msgspec.msgpack.decode(task.replies[rank].payload, type=int) for rank in task.ranks}
    configurations = [
        {
            "name": f"nbdist rank {rank}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": port},
            "justMyCode": False,
        }
        for rank, port in ports.items()
    ]
    hosts = {info.rank: info.host for info in rank_set.ranks if info.node}
    tunnels = [
        f"on this machine: ssh -N -L {port}:127.0.0.1:{port} {hosts[rank]}"
        for rank, port in ports.items()
        if rank in hosts
    ]
    listens = "listens" if len(ports) == 1 else "listen"
    lines = [
        f"{describe_ranks(list(ports))} {listens} on loopback for VS Code: add to configurations in launch.json",
        ",\n".join(json.dumps(each, indent=4) for each in configurations),
        *tunnels,
    ]
    return "\n".join(lines)
