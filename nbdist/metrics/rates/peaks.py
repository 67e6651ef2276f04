"""What a device can do at most: dense matrix products by dtype, as its maker states them.

Owns the table and the estimate for devices that are not in it. Nothing is guessed for a device of which nothing is
known. Figures with structured sparsity, which makers like to print, are twice these.

`tf32` is fp32 data in tensor cores, as after `torch.set_float32_matmul_precision("high")`. Products of 16-bit numbers
are summed in fp32.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError
from nbdist.metrics.node.driver import ask_once

if TYPE_CHECKING:
    import torch

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4", "fp64")
_NAMES = {
    **{name: name for name in DTYPES},
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
    "double": "fp64",
    "float4_e2m1fn_x2": "fp4",
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), "fp8"),
}


@dataclass(frozen=True)
class Peak:
    """The most that a device can do.

    Attributes:
        tflops: 10^12 FLOPs a second.
        source: Where the figure is from, in words.
        estimated: Whether it was worked out from the device's properties.
    """

    tflops: float
    source: str
    estimated: bool = False


_ENGINEERING = "stas00/ml-engineering, which links each maker's page"
_LIGHTNING = "Lightning's table, checked against the maker's data sheet"
_TORCHTITAN = "torchtitan's table"
_SHEET = "NVIDIA's data sheet"

# Names as torch gives them, without "NVIDIA", "Tesla" or "AMD" in front; TFLOPS in the order of DTYPES; the source of
# the first five. int8, fp4 and fp64 (in tensor or matrix cores where there are such) are from data sheets, without
# sparsity; where a card has only a token rate, or its sheet tells none, they are left out.
_Row = tuple[str, tuple[float | None, ...], str]
_TABLE: tuple[_Row, ...] = (
    (r"V100-SXM[23]-\d+GB(-LS)?", (15.7, None, 125, None, None, None, None, 7.8), _LIGHTNING),
    (r"V100-PCIE-\d+GB", (14, None, 112, None, None, None, None, 7), _LIGHTNING),
    (r"T4", (8.1, None, 65, None, None, 130, None, None), _LIGHTNING),
    (r"A10", (31.2, 62.5, 125, 125, None, 250, None, None), _SHEET),
    (
        r"A10G",
        (None, 35, 70, 70, None, None, None, None),
        "measurements in a public issue of Ray (64315), not very sure",
    ),
    (r"A30", (10.3, 82, 165, 165, None, 330, None, 10.3), _SHEET),
    (r"A40", (37.4, 74.8, 149.7, 149.7, None, 299.3, None, None), _LIGHTNING),
    (r"RTX A6000", (38.7, 77.4, 154.8, 154.8, None, 309.7, None, None), _TORCHTITAN),
    (r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe", (19.5, 156, 312, 312, None, 624, None, 19.5), _ENGINEERING),
    (r"L4", (30.3, 60, 121, 121, 242, 242, None, None), _LIGHTNING),
    (r"L40", (90.5, 90.5, 181, 181, 362, 362, None, None), _SHEET),
    (r"L40S", (91.6, 183, 362, 362, 733, 733, None, None), _SHEET),
    (r"RTX 6000 Ada Generation", (91.1, 182.1, 364.2, 364.2, 728.5, 728.5, None, None), _SHEET),
    (r"GeForce RTX 3090", (35.6, 35.6, 71, 71, None, 284, None, None), "NVIDIA's GA102 white paper"),
    (r"GeForce RTX 4090", (82.6, 82.6, 165.2, 165.2, 330.3, 660.6, None, None), "NVIDIA's Ada white paper"),
    (r"GeForce RTX 5090", (104.8, 104.8, 209.5, 209.5, 419, 838, 1676, None), "NVIDIA's figures, without sparsity"),
    (r"H100 (80|96)GB HBM3", (67, 494.5, 989, 989, 1979, 1979, None, 67), _ENGINEERING),
    (r"H100 PCIe", (51, 378, 756, 756, 1513, 1513, None, 51), _ENGINEERING),
    (r"H100 NVL", (60, 417.5, 835.5, 835.5, 1670.5, 1670.5, None, 60), _LIGHTNING),
    (r"H200", (67, 494.5, 989, 989, 1979, 1979, None, 67), _ENGINEERING),
    (r"H200 NVL", (60, 417.5, 835.5, 835.5, 1671, 1671, None, 60), _SHEET),
    (r"GH200( \d+GB?( HBM3e?)?)?", (67, 494.5, 989, 989, 1979, 1979, None, 67), _ENGINEERING),
    (r"H20(-3e)?", (44, 74, 148, 148, 296, 296, None, 1), _TORCHTITAN),
    (r"B200( SXM6)?( AC)?", (80, 1125, 2250, 2250, 4500, 4500, 9000, 37), _ENGINEERING),
    (r"B300( SXM6)?( AC)?", (80, 1125, 2250, 2250, 4500, None, 13500, None), _ENGINEERING),
    (r"GB200", (80, 1250, 2500, 2500, 5000, 5000, 10000, 40), _ENGINEERING),
    (r"GB300", (80, 1250, 2500, 2500, 5000, None, 15000, None), _ENGINEERING),
    (
        r"Instinct MI250X|Instinct MI250X / MI250",
        (47.9, None, 191.5, 191.5, None, 191.5, None, 47.9),
        "half a card: AMD's data sheet",
    ),
    (r"Instinct MI250", (45.3, None, 181, 181, None, 181, None, 45.3), "half a card: AMD's data sheet"),
    (r"Instinct MI3(00|25)X", (163.4, 653.7, 1307, 1307, 2615, 2615, None, 163.4), _ENGINEERING),
    (r"Instinct MI355X", (157.3, None, 2500, 2500, 5000, 5000, 10000, 78.6), _ENGINEERING),
)

# SMs of whole cards that can be divided (MIG).
_SMS = {"A30": 56, "A100": 108, "H100 PCIe": 114, "H100": 132, "H200": 132, "GH200": 132, "H20": 78, "B200": 148}

# Multiply-adds that one SM begins in a clock, by compute capability and in the order of DTYPES; second: GeForce cards,
# whose tensor cores sum in fp32 at half the rate. From NVIDIA's white papers of each architecture.
_RATES: dict[tuple[int, int], tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    (7, 0): ((64, None, 512, None, None, 256, None, 32),) * 2,
    (7, 5): ((64, None, 512, None, None, 1024, None, 2), (64, None, 256, None, None, 1024, None, 2)),
    (8, 0): ((64, 512, 1024, 1024, None, 2048, None, 64),) * 2,
    (8, 6): ((128, 256, 512, 512, None, 1024, None, 2), (128, 128, 256, 256, None, 1024, None, 2)),
    (8, 9): ((128, 256, 512, 512, 1024, 1024, None, 2), (128, 128, 256, 256, 512, 1024, None, 2)),
    (9, 0): ((128, 1024, 2048, 2048, 4096, 4096, None, 128),) * 2,
    (10, 0): ((128, 2048, 4096, 4096, 8192, 8192, 16384, 64),) * 2,
    (12, 0): ((128, 256, 512, 512, 1024, 1024, 2048, 2), (128, 128, 256, 256, 512, 1024, 2048, 2)),
}


def peak(name: str, dtype: str) -> Peak | None:
    """Return the dense peak of a device.

    Args:
        name: As `torch.cuda.get_device_name` gives it. It must match as a whole: an "L40S" is no "L4".
        dtype: One of DTYPES; torch's own names will do.

    Returns:
        The figure; None if the device is not in the table, or has no such arithmetic: `estimate` may know more.

    Raises:
        UsageError: There is no such dtype.
    """
    column = DTYPES.index(short(dtype))
    found = _row(name)
    tflops = None if found is None else found[1][column]
    if found is not None and tflops is None and DTYPES[column] == "tf32":
        tflops = found[1][DTYPES.index("fp32")]  # without such tensor cores the setting changes nothing
    return None if found is None or tflops is None else Peak(float(tflops), found[2])


def estimate(name: str, capability: tuple[int, int], sms: int, clock: float, dtype: str) -> Peak | None:
    """Estimate a device's peak from its properties, if the table lacks it (as for MIG instances).

    Args:
        name: As `torch.cuda.get_device_name` gives it; GeForce cards have other rates.
        capability: Of its architecture, as `torch.cuda.get_device_capability` gives it.
        sms: Its streaming multiprocessors.
        clock: Their highest clock, Hz.
        dtype: As for `peak`.

    Returns:
        SMs x multiply-adds an SM and clock x 2 x clock, marked as an estimate; None for other architectures.
    """
    card, is_part, _ = name.partition(" MIG ")
    if is_part:
        return _part_of(card, sms, dtype)
    if "GTX 16" in name and short(dtype) == "fp16":
        capability = (7, 5)
        dtype, clock = "fp32", 2 * clock  # no tensor cores: twice the rate of fp32
    rates = _RATES.get(capability)
    column = DTYPES.index(short(dtype))
    rate = None if rates is None else rates["GeForce" in name][column]
    if rate is None or sms <= 0 or clock <= 0:
        return None
    words = f"estimated: {sms} SMs x {rate} x 2 x {clock / 1e9:.2f} GHz"
    return Peak(sms * rate * 2 * clock / 1e12, words, estimated=True)


def _part_of(card: str, sms: int, dtype: str) -> Peak | None:
    """Return the peak of a MIG instance: the whole card's, by SMs. None for cards that are not in the table."""
    whole = peak(card, dtype)
    bare = _bare(card)
    total = next((count for name, count in sorted(_SMS.items(), reverse=True) if bare.startswith(name)), None)
    if whole is None or total is None or not 0 < sms <= total:
        return None
    return Peak(whole.tflops * sms / total, f"estimated: {sms} of {total} SMs of a {bare}", estimated=True)


def known(device: torch.device, dtype: str) -> Peak | None:
    """Return the peak of a device of this process: from the table, else estimated, else as measured.

    Args:
        device: A GPU, or the CPU, of which nothing is known until it has been measured.
        dtype: As for `peak`; of others nothing is known.
    """
    if dtype not in DTYPES:
        return None
    return stated(device, dtype) or measured_peaks.get((device.type, _index(device), dtype))


def stated(device: torch.device, dtype: str) -> Peak | None:
    """Return the same, but not as measured."""
    return _of_gpu(_index(device), dtype) if device.type == "cuda" else None


def note(device: torch.device, dtype: str, tflops: float) -> None:
    """Remember what was measured; it serves as the peak of a device of which no other is known."""
    words = "measured here: the best rate of matrix products, so the true peak is higher"
    measured_peaks[device.type, _index(device), short(dtype)] = Peak(tflops, words)


def _index(device: torch.device) -> int:
    """Return a device's number: of one without, that of this thread's current device."""
    import torch

    index: int | None = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return index


def in_tensor_cores(kind: str = "matmul") -> bool:
    """Return whether GPUs multiply fp32 in tensor cores, so that its peak is that of tf32.

    Args:
        kind: "matmul", "conv" or "rnn": cuDNN's convolutions and RNNs have switches of their own, which are on.
    """
    import torch

    # Since PyTorch 2.9; where this has been used, the older function raises.
    if kind != "matmul":
        chosen = getattr(getattr(torch.backends.cudnn, kind, None), "fp32_precision", None)
        return chosen == "tf32" if chosen is not None else torch.backends.cudnn.allow_tf32
    chosen = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return chosen == "tf32" if chosen is not None else torch.get_float32_matmul_precision() != "highest"


def name_of(device: torch.device) -> str:
    """Return the name of a device, for people."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


measured_peaks: dict[tuple[str, int, str], Peak] = {}


@functools.cache
def _of_gpu(index: int, dtype: str) -> Peak | None:
    import torch

    name = torch.cuda.get_device_name(index)
    found = peak(name, dtype)
    if found is not None or _row(name) is not None or torch.version.hip is not None:
        return found
    properties = torch.cuda.get_device_properties(index)
    capability = torch.cuda.get_device_capability(index)
    return estimate(name, capability, properties.multi_processor_count, _highest_clock(properties), dtype)


def _highest_clock(properties: Any) -> float:
    """Return the highest clock of the SMs in Hz; 0 if neither torch nor the driver reports it."""
    if found := getattr(properties, "clock_rate", 0):
        return 1000.0 * float(found)
    return ask_once(lambda nvml: _highest_clock_by_driver(nvml, f"GPU-{properties.uuid}"), 0.0)


def _highest_clock_by_driver(nvml: Any, uuid: str) -> float:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    return 1e6 * float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))


def mixed(flops: Mapping[str, int], figures: Mapping[str, Peak | None]) -> Peak | None:
    """Return the peak for work of several dtypes: what it would be if each part ran at its own peak.

    Args:
        flops: Work by dtype.
        figures: The peak of each dtype.

    Returns:
        One figure; None if a dtype's is not known.
    """
    parts = {dtype: figures.get(dtype) for dtype, amount in flops.items() if amount}
    found = [each for each in parts.values() if each is not None]
    if not found or len(found) < len(parts):
        return None
    if len(found) == 1:
        return found[0]
    seconds = sum(flops[dtype] / each.tflops for dtype, each in parts.items() if each is not None)
    sources = "; ".join(f"{dtype}: {each.source}" for dtype, each in parts.items() if each is not None)
    return Peak(sum(flops.values()) / seconds, sources, any(each.estimated for each in found))


def name_of_dtype(dtype: str) -> str:
    """Return the same as `short`, or the dtype itself where it has no name in the table."""
    return _NAMES.get(dtype, dtype)


def short(dtype: str) -> str:
    """Return the name of a dtype in the table: "bf16" for "bfloat16".

    Raises:
        UsageError: It has none.
    """
    found = _NAMES.get(dtype.removeprefix("torch."))
    if found is None:
        raise UsageError(f"{dtype!r} is not a dtype that matrix products are measured in: {', '.join(DTYPES)}")
    return found


@functools.cache
def _row(name: str) -> _Row | None:
    return next((row for row in _TABLE if re.fullmatch(row[0], _bare(name))), None)


def _bare(name: str) -> str:
    return re.sub(r"^(NVIDIA|Tesla|AMD|\s)+", "", name).strip()
