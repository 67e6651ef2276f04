"""One look at ranks and devices, as values: what the sampler sends, the panel shows and the history keeps.

None stands for what is not known; `why` then says so in words. Bytes, seconds, watts, degrees Celsius, and shares from
0 to 1 throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from nbdist.base import limits
from nbdist.base.text import span

STALLING = 1.2  # times the typical step, from which on the mean is worth a word
EVALUATING = 0.02  # share of the time, from which on evaluations are
_READINGS = 10  # of a rank that are remembered


class GpuSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU, or one MIG instance, as its driver sees it.

    Attributes:
        uuid: What names it everywhere.
        index: As `nvidia-smi` counts.
        name: Of the device, as its maker writes it.
        total: Memory of the device, as `nvidia-smi` reports it: with what its driver keeps for itself.
        used: Memory in use by processes, as `nvidia-smi` reports it.
        kept: What the driver keeps for itself, so that no process can have it; older drivers count it as `used`.
        by_pid: Memory in use by process, as far as the driver tells, and numbers processes as this system does.
        utilization: Share of the last period in which a kernel ran.
        temperature: Of the chip.
        power: Drawn now.
        power_limit: Allowed.
        throttled: Why its clocks are held down ("power", "heat", ...); empty: they are not.
        lost: Whether it has fallen off the bus; one that was lost before it was asked has no `uuid`.
        why: What could not be read and why; empty: all could.
    """

    uuid: str
    index: int
    name: str = ""
    total: int | None = None
    used: int | None = None
    kept: int = 0
    by_pid: dict[int, int] = {}
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    throttled: list[str] = []
    lost: bool = False
    why: str = ""


class NodeSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One machine.

    Attributes:
        name: Host name.
        at: When, in seconds since 1970.
        gpus: Its GPUs, by index.
        memory_total: Memory of the machine, or what its container may use.
        memory_used: Memory that is not available any more.
        cpu: Share of its cores that is busy.
        why: Why there are no GPUs, in words; empty where there are.
        period: Seconds between two looks; grows when looking is slow.
        silent: Seconds since it last reported, where it should have again; then only what does not change is known.
    """

    name: str
    at: float
    gpus: list[GpuSample] = []
    memory_total: int | None = None
    memory_used: int | None = None
    cpu: float | None = None
    why: str = ""
    period: float = 1.0
    silent: float = 0.0

    @property
    def silence(self) -> str:
        """In words that it does not report any more; empty: it does."""
        return f"this machine has not reported for {span(self.silent)}" if self.silent else ""


class Spent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process has spent on a cell.

    Attributes:
        seconds: Wall time.
        joules: Of its GPU, by whomever it was used; None: there is none, or it does not count.
        gpu: UUID of the GPU: ranks that share one have spent its energy together.
    """

    seconds: float
    joules: float | None = None
    gpu: str = ""


class StepSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """The training steps of one rank, over the last window.

    Attributes:
        steps: Optimizer steps since the rank's start.
        timed: Steps that the figures are of: not the first. Those in which FLOPs were counted have the usual time.
        in_cell: Of these, those since the start of the cell that runs; 0 while none runs.
        seconds: All time of the window, stalls included, by its steps. Rates are to be divided by it.
        typical: Seconds of a step in the middle, which ignores stalls.
        flops: Model FLOPs of one step on this rank; None: not counted (`why`).
        hardware_flops: With recomputation.
        uncounted: Share of the window's steps whose shapes were not counted, so `flops` is estimated by their time.
        not_counted: Operations that worked in counted steps and have no formula, so that `flops` is a least figure.
        waiting: Share of the step spent waiting for data.
        communication: Share of the step that only collectives took: transfer, and waiting for other ranks.
        evaluation: Share of all time that evaluations between the steps took.
        without_gradients: Share of all time that blocks without gradients took, beyond those of a usual step: they may
            be evaluations.
        counting: Seconds that counting FLOPs took, which are in no other figure, if this is of a whole cell.
        passes: Backward passes of a cell in which no step was seen (`why`).
        units: Samples or tokens of one step on this rank.
        unit: "samples" or "tokens".
        batch: Stands for the values of the first batch since the cell's start, if it was in the host's memory; equal on
            ranks that share their batches, as in tensor parallelism. Empty: not known.
        peak: What the device can do at most, FLOP/s, at the dtype that is used.
        peak_source: Where that figure is from.
        without_peak: What its products are in, and no peak is known for; most work first.
        spent: Time and energy of the cell, if this is of a whole cell.
        impossible: Whether steps can't be measured in this process at all (`why`).
        why: What is not known and why.
    """

    steps: int = 0
    timed: int = 0
    in_cell: int = 0
    seconds: float | None = None
    typical: float | None = None
    flops: float | None = None
    hardware_flops: float | None = None
    uncounted: float = 0.0
    not_counted: list[str] = []
    waiting: float | None = None
    communication: float | None = None
    evaluation: float = 0.0
    without_gradients: float = 0.0
    counting: float = 0.0
    passes: int = 0
    units: float | None = None
    unit: str = ""
    batch: str = ""
    peak: float | None = None
    peak_source: str = ""
    without_peak: list[str] = []
    spent: Spent | None = None
    impossible: bool = False
    why: str = ""


class RankSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank.

    Attributes:
        rank: Its number; -1: the notebook's own process.
        node: Name of its machine.
        device: "cpu" or "cuda:3".
        gpu: UUID of its GPU; empty on the CPU.
        pid: Its process.
        state: "idle", "busy", "stuck" or "dead".
        doing: What it runs, what it waits in and for whom, or how it died.
        since: When it was first seen stuck, in seconds since 1970.
        cpu: Cores that the process has kept busy since the look before, on average.
        private: Memory of the process, beyond what it was forked with and what files back.
        allocated: Device memory in tensors.
        reserved: Device memory that torch holds.
        held: What it held at each look since the driver's last answer, and at the one before that; the newest last.
        peak: Largest `allocated`, as torch's own `max_memory_allocated` tells it.
        retries: Allocations that worked only after the cache was emptied.
        ooms: Allocations that failed.
        step: Its training steps.
        why: What is not known and why.
    """

    rank: int
    node: str = ""
    device: str = "cpu"
    gpu: str = ""
    pid: int = 0
    state: str = "idle"
    doing: str = ""
    since: float | None = None
    cpu: float | None = None
    private: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    held: list[int] = []
    peak: int | None = None
    retries: int = 0
    ooms: int = 0
    step: StepSample | None = None
    why: str = ""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One look at everything. end: when the allocation ends, in words; empty: it is not known."""

    at: float
    ranks: list[RankSample] = []
    nodes: list[NodeSample] = []
    cell: int = 0
    generation: int = 0
    end: str = ""


def as_of(node: NodeSample, age: float) -> NodeSample:
    """Return the last look at a node as it is to be shown now: what moves is left out if the next one is overdue.

    Args:
        node: The look.
        age: Seconds since it came.
    """
    if age <= 2 * node.period + limits.MACHINE_LATE:  # a slow look doubles the period
        return node
    silent = msgspec.structs.replace(node, cpu=None, memory_used=None, silent=age)
    gpus = [GpuSample(gpu.uuid, gpu.index, gpu.name, gpu.total, why=silent.silence) for gpu in node.gpus]
    return msgspec.structs.replace(silent, gpus=gpus)


def gpu_of(uuid: str, nodes: Iterable[NodeSample]) -> GpuSample | None:
    """Return the sample of a GPU, or of a MIG instance; None where no node knows of it.

    Args:
        uuid: As NVML writes it, or as CUDA does: CUDA leaves out whether it is a whole GPU or an instance of one.
        nodes: Where to look.
    """
    return gpu_among(uuid, (gpu for node in nodes for gpu in node.gpus))


def gpu_among(uuid: str, gpus: Iterable[GpuSample]) -> GpuSample | None:
    """Return a rank's GPU like `gpu_of`, from GPUs that belong to no node yet."""
    number = _number(uuid)
    return next((gpu for gpu in gpus if number and _number(gpu.uuid) == number), None)


def _number(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def non_torch(rank: RankSample, gpu: GpuSample) -> int | None:
    """Return device memory of a rank's process beyond what torch holds: CUDA's context, kernels, NCCL's buffers.

    Args:
        rank: The rank.
        gpu: Its GPU.

    Returns:
        Bytes; None where the driver does not tell by process. In a container it may name processes by the host's
        numbers: one that happens to be this rank's, with less memory than torch alone holds, counts as another's.
    """
    own, held = gpu.by_pid.get(rank.pid), held_at_look(rank, gpu)
    return None if own is None or held is None or own < held else own - held


def held_at_look(rank: RankSample, gpu: GpuSample) -> int | None:
    """Return what torch held when the driver was asked: the most that fits what the driver saw in use.

    The two are read up to a period apart. Memory taken or given back in between would count as held outside of torch.

    Args:
        rank: The rank.
        gpu: Its GPU, as the driver saw it.

    Returns:
        Bytes; the newest figure where none fits; None if torch does not tell.
    """
    seen = gpu.by_pid.get(rank.pid, gpu.used)
    fitting = [held for held in rank.held if seen is not None and held <= seen]
    return max(fitting, default=rank.reserved)


def has_lost(uuid: str, gpus: Sequence[GpuSample]) -> bool:
    """Return whether these samples are of a machine that has lost a GPU for sure.

    Args:
        uuid: The GPU's; empty: not known, so that it is lost for sure only if all are.
        gpus: All of the machine. One that was lost before it was asked has no UUID.
    """
    known = gpu_among(uuid, gpus)
    candidates = [gpu for gpu in gpus if not (uuid and gpu.uuid)] if known is None else [known]
    return bool(candidates) and all(gpu.lost for gpu in candidates)


class HeldLately:
    """What torch held in each process when the driver was asked: the two are read up to a period apart.

    Memory that a process takes or gives back in between would count as held outside of torch, or by other processes. So
    this remembers what ranks said since the driver's last answer, and just before.
    """

    def __init__(self) -> None:
        self._readings: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def note(self, ranks: Sequence[RankSample], looked: Sequence[float | None], now: float) -> list[RankSample]:
        """Note what torch holds in ranks now, and return them with what it held about when the driver was asked.

        Args:
            ranks: As they are now.
            looked: For each, when the driver's answer came, in seconds by any one clock; None: there is none.
            now: By that clock.
        """
        before, self._readings = self._readings, {}
        found = []
        for rank, at in zip(ranks, looked, strict=True):
            if rank.reserved is None:
                found.append(rank)
                continue
            key = rank.rank, rank.pid
            readings = [*before.get(key, []), (now, rank.reserved)]
            older = sum(when < at for when, _ in readings) if at is not None else 0
            self._readings[key] = readings[max(0, older - 1) :][-_READINGS:]
            found.append(msgspec.structs.replace(rank, held=[held for _, held in self._readings[key]]))
        return found
