"""A launch on its own ranks: from a template, in new Pythons (`spawn`), or forked from the notebook (`fork`).

They take work like a session's ranks, so output, errors, interrupts and freed collectives are the same.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from nbdist import transfer
from nbdist.base import limits
from nbdist.base.text import counted
from nbdist.client.base import calls, interruption
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.task import Task
from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.start.session_plan import for_launch
from nbdist.client.start.start_options import start_options
from nbdist.client.start.start_settings import StartSettings
from nbdist.client.start.starting import PortTaken, StartLine
from nbdist.errors import RankError, RankTimeout, UsageError
from nbdist.launch.launch_errors import launch_error
from nbdist.launch.request import DEFAULT_PORT, Request
from nbdist.wire.messages.life import Place, RankInfo, StartOptions


def launch(
    request: Request,
    packed: transfer.Packed | None,
    rank_set: RankSet | None = None,
    place: Place | None = None,
    fork_address: str = "",
) -> list[Any]:
    """Run the function on its own ranks.

    Args:
        request: The launch request.
        packed: The function and its arguments, from `pack`; None if the ranks already have them.
        rank_set: The set of ranks to start; None for a new one.
        place: The position of these ranks among other nodes and restarts, if any.
        fork_address: The address of the process that forks the ranks; "" to fork them from the template.

    Raises:
        LaunchError: A rank failed.
        KeyboardInterrupt: The user interrupted.
        UsageError: The given port is taken.
    """
    rank_set = rank_set or RankSet()
    with closing(rank_set):
        start(rank_set, request, place, fork_address)
        announce(rank_set, request)
        task = submit(rank_set, request, packed)
        return conclude(rank_set, task, request)


def launch_on(rank_set: RankSet, request: Request) -> list[Any]:
    """Run the function on the ranks of a session, which stay.

    Raises:
        RankError: A rank failed.
    """
    with pack(request) as packed, interruption.deferred():
        task = rank_set.submit("call", request.name, None, parcel=packed.parcel)
        task.wait(request.timeout)
        return values(rank_set, task, request)


@contextlib.contextmanager
def closing(rank_set: RankSet) -> Iterator[None]:
    """End the ranks after the body. Another Ctrl-C meanwhile adds nothing to an interrupt or error in progress."""
    try:
        yield
    except BaseException:  # Ctrl-C included: no ranks are left behind
        _end(rank_set, 1.0)
        raise
    rank_set.close()


def _end(rank_set: RankSet, grace: float) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        rank_set.close(grace)


def announce(rank_set: RankSet, request: Request) -> None:
    """Print what is about to run."""
    count, cpu = len(rank_set.ranks), all(info.device == "cpu" for info in rank_set.ranks)
    print(f"Launching {request.name} on {counted(count, 'CPU rank' if cpu else 'GPU rank')}.", flush=True)


def conclude(rank_set: RankSet, task: Task, request: Request) -> list[Any]:
    """Wait for the end of the launch and return its values. Ranks are ended if one has failed."""
    try:
        task.wait(request.timeout)
    except RankTimeout:
        _end(rank_set, limits.FAILED_GRACE)
        raise
    except RankError as error:
        died = any(failure.kind == "died" for failure in error.failures.values())
        _end(rank_set, limits.DEATH_IN_LAUNCH if died else limits.FAILED_GRACE)
        raise launch_error(error, request.name, _local_ranks(rank_set.ranks)) from None
    return values(rank_set, task, request)


def pack(request: Request) -> transfer.Packed:
    """Pack the function and its arguments.

    Raises:
        TransferError: One of them can't be sent; the text names it.
    """
    return calls.pack(request.function, request.args, {}, name=request.name, cuda=False)


def start(rank_set: RankSet, request: Request, place: Place | None = None, fork_address: str = "") -> None:
    """Start the ranks of this node.

    Raises:
        UsageError: The given port is taken.
        SessionBroken: The ranks could not be started.
    """
    own_store = (place is None or not place.master_addr) and request.nodes is None
    port = _port(request) if own_store else 0
    try:
        rank_set.start(options(request, place, port, fork_address), show_progress, request.nodes)
    except PortTaken as error:
        if not port:
            raise
        if port != DEFAULT_PORT:
            raise UsageError(f"use_port: {error}") from None
        rank_set.start(options(request, place, 0, fork_address), show_progress)


def _port(request: Request) -> int:
    """Return the given port; if it is a default that is taken, 0 for any, which saves a failing start."""
    if request.port == DEFAULT_PORT:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", DEFAULT_PORT))
            return DEFAULT_PORT
        return 0
    return request.port


def submit(rank_set: RankSet, request: Request, packed: transfer.Packed | None) -> Task:
    """Have the ranks call the function."""
    options = CellOptions(grace=limits.COLLECTIVE_GRACE, show=True)
    return rank_set.submit("launch", request.name, None, options, packed.parcel if packed is not None else None)


def _local_ranks(ranks: Sequence[RankInfo]) -> dict[int, int]:
    """Return the number of each rank on its node."""
    first: dict[int, int] = {}
    return {info.rank: info.rank - first.setdefault(info.node, info.rank) for info in ranks}


def values(rank_set: RankSet, task: Task, request: Request) -> list[Any]:
    """Return the function's return values by rank; those that can't be sent back are reported and become None."""
    found = rank_set.collect(task, calls.value_or_reason)
    for value in found:
        if isinstance(value, transfer.Unsent):
            print(f"nbdist: {value.why}; its result is None", flush=True)
    found = [None if isinstance(value, transfer.Unsent) else value for value in found]
    return found if request.all_results else found[:1]


def show_progress(line: StartLine) -> None:
    """Report what takes long."""
    if line.stage != "join":
        print(f"nbdist: {line}", flush=True)


def options(request: Request, place: Place | None = None, port: int = 0, fork_address: str = "") -> StartOptions:
    """Return the start options for a request.

    Args:
        request: The launch request.
        place: The position of this node's ranks among other nodes and restarts.
        port: The port of the store; 0 for any.
        fork_address: The address where the notebook forks them.
    """
    gpus = [] if request.cpu else request.gpus
    found = start_options(StartSettings(gpus=gpus, init=False), request.count)
    found = found.with_variables(
        {
            **request.environment,
            **for_launch({**found.environment, **request.environment}, request.mixed_precision),
            "ACCELERATE_MIXED_PRECISION": request.mixed_precision,
        }
    )
    environment = dict(found.environment)
    if request.cpu or not found.gpus:
        environment["ACCELERATE_USE_CPU"] = "true" if request.cpu else environment.get("ACCELERATE_USE_CPU", "true")
    if gpus is not None and not found.gpus:  # none were requested: hide those that exist
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if fork_address:  # a thread pool does not survive a fork, and torch would wait for it
        environment["OMP_NUM_THREADS"] = "1"
    return msgspec.structs.replace(
        found,
        environment=environment,
        port=port,
        place=place,
        fresh=request.start_method == "spawn",
        all_results=request.all_results,
        fork_address=fork_address,
    )
