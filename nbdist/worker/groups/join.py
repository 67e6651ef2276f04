"""How a rank gets into its first process group: its device, its environment, the rendezvous.

The environment has torchrun's variables, and what ranks on GPUs need unless the user has set it: libraries read that
before a cell could set it, or only once in a process.

Young or private parts of torch are probed when used, and a missing one costs that feature only. What becomes of groups
later is for `process_groups`. Independent of the shell or the wire.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import random
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError
from nbdist.wire.messages.life import Place, StartOptions
from nbdist.wire.messages.rank_processes import RankSetup

if TYPE_CHECKING:
    from torch.distributed import Store

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# The name to set, other names by which the user may have decided, the value.
_DEFAULTS = (
    # NCCL's watchdog ends the process when a collective times out or a peer fails, and the rank's variables with it.
    # nbdist watches the ranks itself, and frees those that wait for what can't come.
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("NCCL_ASYNC_ERROR_HANDLING",), "0"),
    # Another thread of its ends the process when the watchdog is stuck, for example while a CUDA call holds the GIL.
    ("TORCH_NCCL_ENABLE_MONITORING", (), "0"),
    # It also ends the process when a kernel has failed, as on an index out of range, before that can be reported.
    ("TORCH_NCCL_RETHROW_CUDA_ERRORS", (), "0"),
    # torch reads it in the first matrix product of a process: a deterministic plan in a later cell would be refused.
    # On H100 it is the size that torch uses anyway, on older GPUs it takes 24 MiB more.
    ("CUBLAS_WORKSPACE_CONFIG", (), ":4096:8"),
)
_SEGMENTS = "expandable_segments:True"
_REGISTERS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"  # which torch ignores when segments may grow


def gpu_defaults(given: Mapping[str, str], kernel: str = "") -> dict[str, str]:
    """Return the variables to add for ranks on GPUs.

    Args:
        given: The user's environment. What it decides stays.
        kernel: Release of the system's kernel; empty: this one's.
    """
    found = {name: value for name, others, value in _DEFAULTS if not any(each in given for each in (name, *others))}
    if _may_expand(given, kernel or platform.release()):
        found[ALLOCATOR_VARIABLES[1]] = _SEGMENTS  # the name that torch 2.8 knows, too
    return found


def _may_expand(given: Mapping[str, str], kernel: str) -> bool:
    """Return whether the allocator may let its segments grow, so that tensors of changing sizes leave no holes.

    Models that are gathered block by block, and batches of different lengths, otherwise end in "out of memory" with
    gigabytes reserved and not allocated. Windows' driver (WSL) does not offer what it takes.
    """
    decided = any(name in given for name in (*ALLOCATOR_VARIABLES, _REGISTERS))
    return not decided and "microsoft" not in kernel.lower()


_LOOPBACK = "lo"
_STARTED_BY_A_RANK = (
    "a rank has started this process, which would form a group with others at the rank's own address ({}:{}). The "
    "ranks are the processes of a group already: let them run the training themselves (with Lightning, "
    "strategy='ddp' in place of 'ddp_notebook'), or set MASTER_PORT to a free port before the processes are started"
)
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # whether a rendezvous only connects to a store that is there


def environment(setup: RankSetup) -> dict[str, str]:
    """Return Torchrun's variables for this rank, and what libraries are to find there unless the user has set it."""
    place = setup.options.place or Place()
    variables = numbers(setup) | {
        "ROLE_NAME": "default",
        "MASTER_ADDR": place.master_addr or setup.store.host,
        "MASTER_PORT": str(place.master_port if place.master_addr else setup.store.port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run or f"nbdist-{setup.incarnation}",
        # The user's own init_process_group() then connects to our store instead of opening one.
        _AGENT_STORE: "True",
    }
    defaults = {
        "OMP_NUM_THREADS": str(setup.threads),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    # With one node nothing of it listens to the network.
    if interface := _LOOPBACK if place.num_nodes == 1 else setup.interface:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if setup.options.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(setup.gpus_shown)
        defaults |= gpu_defaults(setup.options.environment)
    return {name: value for name, value in defaults.items() if name not in setup.options.environment} | variables


def numbers(setup: RankSetup) -> dict[str, str]:
    """Return those of torchrun's variables that depend on the number of ranks."""
    place = setup.options.place or Place()
    world, rank = str(setup.world_size), str(setup.rank)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(setup.local_rank),
        "GROUP_RANK": str(place.node_rank),
        "ROLE_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(setup.options.count),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_WORLD_SIZE": world,
    }


def prepare_torch(setup: RankSetup) -> None:
    """Give the forked torch what a fresh process would have read from its environment."""
    import numpy
    import torch
    import torch.distributed

    wanted = os.environ["OMP_NUM_THREADS"].split(",")[0].strip()  # OpenMP allows a list by nesting level
    torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) > 0 else setup.threads)
    read_debug_level = getattr(torch.distributed, "set_debug_level_from_env", None)
    if read_debug_level is not None:
        read_debug_level()
    if setup.options.fork_address:  # they go on from the notebook's state, as all else that the notebook has
        return
    # torch's own generator starts from a constant in every process, so it is left as a fresh one would be.
    random.seed()
    numpy.random.seed()


def device(setup: RankSetup) -> Any:
    """Return the device of this rank: its own GPU, or the CPU."""
    import torch

    if _gpu_count(setup) == 0:
        return torch.device("cpu")
    local = _gpu(setup)
    torch.cuda.set_device(local)
    return local


def _gpu(setup: RankSetup) -> Any:
    import torch

    return torch.device("cuda", setup.gpu % len(setup.gpus_shown))


def _gpu_count(setup: RankSetup) -> int:
    """Return the GPUs that this torch can use."""
    import torch

    built = torch.backends.cuda.is_built() or torch.version.hip is not None
    return setup.gpu_count if built else 0


def backend_for(options: StartOptions, gpu_count: int) -> str:
    """Return the backend: the requested one, else the usual one of these GPUs, of which torch can use so many."""
    if options.backend is not None:
        return options.backend
    return options.usual_backend if gpu_count else "gloo"


def bound_device(setup: RankSetup, backend: str) -> Any:
    """Return the device to connect to the other ranks at once, so that no first collective pays for it; None: none.

    Only where each rank has a GPU of its own: NCCL refuses a GPU that several ranks connect.
    """
    own = _gpu_count(setup) >= setup.options.count and not setup.options.gpus_are_parts
    return _gpu(setup) if own and "nccl" in backend else None


def join(setup: RankSetup, store: Store, attempt: int = 0) -> str:
    """Make the default process group.

    Args:
        setup: What this rank is.
        store: A client of the session's rendezvous store.
        attempt: A number that no making of it has had before, the same on all ranks.

    Returns:
        Its backend, as torch names it.
    """
    import torch.distributed as dist

    backend = backend_for(setup.options, _gpu_count(setup))
    bound = bound_device(setup, backend)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"nbdist/{setup.incarnation}/{attempt}", store),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=setup.options.timeout),
        device_id=bound,
    )
    if bound is not None:
        _let_groups_connect_by_themselves()
    return backend


def _let_groups_connect_by_themselves() -> None:
    """Have later groups make connections of their own instead of splitting those of the default group.

    A split takes part of all ranks. It would wait for ranks that have died, that are not called for a group of gloo, or
    whose connections were cut and renewed: torch knows none of that.
    """
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    group.bound_device_id = None


def separate_rendezvous(
    cell: Callable[[], int], connecting: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    """Give each `init_process_group()` of the user's a part of the store of its own.

    Without that, a rank that runs a cell again may find the addresses that others left there the time before.

    Args:
        cell: Gives the number of the cell that runs, which is the same on all ranks, those of other nodes too.
        connecting: Entered with the store's port while a rendezvous connects to it.
    """
    from torch.distributed import PrefixStore

    ours = meeting_point()
    # Not `from torch.distributed import rendezvous`: that is the function of the same name.
    handlers = getattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    original = handlers.get("env")
    if original is None:
        return
    latest, own = (0, 0), os.getpid()

    def handler(*args: object, **kwargs: object) -> Iterator[tuple[Any, int, int]]:
        nonlocal latest
        if os.getpid() != own and meeting_point() == ours:
            raise UsageError(_STARTED_BY_A_RANK.format(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")))
        serial = cell()
        latest = (serial, latest[1] + 1 if latest[0] == serial else 1)
        rendezvous = original(*args, **kwargs)
        with connecting(int(os.environ.get("MASTER_PORT", "0"))), own_store(meeting_point() != ours):
            store, rank, world_size = next(rendezvous)
        # The store of several nodes outlives a restart.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        yield PrefixStore(f"cell/{attempt}/{latest[0]}/{latest[1]}", store), rank, world_size
        yield from rendezvous

    handlers["env"] = handler


def meeting_point() -> tuple[str | None, str | None]:
    """Return the address and port at which a rendezvous of this process meets."""
    return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")


@contextlib.contextmanager
def own_store(wanted: bool = True) -> Iterator[None]:
    """Let rank 0 of a rendezvous open a store in the body, if `wanted`: the script has chosen where to meet."""
    before = os.environ.get(_AGENT_STORE)
    if wanted:
        os.environ[_AGENT_STORE] = "False"
    try:
        yield
    finally:
        if wanted and before is not None:
            os.environ[_AGENT_STORE] = before
        elif wanted:
            del os.environ[_AGENT_STORE]


@contextlib.contextmanager
def own_meeting_point(ours: tuple[str | None, str | None]) -> Iterator[None]:
    """Let processes that are spawned in the body form a group of their own, with a store that one of them opens.

    They meet where the script says, or else at a free port: at the rank's own address, the session has its store.

    Args:
        ours: The session's meeting point.
    """
    before = meeting_point()
    if before == ours:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    try:
        with own_store():
            yield
    finally:
        os.environ |= {
            name: value for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), before, strict=True) if value is not None
        }


def serve_store(listener: socket.socket) -> Any:
    """Host the rendezvous store on a listening socket. It serves from a thread of its own for as long as it is kept.

    Given only a host name, TCPStore would listen on every interface.
    """
    import torch.distributed as dist

    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
