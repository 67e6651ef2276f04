"""A launch together with other nodes, or one whose ranks can restart: run by torch's elastic agent.

Torch decides which node has which ranks, when all restart and when everything is over, in its own thread. The cell's
thread carries this out, so that output lands below the cell and Ctrl-C is handled at once. How ranks start and work is
up to `on_ranks`; how nodes meet, to `node_agents`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from nbdist import transfer
from nbdist.base.ranks import describe_ranks
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.task import Task
from nbdist.client.reports import report
from nbdist.errors import NbdistError, NodesMissing, RankError, RankFailure
from nbdist.launch import on_ranks
from nbdist.launch.launch_errors import launch_error
from nbdist.launch.nodes.news import NOWHERE, News
from nbdist.launch.nodes.node_agents import STORE_ERRORS, Left, Nodes
from nbdist.launch.nodes.rendezvous import rendezvous
from nbdist.launch.nodes.waiting_line import WaitingLine
from nbdist.launch.request import Request
from nbdist.wire.messages.life import Place
from nbdist.wire.messages.output import Notice

_LEAVE_LIMIT = 4.0  # seconds for torch to notice that the launch is over
_CAUSE_LIMIT = 2.0  # seconds for another node to report why a rank here has lost its connection
_RETURNED_EVERY = 1.0  # seconds between checks of which ranks on other nodes have returned
_TICK = 0.001  # torch sleeps this long between two checks, which do their own waiting
_INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo alone would use the address of the host name, which may be loopback


def launch(request: Request, packed: transfer.Packed) -> list[Any]:
    """Run the function on this node's ranks, together with those of other nodes.

    Args:
        request: What to launch.
        packed: The function and its arguments, from `on_ranks.pack`.

    Returns:
        The function's return values on the ranks of this node, in their order.

    Raises:
        NodesMissing: Not all nodes came.
        LaunchError: A rank failed, here or on another node, and no restart is left.
        KeyboardInterrupt: The user interrupted; the other nodes' launches end as well.
        UsageError: The given port is taken, or the nodes' arguments don't match.
    """
    with _quiet(logging.getLogger("torch.distributed.elastic")):
        return _Launch(request, packed).run()


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence torch's logs of its rendezvous: they are reported in our words, or not worth a line below a cell."""
    before, silent = logger.propagate, logging.NullHandler()
    logger.propagate = False
    logger.addHandler(silent)  # without any, Python would write warnings to stderr
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silent)


@dataclass(eq=False)
class _Attempt:
    """The ranks of this node, from one start to their end.

    Attributes:
        outcome: The return values, or the error that ended it.
        over: Set when there is an outcome, and no rank is left.
        returned: The ranks, on any node, that have returned.
    """

    place: Place
    task: Task | None = None
    failure: RankFailure | None = None
    outcome: list[Any] | BaseException | None = None
    ended: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    returned: set[int] = field(default_factory=set)
    _ranks: list[int] = field(default_factory=list)
    _told: set[int] = field(default_factory=set)

    def fail(self, failure: RankFailure) -> None:
        """End its ranks because of a failure elsewhere. From any thread."""
        self.failure = failure
        if self.task is not None:
            self.task.fail(failure)

    def take(self, task: Task) -> None:
        """Note that the function runs."""
        self.task, self._ranks = task, task.ranks
        if self.failure is not None:  # while the ranks started
            task.fail(self.failure)

    def say(self, line: str) -> bool:
        """Show a line below the cell, from any thread. False if no ranks are running."""
        return self.task is not None and self.task.put(Notice(line))

    def end(self, outcome: list[Any] | BaseException) -> None:
        """Set the outcome; nothing of it is left."""
        self.outcome, self.ended, self.task = outcome, time.monotonic(), None
        self.over.set()

    def newly_returned(self) -> list[int]:
        """Return the ranks of this node that have returned since the last call."""
        task = self.task
        done = set(self._ranks) if isinstance(self.outcome, list) else set()
        if task is not None:
            done = task.replies.keys() - task.failures.keys()
        new = sorted(done - self._told)
        self._told.update(new)
        return new

    def first_failure(self) -> RankFailure | None:
        """Return the first failure here; None if there is none yet."""
        rank = self.place.first_rank
        if self.task is not None and self.task.interrupted:
            return _own("KeyboardInterrupt", "its notebook was interrupted", rank)
        error = self.outcome
        if not isinstance(error, BaseException):
            return None
        if isinstance(error, RankError) and error.first is not None:
            return error.first
        if isinstance(error, KeyboardInterrupt):
            return _own("KeyboardInterrupt", "its notebook was interrupted", rank)
        return _own(type(error).__name__, str(error), rank)

    @property
    def can_be_tried_again(self) -> bool:
        """Whether it ended because of what ranks did, not because of what the user wants."""
        return isinstance(self.outcome, RankError) and not isinstance(self.outcome, TimeoutError)


def _own(name: str, text: str, rank: int) -> RankFailure:
    return RankFailure(rank, "raised", name, text, "", time.monotonic())


class _Launch:
    """One launch, seen from this node. `run` is for the cell's thread; methods for torch's agent, for its thread.

    Attributes:
        attempt: The latest attempt.
        verdict: The failure that all nodes take as the cause of the latest end.
        left: Whether the user has stopped it.
    """

    def __init__(self, request: Request, packed: transfer.Packed) -> None:
        self.request = request
        self.nodes = Nodes(request)
        self.attempt: _Attempt | None = None
        self.verdict: News | None = None
        self.left = False
        self._packed = packed
        self._announced = False
        self._orders: queue.SimpleQueue[_Attempt | str | None] = queue.SimpleQueue()
        self._error: BaseException | None = None

    # --- in the cell's thread

    def run(self) -> list[Any]:
        """Run until it is over."""
        deciding = threading.Thread(target=self._decide, name="nbdist-elastic", daemon=True)
        deciding.start()
        try:
            self._work()
        except BaseException as error:  # Ctrl-C included: the other nodes must hear of it
            self._leave(error)
            raise
        finally:
            deciding.join(_LEAVE_LIMIT)
        return self._conclude()

    def _work(self) -> None:
        """Carry out the orders of torch's agent, and show what it waits for meanwhile."""
        display = WaitingLine(self.nodes)
        while True:
            try:
                order = self._orders.get(timeout=display.show())
            except queue.Empty:
                continue
            display.end()
            if order is None:
                return
            if isinstance(order, str):
                print(f"nbdist: {order}", flush=True)
            else:
                self._run_ranks(order)

    def _run_ranks(self, attempt: _Attempt) -> None:
        rank_set = RankSet()
        try:
            with on_ranks.closing(rank_set):
                on_ranks.start(rank_set, self._local_request(attempt.place), attempt.place)
                self._announce(rank_set, attempt.place)
                attempt.take(on_ranks.submit(rank_set, self.request, self._packed))
                assert attempt.task is not None
                outcome: list[Any] | BaseException = on_ranks.conclude(rank_set, attempt.task, self.request)
        except NbdistError as error:
            outcome = error
        except BaseException as error:  # Ctrl-C included: torch's thread waits for an outcome
            attempt.outcome = error
            raise
        attempt.end(outcome)

    def _local_request(self, place: Place) -> Request:
        """Return the request for this node: with its port, and the network interface to the others."""
        variables = dict(self.request.environment)
        if place.num_nodes > 1 and (interface := self.nodes.interface()):
            variables.setdefault(_INTERFACE, os.environ.get(_INTERFACE, interface))
        return replace(self.request, use_port=str(self.nodes.port), environment=variables)

    def _announce(self, rank_set: RankSet, place: Place) -> None:
        if self._announced:
            return
        self._announced = True
        if place.num_nodes == 1:
            on_ranks.announce(rank_set, self.request)
            return
        ranks = describe_ranks(info.rank for info in rank_set.ranks)
        print(
            f"Launching {self.request.name} on {ranks} of {place.world_size}: node {place.node_rank} of "
            f"{place.num_nodes}, rendezvous at {self.nodes.address}.",
            flush=True,
        )

    def _leave(self, error: BaseException) -> None:
        """End torch's thread after an interrupt by the user, or an error here."""
        self.left = True
        self.nodes.left.set()
        if self.attempt is not None and not self.attempt.over.is_set():
            self.attempt.end(self.attempt.outcome or error)

    def _conclude(self) -> list[Any]:
        outcome = self.attempt.outcome if self.attempt is not None else None
        if isinstance(outcome, BaseException) and not isinstance(outcome, RankError):
            raise outcome
        if self._error is not None:
            raise self._error
        if isinstance(outcome, TimeoutError):
            raise outcome
        if self.verdict is not None:
            raise self._failed(self.verdict, outcome)
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return outcome

    def _failed(self, verdict: News, outcome: list[Any] | BaseException | None) -> BaseException:
        """Return the error to raise: that of the ranks here, or if they have none, that of another node."""
        assert self.attempt is not None
        error = outcome
        finished = list(range(self.attempt.place.first_rank, self._last_rank() + 1))
        local_ranks = {rank: local for local, rank in enumerate(finished)}
        if not isinstance(error, RankError):
            told = report.build([verdict.as_failure()], finished, launch=True)
            error = launch_error(told, self.request.name, local_ranks)
        elif verdict.failure["rank"] not in error.failures:  # the ranks here had ended before it was reported
            told = report.build([verdict.as_failure(), *error.failures.values()], launch=True)
            error = launch_error(told, self.request.name, local_ranks)
        if verdict.node not in (self.attempt.place.node_rank, NOWHERE):
            error.report += f"\nrank {verdict.failure['rank']} is on node {verdict.node} ({verdict.host})"
        return error

    def _last_rank(self) -> int:
        assert self.attempt is not None
        return self.attempt.place.first_rank + self.request.count - 1

    # --- in torch's thread

    def _decide(self) -> None:
        """Have torch's agent run the launch."""
        try:
            self._run_agent()
        except Left:
            pass
        except NbdistError as error:
            self._error = error.with_traceback(None)  # its frames would keep the store, and so the port
        except Exception as error:  # of torch's agent, in a thread: raised in the cell's
            known = isinstance(error, STORE_ERRORS) and self.nodes.several
            self._error = self.nodes.gone() if known else error.with_traceback(None)
        finally:
            if self._error is not None and self.attempt is not None and not self.attempt.over.is_set():
                self.attempt.fail(_own(type(self._error).__name__, str(self._error), self.attempt.place.first_rank))
            self.nodes.close()
            self._orders.put(None)

    def _run_agent(self) -> None:
        self.nodes.connect()
        handler = rendezvous(self.nodes)
        spec = WorkerSpec(
            role="default",
            local_world_size=self.request.count,
            entrypoint=self.request.name,
            rdzv_handler=handler,
            max_restarts=self.request.max_restarts,
            monitor_interval=_TICK,
            master_addr=self.nodes.host,
            master_port=self.nodes.port,
            local_addr=self.nodes.own_address() if self.nodes.several else "127.0.0.1",
        )
        try:
            _Agent(spec, self).run()
            if self.verdict is not None:
                self.nodes.part()
        finally:
            handler.shutdown()

    def order(self, what: _Attempt | str) -> None:
        """Have the cell's thread run ranks, or print a line."""
        if self.left:
            raise Left
        if isinstance(what, _Attempt):
            self.attempt = what
        self._orders.put(what)


class _Agent(SimpleElasticAgent):
    """Torch's elastic agent, with our ranks as its workers."""

    def __init__(self, spec: WorkerSpec, launch: _Launch) -> None:
        super().__init__(spec)
        self._launch = launch
        self._request = launch.request
        self._nodes = launch.nodes
        self._node = 0
        self._started = 0  # how often ranks have been started
        self._restart = 0
        self._finished = False
        self._returned_due = 0.0

    # --- torch's methods

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        self._node = int(worker_group.group_rank or 0)
        self._restart = self._nodes.begin_round(worker_group.store, self._node, self._started)
        # A node that joins again counts restarts as the others do.
        self._remaining_restarts = max(0, self._request.max_restarts - self._restart)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        several = self._nodes.several
        place = Place(
            first_rank=workers[0].global_rank,
            world_size=workers[0].world_size,
            node_rank=self._node,
            num_nodes=self._request.num_nodes,
            master_addr=self._nodes.host if several else "",
            master_port=self._nodes.port if several else 0,
            run=self._request.rdzv_id,
            restart=self._restart,
            max_restarts=self._request.max_restarts,
        )
        self._started, self._finished = self._restart + 1, False
        self._launch.verdict = None
        self._launch.order(_Attempt(place))
        return {worker.local_rank: None for worker in workers}

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        attempt = self._launch.attempt
        if attempt is None or attempt.over.is_set():
            return
        attempt.fail(_own("NodesMissing", "the set of nodes has changed", attempt.place.first_rank))
        while not attempt.over.wait(1.0):
            if self._launch.left:
                return

    def _shutdown(self, *_: Any, **__: Any) -> None:
        if self._launch.attempt is not None:
            self._stop_workers(self._worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        attempt = self._launch.attempt
        assert attempt is not None
        (self._nodes.left if self._finished else attempt.over).wait(self._request.monitor_interval)
        self._say_who_is_silent(attempt)
        self._exchange_returned(attempt)
        news = self._news(attempt)
        if news is not None:
            return self._failed(attempt, news)
        if not isinstance(attempt.outcome, list):
            return RunResult(WorkerState.HEALTHY)
        if not self._finished:
            self._nodes.finish()
            self._finished = True
        if self._nodes.others_at_work():
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})

    def _say_who_is_silent(self, attempt: _Attempt) -> None:
        if not self._nodes.several:
            return
        with contextlib.suppress(*STORE_ERRORS, NodesMissing):  # the next check of the news finds it too
            for line in self._nodes.silences():
                if not attempt.say(line):
                    self._launch.order(line)

    def _exchange_returned(self, attempt: _Attempt) -> None:
        """Let no rank wait for one on another node that has returned."""
        now = time.monotonic()
        if not self._nodes.several or now < self._returned_due:
            return
        self._returned_due = now + _RETURNED_EVERY
        with contextlib.suppress(*STORE_ERRORS, NodesMissing):  # the next check of the news finds it too
            attempt.returned.update(self._nodes.exchange_returned(attempt.newly_returned()))
        if attempt.returned and (task := attempt.task) is not None:
            task.others_returned(sorted(attempt.returned.difference(task.ranks)))

    # --- failures, here and on other nodes

    def _news(self, attempt: _Attempt) -> News | None:
        """Return what has failed, on any node."""
        try:
            news = self._nodes.hear()
            failure = attempt.first_failure()
            if failure is None and self._launch.left:
                failure = _own("KeyboardInterrupt", "its notebook was interrupted", attempt.place.first_rank)
            if news is not None or failure is None or self._may_be_explained(attempt, failure):
                return news
            again = attempt.can_be_tried_again and not self._launch.left
            return self._nodes.tell(News.of(failure, attempt.place.node_rank, final=not again))
        except (*STORE_ERRORS, NodesMissing):
            if not self._nodes.several:
                raise
            gone = RankFailure(0, "died", "", str(self._nodes.gone()), "", time.monotonic())
            return News.of(gone, NOWHERE, final=True)

    def _may_be_explained(self, attempt: _Attempt, failure: RankFailure) -> bool:
        """Return whether another node is likely to report the cause of a failure here in a moment."""
        if not self._nodes.several or not report.follows(failure) or self._launch.left:
            return False
        return time.monotonic() < attempt.ended + _CAUSE_LIMIT

    def _failed(self, attempt: _Attempt, news: News) -> RunResult:
        if news.node != attempt.place.node_rank:
            attempt.fail(news.as_failure())
        while not attempt.over.wait(1.0):
            pass
        self._launch.verdict = news
        if news.final or self._launch.left:
            self._remaining_restarts = 0
        if self._remaining_restarts > 0:
            what = report.build([news.as_failure()]).report.splitlines()[0]
            where = f" (on node {news.node}, {news.host})" if news.node != attempt.place.node_rank else ""
            self._launch.order(
                f"{what}{where}; all ranks start again ({self._restart + 1} of {self._request.max_restarts})"
            )
        return RunResult(WorkerState.FAILED)
