"""Samples as machines give them that are not here: GPUs in training, on many nodes, some of them in trouble."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import msgspec

from nbdist.metrics.node.sample import GpuSample, NodeSample, RankSample, Sample, StepSample

GIB = 1024**3
TOTAL = int(79.6 * GIB)
NAME = "NVIDIA H100 80GB HBM3"
PER_NODE = 8
LATE, HOT, OTHERS, FULL, DEAD = 2, 3, 5, 6, 15  # what is the matter with which rank


def gpus(count: int, tick: int = 0) -> Sample:
    """Ranks in training, a GPU for each, eight to a node; of 8 some are in trouble, of 16 one is dead."""
    nodes, ranks = [], []
    for first in range(0, count, PER_NODE):
        members = range(first, min(first + PER_NODE, count))
        name = f"node-{first // PER_NODE:02d}"
        pairs = [_trained(rank, name, tick) for rank in members]
        ranks += [rank for rank, _ in pairs]
        devices = [gpu for _, gpu in pairs]
        used = int(410.5 * GIB)
        nodes.append(NodeSample(name, 0.0, gpus=devices, memory_total=1007 * GIB, memory_used=used, cpu=0.23))
    return Sample(at=1.7e9 + tick, ranks=ranks, nodes=nodes, cell=7)


def stuck(sample: Sample) -> Sample:
    """The same, but those that live wait for rank 7."""
    change = {"state": "stuck", "doing": "waits in all_reduce, cell 3 line 4, for rank 7", "since": sample.at - 40}
    ranks = [msgspec.structs.replace(rank, **change) if rank.state == "busy" else rank for rank in sample.ranks]
    return msgspec.structs.replace(sample, ranks=ranks)


def _trained(rank: int, node: str, tick: int) -> tuple[RankSample, GpuSample]:
    wave = math.sin(1.7 * rank + 0.8 * tick)
    uuid, pid = f"GPU-{rank:04d}", 4000 + rank
    allocated = int((52 + 9 * math.sin(2.3 * rank) + wave) * GIB)
    reserved = allocated + int((3 + math.sin(rank)) * GIB)
    own = reserved + 2 * GIB
    if rank == FULL:
        own = int(78.1 * GIB)
        reserved = own - 2 * GIB
    gpu = GpuSample(
        uuid=uuid,
        index=rank % PER_NODE,
        name=NAME,
        total=TOTAL,
        used=own + (4 * GIB if rank == OTHERS else 0),
        by_pid={pid: own},
        utilization=0.93 + 0.06 * wave,
        temperature=58 + 6 * math.sin(rank) + wave,
        power=560 + 90 * wave,
        power_limit=700.0,
        throttled=["heat"] if rank == HOT else [],
    )
    if rank == DEAD:
        return RankSample(rank, node=node, device=f"cuda:{gpu.index}", state="dead", doing="killed by SIGKILL"), gpu
    step = StepSample(
        steps=1200 + tick,
        seconds=0.152 + 0.002 * wave,
        flops=62e12,
        hardware_flops=80e12,
        waiting=0.03,
        communication=0.01 if rank == LATE else 0.14,
        units=4096,
        unit="tokens",
        peak=989e12,
        peak_source="data sheet",
    )
    sample = RankSample(
        rank,
        node=node,
        device=f"cuda:{gpu.index}",
        gpu=uuid,
        pid=pid,
        state="busy",
        doing="cell 7 (12 s)",
        cpu=1.02,
        private=3 * GIB,
        allocated=allocated,
        reserved=reserved,
        peak=allocated + 5 * GIB,
        retries=3 if rank == FULL else 0,
        step=step,
    )
    return sample, gpu


def cpus(count: int, tick: int = 0) -> Sample:
    """Ranks on one machine without GPUs."""
    ranks = [
        RankSample(
            rank, node="laptop", pid=100 + rank, state="busy", cpu=0.9, private=(300 + 100 * rank + tick) * 1024**2
        )
        for rank in range(count)
    ]
    node = NodeSample("laptop", 0.0, memory_total=int(23.4 * GIB), memory_used=int(9.2 * GIB), cpu=0.4, why="no driver")
    return Sample(at=1.7e9 + tick, ranks=ranks, nodes=[node])


class Source:
    """Where a panel gets these from, instead of a session."""

    def __init__(self) -> None:
        self.rate = 1.0
        self._watchers: list[Callable[[Sample], None]] = []
        self._newest: Sample | None = None

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def subscribe(self, watcher: Callable[[Sample], None]) -> Callable[[], None]:
        self._watchers.append(watcher)
        if self._newest is not None:
            watcher(self._newest)
        return lambda: self._watchers.remove(watcher)

    def show(self, sample: Sample) -> None:
        """Hand it on, from another thread, as a monitor does."""
        self._newest = sample
        thread = threading.Thread(target=lambda: [watcher(sample) for watcher in list(self._watchers)])
        thread.start()
        thread.join()
