"""Optimizers and schedulers stay what they are when they are prepared, and schedules fit the data."""

from __future__ import annotations

import pytest

from testbed.kernel import Kernel
from tests.support.cells import TRAINING, on_ranks, value


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, TRAINING)


def test_a_prepared_optimizer_and_scheduler_can_be_pickled_and_copied(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared()
scheduler = nbdist.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1), plan=Plan())
step(model, optimizer)
kinds = [type(thing).__name__ for thing in pickle.loads(pickle.dumps((optimizer, scheduler)))]
twin = copy.deepcopy(scheduler); twin.step()
kinds, scheduler.last_epoch, twin.last_epoch, sorted(scheduler.state_dict().keys() & {"step", "state_dict"})"""
    assert value(ranks, code) == "(['SGD', 'StepLR'], 0, 1, [])"


def test_a_prepared_model_can_be_pickled_and_copied(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared("none", precision="bf16")
twin = copy.deepcopy(model)
with torch.no_grad(): twin.embed.weight.zero_()
again = pickle.loads(pickle.dumps(model))
twin(batch()).abs().sum().item(), "forward" in vars(twin), torch.equal(again.embed.weight, model.embed.weight)"""
    assert value(ranks, code) == "(0.0, True, True)"


def test_a_prepared_model_and_optimizer_are_freed_when_nobody_holds_them(ranks: Kernel) -> None:
    code = """
import gc, weakref
gc.disable()
net = Net(); optimizer = torch.optim.AdamW(net.parameters())
model, optimizer = nbdist.prepare(net, optimizer, plan=Plan(strategy="none", precision="bf16"))
step(model, optimizer)
seen = [weakref.ref(thing) for thing in (net, optimizer)]
del net, model, optimizer
gc.enable()
[reference() for reference in seen]"""
    assert value(ranks, code) == "[None, None]"


def test_a_scheduler_made_after_its_optimizer_was_prepared_steps_without_a_warning(ranks: Kernel) -> None:
    code = """
import warnings
model, optimizer = prepared()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    scheduler = nbdist.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), plan=Plan())
    step(model, optimizer); scheduler.step()
optimizer.param_groups[0]["lr"]"""
    assert value(ranks, code) == "0.05"


SCHEDULED = """
from torch.optim import lr_scheduler as schedules
def scheduled(make, **settings):
    state.forget()
    net = Net(); optimizer = torch.optim.SGD(net.parameters(), 1.0)
    loader = torch.utils.data.DataLoader(torch.zeros(40, 4), 2)
    scheduler = make(optimizer, len(loader))
    net, optimizer, loader, scheduler = nbdist.prepare(net, optimizer, loader, scheduler, plan=Plan(**settings))
    for x in loader:
        with nbdist.accumulate(net): nbdist.backward(net(x).sum()); optimizer.step(); scheduler.step()
    return round(scheduler.get_last_lr()[0], 3)
def transformers_s(optimizer, length):
    from transformers import get_linear_schedule_with_warmup
    return get_linear_schedule_with_warmup(optimizer, 2, 3 * length)
"""


def test_a_schedule_sized_by_the_loader_before_it_was_prepared_is_said_with_the_right_length(ranks: Kernel) -> None:
    code = f"%%distributed\n{SCHEDULED}\nscheduled(lambda o, n: schedules.LinearLR(o, 1.0, 0.0, total_iters=n))"
    outcome = ranks.ok(code)
    assert outcome.plain == ["[0-1] 0.5"]
    assert outcome.stderr.count("ends after") == 1
    assert "LinearLR ends after 20 steps, that is 1 x 20: what an epoch took before the loader" in outcome.stderr
    assert "an epoch takes 10 optimizer steps" in outcome.stderr and "make it end after 10." in outcome.stderr


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        ("transformers_s", "", "ends after 60 steps, that is 3 x 20"),
        ("transformers_s", "accumulate=4", "an epoch takes 3 optimizer steps"),
        ("lambda o, n: schedules.CosineAnnealingLR(o, 2 * n)", "", "for 2 epochs make it end after 20"),
        (
            "lambda o, n: schedules.SequentialLR("
            "o, [schedules.ConstantLR(o), schedules.CosineAnnealingLR(o, n - 4)], [4])",
            "strategy='fsdp'",
            "SequentialLR ends after 20 steps",
        ),
    ],
)
def test_the_length_of_many_schedules_is_known(ranks: Kernel, make: str, settings: str, words: str) -> None:
    assert words in ranks.ok(f"%%distributed\n{SCHEDULED}\nscheduled({make}, {settings})").stderr


@pytest.mark.parametrize(
    "call",
    [
        "scheduled(lambda o, n: schedules.LinearLR(o, 1.0, 0.0, total_iters=n), strategy='none')",
        "scheduled(lambda o, n: schedules.LinearLR(o, 1.0, 0.0, total_iters=n // 2))",
        "scheduled(lambda o, n: schedules.LinearLR(o, 0.1, total_iters=n))",
        "scheduled(lambda o, n: schedules.StepLR(o, n))",
    ],
)
def test_schedules_that_fit_or_are_not_known_are_not_said(ranks: Kernel, call: str) -> None:
    assert "ends after" not in ranks.ok(f"%%distributed\n{SCHEDULED}\n{call}").stderr


def test_a_scheduler_needs_no_optimizer(ranks: Kernel) -> None:
    """As those of other libraries, which set the rate themselves."""
    code = """
class Warmup:
    count = 0
    def step(self): self.count += 1
    def state_dict(self): return {}
model, optimizer = prepared(accumulate=2); scheduler = nbdist.prepare(Warmup(), plan=state.current().plan)
for _ in range(2): step(model, optimizer); scheduler.step()
scheduler.count"""
    assert value(ranks, code) == "1"


def test_nothing_of_an_earlier_plan_is_left_in_an_optimizer_that_a_scheduler_has_wrapped(ranks: Kernel) -> None:
    code = """
net = Net(); optimizer = torch.optim.SGD(net.parameters(), 0.1)
earlier = Plan(strategy="none", accumulate=2, clip_grad_norm=1e-6)
model, optimizer = nbdist.prepare(net, optimizer, plan=earlier)
scheduler = nbdist.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 9), plan=earlier)
step(model, optimizer)  # leaves a window open
nbdist.prepare(model, optimizer, scheduler, plan=Plan(strategy="none"))
before = values(model); step(model, optimizer)
bool((values(model) - before).norm() > 0.01)"""
    assert value(ranks, code) == "True"
