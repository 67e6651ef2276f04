"""What counts as a step, and what a rank answers when it is armed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from nbdist.metrics.events.step_events import of_this_thread
from nbdist.wire.questions.stopping import StepsMade
from nbdist.worker.recovery.step_stop import StepCounter
from tests.support.stepping import CELL, parameter

pytestmark = pytest.mark.torch_private


# --- what a step is


class Wrapper(Optimizer):
    """As Accelerate's: an Optimizer that never was initialized as one."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class InitializedWrapper(Optimizer):
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
        lambda: InitializedWrapper(AdamW([parameter()])),
        lambda: Refined([parameter()]),
    ],
    ids=["plain", "foreach", "fused", "wrapper", "initialized wrapper", "step calls super().step"],
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
    assert not of_this_thread().in_step


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
    assert not of_this_thread().in_step
    SGD([parameter()]).step()
    assert counter.count == 1


def test_a_wrapper_that_tries_a_failed_step_again_makes_one_step(counter: StepCounter) -> None:
    class Persistent(Optimizer):
        def __init__(self) -> None:
            super().__init__([parameter()], {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with contextlib.suppress(RuntimeError):
                Failing([parameter()]).step()
            SGD([parameter()]).step()

    optimizer = Persistent()
    for _ in range(2):
        optimizer.step()
    assert counter.count == 2


def test_a_step_is_under_way_until_the_outermost_one_is_whole() -> None:
    events = of_this_thread()
    optimizer = InitializedWrapper(SGD([parameter()]))
    optimizer.look = lambda: events.in_step
    seen: list[tuple[str, bool]] = []
    stop = events.listen(
        before=lambda stepping: seen.append(("before", events.in_step)),
        after=lambda stepped: seen.append(("after", events.in_step)),
        over=lambda: seen.append(("over", events.in_step)),
    )
    optimizer.step()
    stop()
    assert optimizer.looks == [True]
    assert seen == [("before", False), ("after", True), ("over", False)]
    assert not events.in_step


def test_the_outermost_optimizer_is_named() -> None:
    seen: list[Optimizer] = []
    stop = of_this_thread().listen(before=seen.append, after=seen.append)
    optimizer = InitializedWrapper(SGD([parameter()]))
    optimizer.step()
    stop()
    assert seen == [optimizer, optimizer]


def test_a_step_that_is_refused_before_it_begins_is_not_under_way() -> None:
    def refuse(optimizer: Optimizer) -> None:
        raise KeyboardInterrupt

    seen: list[Optimizer] = []
    stop = of_this_thread().listen(before=refuse, after=seen.append)
    with pytest.raises(KeyboardInterrupt):
        SGD([parameter()]).step()
    stop()
    assert not of_this_thread().in_step
    SGD([parameter()]).step()
    assert seen == []


def test_who_listens_no_longer_hears_nothing_and_the_last_takes_the_hooks_off() -> None:
    from torch.optim import optimizer

    hooks = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    first: list[Optimizer] = []
    second: list[Optimizer] = []
    stop_first = of_this_thread().listen(after=first.append)
    stop_second = of_this_thread().listen(after=second.append)
    stop_first()
    SGD([parameter()]).step()
    stop_first()
    stop_second()
    assert (len(first), len(second)) == (0, 1)
    assert hooks == (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))


@pytest.mark.parametrize(("compiled", "heard"), [(False, 0), (True, 3)])
def test_compiled_steps_are_heard_by_those_who_want_them(compiled: bool, heard: int) -> None:
    seen: list[Optimizer] = []
    stop = of_this_thread().listen(after=seen.append, compiled=compiled)
    _make_three_compiled(SGD([parameter()]))
    stop()
    assert len(seen) == heard


def _make_three_compiled(optimizer: Optimizer) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        compiled = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            compiled()


def test_one_who_wants_compiled_steps_comes_after_one_who_does_not() -> None:
    first: list[Optimizer] = []
    second: list[Optimizer] = []
    stop_first = of_this_thread().listen(after=first.append)
    stop_second = of_this_thread().listen(after=second.append, compiled=True)
    _make_three_compiled(SGD([parameter()]))
    stop_second()
    _make_three_compiled(SGD([parameter()]))
    stop_first()
    assert (len(first), len(second)) == (3, 3)


def test_without_the_hooks_of_torch_the_feature_is_off_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    counter = StepCounter()
    counter.install()
    assert not counter.available
    assert "torch" in counter.reason


# --- what a rank answers when it is armed


def test_the_answer_says_how_many_steps_were_made_and_how_long_they_take(counter: StepCounter) -> None:
    optimizer = SGD([parameter()])
    assert counter.arm(CELL) == StepsMade(count=0, stepping=False, running=True)
    counter.disarm(CELL)
    for _ in range(3):
        optimizer.step()
    answer = counter.arm(CELL)
    assert answer.count == 3
    assert answer.age is not None and answer.age >= 0
    assert answer.median is not None and answer.median > 0


def test_a_cell_that_has_not_started_is_running_and_one_that_has_ended_is_not(counter: StepCounter) -> None:
    assert counter.arm(CELL + 1).running
    counter.end(CELL)
    assert not counter.arm(CELL).running


def test_a_new_cell_starts_at_no_steps(counter: StepCounter) -> None:
    SGD([parameter()]).step()
    counter.end(CELL)
    counter.begin(CELL + 1)
    assert counter.count == 0
    assert counter.arm(CELL + 1).age is None
