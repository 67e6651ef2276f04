"""What a Sample means to a reader: a row for each rank, a line for each node, the figures above them, the warnings.

Owns every definition and every word that the panel shows. Independent of notebooks, of HTML, or of how it is sent.
"""

from __future__ import annotations

import socket
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from nbdist.base.text import counted, percent, size
from nbdist.metrics.node.sample import NodeSample, RankSample, Sample, StepSample, gpu_of, held_at_look, non_torch
from nbdist.panel.figures import WORKING, Together, Trend, clip, finite, mark_of, ratio, seconds_of, stats_of, trend_of
from nbdist.wire.pages.panel_messages import Alert, Level, Stat

HEAT_ABOVE = 16  # ranks; with more of them a heat map takes the place of rows
AT_POWER_LIMIT = "power limit"  # a reason for lower clocks that is no fault
NEARLY_FULL = 0.95  # share of a device's memory
FRAGMENTED = 0.1  # share of a device's memory that torch holds empty, while allocations were retried
STRAGGLING = 1.1  # times the median step


class Row(NamedTuple):
    """One rank. Memory in bytes, temperature in degrees Celsius, power in watts, shares from 0 to 1; None: not known.

    Attributes:
        name: What it is called: its number, or "notebook".
        node: Index of its machine.
        gpu: Name of its device; empty on the CPU.
        total: Memory of the device, as nvidia-smi reports it; of the machine on the CPU.
        allocated: In tensors; on the CPU all that is the process's own.
        cache: Held by torch and empty.
        non_torch: The process's, outside of torch: CUDA context, NCCL.
        process: The process's as the driver reports it, where torch can't be asked for `allocated` and `cache`.
        others: Used by other processes; with what is this one's where the driver does not tell whose it is.
        kept: What the driver keeps for itself.
        peak: Largest `allocated`, as torch tells it.
        cpu: Cores that the process keeps busy.
        step: Seconds of a training step.
        work: What it takes without collectives.
        flops: Model FLOP/s, over the time of its own step.
        mark: What stands before it: "≥ " where operations without a formula are missing, "≈ " where steps are.
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
    process: int | None = None
    others: int | None = None
    kept: int | None = None
    peak: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    cpu: float | None = None
    state: str = "idle"
    doing: str = ""
    step: float | None = None
    work: float | None = None
    flops: float | None = None
    mark: str = ""
    mfu: float | None = None
    badges: tuple[tuple[Level, str], ...] = ()
    why: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether its memory is a GPU's."""
        return self.cache is not None or self.gpu != ""

    @property
    def held(self) -> int | None:
        """What this rank takes of the device's memory."""
        return self.process if self.allocated is None else self.allocated + (self.cache or 0) + (self.non_torch or 0)

    @property
    def used(self) -> int | None:
        """What processes together take of it."""
        return None if self.held is None and self.others is None else (self.held or 0) + (self.others or 0)

    @property
    def full(self) -> float | None:
        """The share of a GPU's memory that no process can have any more."""
        used = self.used if self.on_gpu else None
        return None if used is None else ratio(used + (self.kept or 0), self.total)


class Node(NamedTuple):
    """One machine; bytes, shares from 0 to 1, seconds between two looks; `why`: what else is to be said."""

    name: str
    gpus: str = ""
    cpu: float | None = None
    used: int | None = None
    total: int | None = None
    period: float | None = None
    why: str = ""


class View(NamedTuple):
    """All that there is to show.

    Attributes:
        flops: FLOP/s of all ranks at work together, by the slowest one's step; None while none works.
        cell: The newest that runs; 0: none does.
        trend: Figures that are drawn over time, in the order of `figures.TRENDS`.
        alert: Why ranks are stuck; None: none is.
    """

    at: float
    title: str
    rows: tuple[Row, ...]
    nodes: tuple[Node, ...]
    stats: tuple[Stat, ...]
    flops: float | None = None
    cell: int = 0
    trend: Trend = ()
    alert: Alert | None = None

    @property
    def heat(self) -> bool:
        """Whether there are too many ranks for a row each."""
        return len(self.rows) > HEAT_ABOVE


def view_of(sample: Sample, left_alone: str = "") -> View:
    """Return a Sample, ready to be shown.

    Args:
        sample: The Sample.
        left_alone: What sessions without a client hold of this machine.
    """
    every = dict.fromkeys([*(rank.node for rank in sample.ranks), *(node.name for node in sample.nodes)])
    names = {name: index for index, name in enumerate(every)}
    nodes = {node.name: node for node in sample.nodes}
    late = _stragglers(sample.ranks)
    alert, apart = _alert(sample)
    rows = tuple(_row(rank, names[rank.node], nodes.get(rank.node), late, apart) for rank in sample.ranks)
    gpus: list[Counter[str]] = [Counter() for _ in names]
    for row in rows:
        gpus[row.node][row.gpu if row.device != "cpu" else "cpu"] += 1
    lines = tuple(
        _node(name, nodes.get(name), counts, left_alone if name == socket.gethostname() else "")
        for name, counts in zip(names, gpus, strict=True)
    )
    together = Together.of(sample.ranks)
    held = {row.name: row.held for row in rows if row.held is not None}
    stats = stats_of(together, sample.ranks, held, late)
    flops = together.per_second("flops") if together is not None and together.now else None
    trend = trend_of(together, held)
    return View(sample.at, _title(sample, rows), rows, lines, stats, flops, sample.cell, trend, alert)


def urgency(row: Row) -> int:
    """Return how much a rank deserves a look; 0: it does not. In labextension/src/state.ts, too."""
    if row.state == "dead":
        return 4
    if row.badges:
        return 3 if any(level == "bad" for level, _ in row.badges) else 2
    return 1 if row.state == "stuck" else 0


# --- rows


def _row(
    rank: RankSample, node: int, machine: NodeSample | None, late: dict[int, float], apart: Collection[int]
) -> Row:
    step = rank.step or StepSample()
    row = Row(
        rank=rank.rank,
        name="notebook" if rank.rank < 0 else str(rank.rank),
        node=node,
        device=rank.device,
        gpu="",
        pid=rank.pid,
        cpu=finite(rank.cpu),
        state=rank.state,
        doing=clip(rank.doing),
        step=seconds_of(step),
        work=_work(step),
        flops=ratio(step.flops, seconds_of(step)),
        mark=mark_of(step),
        mfu=ratio(ratio(step.flops, seconds_of(step)), step.peak),
    )
    row = _with_gpu(row, rank, machine) if rank.gpu or rank.device != "cpu" else _with_cpu(row, rank, machine)
    return row._replace(badges=tuple(_badges(row, rank, machine, late, apart)), why=clip(row.why))


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
        kept=gpu.kept,
        why=gpu.why,
    )
    if gpu.used is None:
        return row
    if allocated is None and rank.why:
        own = gpu.by_pid.get(rank.pid)
        known = "this is the driver's figure" if own is not None else "its own memory is not known"
        return row._replace(process=own, others=max(0, gpu.used - (own or 0)), why=f"{rank.why}; {known}")
    beyond = non_torch(rank, gpu)
    held = held_at_look(rank, gpu) or 0
    return row._replace(non_torch=beyond, others=max(0, gpu.used - held - (beyond or 0)))


def _silent(rank: RankSample) -> str:
    return "" if rank.state == "dead" else rank.why or "this rank has not answered"


def _no_gpu(rank: RankSample, machine: NodeSample | None) -> str:
    if rank.state == "dead" or rank.why:
        return rank.why
    if not rank.gpu:
        return "this rank has not used its GPU yet"
    return (machine.why if machine else "") or "the driver has not reported this GPU yet"


def _badges(
    row: Row, rank: RankSample, machine: NodeSample | None, late: dict[int, float], apart: Collection[int]
) -> Iterable[tuple[Level, str]]:
    if rank.rank in apart:
        yield "bad", "not waiting with the others"
    if rank.ooms:
        yield "bad", "out of memory" if rank.ooms == 1 else f"out of memory {rank.ooms} times"
    if row.full is not None and row.full >= NEARLY_FULL:
        yield "warn", f"nearly full: {percent(row.full)}"
    if rank.retries:
        yield "warn", f"{rank.retries} allocation {'retry' if rank.retries == 1 else 'retries'}"
        if (ratio(row.cache, row.total) or 0) >= FRAGMENTED:
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
        if step is not None and (seconds := _work(step)) is not None:
            work[rank.rank] = seconds
    median = statistics.median_low(work.values()) if len(work) > 1 else 0.0
    return {rank: spent / median - 1 for rank, spent in work.items() if median and spent > STRAGGLING * median}


def _work(step: StepSample) -> float | None:
    seconds = seconds_of(step)
    return None if seconds is None else seconds * (1 - (finite(step.communication) or 0.0))


# --- nodes


def _node(name: str, machine: NodeSample | None, gpus: Counter[str], left_alone: str) -> Node:
    words = ", ".join(f"{count} × {gpu}" if count > 1 else gpu for gpu, count in gpus.items() if gpu not in ("", "cpu"))
    if machine is None:
        return Node(name, words, why="this machine has not been looked at yet")
    why = machine.silence or machine.why
    if not machine.silent and set(gpus) <= {"cpu"} and not machine.gpus:
        why = f"no GPUs: {why or 'the driver has not been asked yet'}"
    return Node(
        name,
        words,
        finite(machine.cpu),
        machine.memory_used,
        machine.memory_total,
        finite(machine.period),
        "; ".join(words for words in (clip(why), left_alone) if words),
    )


# --- all ranks


def _alert(sample: Sample) -> tuple[Alert | None, Collection[int]]:
    """Return what most of the ranks that are stuck wait for, and the ranks that live and don't wait, if most do."""
    stuck = [rank for rank in sample.ranks if rank.state == "stuck"]
    if not stuck:
        return None, ()
    waits = Counter(rank.doing for rank in stuck)
    doing, count = waits.most_common(1)[0]
    since = min((rank.since for rank in stuck if rank.since is not None and rank.doing == doing), default=None)
    seconds = max(0.0, sample.at - since) if since is not None else None
    who = f"{count} ranks are stuck: each" if count > 1 else f"rank {stuck[0].rank} is stuck: it"
    rest = f"; {counted(len(stuck) - count, 'rank')} elsewhere" if len(stuck) > count else ""
    apart = [rank.rank for rank in sample.ranks if rank.state in ("busy", "idle")]
    return Alert(f"{who} {clip(doing)}{rest}", clip(doing), seconds), apart if len(apart) < len(stuck) else ()


def _title(sample: Sample, rows: Sequence[Row]) -> str:
    if [row.rank for row in rows] == [-1]:
        return "this notebook's process"
    states = Counter(row.state for row in rows)
    order = [state for state in ("busy", "idle", "stuck", "dead") if states[state]]
    words = f"all {order[0]}" if len(order) == 1 else ", ".join(f"{states[state]} {state}" for state in order)
    cell = f" · cell {sample.cell}" if sample.cell else ""
    end = f" · {sample.end}" if sample.end else ""
    return f"1 rank: {order[0]}{cell}{end}" if len(rows) == 1 else f"{len(rows)} ranks: {words}{cell}{end}"
