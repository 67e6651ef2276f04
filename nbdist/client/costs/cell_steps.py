"""What training steps cost, below each cell that made some: `%distributed tflops on`; and `%distributed peak`.

Owns when ranks and this process are measured, and how the line looks. `nbdist.metrics.steps` defines the figures.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from IPython.core.interactiveshell import InteractiveShell

from nbdist.base.ranks import describe_ranks
from nbdist.base.text import duration, energy, flop_rate, flop_unit, flops_in, percent, table
from nbdist.client.costs.recomputation import Recomputation
from nbdist.client.ranks.observers import Observer, subscribe
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.client.session.session import Session, rank_set_of
from nbdist.metrics import measuring
from nbdist.metrics.node import active_meter, step_shares
from nbdist.metrics.node.sample import EVALUATING, STALLING, StepSample

NOTHING_TIMED = "no training steps have been timed: `%distributed tflops on`, then run a cell that trains"
HERE = -1  # the notebook's own process, among ranks
COUNTING = 0.02  # share of the time that counting took, from which on it is shown
UNEQUAL = 1.1  # times the median rank's step, from which on the slowest rank is named
_UNMARKED = "code without gradients between steps took {} of the time: if that evaluates, call eval() on the model"
_INDENT = "    "
_WIDTH = 100  # characters of a line


class CellSteps(Observer):
    """Measures the training steps of a notebook's cells, in its own process and on ranks.

    Args:
        shell: The notebook's shell.

    Attributes:
        on: Whether steps are measured.
        shown: Whether a line is shown below cells that made steps.
        last: What the last cell with training steps took, by rank.
        trouble: Why steps can't be measured at all; empty: nothing is known of that.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.on = self.shown = False
        self.last: dict[int, StepSample] = {}
        self.trouble = ""
        self._recomputation = Recomputation()
        events: Any = shell.events
        events.register("pre_run_cell", self._before)
        events.register("post_run_cell", self._after)
        subscribe(self)

    def switch(self, on: bool, *, here: bool) -> None:
        """Start or stop measuring steps and showing a line below cells.

        Args:
            on: Whether to start or stop.
            here: Whether there are no ranks, so that the next cell trains in this process.
        """
        self.on = self.shown = on
        if on and here:
            import torch  # noqa: F401 - so that the next cell, which may import it, is measured
        self._before()

    def measure(self) -> None:
        """Measure steps from now on, without a line below cells: for callers that show them in another way."""
        self.on = True
        self._before()

    def cell_began(self, task: TaskRecord) -> None:
        """Have ranks measure what runs the user's code. A launch has processes of its own, where nothing is shown."""
        if self.on and task.kind in ("cell", "call"):
            task.metered = msgspec.structs.replace(task.metered, steps=True)

    def below(self, task: TaskRecord) -> str:
        """Return the lines below a cell that ran on ranks; empty if it made no steps."""
        if not self.shown:
            return ""
        samples = _steps_in(task)
        figures = render(samples, [rank for rank in task.ranks if rank not in task.replies])
        change = self._recomputation.compare(task)
        return "\n".join(filter(None, (figures, *_wrapped(change), self._new_trouble(samples))))

    def cell_ended(self, task: TaskRecord) -> None:
        """Keep the steps of the last cell that made some."""
        found = _steps_in(task)
        if any(sample.steps for sample in found.values()):
            self.last = found

    def _new_trouble(self, samples: Mapping[int, StepSample]) -> str:
        """Return why steps can't be measured, the first time that it is known; else nothing."""
        trouble = next((sample.why for sample in samples.values() if sample.impossible), "")
        if trouble == self.trouble or not samples:
            return ""
        self.trouble = trouble
        return trouble

    # --- the notebook's own process

    def _before(self, info: object = None) -> None:
        if self.on and "torch" in sys.modules:
            measuring.start_steps()
        elif not self.on:
            active_meter.stop()

    def _after(self, result: object) -> None:
        if not self.on:
            return
        lap = active_meter.end_lap()
        if lap is not None and lap.steps:
            self.last = {HERE: lap}
        if self.shown and lap is not None:
            samples = {HERE: lap}
            if line := render(samples) or self._new_trouble(samples):
                print(line)


class LastSteps(Observer):
    """Measures the training steps of all cells on ranks, for a process without a notebook's shell."""

    def __init__(self) -> None:
        self._last: dict[int, StepSample] = {}
        subscribe(self)

    def why(self) -> str:
        """Return why the steps of the last cell that made some took as long as they did."""
        return explain(self._last) if self._last else "no cell has made training steps yet"

    def cell_began(self, task: TaskRecord) -> None:
        """Have ranks measure what runs the user's code."""
        if task.kind in ("cell", "call"):
            task.metered = msgspec.structs.replace(task.metered, steps=True)

    def cell_ended(self, task: TaskRecord) -> None:
        """Keep the steps of the last cell that made some."""
        found = _steps_in(task)
        if any(sample.steps for sample in found.values()):
            self._last = found


def _steps_in(task: TaskRecord) -> dict[int, StepSample]:
    return {rank: reply.steps for rank, reply in sorted(task.replies.items()) if reply.steps is not None}


def explain(samples: Mapping[int, StepSample]) -> str:
    """Return why the steps of a cell took as long as they did: a sentence, and a row for each rank.

    Args:
        samples: By rank, of the whole cell.
    """
    parts = step_shares.parts_of(samples)
    if not parts:
        return NOTHING_TIMED
    rows = [
        ("notebook" if rank == HERE else rank, duration(each.step), duration(each.work), *map(_known, each[2:]))
        for rank, each in parts.items()
    ]
    header = ("rank", "step", "work", "evaluation", "waiting for data", "collectives", "waiting for ranks")
    timed = {rank: samples[rank] for rank in parts}
    found = [step_shares.sentence(samples), *_evaluation(timed), table(rows, header)]
    if any(each.others is None for each in parts.values()) and len(parts) > 1:
        found.append("n/a: time in collectives is not known here; `%%distributed --profile` shows it")
    return "\n".join(part for part in found if part)


def _known(seconds: float | None) -> str:
    return "n/a" if seconds is None else duration(seconds)


def render(samples: Mapping[int, StepSample], missing: Sequence[int] = ()) -> str:
    """Return a line about the steps of a cell, and below it what is not known, with the reason.

    Args:
        samples: By rank, of the whole cell.
        missing: Its ranks that have not answered.

    Returns:
        Steps, time, units of work, TFLOPS, MFU, HFU, waiting, in lines of at most 100 characters; empty without steps,
        unless something seems to have trained.
    """
    stepping = {rank: sample for rank, sample in samples.items() if sample.steps}
    if not stepping:
        return _unseen(samples)
    parts = [_steps(stepping)]
    timed = {rank: sample for rank, sample in stepping.items() if sample.seconds}
    if timed:
        parts += [_time(timed), *_throughput(timed, _slowest(timed)), *_rates(timed)]
    why = step_shares.sentence(timed) if len(timed) > 1 else ""
    parts += [] if why else _waiting(timed)  # which the sentence says
    notes = [*_spending(stepping), *_notes(stepping, timed)]
    if missing:
        notes.append(f"{describe_ranks(sorted(missing))} missing")
    below = [*([why] if why else []), *(["; ".join(notes)] if notes else [])]
    return "\n".join([*_filled(parts), *(line for each in below for line in _wrapped(each))])


def _unseen(samples: Mapping[int, StepSample]) -> str:
    """Return why no step was seen in a cell that seems to train; empty if none does. One pass is not a loop."""
    reasons = sorted({sample.why for sample in samples.values() if sample.passes > 1})
    return "\n".join(textwrap.wrap(f"training steps n/a: {'; '.join(reasons)}", _WIDTH)) if reasons else ""


def _filled(parts: Sequence[str]) -> list[str]:
    """Return the parts in as few lines as they fit in."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} | {part}"
        lines = [*lines[:-1], longer] if len(longer) <= _WIDTH else [*lines, _INDENT + part]
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )


def _notes(stepping: Mapping[int, StepSample], timed: Mapping[int, StepSample]) -> list[str]:
    """Return what is behind the figures, and what they lack and why."""
    reasons = sorted({sample.why for sample in stepping.values() if sample.why})
    notes = [*_evaluation(timed), *_stragglers_and_stalls(timed)] if timed else []
    notes += [f"{describe_ranks(ranks)} share their batches" for ranks in _sharing(timed) if len(ranks) > 1]
    notes += [f"{_unknown(timed)} n/a: {'; '.join(reasons)}"] if reasons else []
    if names := _not_counted(timed):
        notes.append(f"not counted: {', '.join(names)} (register_flops)")
    if (counting := max(map(_counting, timed.values()), default=0.0)) >= COUNTING:
        notes.append(f"counting FLOPs took {percent(counting)} of the time, which is left out")
    if timed and (uncounted := statistics.fmean(sample.uncounted for sample in timed.values())):
        notes.append(f"{percent(uncounted)} of the steps have shapes that were not counted")
    return notes


def _unknown(timed: Mapping[int, StepSample]) -> str:
    """Return the names of the figures that a reason is for."""
    if not timed:
        return "time"
    return "MFU" if all(sample.flops is not None for sample in timed.values()) else "TFLOPS"


def _not_counted(timed: Mapping[int, StepSample]) -> list[str]:
    return sorted({name for sample in timed.values() for name in sample.not_counted})


def _steps(samples: Mapping[int, StepSample]) -> str:
    """Return how many steps there were, and of how many the figures are, if not of all."""
    fewest, most = min(each.steps for each in samples.values()), max(each.steps for each in samples.values())
    made = f"{fewest:,} step{'s' if most != 1 else ''}" if fewest == most else f"{fewest:,}-{most:,} steps"
    left_out = max((each.steps - each.timed for each in samples.values() if each.timed), default=0)
    return f"{made}, {most - left_out:,} timed" if left_out else made


def _time(samples: Mapping[int, StepSample]) -> str:
    return f"{duration(statistics.median(sample.seconds or 0.0 for sample in samples.values()))} a step"


def _counting(sample: StepSample) -> float:
    """Return the share of counting in all time."""
    timed = (sample.seconds or 0.0) * sample.timed
    return sample.counting / (timed + sample.counting) if timed else 0.0


def _stragglers_and_stalls(samples: Mapping[int, StepSample]) -> list[str]:
    """Return what a mean hides: ranks that do not go in step with the others, and stalls between steps."""
    seconds = {rank: sample.seconds or 0.0 for rank, sample in samples.items()}
    middle = statistics.median(seconds.values())
    slowest = max(seconds, key=lambda rank: seconds[rank])
    found = [f"slowest: rank {slowest}, {duration(seconds[slowest])}"] if seconds[slowest] > UNEQUAL * middle else []
    typical = statistics.median(sample.typical or 0.0 for sample in samples.values())
    training = statistics.median(map(_training, samples.values()))
    if 0 < STALLING * typical < training:
        found.append(f"a typical step took {duration(typical)}, stalls the rest")
        share = max(sample.without_gradients for sample in samples.values())
        found += [_UNMARKED.format(percent(share))] if share >= EVALUATING else []
    return found


def _evaluation(samples: Mapping[int, StepSample]) -> list[str]:
    """Return the share of evaluations in all time, and how fast the training is without them."""
    share = max(sample.evaluation for sample in samples.values())
    if share < EVALUATING:
        return []
    training = [_training(sample) for sample in samples.values()]
    step = duration(statistics.median(training))  # of the ranks that `_time` is of
    rate = "".join(f", {words}" for words in _throughput(samples, max(training)))
    return [f"evaluation took {percent(share)} of the time; without it a step takes {step}{rate}"]


def _training(sample: StepSample) -> float:
    """Return the seconds of a step without evaluations."""
    return (sample.seconds or 0.0) * (1 - sample.evaluation)


def _slowest(samples: Mapping[int, StepSample]) -> float:
    return max(sample.seconds or 0.0 for sample in samples.values())


def _throughput(samples: Mapping[int, StepSample], seconds: float) -> list[str]:
    """Return the samples or tokens per second of all ranks, at so many seconds a step."""
    kinds = {sample.unit for sample in samples.values()}
    if len(kinds) != 1 or not all(sample.units for sample in samples.values()):
        return []
    units = sum(samples[ranks[0]].units or 0.0 for ranks in _sharing(samples))
    return [f"{units / seconds:,.0f} {kinds.pop()}/s"]


def _spending(samples: Mapping[int, StepSample]) -> list[str]:
    """Return the energy of the cell's GPUs, and of a unit of its work."""
    spent = [sample.spent for sample in samples.values() if sample.spent is not None]
    joules = {each.gpu: each.joules for each in spent if each.joules is not None}  # ranks may share a GPU
    if not joules or len(spent) < len(samples) or any(each.joules is None for each in spent):
        return []
    whole = sum(joules.values())
    kinds = {sample.unit for sample in samples.values() if sample.unit}
    units = sum((samples[ranks[0]].units or 0.0) * samples[ranks[0]].steps for ranks in _sharing(samples))
    each = f", {whole / units:.3g} J a {kinds.pop().removesuffix('s')}" if units and len(kinds) == 1 else ""
    return [f"energy {energy(whole)}{each}"]


def _sharing(samples: Mapping[int, StepSample]) -> list[list[int]]:
    """Return ranks by their batches: those that had the same first one, as in tensor parallelism, count it once."""
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank, sample in samples.items():
        groups[sample.batch or rank].append(rank)
    return list(groups.values())


def _rates(samples: Mapping[int, StepSample]) -> list[str]:
    """Return FLOP/s, and their shares of the peak where that is known."""
    mark = "about " if any(sample.uncounted for sample in samples.values()) else ""
    mark = mark or ("≥ " if _not_counted(samples) else "")
    flops = [sample.flops for sample in samples.values() if sample.flops is not None]
    if len(flops) < len(samples):
        return ["TFLOPS n/a"]
    total = sum(flops) / _slowest(samples)
    scale, unit = flop_unit(total / len(samples))
    rate = f"{mark}{flops_in(scale, total / len(samples))} {unit}"
    parts = [rate if len(samples) == 1 else f"{rate} a rank ({flops_in(scale, total)} in all)"]
    peaks = [sample.peak for sample in samples.values() if sample.peak]
    if len(peaks) < len(samples):
        return parts
    hardware = sum(sample.hardware_flops or 0.0 for sample in samples.values()) / _slowest(samples)
    parts.append(f"MFU {mark}{percent(total / sum(peaks), 1)}")
    parts += [f"HFU {mark}{percent(hardware / sum(peaks), 1)}"] if hardware != total else []
    sources = {sample.peak_source.partition(":")[0] for sample in samples.values()}
    parts[-1] += "".join(f" (of a peak {mark})" for mark in ("estimated", "measured here") if mark in sources)
    return parts


def _waiting(samples: Mapping[int, StepSample]) -> list[str]:
    waiting = [sample.waiting for sample in samples.values() if sample.waiting is not None]
    return [f"waiting for data {percent(max(waiting))}"] if waiting else []


def without_peak(steps: Iterable[StepSample]) -> list[str]:
    """Return what these steps compute in and no peak is known for, most work first."""
    return list(dict.fromkeys(dtype for step in steps for dtype in step.without_peak))


def measure_peaks(session: Session | None, dtypes: Collection[str], seconds: float) -> str:
    """Measure the best rate of matrix products, on all ranks at once or in this process.

    Args:
        session: Whose ranks; None for this process, on its CPU unless it already uses a GPU.
        dtypes: As in `nbdist.metrics.rates.matmul_rate.measure`; without any that it measures, its default.
        seconds: Approximate duration, of each.

    Returns:
        A table.
    """
    from nbdist.metrics.rates import matmul_rate

    chosen: list[str | None] = [dtype for dtype in dtypes if dtype in matmul_rate.DTYPES]
    return "\n".join(_measured_peaks(session, dtype, seconds) for dtype in chosen or [None])


def _measured_peaks(session: Session | None, dtype: str | None, seconds: float) -> str:
    from nbdist.metrics.rates import matmul_rate

    if session is None:
        import torch

        device = None if torch.cuda.is_initialized() else "cpu"
        found: list[tuple[object, Any]] = [("notebook", matmul_rate.measure(dtype, seconds, device))]
    else:
        living = rank_set_of(session).living()
        found = list(zip(living, session.call(matmul_rate.measure, dtype, seconds, ranks=living), strict=True))
    rows = [
        (
            who,
            rate.device,
            rate.dtype,
            flop_rate(rate.tflops * 1e12),
            "n/a" if rate.stated is None else flop_rate(rate.stated * 1e12),
            "n/a" if rate.stated is None else percent(rate.tflops / rate.stated),
        )
        for who, rate in found
    ]
    total = sum(rate.tflops for _, rate in found)
    lines = [table(rows, ("rank", "device", "dtype", "reached", "stated peak", "share"))]
    if len(found) > 1:
        lines.append(f"in all: {flop_rate(total * 1e12)}")
    return "\n".join(lines)
