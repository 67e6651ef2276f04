"""The figures above the ranks: memory, speed and waiting of all of them together.

Owns how they are made of Samples, and their words. Independent of single rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from nbdist.base.text import duration, figures, flop_rate, flop_unit, flops_in, percent, size, sizes
from nbdist.metrics.node.sample import EVALUATING, STALLING, RankSample, StepSample
from nbdist.wire.pages.panel_messages import Stat

UNEVEN = 1.05  # times the mean memory
WORKING = ("busy", "stuck")  # states of a rank that runs something
TRENDS = ("memory", "step", "flops", "mfu", "throughput", "waiting")  # keys of figures that are drawn over time
_LONGEST = 96  # characters of an explanation
_SEEN = 0.005  # the least share that is worth a word

Trend = tuple["float | None", ...]


class Together(NamedTuple):
    """Ranks that train, or if none works now, those that did.

    Attributes:
        steps: Of each.
        slowest: Seconds of the slowest one's.
        now: Whether they go on: some work, and none is stuck.
    """

    steps: list[StepSample]
    slowest: float
    now: bool

    @classmethod
    def of(cls, ranks: Sequence[RankSample]) -> Together | None:
        """Return the ranks that train; None if none does."""
        timed = [(rank, rank.step, seconds) for rank in ranks if rank.step and (seconds := seconds_of(rank.step))]
        working = [each for each in timed if each[0].state in WORKING]
        if not timed:
            return None
        chosen = working or timed
        goes_on = bool(working) and not any(rank.state == "stuck" for rank in ranks)
        return cls([step for _, step, _ in chosen], max(seconds for _, _, seconds in chosen), goes_on)

    def per_second(self, field: str) -> float | None:
        """Return the sum of something over all ranks, by the slowest rank's step; None if a rank does not know it."""
        return self._sum(field, self.steps)

    @property
    def units_per_second(self) -> float | None:
        """The samples or tokens of all ranks; those that had the same first batch, as in tensor parallelism, once."""
        return self._sum("units", {step.batch or index: step for index, step in enumerate(self.steps)}.values())

    def _sum(self, field: str, steps: Collection[StepSample]) -> float | None:
        known = [amount for step in steps if (amount := finite(getattr(step, field))) is not None]
        return sum(known) / self.slowest if len(known) == len(steps) else None

    @property
    def not_counted(self) -> list[str]:
        """Operations whose work is missing in FLOPs, so that what is made of them is a least figure."""
        return sorted({name for step in self.steps for name in step.not_counted})


def stats_of(
    together: Together | None, ranks: Sequence[RankSample], held: Mapping[str, int], late: Mapping[int, float]
) -> tuple[Stat, ...]:
    """Return the figures over all ranks.

    Args:
        together: Those that train.
        ranks: All.
        held: Bytes by the name of each that has answered.
        late: Which make others wait, and by what share.
    """
    if together is None:
        why = next(
            (rank.step.why for rank in ranks if rank.step is not None and rank.step.why), "no training steps yet"
        )
        return _memory(held), Stat("step", "step", "n/a", clip(why))
    speed = [_step(together, late), _tflops(together), _mfu(together)]
    speed += [*_throughput(together), *_shares(together.steps)]
    return (_memory(held), *(speed if together.now else map(_as_last_seen, speed)))


def trend_of(together: Together | None, held: Mapping[str, int]) -> Trend:
    """Return the figures of `TRENDS` at one moment, as numbers; speeds only while ranks train."""
    most = max(held.values(), default=None)
    if together is None or not together.now:
        return (most, *(None,) * (len(TRENDS) - 1))
    flops, peaks = together.per_second("flops"), [finite(step.peak) or 0.0 for step in together.steps]
    mfu = ratio(flops, sum(peaks)) if all(peaks) else None
    waiting = [finite(step.waiting) for step in together.steps]
    waits = statistics.fmean(share or 0.0 for share in waiting) if any(share is not None for share in waiting) else None
    return most, together.slowest, flops, mfu, together.units_per_second, waits


def _as_last_seen(stat: Stat) -> Stat:
    return stat._replace(note="as last seen" if stat.value != "n/a" else stat.note, level="stale")


def _memory(held: Mapping[str, int]) -> Stat:
    if not held:
        return Stat("memory", "memory", "n/a", "no rank has answered")
    most = max(held, key=lambda name: held[name])
    if len(held) == 1:
        return Stat("memory", "memory", size(held[most]))
    mean = statistics.fmean(held.values())
    uneven = ratio(held[most], mean) or 1.0
    note = f"most on rank {most}: +{percent(uneven - 1)}" if uneven > UNEVEN else "even"
    return Stat("memory", "memory, min / mean / max", min_mean_max(list(held.values())), note)


def _step(ranks: Together, late: Mapping[int, float]) -> Stat:
    if late:
        worst = max(late, key=lambda rank: late[rank])
        return Stat("step", "step", duration(ranks.slowest), f"rank {worst} is late: +{percent(late[worst])}", "warn")
    notes = [_evaluation(ranks)] if max(step.evaluation for step in ranks.steps) >= EVALUATING else []
    notes += [f"typically {duration(typical)}"] if (typical := _without_stalls(ranks)) else []
    if len(ranks.steps) > 1:
        known = all(finite(step.communication) is not None for step in ranks.steps)
        notes.append("no straggler" if known else "straggler n/a: time in collectives is not known")
    return Stat("step", "step", duration(ranks.slowest), ", ".join(notes))


def _without_stalls(ranks: Together) -> float | None:
    """Return the seconds of a typical step; None where the mean is about that."""
    typical = max((finite(step.typical) or 0.0 for step in ranks.steps), default=0.0)
    return typical if 0 < STALLING * typical < max(map(_training, ranks.steps)) else None


def _training(step: StepSample) -> float:
    """Return the seconds of a step without evaluations."""
    return (seconds_of(step) or 0.0) * (1 - step.evaluation)


def _evaluation(ranks: Together) -> str:
    share = max(step.evaluation for step in ranks.steps)
    return f"evaluation {percent(share)}, without it {duration(max(map(_training, ranks.steps)))}"


def _tflops(ranks: Together) -> Stat:
    total, count = ranks.per_second("flops"), len(ranks.steps)
    if total is None:
        return Stat(
            "flops", "TFLOPS", "n/a", clip(next((step.why for step in ranks.steps if step.why), "not counted yet"))
        )
    uncounted = statistics.fmean(step.uncounted for step in ranks.steps)
    scale, unit = flop_unit(total / count)
    notes = [f"without {', '.join(ranks.not_counted)}"] if ranks.not_counted else []
    notes += [f"{flops_in(scale, total)} in all"] if count > 1 else []
    notes += [f"{percent(uncounted)} of steps not counted"] if uncounted >= _SEEN else []
    value = mark_of(*ranks.steps) + flops_in(scale, total / count)
    return Stat("flops", f"{unit} per rank" if count > 1 else unit, value, clip(", ".join(notes)))


def mark_of(*steps: StepSample) -> str:
    """Return what stands before a figure of FLOPs: that it is estimated in part, or the least that it can be."""
    if any(step.uncounted >= _SEEN for step in steps):
        return "≈ "
    return "≥ " if any(step.not_counted for step in steps) else ""


def _mfu(ranks: Together) -> Stat:
    total, hardware = ranks.per_second("flops"), ranks.per_second("hardware_flops")
    peaks = [peak for step in ranks.steps if (peak := finite(step.peak))]
    if total is None:
        return Stat("mfu", "MFU", "n/a")
    if len(peaks) < len(ranks.steps):
        return Stat("mfu", "MFU", "n/a", "peak not known: `%distributed peak` measures it", action="peak")
    notes = [f"HFU {percent(hardware / sum(peaks), 1)}"] if hardware is not None and hardware > total else []
    source = ranks.steps[0].peak_source
    notes.append(f"of {flop_rate(statistics.fmean(peaks))}" + (f" ({source.partition(':')[0]})" if source else ""))
    return Stat("mfu", "MFU", mark_of(*ranks.steps) + percent(total / sum(peaks), 1), clip(", ".join(notes)))


def _throughput(ranks: Together) -> list[Stat]:
    rate = ranks.units_per_second
    unit = ranks.steps[0].unit or "samples"
    return [] if rate is None else [Stat("throughput", f"{unit} per second", figures(rate))]


def _shares(steps: Sequence[StepSample]) -> list[Stat]:
    """Return what steps wait for, the mean over ranks."""
    waiting = [share for step in steps if (share := finite(step.waiting)) is not None]
    talking = [share for step in steps if (share := finite(step.communication)) is not None]
    known = [("data", waiting)] * bool(waiting) + [("collectives", talking)] * bool(talking)
    if not known:
        return []
    values = " / ".join(percent(statistics.fmean(shares)) for _, shares in known)
    return [Stat("waiting", "waiting", values, f"for {' / '.join(label for label, _ in known)}")]


# --- arithmetic


def seconds_of(step: StepSample) -> float | None:
    """Return the seconds of one step; None if they are not known, or a clock ran backwards."""
    seconds = finite(step.seconds)
    return seconds if seconds is not None and seconds > 0 else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a part of a whole from 0 on; None if either is not known."""
    part, whole = finite(part), finite(whole)
    return part / whole if part is not None and whole is not None and whole > 0 else None


def min_mean_max(amounts: Sequence[int]) -> str:
    """Return the bytes over ranks, in one unit: "61.0 / 63.2 / 71.5 GiB"."""
    *figures_of, unit = sizes([min(amounts), statistics.fmean(amounts), max(amounts)])
    return f"{' / '.join(figures_of)} {unit}"


def clip(text: str) -> str:
    """Return at most `limit` characters of an explanation."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def finite(value: float | None) -> float | None:
    """Return the number, unless it is none that could be shown."""
    return value if value is not None and math.isfinite(value) else None
