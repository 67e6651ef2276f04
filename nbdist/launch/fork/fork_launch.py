"""A launch on children of the notebook's own process, which have its memory: nothing has to travel to them.

Owns what speaks against that, and what it lacks. From the fork on they are ranks like any others (`on_ranks`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from nbdist import cuda_guard, transfer
from nbdist.client.session.rank_set import RankSet
from nbdist.errors import LaunchError, NbdistError, TransferError, UsageError
from nbdist.launch import on_ranks
from nbdist.launch.fork.kernel_threads import describe_threads
from nbdist.launch.request import Request
from nbdist.wire.life import Place

_LACKS = (
    "ranks forked from the notebook take over its random numbers, and compute with one thread on the CPU; "
    "docs/launcher.md lists what else differs"
)

_said: set[str] = set()


def launch(request: Request) -> list[Any]:
    """Run the function on children of this process.

    Raises:
        UsageError: They could not use CUDA, an `Accelerator` is in the way, or the port that was named is taken.
        TransferError: The function holds a tensor on a GPU.
        LaunchError: A rank failed.
        KeyboardInterrupt: The user interrupted.
    """
    _check(request)
    _say_once(_LACKS)
    threads = describe_threads()
    if threads:
        _say_once(
            f"this kernel runs {threads}, of which its forks have none: what waits for one of them there, or for a "
            "lock that one holds, never returns"
        )
    for restart in range(request.max_restarts):
        try:
            return _attempt(request, restart)
        except LaunchError as error:
            print(f"nbdist: {error}; all ranks start again ({restart + 1} of {request.max_restarts})", flush=True)
    return _attempt(request, request.max_restarts)


def _attempt(request: Request, restart: int) -> list[Any]:
    from nbdist.launch.fork.forker import Forker  # it loads torch

    rank_set = RankSet()
    place = Place(world_size=request.count, restart=restart, max_restarts=request.max_restarts)
    with Forker(functools.partial(request.function, *request.args), rank_set.call_soon) as forker:
        return on_ranks.launch(request, None, rank_set, place, forker.address)


def hindrance(request: Request) -> str:
    """Why a function can't be forked from here, in words; empty if it can."""
    try:
        _check(request)
    except NbdistError as error:
        return str(error)
    return ""


def _check(request: Request) -> None:
    """Refuse what would fail on the ranks, or be wrong there."""
    if not request.alone:
        raise UsageError("a fork can't take part in a rendezvous with other nodes")
    held = transfer.find_on_gpu(request.function, f"function {request.name!r}")
    held = held or transfer.find_on_gpu(tuple(request.args), "args")
    if held:
        error = TransferError(f"cannot fork with {held}, which only this process can use; hold its `.cpu()`")
        error.part, error.on_gpu = held, True
        raise error
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if getattr(state, "_shared_state", None):
        raise UsageError(
            "this notebook has made an `Accelerator`, which forked ranks would take for theirs: make it inside of the "
            f"function only, and restart the notebook; or leave start_method out, and {request.name} runs on ranks "
            "without one"
        )
    cuda_guard.check_fork()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(f"nbdist: {text}", flush=True)
