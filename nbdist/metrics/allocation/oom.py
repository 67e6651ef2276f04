"""What an out-of-memory error means: what was asked for, who has the memory, and what would help.

Owns which errors count and the words. The figures come from torch, the driver and /proc as they are when it is asked:
the error's frames still hold what they held. Independent of notebooks.
"""

from __future__ import annotations

import os
import re
import sys
import traceback as tracebacks
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nbdist.base.text import size
from nbdist.metrics.allocation import tensors, watermarks
from nbdist.metrics.allocation.tensors import Block
from nbdist.metrics.node import device, host
from nbdist.metrics.node.driver import within_limit
from nbdist.metrics.node.nvml import read_once
from nbdist.metrics.node.sample import GpuSample, gpu_among

_ASKED = (
    re.compile(r"[Tt]ried to allocate (?P<amount>[\d.]+) ?(?P<unit>[KMGTPE]?i?B|bytes)"),  # torch
    re.compile(r"Unable to allocate (?P<amount>[\d.]+) ?(?P<unit>[KMGTPE]?i?B|bytes)"),  # numpy
)
_WORTH_A_LINE = 1 << 20  # bytes of a tensor; smaller ones are not what fills a memory
_CUDA_MEMORY = 2  # cudaErrorMemoryAllocation
_GPU = re.compile(r"\bGPU (\d+)\b")
_POWERS = {"B": 0, "bytes": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5, "EiB": 6}
_ALLOCATOR, _EXPANDABLE = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True"
_CPU_ALLOCATOR = "DefaultCPUAllocator"
_SIGNS = (  # in messages of errors without a class of their own
    "CUDA out of memory.",
    "CUDNN_STATUS_NOT_SUPPORTED.",
    f"{_CPU_ALLOCATOR}: can't allocate memory",
    f"{_CPU_ALLOCATOR}: not enough memory",
)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Who had a device's memory when it ran out. Bytes; None: not known.

    Attributes:
        device: "cuda:0", or "cpu".
        asked: What was asked for.
        total: Of the device, as nvidia-smi reports it, or of what this process may use of the machine.
        kept: By the device's driver for itself: in the total, but neither free nor anybody's.
        free: Left for anybody.
        allocated: In torch's tensors; on the CPU, resident memory of this process.
        cached: Held by torch in no tensor.
        outside: Of this process, outside torch: context, kernels, libraries.
        others: Of other processes.
    """

    device: str
    asked: int | None = None
    total: int | None = None
    kept: int = 0
    free: int | None = None
    allocated: int | None = None
    cached: int | None = None
    outside: int | None = None
    others: int | None = None


def explain(error: BaseException, *namespaces: Mapping[str, Any]) -> str:
    """Return what to show below an out-of-memory error.

    Args:
        error: What was raised, with its traceback.
        namespaces: Where the user's names are; those of the error's frames are looked at too.

    Returns:
        Aligned lines; empty: the error is not one of these.
    """
    where = device_of(error)
    if not where:
        return ""
    try:
        account = _account(where, asked_for(error))
        frames = [frame.f_locals for frame, _ in tracebacks.walk_tb(error.__traceback__)]
        named = tensors.find(*namespaces, *reversed(frames))
        blocks = tensors.nameless() | named
        return render(account, tensors.largest(blocks.values(), where))
    except Exception:  # memory may have run out for this, too
        return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory was short, on the device or on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _is_of_runtime(error):
        return True
    return isinstance(error, RuntimeError) and any(sign in _text(error) for sign in _SIGNS)


def device_of(error: BaseException) -> str:
    """Return where memory ran out: "cuda:0", "cpu"; empty: unknown, or this error is about something else."""
    if not is_out_of_memory(error):
        return ""
    if _is_of_runtime(error):
        return f"cuda:{sys.modules['torch'].cuda.current_device()}"
    text = _text(error)
    if isinstance(error, MemoryError) or _CPU_ALLOCATOR in text:
        return "cpu"
    found = _GPU.search(text)
    return f"cuda:{found[1] if found else 0}" if "CUDA" in text or "HIP" in text else ""


def _is_of_runtime(error: BaseException) -> bool:
    """Return whether it is the CUDA runtime's, past the allocator: for a context, a library, NCCL."""
    return type(error).__name__ == "AcceleratorError" and getattr(error, "error_code", None) == _CUDA_MEMORY


def asked_for(error: BaseException) -> int | None:
    """Return how many bytes were asked for, by the error's own words."""
    text = _text(error)
    for pattern in _ASKED:
        if found := pattern.search(text):
            return int(float(found["amount"]) * 1024 ** _POWERS.get(found["unit"], 0))
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a __str__ of somebody's own
        return ""


def _account(where: str, asked: int | None) -> Account:
    if where == "cpu":
        total, used = host.memory()
        resident = watermarks.resident()[0]
        return Account(
            device=where,
            asked=asked,
            total=total,
            free=total - used,
            allocated=resident,
            others=max(0, used - resident),
        )
    cuda, index = sys.modules["torch"].cuda, int(where.partition(":")[2])
    free, total = cuda.mem_get_info(index)
    allocated, reserved = cuda.memory_allocated(index), cuda.memory_reserved(index)
    gpu = gpu_among(device.uuid(cuda, index), within_limit(read_once, []))
    outside, others = share(gpu, os.getpid(), total - free, reserved)
    whole = max(total, (gpu.total if gpu is not None else None) or 0)  # CUDA's is without what the driver keeps
    return Account(
        device=where,
        asked=asked,
        total=whole,
        kept=whole - total,
        free=free,
        allocated=allocated,
        cached=reserved - allocated,
        outside=outside,
        others=others,
    )


def share(gpu: GpuSample | None, pid: int, used: int, reserved: int) -> tuple[int | None, int | None]:
    """Return what of a GPU's memory this process has outside torch, and what other processes have.

    Args:
        gpu: What the driver says; None: nothing.
        pid: This process, which the driver may not know by this number (in containers).
        used: Memory in use on the device, by anybody.
        reserved: Memory that torch holds.

    Returns:
        The two; where the driver does not tell processes apart, None and the sum of the two.
    """
    own = gpu.by_pid.get(pid) if gpu is not None else None
    if own is None or own < reserved:
        return None, max(0, used - reserved)
    return own - reserved, max(0, used - own)


def render(account: Account, blocks: Sequence[Block] = ()) -> str:
    """Return the lines.

    Args:
        account: The figures.
        blocks: The largest of the live tensors.
    """
    largest = [block for block in blocks if block.size >= _WORTH_A_LINE]
    rows = [
        *_rows(account),
        *(("" if at else "largest tensors", block.size, block.describe()) for at, block in enumerate(largest)),
    ]
    lines = [f"  {name:<15}  {size(value):>10}  {note}".rstrip() for name, value, note in rows if value is not None]
    advice = [f"  {line}" for line in _advice(account)]
    return "\n".join([f"nbdist: out of memory on {account.device}", *lines, *advice])


def _rows(account: Account) -> list[tuple[str, int | None, str]]:
    kept = f", of which the driver keeps {size(account.kept)}" if account.kept else ""
    yet = [("asked for", account.asked, ""), ("free", account.free, f"of {size(account.total)}{kept}")]
    if account.device == "cpu":
        return [*yet, ("this process", account.allocated, ""), ("other processes", account.others, "")]
    yet += [("in tensors", account.allocated, ""), ("cached", account.cached, "held by torch, in no tensor")]
    if account.outside is None:
        return [*yet, ("outside torch", account.others, "contexts, libraries and other processes")]
    return [
        *yet,
        ("this process", account.outside, "outside torch: context, kernels, libraries"),
        ("other processes", account.others, ""),
    ]


def _advice(account: Account) -> list[str]:
    found = ["what the traceback above and Out hold is freed by `%distributed free`"]
    fragmented = account.cached is not None and account.asked is not None and account.cached >= account.asked
    if fragmented and not any(_EXPANDABLE in os.environ.get(name, "") for name in _ALLOCATOR):
        found.append(f"enough is cached, but in pieces: set {_ALLOCATOR[0]}={_EXPANDABLE} before the start")
    return found
