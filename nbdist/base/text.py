"""Numbers, tables and hints as people read them. The panel's page has the same rules in labextension/src/words.ts.

What is not known is "n/a".
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = ((1e12, "TFLOPS"), (1e9, "GFLOPS"), (1e6, "MFLOPS"))


def size(value: float | None, *, signed: bool = False) -> str:
    """Return the bytes with a unit, three figures or more: "1.5 GiB", "+512 MiB"; "n/a" for what is not known."""
    return "n/a" if value is None else " ".join(sizes([value], signed=signed))


def sizes(values: Sequence[float], *, signed: bool = False) -> list[str]:
    """Return the bytes in one unit, that of the largest, which comes last: ["1.0", "2.5", "GiB"]."""
    scale = _scale(max(map(abs, values)))
    scaled = (value / 1024**scale for value in values)
    texts = [figures(value) if scale else f"{value:.0f}" for value in scaled]
    plus = ["+" if signed and value > 0 else "" for value in values]
    return [*map(str.__add__, plus, texts), _UNITS[scale]]


def part_of(part: float, whole: float) -> str:
    """Return a part of something, in bytes: "61.2 of 79.6 GiB", "298 MiB of 24.0 GiB"."""
    number, unit = sizes([part])
    return f"{number}{'' if unit == _UNITS[_scale(whole)] else f' {unit}'} of {size(whole)}"


def _scale(value: float) -> int:
    """Return the largest power of 1024 that a size is given in."""
    return next((power for power in reversed(range(len(_UNITS))) if abs(value) >= 1024**power), 0)


def figures(value: float) -> str:
    """Return three figures or more: "61.2", "1,007"."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Return a time span with a unit: "35.0 ms", "2.31 s", "3 min 20 s"."""
    if seconds < 0.9995:
        return f"{_three_figures(seconds * 1000)} ms"
    if seconds < 119.5:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def span(seconds: float) -> str:
    """Return a time span in the largest whole unit that says enough: "45 s", "15 min", "12 h"."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7170 else f"{seconds / 3600:.0f} h"


_SPANS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> float | None:
    """Return the seconds of a time span: "90", "90s", "15m", "12h", "2d"; None if it is none."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?([a-z]*)", text.strip())
    return float(found[1]) * _SPANS[found[2]] if found and found[2] in _SPANS else None


_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?")
_TIME_LEFT = re.compile(r"(?:(?:([0-9]+)-)?([0-9]+):)?([0-9]+):([0-9]{2})")


def parse_clock(text: str, now: float) -> float | None:
    """Return the next moment at which it is "18:00" or "18:00:30" here, or that of an ISO date; None: it is neither.

    Args:
        text: The text.
        now: The present, by `time.time`, as is what is returned.
    """
    if (found := _CLOCK.fullmatch(text.strip())) is not None:
        hour, minute, second = (int(part or 0) for part in found.groups())
        today = datetime.fromtimestamp(now)
        at = today.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return (at if at > today else at + timedelta(days=1)).timestamp()
    try:
        return datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def parse_time_left(text: str) -> float | None:
    """Return the seconds of "3600", or of "[D-]HH:MM:SS" and "MM:SS" as Slurm has them; None: it is neither.

    Infinite for UNLIMITED.
    """
    text = text.strip()
    if text.upper() == "UNLIMITED":
        return math.inf
    if (found := _TIME_LEFT.fullmatch(text)) is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    seconds_only = re.fullmatch(r"[0-9]+(\.[0-9]*)?", text)
    return float(text) if seconds_only else None


def energy(joules: float) -> str:
    """Return an energy as it is billed: "0.420 kWh", or "1,512 J" where that is less than a thousandth of one."""
    return f"{joules / 3.6e6:.3f} kWh" if joules >= 3600 else f"{figures(joules)} J"


def flop_rate(rate: float) -> str:
    """Format FLOP/s with a unit: "412 TFLOPS", "48.1 GFLOPS", "0.520 MFLOPS"."""
    scale, unit = flop_unit(rate)
    return f"{flops_in(scale, rate)} {unit}"


def flop_unit(rate: float) -> tuple[float, str]:
    """Return what a rate is given in, and its name: 1e12 and "TFLOPS"."""
    return next((each for each in _RATES if rate >= each[0]), _RATES[-1])


def flops_in(scale: float, rate: float) -> str:
    """Return a rate in a given unit, without its name: "3,296"."""
    rate /= scale
    return figures(rate) if rate >= 10 else _three_figures(rate)


def percent(share: float, digits: int = 0) -> str:
    """Return a share from 0 to 1 in percent: "97 %"."""
    return f"{share * 100:.{digits}f} %"


def _three_figures(value: float) -> str:
    """Format with three significant figures, so that the width stays the same, and without an exponent."""
    value = float(f"{value:.3g}")
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 rank", "2 ranks", "1,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def split_commas(text: str) -> list[str]:
    """Return the words of a list: "0, 2" has "0" and "2"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def number_or_text(text: str) -> int | float | str:
    """Return the finite number that a text is, else the text."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """Aligned columns; numbers to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    right = [all(isinstance(row[column], (int, float)) for row in rows) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()

    return "\n".join(line(row) for row in cells)


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return the known words that are most like one that is not known, the best first; none where none is like it."""
    import difflib  # only mistakes need it

    return difflib.get_close_matches(word, list(known), count)


def did_you_mean(word: str, known: Collection[str], form: str = "'{}'") -> str:
    """Return what follows a word that is not known: ": did you mean 'fsdp'?", or the full stop of the sentence.

    Args:
        word: What was given.
        known: What may be given.
        form: How the nearest one is shown.
    """
    close = nearest(word, known)
    return f": did you mean {form.format(close[0])}?" if close else "."
