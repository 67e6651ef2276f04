"""What a Sample means to a reader: a row for each rank, a line for each node, the figures above them, the warnings.

Owns every definition and every word that the panel shows. Knows nothing of notebooks, of HTML, or of how it is sent.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from nbdist.metrics.node.sample import STALLING, NodeSample, RankSample, Sample, StepSample, gpu_of, non_torch
from nbdist.text import counted, duration, figures, flop_rate, flop_unit, flops_in, percent, size, sizes

HEAT_ABOVE = 16  # ranks; with more of them a heat map takes the place of rows
AT_POWER_LIMIT = "power limit"  # a reason for lower clocks that is no fault
NEARLY_FULL = 0.95  # share of a device's memory
FRAGMENTED = 0.1  # share of a device's memory that torch holds empty, while allocations were retried
STRAGGLING = 1.1  # times the median step
UNEVEN = 1.05  # times the mean memory
_LONGEST = 96  # characters of an explanation
WORKING = ("busy", "stuck")  # states of a rank that runs something

Level = Literal["warn", "bad"]
Look = Literal["warn", "bad", "stale"]  # of a figure; stale: of steps that are over


class Row(NamedTuple):
    """One rank. Memory in bytes, temperature in degrees Celsius, power in watts, shares from 0 to 1; None: not known.

    Attributes:
        name: What it is called: its number, or "notebook".
        node: Index of its machine.
        gpu: Name of its device; empty on the CPU.
        total: Memory of the device; of the machine on the CPU.
        allocated: In tensors; on the CPU all that is the process's own.
        cache: Held by torch and empty.
        non_torch: The process's, outside of torch: CUDA context, NCCL.
        others: Used by other processes; with `non_torch` where the driver does not tell whose it is.
        peak: Largest `allocated`, as torch tells it.
        step: Seconds of a training step.
        flops: Model FLOP/s, over the time of its own step.
        least: Whether operations without a formula are missing in it.
        mfu: Share of the device's peak.
        badges: What deserves a look.
        why: What is not known and why.
    """

    rank: int
    name: str
    node: int
    device: str
    gpu: str
    pid: int
    total: int | None = None
    allocated: int | None = None
    cache: int | None = None
    non_torch: int | None = None
    others: int | None = None
    peak: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    state: str = "idle"
    doing: str = ""
    step: float | None = None
    flops: float | None = None
    least: bool = False
    mfu: float | None = None
    badges: tuple[tuple[Level, str], ...] = ()
    why: str = ""

    @property
    def held(self) -> int | None:
        """What this rank takes of the device's memory."""
        return None if self.allocated is None else self.allocated + (self.cache or 0) + (self.non_torch or 0)

    @property
    def used(self) -> int | None:
        """What everybody together takes of it."""
        return None if self.held is None else self.held + (self.others or 0)


class Node(NamedTuple):
    """One machine; bytes, shares from 0 to 1, seconds between two looks; `why`: what is not known and why."""

    name: str
    gpus: str = ""
    cpu: float | None = None
    used: int | None = None
    total: int | None = None
    period: float | None = None
    why: str = ""


class Stat(NamedTuple):
    """One figure over all ranks, in words."""

    label: str
    value: str
    note: str = ""
    level: Look | None = None

    @property
    def remark(self) -> str:
        """The note, marked where it is a warning."""
        return f"⚠ {self.note}" if self.level in ("warn", "bad") else self.note


class View(NamedTuple):
    """All that there is to show.

    Attributes:
        flops: FLOP/s of all ranks at work together, by the slowest one's step; None while none works.
    """

    at: float
    title: str
    rows: tuple[Row, ...]
    nodes: tuple[Node, ...]
    stats: tuple[Stat, ...]
    flops: float | None = None

    @property
    def heat(self) -> bool:
        """Whether there are too many ranks for a row each."""
        return len(self.rows) > HEAT_ABOVE


def view_of(sample: Sample) -> View:
    """Return a Sample, ready to be shown."""
    every = dict.fromkeys([*(rank.node for rank in sample.ranks), *(node.name for node in sample.nodes)])
    names = {name: index for index, name in enumerate(every)}
    nodes = {node.name: node for node in sample.nodes}
    late = _stragglers(sample.ranks)
    rows = tuple(_row(rank, names[rank.node], nodes.get(rank.node), late) for rank in sample.ranks)
    gpus: list[Counter[str]] = [Counter() for _ in names]
    for row in rows:
        gpus[row.node][row.gpu if row.device != "cpu" else "cpu"] += 1
    lines = tuple(_node(name, nodes.get(name), counts) for name, counts in zip(names, gpus, strict=True))
    together = _Together.of(sample.ranks)
    stats = _stats(together, sample.ranks, rows, late)
    flops = together.per_second("flops") if together is not None and together.now else None
    return View(sample.at, _title(sample, rows), rows, lines, stats, flops)


def urgency(row: Row) -> int:
    """Return how much a rank deserves a look; 0: it does not. In labextension/src/state.ts, too."""
    if row.state == "dead":
        return 4
    if row.badges:
        return 3 if any(level == "bad" for level, _ in row.badges) else 2
    return 1 if row.state == "stuck" else 0


# --- rows


def _row(rank: RankSample, node: int, machine: NodeSample | None, late: dict[int, float]) -> Row:
    step = rank.step or StepSample()
    row = Row(
        rank=rank.rank,
        name="notebook" if rank.rank < 0 else str(rank.rank),
        node=node,
        device=rank.device,
        gpu="",
        pid=rank.pid,
        state=rank.state,
        doing=clip(rank.doing),
        step=_seconds(step),
        flops=_ratio(step.flops, _seconds(step)),
        least=bool(step.not_counted),
        mfu=_ratio(_ratio(step.flops, _seconds(step)), step.peak),
    )
    row = _with_gpu(row, rank, machine) if rank.gpu or rank.device != "cpu" else _with_cpu(row, rank, machine)
    return row._replace(badges=tuple(_badges(row, rank, machine, late)), why=clip(row.why))


def _with_cpu(row: Row, rank: RankSample, machine: NodeSample | None) -> Row:
    if rank.private is None:
        return row._replace(why=_silent(rank))
    row = row._replace(allocated=rank.private)
    if machine is None or machine.memory_total is None:
        return row._replace(why="the memory of this machine is not known yet")
    others = None if machine.memory_used is None else max(0, machine.memory_used - rank.private)
    return row._replace(total=machine.memory_total, others=others)


def _with_gpu(row: Row, rank: RankSample, machine: NodeSample | None) -> Row:
    gpu = gpu_of(rank.gpu, [machine] if machine is not None else [])
    allocated, reserved = rank.allocated, rank.reserved
    if allocated is not None and reserved is not None:
        row = row._replace(allocated=allocated, cache=max(0, reserved - allocated), peak=rank.peak)
    if gpu is None:
        return row._replace(why=_no_gpu(rank, machine))
    row = row._replace(
        gpu=gpu.name,
        total=gpu.total or None,
        utilization=finite(gpu.utilization),
        temperature=finite(gpu.temperature),
        power=finite(gpu.power),
        power_limit=finite(gpu.power_limit),
        why=gpu.why,
    )
    if gpu.used is None:
        return row
    beyond = non_torch(rank, gpu)
    return row._replace(non_torch=beyond, others=max(0, gpu.used - (reserved or 0) - (beyond or 0)))


def _silent(rank: RankSample) -> str:
    return "" if rank.state == "dead" else rank.why or "this rank has not answered"


def _no_gpu(rank: RankSample, machine: NodeSample | None) -> str:
    if rank.state == "dead" or rank.why:
        return rank.why
    if not rank.gpu:
        return "this rank has not used its GPU yet"
    return (machine.why if machine else "") or "the driver has not reported this GPU yet"


def _badges(
    row: Row, rank: RankSample, machine: NodeSample | None, late: dict[int, float]
) -> Iterable[tuple[Level, str]]:
    if rank.ooms:
        yield "bad", "out of memory" if rank.ooms == 1 else f"out of memory {rank.ooms} times"
    full = _ratio(row.used, row.total) if row.cache is not None else None
    if full is not None and full >= NEARLY_FULL:
        yield "warn", f"nearly full: {percent(full)}"
    if rank.retries:
        yield "warn", f"{rank.retries} allocation {'retry' if rank.retries == 1 else 'retries'}"
        if (_ratio(row.cache, row.total) or 0) >= FRAGMENTED:
            yield "warn", f"fragmented: {size(row.cache)} held empty"
    gpu = gpu_of(rank.gpu, [machine] if machine is not None else [])
    for reason in gpu.throttled if gpu is not None else ():
        if reason == AT_POWER_LIMIT:  # as under any dense training
            continue
        yield "warn", f"throttled: {reason}"
    if rank.rank in late:
        yield "warn", f"straggler: +{percent(late[rank.rank])}"


def _stragglers(ranks: Sequence[RankSample]) -> dict[int, float]:
    """Return ranks that make others wait now, and by what share of the median they are late.

    In synchronous training all steps last as long as the slowest rank's, which is the one that waits least in
    collectives; so time in collectives, where it is known, does not count.
    """
    work = {}
    for rank in ranks:
        step = rank.step if rank.state in WORKING else None
        if step is not None and (seconds := _seconds(step)) is not None:
            work[rank.rank] = seconds * (1 - (finite(step.communication) or 0.0))
    median = statistics.median_low(work.values()) if len(work) > 1 else 0.0
    return {rank: spent / median - 1 for rank, spent in work.items() if median and spent > STRAGGLING * median}


# --- nodes


def _node(name: str, machine: NodeSample | None, gpus: Counter[str]) -> Node:
    words = ", ".join(f"{count} × {gpu}" if count > 1 else gpu for gpu, count in gpus.items() if gpu not in ("", "cpu"))
    if machine is None:
        return Node(name, words, why="this machine has not been looked at yet")
    why = machine.why
    if set(gpus) <= {"cpu"} and not machine.gpus:
        why = f"no GPUs: {why or 'the driver has not been asked yet'}"
    return Node(
        name,
        words,
        finite(machine.cpu),
        machine.memory_used,
        machine.memory_total,
        finite(machine.period),
        clip(why),
    )


# --- figures over all ranks


def _title(sample: Sample, rows: Sequence[Row]) -> str:
    if [row.rank for row in rows] == [-1]:
        return "this notebook's process"
    states = Counter(row.state for row in rows)
    order = [state for state in ("busy", "idle", "stuck", "dead") if states[state]]
    words = f"all {order[0]}" if len(order) == 1 else ", ".join(f"{states[state]} {state}" for state in order)
    cell = f" · cell {sample.cell}" if sample.cell else ""
    return f"1 rank: {order[0]}{cell}" if len(rows) == 1 else f"{len(rows)} ranks: {words}{cell}"


class _Together(NamedTuple):
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
    def of(cls, ranks: Sequence[RankSample]) -> _Together | None:
        """Return the ranks that train; None if none does."""
        timed = [(rank, rank.step, seconds) for rank in ranks if rank.step and (seconds := _seconds(rank.step))]
        working = [each for each in timed if each[0].state in WORKING]
        if not timed:
            return None
        chosen = working or timed
        goes_on = bool(working) and not any(rank.state == "stuck" for rank in ranks)
        return cls([step for _, step, _ in chosen], max(seconds for _, _, seconds in chosen), goes_on)

    def per_second(self, field: str) -> float | None:
        """Return the sum of something over all ranks, by the slowest rank's step; None if a rank does not know it."""
        amounts = [finite(getattr(step, field)) for step in self.steps]
        known = [amount for amount in amounts if amount is not None]
        return sum(known) / self.slowest if len(known) == len(amounts) else None

    @property
    def not_counted(self) -> list[str]:
        """Operations whose work is missing in FLOPs, so that what is made of them is a least figure."""
        return sorted({name for step in self.steps for name in step.not_counted})


def _stats(
    together: _Together | None, ranks: Sequence[RankSample], rows: Sequence[Row], late: dict[int, float]
) -> tuple[Stat, ...]:
    stuck = _stuck(ranks)
    if together is None:
        why = next(
            (rank.step.why for rank in ranks if rank.step is not None and rank.step.why), "no training steps yet"
        )
        return *stuck, _memory(rows), Stat("step", "n/a", clip(why)), Stat("TFLOPS", "n/a"), Stat("MFU", "n/a")
    speed = [_step(together, late), _tflops(together), _mfu(together)]
    speed += [*_throughput(together), *_shares(together.steps)]
    return (*stuck, _memory(rows), *(speed if together.now else map(_as_last_seen, speed)))


def _stuck(ranks: Sequence[RankSample]) -> list[Stat]:
    """Return what most of the ranks that are stuck wait for; nothing if none is."""
    waits = Counter(rank.doing for rank in ranks if rank.state == "stuck")
    if not waits:
        return []
    doing, count = waits.most_common(1)[0]
    rest = sum(waits.values()) - count
    note = f"{doing}; {counted(rest, 'rank')} elsewhere" if rest else doing
    return [Stat("stuck", counted(count, "rank"), clip(note), "bad")]


def _as_last_seen(stat: Stat) -> Stat:
    return stat._replace(note="as last seen" if stat.value != "n/a" else stat.note, level="stale")


def _memory(rows: Sequence[Row]) -> Stat:
    held = {row.name: row.held for row in rows if row.held is not None}
    if not held:
        return Stat("memory", "n/a", "no rank has answered")
    most = max(held, key=lambda name: held[name])
    if len(held) == 1:
        return Stat("memory", size(held[most]))
    mean = statistics.fmean(held.values())
    uneven = _ratio(held[most], mean) or 1.0
    note = f"most on rank {most}: +{percent(uneven - 1)}" if uneven > UNEVEN else "even"
    return Stat("memory, min / mean / max", min_mean_max(list(held.values())), note)


def _step(ranks: _Together, late: dict[int, float]) -> Stat:
    if late:
        worst = max(late, key=lambda rank: late[rank])
        return Stat("step", duration(ranks.slowest), f"rank {worst} is late: +{percent(late[worst])}", "warn")
    notes = [f"typically {duration(typical)}"] if (typical := _without_stalls(ranks)) else []
    if len(ranks.steps) > 1:
        known = all(finite(step.communication) is not None for step in ranks.steps)
        notes.append("no straggler" if known else "straggler n/a: time in collectives is not known")
    return Stat("step", duration(ranks.slowest), ", ".join(notes))


def _without_stalls(ranks: _Together) -> float | None:
    """Return the seconds of a typical step; None where the mean is about that."""
    typical = max((finite(step.typical) or 0.0 for step in ranks.steps), default=0.0)
    return typical if 0 < STALLING * typical < ranks.slowest else None


def _tflops(ranks: _Together) -> Stat:
    total, count = ranks.per_second("flops"), len(ranks.steps)
    if total is None:
        return Stat("TFLOPS", "n/a", clip(next((step.why for step in ranks.steps if step.why), "not counted yet")))
    uncounted = statistics.fmean(step.uncounted for step in ranks.steps)
    scale, unit = flop_unit(total / count)
    notes = [f"without {', '.join(ranks.not_counted)}"] if ranks.not_counted else []
    notes += [f"{flops_in(scale, total)} in all"] if count > 1 else []
    notes += [f"{percent(uncounted)} of steps not counted"] if uncounted >= 0.005 else []
    value = marked(flops_in(scale, total / count), bool(ranks.not_counted))
    return Stat(f"{unit} per rank" if count > 1 else unit, value, clip(", ".join(notes)))


def marked(figure: str, least: bool) -> str:
    """Return a figure of FLOPs, marked if it is the least that it can be."""
    return f"≥ {figure}" if least else figure


def _mfu(ranks: _Together) -> Stat:
    total, hardware = ranks.per_second("flops"), ranks.per_second("hardware_flops")
    peaks = [peak for step in ranks.steps if (peak := finite(step.peak))]
    if total is None:
        return Stat("MFU", "n/a")
    if len(peaks) < len(ranks.steps):
        return Stat("MFU", "n/a", "peak not known: `%distributed peak` measures it")
    notes = [f"HFU {percent(hardware / sum(peaks), 1)}"] if hardware is not None and hardware > total else []
    notes.append(f"peak {flop_rate(statistics.fmean(peaks))}")
    notes += [ranks.steps[0].peak_source] if ranks.steps[0].peak_source else []
    return Stat("MFU", marked(percent(total / sum(peaks), 1), bool(ranks.not_counted)), clip(", ".join(notes)))


def _throughput(ranks: _Together) -> list[Stat]:
    rate = ranks.per_second("units")
    unit = ranks.steps[0].unit or "samples"
    return [] if rate is None else [Stat(f"{unit} per second", figures(rate))]


def _shares(steps: Sequence[StepSample]) -> list[Stat]:
    """Return what steps wait for, the mean over ranks."""
    waiting = [share for step in steps if (share := finite(step.waiting)) is not None]
    talking = [share for step in steps if (share := finite(step.communication)) is not None]
    known = [("data", waiting)] * bool(waiting) + [("collectives", talking)] * bool(talking)
    if not known:
        return []
    values = " / ".join(percent(statistics.fmean(shares)) for _, shares in known)
    return [Stat("waiting", values, f"for {' / '.join(label for label, _ in known)}")]


# --- arithmetic


def _seconds(step: StepSample) -> float | None:
    """Return the seconds of one step; None also if a clock ran backwards."""
    seconds = finite(step.seconds)
    return seconds if seconds is not None and seconds > 0 else None


def _ratio(part: float | None, whole: float | None) -> float | None:
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
