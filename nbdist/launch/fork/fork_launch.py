"""A launch on children of the notebook's own process, which share its memory: nothing has to be sent to them.

Owns what prevents a fork launch, and its limitations. After the fork they are ranks like any others (`on_ranks`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from nbdist import cuda_guard, transfer
from nbdist.client.ranks.rank_set import RankSet
from nbdist.errors import LaunchError, NbdistError, TransferError, UsageError
from nbdist.launch import on_ranks
from nbdist.launch.fork.kernel_threads import describe_threads
from nbdist.launch.request import Request
from nbdist.wire.messages.life import Place

_LACKS = (
    "ranks forked from the notebook inherit its random state, and compute with one thread on the CPU; "
    "docs/launcher.md lists what else differs"
)

_said: set[str] = set()


def launch(request: Request) -> list[Any]:
    """Run the function on children of this process.

    Raises:
        UsageError: They could not use CUDA, an `Accelerator` is in the way, or the given port is taken.
        TransferError: The function holds a tensor on a GPU.
        LaunchError: A rank failed.
        KeyboardInterrupt: The user interrupted.
    """
    _check(request)
    _say_once(_LACKS)
    threads = describe_threads()
    if threads:
        _say_once(
            f"this kernel runs {threads}, which forked ranks won't have: code there that waits for one of these "
            "threads, or for a lock that one holds, will hang"
        )
    for restart in range(request.max_restarts):
        try:
            return _attempt(request, restart)
        except LaunchError as error:
            print(f"nbdist: {error}; all ranks start again ({restart + 1} of {request.max_restarts})", flush=True)
    return _attempt(request, request.max_restarts)


def _attempt(request: Request, restart: int) -> list[Any]:
    from nbdist.launch.fork.forker import Forker  # it imports torch

    rank_set = RankSet()
    place = Place(world_size=request.count, restart=restart, max_restarts=request.max_restarts)
    with Forker(functools.partial(request.function, *request.args), rank_set.talk.call_soon) as forker:
        return on_ranks.launch(request, None, rank_set, place, forker.address)


def hindrance(request: Request) -> str:
    """Describe why a function can't be forked from here; empty if it can."""
    try:
        _check(request)
    except NbdistError as error:
        return str(error)
    return ""


def _check(request: Request) -> None:
    """Reject what would fail on the ranks, or be wrong there."""
    if not request.alone:
        raise UsageError("a fork can't take part in a rendezvous with other nodes")
    held = transfer.find_on_gpu(request.function, f"function {request.name!r}")
    held = held or transfer.find_on_gpu(tuple(request.args), "args")
    if held:
        error = TransferError(f"cannot fork with {held}, which only this process can use; use its `.cpu()`")
        error.part, error.on_gpu = held, True
        raise error
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if getattr(state, "_shared_state", None):
        raise UsageError(
            "this notebook has created an `Accelerator`, which forked ranks would mistake for their own: create it "
            f"inside the function and restart the notebook, or leave out start_method to run {request.name} on ranks "
            "without it"
        )
    cuda_guard.check_fork()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(f"nbdist: {text}", flush=True)
