"""Numbers in words, with their units. The page's own are in labextension/src/words.ts."""

from __future__ import annotations

import math

_LONGEST = 96  # characters of an explanation


def size(value: float | None) -> str:
    """Bytes for people, three figures or more: "61.2 GiB"."""
    return "n/a" if value is None else sizes(value)


def sizes(*values: float) -> str:
    """Several in one unit, that of the largest: "61.0 / 63.2 / 71.5 GiB"."""
    scale, unit = _scale(max(values))
    return f"{' / '.join(figures(value / scale) for value in values)} {unit}"


def part_of(part: float, whole: float) -> str:
    """A part of something, in bytes: "61.2 of 79.6 GiB", "298 MiB of 24.0 GiB"."""
    (scale, unit), (_, whole_unit) = _scale(part), _scale(whole)
    return f"{figures(part / scale)}{'' if unit == whole_unit else f' {unit}'} of {size(whole)}"


def flops(value: float) -> str:
    """FLOP/s with their unit, three figures or more: "412 TFLOPS", "11.5 GFLOPS"."""
    scale, unit = flops_unit(value)
    return f"{flops_in(scale, value)} {unit}"


def flops_in(scale: float, value: float) -> str:
    """The same in a given unit, without its name: "3,296"."""
    value /= scale
    return figures(value) if value >= 10 else _three_figures(value)


def flops_unit(value: float) -> tuple[float, str]:
    """What so many FLOP/s are given in: TFLOPS, or GFLOPS where they would be less than one."""
    return (1e12, "TFLOPS") if value >= 1e12 else (1e9, "GFLOPS")


def percent(share: float, digits: int = 0) -> str:
    """A share from 0 to 1 in percent: "97 %"."""
    return f"{share * 100:.{digits}f} %"


def duration(seconds: float) -> str:
    """A time span for people: "152 ms"."""
    return f"{_three_figures(seconds * 1000)} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def clip(text: str) -> str:
    """At most so many characters of it."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def finite(value: float | None) -> float | None:
    """The number, unless it is none that could be shown."""
    return value if value is not None and math.isfinite(value) else None


def figures(value: float) -> str:
    """Three figures or more: "61.2", "1,007"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _scale(value: float) -> tuple[int, str]:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if abs(value) >= 1024**power:
            return 1024**power, unit
    return 1024, "KiB"


def _three_figures(value: float) -> str:
    """Always three, so that a figure keeps its width, and without an exponent."""
    value = float(f"{value:.3g}")
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
