"""This process, as a RankSample: its memory, and what torch knows of its GPU.

Reads counters only: nothing is initialized by it, and it costs microseconds.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import msgspec

from nbdist.base import limits
from nbdist.metrics.node import active_meter, host
from nbdist.metrics.node.driver import within_limit
from nbdist.metrics.node.nvml import read_once
from nbdist.metrics.node.sample import GpuSample, RankSample, has_lost

_processor = host.ProcessorUse()


def look(rank: int, inherited: int = 0, gpu: int = 0) -> RankSample:
    """Return this process now.

    Args:
        rank: Its rank.
        inherited: Bytes of anonymous memory that it was forked with, and so shares.
        gpu: Its GPU, as torch counts. CUDA's current device is of no help: each thread has one of its own.
    """
    return msgspec.structs.replace(look_at_host(rank, inherited), **look_at_gpu(gpu))


def look_at_host(rank: int, inherited: int = 0) -> RankSample:
    """Return this process now, without its GPU. The arguments are those of `look`."""
    private = max(0, host.anonymous_memory() - inherited)
    return RankSample(
        rank=rank,
        node=socket.gethostname(),
        pid=os.getpid(),
        cpu=_processor.look(),
        private=private,
        step=active_meter.current_sample(),
    )


def uses_gpu() -> bool:
    """Return whether this process uses one. Any thread may ask."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def look_at_gpu(gpu: int) -> dict[str, Any]:
    """Return what this process has on its GPU: fields of a RankSample. Empty if it uses none.

    Waits for CUDA's allocator, and holds Python's lock meanwhile.

    Args:
        gpu: As for `look`.
    """
    if not uses_gpu():
        return {}
    cuda = sys.modules["torch.cuda"]
    try:
        return _gpu(cuda, in_use(cuda, gpu))
    except Exception as error:  # after a failed kernel torch refuses whatever it is asked
        why = f"torch does not report on its GPU: {type(error).__name__}: {error}".splitlines()[0]
        return {"device": f"cuda:{gpu}", "why": why}


def _gpu(cuda: Any, index: int) -> dict[str, Any]:
    stats = cuda.memory_stats(index)
    return {
        "device": f"cuda:{index}",
        "gpu": uuid(cuda, index),
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
    }


def memory_by_driver(pid: int | None = None) -> int | None:
    """Return the bytes that the driver reports for a process on all its GPUs; None where it doesn't, or not soon.

    For when torch can't be asked. Takes milliseconds, or longer where the driver has to initialize GPUs.

    Args:
        pid: The process; None: this one.
    """
    none: list[GpuSample] = []
    gpus = within_limit(read_once, none, limits.DRIVER_ANSWER)
    shares = [share for gpu in gpus if (share := gpu.by_pid.get(pid or os.getpid())) is not None]
    return sum(shares) if shares else None


def is_lost(own: str) -> bool:
    """Return whether a GPU has fallen off the bus, as far as the driver tells soon.

    Args:
        own: Its UUID; empty if it is not known.
    """
    none: list[GpuSample] = []
    return has_lost(own, within_limit(read_once, none, limits.DRIVER_ANSWER))


def in_use(cuda: Any, own: int) -> int:
    """Return the GPU that this process uses: its own, or if torch holds nothing there, where it holds the most.

    Args:
        cuda: `torch.cuda`, initialized.
        own: The GPU that it should use, as torch counts.
    """
    count = cuda.device_count()
    if own < count and cuda.memory_reserved(own):
        return own
    most = max(range(count), key=cuda.memory_reserved, default=own)
    return most if cuda.memory_reserved(most) else own


def uuid(cuda: Any, index: int) -> str:
    """Return the UUID of a GPU as the driver writes it; empty where torch does not tell.

    Args:
        cuda: `torch.cuda`, initialized.
        index: As torch counts.
    """
    found = str(getattr(cuda.get_device_properties(index), "uuid", ""))
    return f"GPU-{found}" if found and not found.startswith(("GPU-", "MIG-")) else found
