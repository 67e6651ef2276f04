"""A launch on ranks of its own that come from a template, or are Pythons of their own (`spawn`).

They take work as a session's ranks do, so output, errors, interrupts and freed collectives are the same.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from nbdist import transfer
from nbdist.client.session import calls
from nbdist.client.session.cell_options import CellOptions
from nbdist.client.session.rank_set import RankSet
from nbdist.client.session.session_plan import for_launch
from nbdist.client.session.start_options import Arguments
from nbdist.client.session.starting import PortTaken, StartLine
from nbdist.client.session.task import Task
from nbdist.errors import RankError, RankTimeout, UsageError
from nbdist.launch.launch_errors import launch_error
from nbdist.launch.request import DEFAULT_PORT, Request
from nbdist.text import counted
from nbdist.wire.cells import Reply
from nbdist.wire.life import Place, RankInfo, StartOptions

_COLLECTIVE_GRACE = 0.5  # seconds that ranks may wait in a collective for one that has raised
_FAILED_GRACE = 0.5  # seconds that ranks have to end when another has failed
_DEATH_GRACE = 0.1  # ... when it has died: its error is to be seen within half a second


class Crew(Protocol):
    """Ranks that live for one launch.

    Attributes:
        ranks: What each rank is.
    """

    ranks: list[RankInfo]

    def close(self, grace: float = 1.0) -> None:
        """End them, after `grace` seconds by force. Ctrl-C comes when that is done."""

    def collect(self, task: Task, read: Callable[[Reply], Any]) -> list[Any]:
        """The values that they have sent, in the order of the ranks, as `read` finds them in the replies."""


def launch(request: Request, packed: transfer.Packed) -> list[Any]:
    """Run the function on ranks of its own.

    Args:
        request: What to launch.
        packed: The function and its arguments, from `pack`.

    Raises:
        LaunchError: A rank failed.
        KeyboardInterrupt: The user interrupted.
        UsageError: The port that was named is taken.
    """
    rank_set = RankSet()
    with closing(rank_set):
        start(rank_set, request)
        announce(rank_set, request)
        task = submit(rank_set, request, packed)
        return conclude(rank_set, task, request)


@contextlib.contextmanager
def closing(crew: Crew) -> Iterator[None]:
    """End the ranks after the body. Another Ctrl-C meanwhile adds nothing to an interrupt or error under way."""
    try:
        yield
    except BaseException:
        _end(crew, 1.0)
        raise
    crew.close()


def _end(crew: Crew, grace: float) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        crew.close(grace)


def announce(crew: Crew, request: Request) -> None:
    """Say what is about to run."""
    count, cpu = len(crew.ranks), all(info.device == "cpu" for info in crew.ranks)
    print(f"Launching {request.name} on {counted(count, 'CPU rank' if cpu else 'GPU rank')}.", flush=True)


def conclude(crew: Crew, task: Task, request: Request) -> list[Any]:
    """Wait for the end of the launch and take its values. Ranks that have failed are ended."""
    try:
        task.wait(request.timeout)
    except RankTimeout:
        _end(crew, _FAILED_GRACE)
        raise
    except RankError as error:
        died = any(failure.kind == "died" for failure in error.failures.values())
        _end(crew, _DEATH_GRACE if died else _FAILED_GRACE)
        raise launch_error(error, request.name, crew.ranks[0].rank) from None
    return values(crew, task, request)


def pack(request: Request) -> transfer.Packed:
    """The function and its arguments as a parcel.

    Raises:
        TransferError: One of them can't travel; the text names it.
    """
    return calls.pack(request.function, request.args, {}, name=request.name, cuda=False)


def start(rank_set: RankSet, request: Request, place: Place | None = None) -> None:
    """Bring up the ranks of this node.

    Raises:
        UsageError: The port that was named is taken.
        SessionBroken: They could not be brought up.
    """
    own_store = place is None or not place.master_addr
    port = _port(request) if own_store else 0
    try:
        rank_set.start(options(request, place, port), _progress)
    except PortTaken as error:
        if not port:
            raise
        if port != DEFAULT_PORT:
            raise UsageError(f"use_port: {error}") from None
        rank_set.start(options(request, place, 0), _progress)


def _port(request: Request) -> int:
    """The port that was named; instead of a default that is taken any, without the cost of a start that fails."""
    if request.port == DEFAULT_PORT:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", DEFAULT_PORT))
            return DEFAULT_PORT
        return 0
    return request.port


def submit(rank_set: RankSet, request: Request, packed: transfer.Packed) -> Task:
    """Let the ranks call the function."""
    payload = msgspec.msgpack.encode(packed.parcel)
    options = CellOptions(grace=_COLLECTIVE_GRACE, show=True)
    return rank_set.submit("launch", request.name, None, options, payload)


def values(crew: Crew, task: Task, request: Request) -> list[Any]:
    """What the function returned, by rank; what can't come back is said, and None stands for it."""
    found = crew.collect(task, calls.value_or_reason)
    for value in found:
        if isinstance(value, transfer.Unsent):
            print(f"nbdist: {value.why}; None stands for it in the results", flush=True)
    found = [None if isinstance(value, transfer.Unsent) else value for value in found]
    return found if request.all_results else found[:1]


def _progress(line: StartLine) -> None:
    """Report what takes long enough to wonder."""
    if line.stage != "join":
        print(f"nbdist: {line}", flush=True)


def options(request: Request, place: Place | None = None, port: int = 0) -> StartOptions:
    """What to start for a request: of this node if `place` is given; the store listens at `port`, 0: anywhere."""
    gpus = [] if request.cpu else request.gpus
    found = Arguments(gpus, None, False, None).options(request.count)
    environment = {**found.environment, **request.environment}
    environment |= for_launch(environment, request.mixed_precision)
    environment["ACCELERATE_MIXED_PRECISION"] = request.mixed_precision
    if request.cpu or not found.gpus:
        environment["ACCELERATE_USE_CPU"] = "true" if request.cpu else environment.get("ACCELERATE_USE_CPU", "true")
    if gpus is not None and not found.gpus:  # none were asked for: those that are there are hidden
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return msgspec.structs.replace(
        found,
        environment=environment,
        port=port,
        place=place,
        fresh=request.start_method == "spawn",
        all_results=request.all_results,
    )
