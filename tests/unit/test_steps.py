"""What counts as a step, where a cell is stopped, and that several ranks stop after the same step."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from nbdist.processes import die_with_parent
from nbdist.worker.steps import StepCounter, StepStop

pytestmark = pytest.mark.torch_private

CELL = 7  # a serial number
MANY = 10_000  # steps: more than any cell here makes
LIMIT = 30.0  # seconds, after which something hangs

Step = Callable[[], object]
Log = list[str]


@pytest.fixture
def counter() -> Iterator[StepCounter]:
    """A counter with the cell CELL running."""
    counter = StepCounter()
    counter.install()
    assert counter.available
    counter.begin(CELL)
    yield counter
    counter.end(CELL)
    counter.uninstall()


@pytest.fixture
def control() -> Iterator[ThreadPoolExecutor]:
    """A thread that asks, as a rank's control thread does."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(4))
    made.grad = torch.ones(4)
    return made


def ask(counter: StepCounter, target: int, serial: int = CELL) -> None:
    counter.arm(serial)
    counter.aim(serial, target)


# --- what a step is


class Wrapper(Optimizer):
    """As Accelerate's: an Optimizer that never was initialised as one."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class InitialisedWrapper(Optimizer):
    """As ZeroRedundancyOptimizer: both are optimizers to torch."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.looks: list[bool] = []
        self.look: Callable[[], bool] = lambda: False

    def step(self, closure: Any = None) -> Any:
        value = self.inner.step(closure)
        self.looks.append(self.look())
        return value


class Refined(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Failing(SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD([parameter()]),
        lambda: AdamW([parameter()], foreach=True),
        lambda: AdamW([parameter()], fused=True),
        lambda: Wrapper(AdamW([parameter()])),
        lambda: InitialisedWrapper(AdamW([parameter()])),
        lambda: Refined([parameter()]),
    ],
    ids=["plain", "foreach", "fused", "wrapper", "initialised wrapper", "step calls super().step"],
)
def test_each_step_counts_once(counter: StepCounter, make: Callable[[], Optimizer]) -> None:
    optimizer = make()
    for _ in range(3):
        optimizer.step()
    assert counter.count == 3


def test_a_step_that_calls_its_closure_many_times_counts_once(counter: StepCounter) -> None:
    weight = parameter()
    optimizer = torch.optim.LBFGS([weight], max_iter=5)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = weight.pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls > 1
    assert counter.count == 1


def test_steps_of_several_optimizers_count_one_by_one(counter: StepCounter) -> None:
    generator, discriminator = SGD([parameter()]), AdamW([parameter()])
    for _ in range(2):
        generator.step()
        discriminator.step()
    assert counter.count == 4


def test_what_the_scaler_skips_is_no_step(counter: StepCounter) -> None:
    weight = parameter()
    optimizer, scaler = AdamW([weight]), torch.amp.GradScaler("cpu")
    for value in (1.0, float("inf"), 1.0):
        scaler.scale(weight.sum() * 0).backward()
        weight.grad = torch.full((4,), value)
        scaler.step(optimizer)
        scaler.update()
    assert counter.count == 2


def test_a_step_in_backward_is_none(counter: StepCounter) -> None:
    weight = parameter()
    optimizer = SGD([weight])
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    weight.sum().backward()
    assert counter.count == 0
    assert not counter.in_step


def test_a_step_in_another_thread_is_none(counter: StepCounter, control: ThreadPoolExecutor) -> None:
    control.submit(SGD([parameter()]).step).result()
    assert counter.count == 0


def test_a_compiled_step_counts_and_is_not_compiled_again_for_it(counter: StepCounter) -> None:
    import torch._dynamo.utils as dynamo

    optimizer = SGD([parameter()])

    def train_step() -> None:
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        compiled = torch.compile(train_step, backend="eager")
        for _ in range(3):
            compiled()
        frames = dynamo.counters["frames"]["total"]
        for _ in range(3):
            compiled()
    assert counter.count == 6
    assert dynamo.counters["frames"]["total"] == frames


def test_a_step_that_raises_is_none_and_the_next_one_counts(counter: StepCounter) -> None:
    with contextlib.suppress(RuntimeError):
        Failing([parameter()]).step()
    assert not counter.in_step
    SGD([parameter()]).step()
    assert counter.count == 1


def test_a_wrapper_that_tries_a_failed_step_again_makes_one_step(counter: StepCounter) -> None:
    class Persistent(Optimizer):
        def __init__(self) -> None:
            super().__init__([parameter()], {})

        def step(self, closure: Any = None) -> None:
            with contextlib.suppress(RuntimeError):
                Failing([parameter()]).step()
            SGD([parameter()]).step()

    optimizer = Persistent()
    for _ in range(2):
        optimizer.step()
    assert counter.count == 2


def test_the_rank_is_in_a_step_until_the_outermost_one_is_whole(counter: StepCounter) -> None:
    optimizer = InitialisedWrapper(SGD([parameter()]))
    optimizer.look = lambda: counter.in_step
    seen: list[tuple[str, bool]] = []
    counter.on_step.append(lambda stepped: seen.append(("on_step", counter.in_step)))
    counter.after_step = lambda: seen.append(("after_step", counter.in_step))
    optimizer.step()
    assert optimizer.looks == [True]
    assert seen == [("on_step", True), ("after_step", False)]
    assert not counter.in_step


def test_on_step_is_told_the_outermost_optimizer(counter: StepCounter) -> None:
    seen: list[Optimizer] = []
    counter.on_step.append(seen.append)
    optimizer = InitialisedWrapper(SGD([parameter()]))
    optimizer.step()
    assert seen == [optimizer]


def test_without_the_hooks_of_torch_the_feature_is_off_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    counter = StepCounter()
    counter.install()
    assert not counter.available
    assert "torch" in counter.reason


# --- what a rank answers when it is armed


def test_the_answer_says_how_many_steps_were_made_and_how_long_they_take(counter: StepCounter) -> None:
    optimizer = SGD([parameter()])
    assert counter.arm(CELL) == {"count": 0, "stepping": False, "running": True, "age": None, "median": None}
    counter.disarm(CELL)
    for _ in range(3):
        optimizer.step()
    answer = counter.arm(CELL)
    assert answer["count"] == 3
    assert answer["age"] >= 0
    assert answer["median"] > 0


def test_a_cell_that_has_not_started_is_running_and_one_that_has_ended_is_not(counter: StepCounter) -> None:
    assert counter.arm(CELL + 1)["running"]
    counter.end(CELL)
    assert not counter.arm(CELL)["running"]


def test_a_new_cell_starts_at_no_steps(counter: StepCounter) -> None:
    SGD([parameter()]).step()
    counter.end(CELL)
    counter.begin(CELL + 1)
    assert counter.count == 0
    assert counter.arm(CELL + 1)["age"] is None


# --- where it stops


def for_loop(step: Step, log: Log) -> None:
    for _ in range(MANY):
        step()
        log.append("end")


def with_around_the_step(step: Step, log: Log) -> None:
    for _ in range(MANY):
        with contextlib.nullcontext():
            step()
        log.append("end")


def statement_of_several_lines(step: Step, log: Log) -> None:
    for _ in range(MANY):
        log.extend(
            ["end" if step() is None else ""],
        )


def try_around_the_step(step: Step, log: Log) -> None:
    for _ in range(MANY):
        try:
            step()
        except ValueError:
            pass
        finally:
            log.append("end")


def handled_error_before_the_step(step: Step, log: Log) -> None:
    for _ in range(MANY):
        with contextlib.suppress(ValueError):
            int("no number")
        try:
            int("no number")
        except ValueError as error:
            del error
        step()
        for _ in range(3):
            pass
        log.append("end")


def while_loop(step: Step, log: Log) -> None:
    batches = iter(range(MANY))
    try:
        while next(batches, None) is not None:
            step()
            log.append("end")
    finally:
        assert next(batches) == log.count("end"), "no batch is fetched in vain"


def endless_loop(step: Step, log: Log) -> None:
    while True:
        with contextlib.nullcontext():
            step()
        log.append("end")


def one_line(step: Step, log: Log) -> None:
    for _ in range(MANY): step(); log.append("end")  # fmt: skip # noqa: E701, E702


def comprehension(step: Step, log: Log) -> None:
    _ = [(step(), log.append("end")) for _ in range(MANY)]


def function_in_a_loop(step: Step, log: Log) -> None:
    def train_step() -> None:
        step()

    for _ in range(MANY):
        train_step()
        log.append("end")


def early_continue(step: Step, log: Log) -> None:
    for number in range(MANY):
        step()
        log.append("end")
        if number >= 0:
            continue
        log.append("never")


def break_out_of_the_inner_loop(step: Step, log: Log) -> None:
    for _ in range(MANY):
        for _ in range(MANY):
            step()
            break
        log.append("end")


def generator(step: Step, log: Log) -> None:
    def losses() -> Iterator[int]:
        for number in range(MANY):
            step()
            yield number
            log.append("end")

    for _ in losses():
        pass


def coroutine(step: Step, log: Log) -> None:
    async def train_step() -> None:
        step()
        await asyncio.sleep(0)

    async def train() -> None:
        for _ in range(MANY):
            await train_step()
            log.append("end")

    asyncio.run(train())


@pytest.mark.parametrize(
    "train",
    [
        for_loop,
        with_around_the_step,
        statement_of_several_lines,
        try_around_the_step,
        handled_error_before_the_step,
        while_loop,
        endless_loop,
        one_line,
        comprehension,
        function_in_a_loop,
        early_continue,
        break_out_of_the_inner_loop,
        generator,
        coroutine,
    ],
)
def test_the_cell_stops_at_the_end_of_the_loops_body(counter: StepCounter, train: Callable[[Step, Log], None]) -> None:
    ask(counter, target=3)
    log: Log = []
    with pytest.raises(StepStop, match=r"^stopped after step 3$"):
        train(SGD([parameter()]).step, log)
    assert counter.stopped == counter.count == 3
    assert log == ["end"] * 3
    assert sys.gettrace() is None


def test_a_scheduler_and_what_follows_agree_with_the_steps(counter: StepCounter) -> None:
    ask(counter, target=5)
    optimizer = AdamW([parameter()])
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    bodies = 0
    with pytest.raises(StepStop):
        for _ in range(MANY):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            bodies += 1
    assert scheduler.last_epoch == bodies == 5


def test_a_body_with_several_steps_is_finished(counter: StepCounter) -> None:
    ask(counter, target=3)
    first, second = SGD([parameter()]), SGD([parameter()])
    with pytest.raises(StepStop, match="after step 4"):
        for _ in range(MANY):
            first.step()
            second.step()


def test_a_loop_that_is_not_pythons_stops_where_it_comes_by_again(counter: StepCounter) -> None:
    ask(counter, target=3)
    optimizer = SGD([parameter()])

    def train_step(_: int) -> None:
        optimizer.step()

    with pytest.raises(StepStop, match="after step 4"):
        list(map(train_step, range(MANY)))


def test_under_a_tracer_of_the_users_it_stops_in_the_step(counter: StepCounter) -> None:
    ask(counter, target=2)
    log: Log = []

    def tracer(*_: object) -> None: ...

    sys.settrace(tracer)
    try:
        with pytest.raises(StepStop):
            for_loop(SGD([parameter()]).step, log)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert counter.stopped == 2
    assert log == ["end"]


def test_a_cell_that_catches_the_stop_goes_on_and_is_not_stopped_again(counter: StepCounter) -> None:
    ask(counter, target=2)
    optimizer = SGD([parameter()])
    saved = 0
    for _ in range(10):
        try:
            for _ in range(3):
                optimizer.step()
        except KeyboardInterrupt:
            saved += 1
    assert saved == 1
    assert counter.count == 29
    assert counter.stopped is None


def test_a_stop_asked_for_before_the_cell_came_stays(counter: StepCounter) -> None:
    ask(counter, target=2, serial=CELL + 1)
    SGD([parameter()]).step()  # not the cell that was meant
    counter.end(CELL)
    counter.begin(CELL + 1)
    with pytest.raises(StepStop):
        for_loop(SGD([parameter()]).step, [])
    assert counter.stopped == 2


def test_a_stop_that_was_not_reached_ends_with_its_cell(counter: StepCounter) -> None:
    ask(counter, target=2)
    optimizer = SGD([parameter()])
    optimizer.step()
    optimizer.step()  # here it begins to wait for the end of a body that never comes
    counter.end(CELL)
    assert sys.gettrace() is None
    counter.begin(CELL + 1)
    for_loop_of_three(optimizer.step)
    assert counter.stopped is None


def for_loop_of_three(step: Step) -> None:
    for _ in range(3):
        step()


# --- waiting for the target


def test_an_armed_rank_waits_at_its_next_step_for_the_target(counter: StepCounter, control: ThreadPoolExecutor) -> None:
    asked, arrived = threading.Event(), threading.Event()
    optimizer = SGD([parameter()])

    def step() -> None:
        arrived.set()
        optimizer.step()

    def answer() -> int:
        count = int(counter.arm(CELL)["count"])
        asked.set()
        assert arrived.wait(LIMIT)
        counter.aim(CELL, count + 2)
        return count

    counted = control.submit(answer)
    assert asked.wait(LIMIT)
    with pytest.raises(StepStop):
        for_loop(step, [])
    assert counter.stopped == counted.result() + 2 == 2


def test_an_armed_rank_makes_no_step_that_others_have_not_made(
    counter: StepCounter, control: ThreadPoolExecutor
) -> None:
    optimizer = SGD([parameter()])
    optimizer.step()
    counter.arm(CELL)
    control.submit(counter.aim, CELL, 1)
    with pytest.raises(KeyboardInterrupt) as caught:
        optimizer.step()
    assert counter.count == 1
    assert caught.type is KeyboardInterrupt


def test_a_rank_to_be_interrupted_after_its_step_finishes_the_loops_body_first(counter: StepCounter) -> None:
    optimizer = SGD([parameter()])
    log: list[str] = []
    with pytest.raises(StepStop):
        for _ in range(3):
            log.append(f"before the step: {counter.finishing()}")
            optimizer.step()
            log.append(f"after it: {counter.finishing()}")
            log.append("counted")
    assert log == ["before the step: False", "after it: True", "counted"]


def test_a_rank_to_be_interrupted_behind_its_loop_is_at_once(counter: StepCounter) -> None:
    names = {"optimizer": SGD([parameter()]), "counter": counter}
    exec("for _ in range(3):\n    optimizer.step()\nfinishing = counter.finishing()", names)
    assert names["finishing"] is False


def test_a_stop_that_is_called_off_lets_the_waiting_rank_go_on(
    counter: StepCounter, control: ThreadPoolExecutor
) -> None:
    counter.on_step.append(lambda _: counter.count == 1 and counter.arm(CELL))
    counter.after_step = lambda: control.submit(counter.disarm, CELL) and None
    for_loop_of_three(SGD([parameter()]).step)
    assert counter.count == 3
    assert counter.stopped is None


def test_an_interrupt_breaks_the_wait(counter: StepCounter, control: ThreadPoolExecutor) -> None:
    counter.on_step.append(lambda _: counter.arm(CELL))
    main = threading.main_thread().ident or 0
    counter.after_step = lambda: control.submit(signal.pthread_kill, main, signal.SIGINT) and None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            for_loop_of_three(SGD([parameter()]).step)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not isinstance(caught.value, StepStop)
    assert counter.count == 1


# --- a stop that waits for the end of the loop's body


def test_a_pending_stop_is_overdue_after_a_while(counter: StepCounter) -> None:
    woken: list[bool] = []
    waking = StepCounter(wake=lambda: woken.append(True))
    counter.uninstall()
    waking.install()
    try:
        waking.begin(CELL)
        ask(waking, target=1)
        assert waking.overdue() is None
        SGD([parameter()]).step()
        due = waking.overdue()
        waking.disarm(CELL)
    finally:
        waking.end(CELL)
        waking.uninstall()
    assert woken == [True]
    assert due is not None
    assert waking.overdue() is None


def test_a_pending_stop_that_is_called_off_leaves_no_trace(counter: StepCounter, control: ThreadPoolExecutor) -> None:
    ask(counter, target=2)
    optimizer = SGD([parameter()])
    log: Log = []
    for number in range(1, 5):
        optimizer.step()
        if number == 2:
            assert sys.gettrace() is not None
            control.submit(counter.disarm, CELL).result()
        log.append("end")
    assert log == ["end"] * 4
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None


def test_a_process_that_the_cell_forks_is_not_stopped(counter: StepCounter) -> None:
    ask(counter, target=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are threads: the child starts none
        child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(KeyboardInterrupt):
            for_loop_of_three(SGD([parameter()]).step)
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- several ranks

RANKS = 4
INTERRUPTS = 30
SEED = 7


@pytest.mark.slow
def test_ranks_interrupted_at_any_moment_stop_after_the_same_step() -> None:
    """The ranks are forked from a process that has run no tensor operation, as a rank's template has not."""
    program = "from tests.unit import test_steps; test_steps.interrupt_ranks()"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    cells = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cells) == INTERRUPTS
    for ends in cells:
        assert len(ends) == RANKS
        assert all(end == ends[0] for end in ends), "as many steps and collectives, and the same weights"
        assert ends[0]["stopped"] in (None, ends[0]["steps"])
        assert ends[0]["steps"] == ends[0]["bodies"] == ends[0]["scheduler"]
    assert sum(ends[0]["stopped"] is not None for ends in cells) >= INTERRUPTS // 2


class Rank:
    """A rank as its controller sees it: lines of JSON go both ways."""

    def __init__(self, number: int, rendezvous: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        controller = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(controller)
                _be_rank(number, theirs, rendezvous)
            finally:
                os._exit(1)
        self._socket, self._lines = ours, ours.makefile()
        self._early: list[dict[str, Any]] = []

    def send(self, **message: Any) -> None:
        _send(self._socket, message)

    def receive(self, kind: str) -> dict[str, Any]:
        """The next message of this kind."""
        for message in self._early:
            if kind in message:
                self._early.remove(message)
                return dict(message[kind])
        while kind not in (message := json.loads(self._lines.readline())):
            self._early.append(message)
        return dict(message[kind])


def interrupt_ranks() -> None:
    """The controller's part: starts ranks, interrupts cells at random moments, prints how each ended on each rank."""
    moments = random.Random(SEED)
    rendezvous = socket.create_server(("127.0.0.1", 0))
    ranks = [Rank(number, rendezvous) for number in range(RANKS)]
    for serial in range(1, INTERRUPTS + 1):
        plan = {
            "serial": serial,
            "steps": moments.choice([2, MANY, MANY]),  # some end before they are stopped
            "micro": moments.choice([1, 1, 3]),
            "delay": moments.choice([0, 0.001, 0.005]),
            "late": moments.choice([0, 0.03]),
        }
        print(json.dumps(_interrupt(ranks, plan, moments)), flush=True)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)


def _interrupt(ranks: list[Rank], plan: dict[str, Any], moments: random.Random) -> list[dict[str, Any]]:
    for rank in ranks:
        rank.send(cell=plan)
    time.sleep(moments.random() * moments.choice([0.01, 0.1, 0.3]))
    for rank in moments.sample(ranks, RANKS):
        rank.send(arm=plan["serial"])
        time.sleep(moments.random() * 0.01)  # control messages arrive at very different moments
    target = max(rank.receive("armed")["count"] for rank in ranks) + 1
    for rank in moments.sample(ranks, RANKS):
        rank.send(aim=plan["serial"], target=target)
        time.sleep(moments.random() * 0.01)
    return [rank.receive("ended") for rank in ranks]


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _be_rank(number: int, channel: socket.socket, rendezvous: socket.socket) -> None:
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1",
        rendezvous.getsockname()[1],
        is_master=number == 0,
        master_listen_fd=os.dup(rendezvous.fileno()) if number == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    counter = StepCounter()
    counter.install()
    cells: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_answer, args=(channel, counter, cells), daemon=True).start()
    while True:
        _train(number, cells.get(), model, counter, channel)


def _answer(channel: socket.socket, counter: StepCounter, cells: SimpleQueue[dict[str, Any]]) -> None:
    for line in channel.makefile():
        message = json.loads(line)
        if "arm" in message:
            _send(channel, {"armed": counter.arm(message["arm"])})
        elif "aim" in message:
            counter.aim(message["aim"], message["target"])
        else:
            cells.put(message["cell"])


def _train(number: int, plan: dict[str, Any], model: nn.Module, counter: StepCounter, channel: socket.socket) -> None:
    import torch.distributed as dist

    pace = random.Random(plan["serial"] * RANKS + number)
    optimizer = AdamW(model.parameters(), 1e-3)
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    bodies = 0
    time.sleep(pace.random() * plan["late"])
    counter.begin(plan["serial"])
    with contextlib.suppress(StepStop):
        for _ in range(plan["steps"]):
            for _ in range(plan["micro"]):
                time.sleep(pace.random() * plan["delay"])
                model(torch.randn(4, 8)).pow(2).mean().backward()
            work = dist.all_reduce(torch.ones(1), async_op=True)
            optimizer.step()
            optimizer.zero_grad()
            work.wait()
            dist.all_reduce(torch.ones(1))
            scheduler.step()
            bodies += 1
    counter.end(plan["serial"])
    end = {
        "steps": counter.count,
        "stopped": counter.stopped,
        "bodies": bodies,
        "scheduler": scheduler.last_epoch,
        "collectives": dist.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group(),
        "weights": sum(float(p.detach().double().sum()) for p in model.parameters()),
    }
    _send(channel, {"ended": end})
