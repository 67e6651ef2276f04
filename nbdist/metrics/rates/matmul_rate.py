"""The best rate of matrix products that a device really reaches, measured in a second or two.

What makers state is reached by no program: on an H100 about 80 % of it. This is the figure to compare training with,
and the only one that a CPU has. Owns the measurement; `peaks` remembers its result for this process.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.base import text
from nbdist.errors import UsageError
from nbdist.metrics.rates import peaks, timing

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
_CPU_SIZES = (256, 512, 1024, 2048)
_GPU_SIZES = (2048, 4096, 8192, 16384)
_LEAST = 3  # products of a size, to be worth beginning
_MEMORY = 4  # times what two factors and a product take must be free


@dataclass(frozen=True)
class Rate:
    """What was measured.

    Attributes:
        device: As people know it.
        dtype: As `peaks` names it.
        tflops: The best rate.
        size: Of the square matrices that reached it.
        stated: The peak that the maker states, or an estimate; None: not known.
        stated_source: Where that is from.
    """

    device: str
    dtype: str
    tflops: float
    size: int
    stated: float | None = None
    stated_source: str = ""


def measure(dtype: str | None = None, seconds: float = 2.0, device: str | None = None) -> Rate:
    """Measure the rate of matrix products here, now, with whatever else this machine does.

    Args:
        dtype: "fp32", "tf32", "fp16", "bf16" or "fp64"; None: fp32 on a CPU, bf16 on a GPU.
        seconds: How long, about.
        device: Where; None: on the GPU of this process, or on the CPU if it has none.

    Returns:
        The rate, which from now on serves as the peak of a device of which no other is known.

    Raises:
        UsageError: The dtype has no such products here, or the GPU is too full for any.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = dtype or ("fp32" if where.type == "cpu" else "bf16")
    if chosen not in DTYPES or (chosen == "tf32" and where.type == "cpu"):
        allowed = [name for name in DTYPES if name != "tf32" or where.type != "cpu"]
        raise UsageError(f"products on {peaks.name_of(where)} are measured in {', '.join(allowed)}, not in {chosen!r}")
    with _tensor_cores(chosen == "tf32"), torch.inference_mode():
        tflops, size = _best(where, DTYPES[chosen], seconds)
    peaks.note(where, chosen, tflops)
    stated = peaks.stated(where, chosen)
    source = "" if stated is None else stated.source
    return Rate(peaks.name_of(where), chosen, tflops, size, None if stated is None else stated.tflops, source)


def _best(device: torch.device, dtype: torch.dtype, seconds: float) -> tuple[float, int]:
    """Return the best rate in TFLOPS, and the size of the matrices that reached it."""
    found: list[tuple[float, int]] = []
    deadline = time.perf_counter() + seconds
    sizes = sizes_with_room(torch.cuda.mem_get_info(device)[0], dtype) if device.type == "cuda" else _CPU_SIZES
    for number, size in enumerate(sizes):
        left = deadline - time.perf_counter()
        if found and left <= 0:
            break
        share = max(left, 0.0) / (len(sizes) - number)
        left_factor = torch.randn(size, size, device=device, dtype=dtype)
        right_factor = torch.randn(size, size, device=device, dtype=dtype)
        out = torch.empty_like(left_factor)
        each = timing.median(functools.partial(torch.mm, left_factor, right_factor, out=out), device, share)
        found.append((2 * size**3 / each / 1e12, size))
        if each * _LEAST > deadline - time.perf_counter():
            break  # the next size takes eight times as long
    return max(found)


def sizes_with_room(free: int, dtype: torch.dtype) -> list[int]:
    """Return those that a GPU with so many free bytes has room for."""
    found = [size for size in _GPU_SIZES if _MEMORY * 3 * size * size * dtype.itemsize <= free]
    if not found:
        raise UsageError(f"the GPU has {text.size(free)} free, too little to measure: `%distributed free`, then again")
    return found


@contextlib.contextmanager
def _tensor_cores(wanted: bool) -> Iterator[None]:
    """Run fp32 products on GPUs with or without tensor cores in the body; restore the setting afterwards."""
    matmul: Any = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")  # since 2.9; where this has been used, the older functions raise

    def choose(precision: str) -> None:
        if newer:
            matmul.fp32_precision = precision
        else:
            torch.set_float32_matmul_precision(precision)

    before = matmul.fp32_precision if newer else torch.get_float32_matmul_precision()
    choose(("ieee", "tf32")[wanted] if newer else ("highest", "high")[wanted])
    try:
        yield
    finally:
        choose(before)
