"""`notebook_launcher` and `debug_launcher`: Accelerate's names and arguments, on ranks that just work.

Owns the choice of how the ranks come to be, and the words about it. `nbdist.launch` does it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbdist import cuda_guard, shells, transfer
from nbdist.base.ranks import describe_ranks
from nbdist.base.text import size
from nbdist.client.session import session as sessions
from nbdist.client.session.current import current_session
from nbdist.client.session.session import rank_set_of
from nbdist.client.start.connection import prewarm
from nbdist.client.start.node_arguments import nodes_wanted
from nbdist.client.start.start_settings import StartSettings
from nbdist.errors import TransferError, UsageError
from nbdist.launch import in_process, on_ranks
from nbdist.launch.fork import fork_launch
from nbdist.launch.request import Request


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    on: str | Mapping[str, Any] | sessions.Session | None = None,
    start_method: str | None = None,
    gpus: Sequence[int | str] | None = None,
    timeout: float | None = None,
    all_results: bool = True,
) -> list[Any]:
    """Run a function on ranks of its own, with torchrun's environment, and return what it returned.

    >>> nbdist.notebook_launcher(train, args=(model, 3e-4), num_processes=8)

    Args:
        function: What to run. It travels by value, as do its arguments: closures and classes of the notebook work.
        args: Its arguments.
        num_processes: Number of ranks on this node; None: one for each GPU. 1 runs in the notebook's own process,
            as in Accelerate.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; for `nbdist.autocast()` and for `Accelerator()` in the function.
        use_port: Where ranks meet. When the default is taken, another is used.
        master_addr: Address of the node with `node_rank` 0.
        node_rank: Which node this is.
        num_nodes: Number of nodes; on each of them this is called, with its own `node_rank`.
        rdzv_backend: "static", or "c10d": nodes find their ranks themselves.
        rdzv_endpoint: host:port of the rendezvous; empty: `master_addr` and `use_port`.
        rdzv_conf: Further settings of the rendezvous (`{"timeout": 900}`, in seconds).
        rdzv_id: Name of the job, the same on all nodes.
        max_restarts: How often all ranks start again after one has failed; the same on all nodes.
        monitor_interval: Seconds between two looks at other nodes.
        log_line_prefix_template: Taken for compatibility; lines are named by rank anyway.
        on: Where, in place of this machine alone: the name of a profile, or what a profile would hold, whose nodes are
            started as for a `Session`; num_processes counts ranks on each. Or a running Session: the function runs on
            its ranks, as with `session.call`, and its errors are those of the session.
        start_method: "warm": ranks come from a template that has torch loaded already; "spawn": each is a new Python;
            "fork": each is a child of the notebook's process; None: warm, or fork where the function can't travel.
        gpus: Which GPUs, as CUDA_VISIBLE_DEVICES would name them; None: all, as far as ranks need them.
        timeout: Seconds after which the function is interrupted.
        all_results: Whether all ranks' values come back; otherwise rank 0's only, as a list of one, which on nodes
            without rank 0 holds None.

    Returns:
        What the function returned, by rank; on one of several nodes, that of its own ranks. None stands for what
        can't come back; a line says so. `sys.exit()` counts as a return of None.

    Raises:
        UsageError: An argument is wrong; nothing was started.
        TransferError: The function or an argument can't travel; the text names the part.
        LaunchError: A rank failed, the first named first. It is torch's ChildFailedError, too.
        NodesMissing: Other nodes did not come in time, or the one where all meet has gone.
        RankTimeout: It was not done in time.
    """
    _check_here()
    nodes = None
    if isinstance(on, sessions.Session):
        given = {"num_processes": num_processes, "gpus": gpus, "start_method": start_method}
        _refuse(given | {"mixed_precision": None if mixed_precision == "no" else mixed_precision})
        num_processes = len(on.ranks)
    elif on is not None:
        _, nodes = nodes_wanted(StartSettings(num_processes=num_processes, on=on))
        assert nodes is not None
        num_processes = 1 if nodes.ranks_of(0) == 0 else nodes.ranks_of(0)
    request = Request(
        function,
        args,
        num_processes,
        mixed_precision,
        use_port,
        master_addr,
        node_rank,
        num_nodes,
        rdzv_backend,
        rdzv_endpoint,
        rdzv_conf,
        rdzv_id,
        max_restarts,
        monitor_interval,
        log_line_prefix_template,
        start_method=start_method,
        gpus=gpus,
        timeout=timeout,
        all_results=all_results,
        nodes=nodes,
    )
    if isinstance(on, sessions.Session):
        return on_ranks.launch_on(rank_set_of(on), request)
    if cuda_guard.preflight_asked():
        cuda_guard.preflight()
    return _launch(request)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run a function on CPU ranks, to find its errors. They talk through gloo on loopback.

    Args:
        function: What to run.
        args: Its arguments.
        num_processes: Number of ranks.

    Returns:
        What the function returned, by rank.
    """
    _check_here()
    return _launch_here(Request(function, args, num_processes, cpu=True, environment={"CUDA_VISIBLE_DEVICES": ""}))


def _refuse(given: Mapping[str, object]) -> None:
    """Raise an error for arguments that don't go with a session whose ranks have been started."""
    if useless := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"the ranks of the session in `on` are already running: leave out {', '.join(useless)}")


def _launch(request: Request) -> list[Any]:
    if request.in_notebook:
        return in_process.launch(request)
    _warn_of_session()
    return _launch_here(request)


def _launch_here(request: Request) -> list[Any]:
    """Run it on ranks of this machine."""
    if request.start_method == "fork":
        return fork_launch.launch(request)
    packed = _pack(request)
    if packed is None:
        return fork_launch.launch(request)
    with packed:
        if request.may_use_gpus:
            _warn_of_memory()
        if not request.elastic:
            return on_ranks.launch(request, packed)
        from nbdist.launch.nodes import elastic  # it loads torch

        return elastic.launch(request, packed)


def _pack(request: Request) -> transfer.Packed | None:
    """Return the function and its arguments as a parcel; None where they can't travel, but a fork takes them along.

    Raises:
        TransferError: They can't travel, and are not to be forked, or can't.
    """
    try:
        return on_ranks.pack(request)
    except TransferError as error:
        if error.on_gpu:
            raise
        if request.nodes is not None:
            raise
        if request.start_method is not None:
            error.args = (f"{error}; or launch it with `start_method='fork'`, which sends nothing between processes",)
            raise
        hindrance = fork_launch.hindrance(request)
        if hindrance:
            error.args = (
                f"{error}. `start_method='fork'`, which would avoid sending it, does not work here: {hindrance}",
            )
            raise
        print(f"nbdist: forked from the notebook, because {error.part or error}", flush=True)
        return None


def _check_here() -> None:
    if shells.on_rank():
        raise UsageError(
            f"this is rank {os.environ.get('RANK')}: "
            "launch from the notebook, not from a function or cell that runs on ranks"
        )


def _warn_of_memory() -> None:
    """Warn of memory that the notebook's own process holds and the ranks may need."""
    warning = cuda_guard.memory_warning()
    if warning is not None:
        print(f"nbdist: {warning}", flush=True)


def _warn_of_session() -> None:
    """Warn that a session's ranks keep running in addition to those of the launch."""
    session = current_session()
    if session is None or session.closed:
        return
    held = sum(row["device_memory"] or 0 for row in session.status())
    memory = f", which hold {size(held)} of GPU memory" if held else ""
    print(
        f"nbdist: these ranks are extra processes, besides {describe_ranks([info.rank for info in session.ranks])} "
        f"of the session{memory}. `%distributed stop` ends those",
        flush=True,
    )


def _get_ready() -> None:
    """Warm up what a launch needs, if this is a notebook."""
    if shells.current() is None or shells.on_rank():
        return
    cuda_guard.arm()
    prewarm()


_get_ready()
