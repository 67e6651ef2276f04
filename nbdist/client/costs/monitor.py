"""Samples ranks and nodes periodically, while something subscribes: the panel, the history, a plot.

Owns the thread that gathers Samples and delivers them. Without a session it samples the notebook's own process.
Nothing runs without subscribers.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

import msgspec

from nbdist import shells
from nbdist.base import limits
from nbdist.client.ranks import observers
from nbdist.client.ranks.observers import Observer
from nbdist.client.ranks.task import Task
from nbdist.client.reports.report import describe_death
from nbdist.client.session.session import Session, end_of, rank_set_of
from nbdist.errors import UsageError
from nbdist.metrics.node import device
from nbdist.metrics.node.sample import GpuSample, HeldLately, NodeSample, RankSample, Sample, as_of, gpu_of
from nbdist.metrics.node.sampler import FASTEST, Sampler
from nbdist.wire.messages.life import Died, RankInfo
from nbdist.wire.questions.knowing import GetMetrics, Metrics
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import Look, WatchNodes

SLOWEST = 60.0  # seconds
_NODE_LIMIT = 0.5  # seconds that the first sample waits for its node's data

Watcher = Callable[[Sample], None]


class Monitor(Observer):
    """Gathers Samples of a session, or of this process.

    Use `Monitor.of`: there is one for each session.

    Args:
        session: What to sample; None for this process.

    Attributes:
        latest: The newest Sample, None before the first.
    """

    _monitors: ClassVar[weakref.WeakKeyDictionary[Session, Monitor]] = weakref.WeakKeyDictionary()
    _own: ClassVar[Monitor | None] = None

    def __init__(self, session: Session | None) -> None:
        self.latest: Sample | None = None
        self._session = None if session is None else weakref.ref(session)
        self._watchers: dict[object, Watcher] = {}
        self._rate = 1.0
        self._paused = False
        self._changes = 0  # count of changes that the thread must notice at once
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop_observing: Callable[[], None] = lambda: None
        self._nodes: dict[str, NodeSample] = {}
        self._came: dict[str, float] = {}  # when these came, by this process's clock
        self._held = HeldLately()
        self._places: dict[int, str] = {}  # of ranks: the names of their nodes
        self._stuck: dict[int, float] = {}  # ranks, and since when they have been seen so
        self._node_known = threading.Event()
        self._watched: tuple[float, list[RankInfo] | None] = 0.0, None  # what the nodes were asked for
        self._own_process: _OwnProcess | None = None

    @classmethod
    def of(cls, session: Session | None) -> Monitor:
        """Return the monitor of a session, or of this process for None."""
        if session is None:
            if cls._own is None:
                cls._own = cls(None)
            return cls._own
        return cls._monitors.setdefault(session, cls(session))

    def subscribe(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` with each Sample from now on, from the monitor's thread. One that raises is not called again.

        Returns:
            A function that unsubscribes it.
        """
        key = object()
        with self._changing():
            self._watchers[key] = watcher
            if self._thread is None:
                if self._session is None and self._own_process is None:
                    self._own_process = _OwnProcess()
                self._stop_observing = observers.subscribe(self)
                self._thread = threading.Thread(target=self._run, name="nbdist-monitor", daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._changing():
                self._watchers.pop(key, None)

        return unsubscribe

    @property
    def rate(self) -> float:
        """Seconds between two samples, 0.25 to 60.

        Raises:
            UsageError: It is out of range.
        """
        return self._rate

    @rate.setter
    def rate(self, seconds: float) -> None:
        if not FASTEST <= seconds <= SLOWEST:
            raise UsageError(f"rate must be {FASTEST:g} to {SLOWEST:g} seconds, got {seconds:g}")
        with self._changing():
            self._rate = seconds

    @property
    def paused(self) -> bool:
        """Whether it is paused although something subscribes."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        with self._changing():
            self._paused = paused

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changes += 1
            self._changed.notify()

    # --- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watchers or (self._session is not None and self._session() is None):
                    self._watch_nodes(0.0)
                    self._stop_observing()
                    self._thread = None
                    return
                seen, period = self._changes, 0.0 if self._paused else self._rate
            began = time.monotonic()
            self._watch_nodes(period)
            if period:
                self._look()
            with self._changed:
                rest = max(0.0, period - (time.monotonic() - began)) if period else None
                self._changed.wait_for(self._is_newer(seen), rest)

    def _is_newer(self, seen: int) -> Callable[[], bool]:
        return lambda: self._changes != seen

    def _open_session(self) -> Session | None:
        session = self._session() if self._session is not None else None
        return None if session is None or session.closed else session

    def _watch_nodes(self, period: float) -> None:
        """Have nodes sampled every `period` seconds; 0 to stop. A fresh set of ranks has to be asked again."""
        session = self._open_session()
        if self._session is not None and session is None:
            self._watched = 0.0, None
            return
        rank_set = rank_set_of(session) if session is not None else None
        ranks = rank_set.ranks if rank_set is not None else None
        if self._watched[0] == period and self._watched[1] is ranks:
            return
        self._watched = period, ranks
        self._nodes.clear()
        self._came.clear()
        self._places.clear()
        self._node_known.clear()
        if rank_set is not None:
            rank_set.traffic.send(WatchNodes(period))
            if period:
                self._node_known.wait(_NODE_LIMIT)
        elif self._own_process is not None:
            self._own_process.watch(period)

    def node_looked_at(self, key: str, look: Look) -> None:
        """Handle a sample of a node, of this session or another."""
        session = self._open_session()
        if session is not None and rank_set_of(session).traffic.key == key:
            self._note_node(look.node)
            self._node_known.set()

    def _look(self) -> None:
        sample = self._look_at_self() if self._session is None else self._look_at_ranks()
        if sample is None:
            return
        self.latest = sample
        observers.ranks_looked_at(sample)
        for key, watcher in list(self._watchers.items()):
            try:
                watcher(sample)
            except Exception:  # a watcher's mistake: the others get their samples
                traceback.print_exc()
                self._watchers.pop(key, None)

    def _look_at_self(self) -> Sample:
        assert self._own_process is not None
        for node in self._own_process.take():
            self._note_node(node)
        nodes = self._nodes_now()
        ranks = self._with_held([_named(self._own_process.look(), nodes)])
        return Sample(at=time.time(), ranks=ranks, nodes=nodes)

    def _look_at_ranks(self) -> Sample | None:
        session = self._open_session()
        if session is None:
            return None
        rank_set = rank_set_of(session)
        living = rank_set.living()
        answers = rank_set.traffic.ask(living, GetMetrics(), timeout=limits.METRICS_ANSWER)
        running = rank_set.traffic.running(living)
        nodes = self._nodes_now()
        ranks = [
            _looked_at(info, answers.get(info.rank), running.get(info.rank), rank_set.traffic.dead.get(info.rank))
            for info in rank_set.ranks
        ]
        now = time.time()
        ranks = [self._dated(_named(self._placed(rank, nodes), nodes), now) for rank in ranks]
        cell = max((task.number for task in running.values()), default=0)
        ranks = self._with_held(ranks)
        end = end_of(session).words
        return Sample(at=now, ranks=ranks, nodes=nodes, cell=cell, generation=rank_set.generation, end=end)

    def _note_node(self, node: NodeSample) -> None:
        self._came[node.name] = time.monotonic()  # first this: the other thread asks how old each node is
        self._nodes[node.name] = node

    def _nodes_now(self) -> list[NodeSample]:
        """Return what is known of nodes now; of one that reports no more, only what does not change."""
        now = time.monotonic()
        return [as_of(node, now - self._came[name]) for name, node in list(self._nodes.items())]

    def _with_held(self, ranks: list[RankSample]) -> list[RankSample]:
        """Return the ranks with what torch held in them when the driver of their node was asked."""
        return self._held.note(ranks, [self._came.get(rank.node) for rank in ranks], time.monotonic())

    def _dated(self, rank: RankSample, now: float) -> RankSample:
        """Return the rank with the time since when it has been stuck, if it is."""
        if rank.state != "stuck":
            self._stuck.pop(rank.rank, None)
            return rank
        return msgspec.structs.replace(rank, since=self._stuck.setdefault(rank.rank, now))

    def _placed(self, rank: RankSample, nodes: list[NodeSample]) -> RankSample:
        """Return the rank placed on the node that it named, perhaps in an earlier answer."""
        if rank.node:
            self._places[rank.rank] = rank.node
            return rank
        likely = nodes[0].name if nodes else socket.gethostname()
        return msgspec.structs.replace(rank, node=self._places.get(rank.rank, likely))


def _looked_at(info: RankInfo, answer: Metrics | NoAnswer | None, task: Task | None, died: Died | None) -> RankSample:
    """Return a rank with everything known of it: its answer, what it runs, how it died."""
    found = RankSample(rank=info.rank, pid=info.pid, device=info.device)
    if died is not None:
        return msgspec.structs.replace(found, state="dead", doing=describe_death(died))
    if answer is None:
        found = msgspec.structs.replace(found, why="it has not answered: it is in a call that blocks Python")
    elif isinstance(answer, NoAnswer):
        found = msgspec.structs.replace(found, why=answer.why)
    else:
        sample = answer.sample
        found = msgspec.structs.replace(sample, device=info.device if sample.device == "cpu" else sample.device)
    if info.host:  # of several nodes, which may have one name
        found = msgspec.structs.replace(found, node=info.host)
    if task is None:
        return found
    if (wait := task.waits.get(info.rank)) is not None:
        return msgspec.structs.replace(found, state="stuck", doing=wait)
    return msgspec.structs.replace(found, state="busy", doing=task.describe())


def _named(rank: RankSample, nodes: list[NodeSample]) -> RankSample:
    """Return the rank with its GPU named as by the driver, who knows it also where torch can't be asked."""
    can_t_be_asked = rank.device != "cpu" and not rank.gpu and rank.why
    gpu = _gpu_of_process(rank, nodes) if can_t_be_asked else gpu_of(rank.gpu, nodes)
    return rank if gpu is None else msgspec.structs.replace(rank, gpu=gpu.uuid)


def _gpu_of_process(rank: RankSample, nodes: list[NodeSample]) -> GpuSample | None:
    """Return the GPU that a rank's process has most on; None where the driver does not tell processes apart."""
    own = [gpu for node in nodes if node.name == rank.node for gpu in node.gpus if rank.pid in gpu.by_pid]
    return max(own, key=lambda gpu: gpu.by_pid[rank.pid], default=None)


class _OwnProcess:
    """The notebook's own process and its machine. Created in the thread that runs cells, usually in a cell."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._busy = True
        if (shell := shells.current()) is not None:
            shell.events.register("pre_run_cell", lambda *_: self._note(True))
            shell.events.register("post_run_cell", lambda *_: self._note(False))

    def _note(self, busy: bool) -> None:
        self._busy = busy

    def watch(self, period: float) -> None:
        self._sampler.watch(period)
        if period:
            waiting = select.poll()  # not select, which fails with 1,024 or more open files
            waiting.register(self._sampler.wake, select.POLLIN)
            waiting.poll(_NODE_LIMIT * 1000)

    def take(self) -> list[NodeSample]:
        return self._sampler.take()

    def look(self) -> RankSample:
        found = device.look(-1)
        return msgspec.structs.replace(found, node=socket.gethostname(), state="busy" if self._busy else "idle")
