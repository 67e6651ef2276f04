"""What a plan asks of the whole process: seeds, determinism, TF32, activations of compiled code, NUMA, collection.

Independent of models.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nbdist.base.checks import is_whole
from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.train import state as training

_SYSFS = Path("/sys")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_DEFAULT = 0  # MPOL_DEFAULT
_PREFERRED = 1  # MPOL_PREFERRED: other nodes' memory is still used when this one's is full

_undo: list[Callable[[], object]] = []  # what the plan in effect has changed, the last first


def apply(plan: Plan, device: torch.device) -> None:
    """Set this process up as the plan says. What it leaves open is as it was before any plan."""
    while _undo:
        _undo.pop()()
    if plan.seed is not None:
        set_seed(plan.seed, per_rank=plan.seed_per_rank)
    if plan.deterministic:
        _choose_deterministic_algorithms()
    if plan.tf32 is not None:
        _choose_tf32(plan.tf32)
    if plan.compile and plan.activation_budget is not None:
        _budget_activations(plan.activation_budget)
    if plan.numa:
        bind_to_numa_node(device, exclusive=plan.numa == "exclusive")
    if plan.gc_interval and gc.isenabled():
        _undo.append(gc.enable)
        gc.disable()


def _choose_deterministic_algorithms() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    _undo.append(partial(torch.use_deterministic_algorithms, before, warn_only=warn_only))
    _undo.append(partial(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its handle
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _choose_tf32(wanted: bool) -> None:
    """Set TF32 by the older function, which also sets the newer switches: if they disagree, reading the older raises.

    What the user has set is read from the newer switches (since torch 2.9), which always can be.
    """
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        matmul: Any = getattr(backend, "matmul", None)
        if hasattr(matmul, "fp32_precision"):
            _undo.append(partial(setattr, matmul, "fp32_precision", matmul.fp32_precision))
    with contextlib.suppress(RuntimeError):  # the user has made them disagree
        _undo.append(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high" if wanted else "highest")


def _budget_activations(share: float) -> None:
    """Set the activation budget for what is compiled from now on, a setting of the process."""
    try:
        from torch._functorch import config
    except ImportError:
        raise UsageError(
            f"PyTorch {torch.__version__} takes no activation budget: leave it out, or use activation_checkpointing"
        ) from None
    _undo.append(partial(setattr, config, "activation_memory_budget", config.activation_memory_budget))
    config.activation_memory_budget = share


def set_seed(seed: int, *, per_rank: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch (CPU and all GPUs).

    Args:
        seed: At least 0.
        per_rank: Whether each rank adds its rank.

    Raises:
        UsageError: The seed is not such a number.
    """
    if not is_whole(seed):
        raise UsageError(f"seed={seed!r} is not a seed: give an integer of 0 or more, for example 42")
    seed += training.data_rank() if per_rank else 0
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def bind_to_numa_node(device: torch.device, sysfs: Path = _SYSFS, *, exclusive: bool = False) -> int | None:
    """Bind this process to the cores and the memory that are next to its GPU, until the next plan. Linux only.

    Threads that are there already are bound as well, for example those of autograd. Only this one's memory policy can
    be set: the others' memory is near their cores, as that of pages is which a thread touches first.

    Args:
        device: This rank's device.
        sysfs: Where the kernel tells of its devices.
        exclusive: Whether this machine's ranks with a GPU on the same node divide its cores. Where there is one node
            only, they divide all cores.

    Returns:
        The NUMA node; None if there is none to bind to: no GPU, one node only, or the machine does not tell.
    """
    if device.type != "cuda" or not sys.platform.startswith("linux"):
        return None
    node = _node_of_gpu(torch.cuda.current_device() if device.index is None else device.index, sysfs)
    if node is None and not exclusive:
        return None
    cores = os.sched_getaffinity(0)
    if node is not None:
        cores &= cores_of_node(node, sysfs)
    if not cores:  # a container may own none of them
        return None
    bind_threads(_share(cores, node, sysfs) if exclusive else cores)
    if node is not None:
        _prefer_memory(node)
    return node


def _node_of_gpu(index: int, sysfs: Path) -> int | None:
    place: Any = torch.cuda.get_device_properties(index)
    return numa_node(f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0", sysfs)


def _share(cores: set[int], node: int | None, sysfs: Path) -> set[int]:
    """Return this rank's part of the cores of its node. Ranks have GPUs in their order, in turn if there are fewer."""
    own, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = [_node_of_gpu(index, sysfs) for index in range(torch.cuda.device_count())]
    neighbors = [rank for rank in range(ranks) if rank == own or gpus[rank % len(gpus)] == node]
    found = part_of_cores(cores, neighbors.index(own), len(neighbors), sysfs)
    if not found:
        warnings.warn(
            f"{len(neighbors)} ranks have a GPU next to the same cores, and there are fewer cores than ranks "
            f"({len(cores)} with hyperthreads): the ranks share them",
            stacklevel=2,
        )
    return found or cores


def part_of_cores(cores: set[int], number: int, parts: int, sysfs: Path = _SYSFS) -> set[int]:
    """Return one of several parts of cores: whole physical cores, hyperthreads together.

    Args:
        cores: As Linux numbers them, hyperthreads counted.
        number: Which part, from 0.
        parts: How many there are.
        sysfs: Where the kernel reports its cores.

    Returns:
        The cores of this part, the same number of physical ones in each, or one more; none if there are too few.
    """
    physical: dict[int, set[int]] = {}
    for core in sorted(cores):
        siblings = _cores_in(sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        physical.setdefault(min(siblings, default=core), set()).add(core)
    if len(physical) < parts:
        return set()
    first, end = (len(physical) * each // parts for each in (number, number + 1))
    return set().union(*list(physical.values())[first:end])


def bind_threads(cores: set[int]) -> None:
    """Let all threads of this process run on these cores only, until the next plan. What they start inherits it."""
    usual, before = os.sched_getaffinity(0), _cores_by_thread()
    _undo.append(partial(_unbind_threads, before, usual))
    for thread, allowed in before.items():
        _bind(thread, allowed & cores or allowed)


def _unbind_threads(before: Mapping[int, set[int]], usual: set[int]) -> None:
    """Give each thread its cores back; those that were started meanwhile get the usual ones."""
    for thread in _cores_by_thread():
        _bind(thread, before.get(thread, usual))


def _cores_by_thread() -> dict[int, set[int]]:
    found = {}
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found[int(name)] = os.sched_getaffinity(int(name))
    return found


def _bind(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(thread, cores)


def numa_node(address: str, sysfs: Path = _SYSFS) -> int | None:
    """Return the NUMA node of a PCI device such as "0000:3b:00.0"; None if the machine does not tell."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_of_node(node: int, sysfs: Path = _SYSFS) -> set[int]:
    """Return the cores of a NUMA node; none if the machine does not tell."""
    return _cores_in(sysfs / f"devices/system/node/node{node}/cpulist")


def _cores_in(path: Path) -> set[int]:
    """Return the cores in a list such as "4-6,12"; none if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    spans = [span.partition("-") for span in text.split(",") if span]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def _prefer_memory(node: int) -> None:
    """Have this thread, and those that it starts, take memory from a NUMA node, until the next plan."""
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << (node % 64)
    _undo.append(partial(_set_memory_policy, _DEFAULT, None, 0))
    _set_memory_policy(_PREFERRED, mask, words * 64 + 1)


def _set_memory_policy(policy: int, mask: Any, bits: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    # A container may forbid it. Cores are bound all the same, and memory is taken where these first touch it.
    if number is not None:
        ctypes.CDLL(None).syscall(number, policy, mask, bits)
