"""Bytes, seconds and rates as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = ((1e12, "TFLOPS"), (1e9, "GFLOPS"), (1e6, "MFLOPS"))


def size(value: float | None, *, signed: bool = False) -> str:
    """Bytes with a unit: "1.5 GiB", "+512.0 MiB"; "n/a" for what is not known."""
    return "n/a" if value is None else " ".join(sizes([value], signed=signed))


def sizes(values: Sequence[float], *, signed: bool = False) -> list[str]:
    """Bytes in one unit, that of the largest, which comes last: ["1.0", "2.5", "GiB"]."""
    scale = 0
    largest = max(map(abs, values))
    while largest >= 1000 and scale < len(_UNITS) - 1:
        largest /= 1024
        scale += 1
    digits = 1 if scale else 0
    sign = "+" if signed else ""
    return [*(f"{value / 1024**scale:{sign if value else ''}.{digits}f}" for value in values), _UNITS[scale]]


def time(seconds: float) -> str:
    """A time span with a unit: "35 ms", "2.31 s", "3 min 20 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 119.5:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def flops(rate: float) -> str:
    """FLOP/s with a unit: "312.4 TFLOPS", "48.1 GFLOPS", "0.52 MFLOPS"."""
    scale, unit = next((each for each in _RATES if rate >= each[0]), _RATES[-1])
    amount = rate / scale
    return f"{amount:,.1f} {unit}" if amount >= 10 else f"{amount:.2f} {unit}"
