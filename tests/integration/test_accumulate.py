"""Windows of gradient accumulation: when optimizers step, and what an interrupt leaves of one."""

from __future__ import annotations

import json

import pytest

from testbed.kernel import Kernel
from tests.support.cells import TRAINING, on_ranks, refused, value


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, TRAINING)


WINDOWS = """
model, optimizer = prepared({strategy!r}, accumulate=3)
scheduler = nbdist.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), plan=state.current().plan)
told = []
for number in range(6):
    before = values(model)
    with nbdist.accumulate(model):
        nbdist.backward(model(batch(rank)).square().mean())
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
    told.append((nbdist.sync_gradients(), not torch.equal(values(model), before), scheduler.last_epoch))
"""


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_optimizer_and_scheduler_step_at_the_end_of_windows_only(ranks: Kernel, strategy: str) -> None:
    inside = [(False, False, 0), (False, False, 1)]
    expected = [inside[0], inside[0], (True, True, 1), inside[1], inside[1], (True, True, 2)]
    assert value(ranks, WINDOWS.format(strategy=strategy) + "told == " + repr(expected)) == "True"


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_gradients_may_be_zeroed_before_backward_or_behind_the_step(ranks: Kernel, strategy: str) -> None:
    code = f"""
def run(first):
    model, optimizer = prepared({strategy!r}, accumulate=3)
    for number in range(6):
        with nbdist.accumulate(model):
            if first: optimizer.zero_grad()
            nbdist.backward(model(batch(rank + number)).square().mean())
            optimizer.step()
            if not first: optimizer.zero_grad()
    return values(model)
torch.equal(run(True), run(False))"""
    assert value(ranks, code) == "True"


def test_a_window_that_is_given_up_leaves_no_gradient_behind(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=2)
for number in range(2):
    with nbdist.accumulate(model):
        nbdist.backward(model(batch()).square().mean())
        if not nbdist.sync_gradients(): optimizer.step()  # the last one finds its loss too bad
        optimizer.zero_grad()
[parameter.grad for parameter in model.parameters() if parameter.grad is not None and parameter.grad.any()]"""
    assert value(ranks, code) == "[]"


def test_garbage_is_collected_every_so_many_steps_and_not_between(ranks: Kernel) -> None:
    code = """
import gc
model, optimizer = prepared("ddp", gc_interval=2); told = []
state.before_loop()  # which frees what other tests have left
for _ in range(5):
    seen = []; gc.callbacks.append(lambda phase, info: seen.append(phase))
    step(model, optimizer); gc.callbacks.pop(); told.append("start" in seen)
nbdist.prepare(Net(), plan=Plan()); told, gc.isenabled()"""
    assert value(ranks, code) == "([False, True, False, True, False], True)"


def test_two_optimizers_keep_apart_what_each_has_gathered(ranks: Kernel) -> None:
    code = """
def run(first):
    nbdist.free_memory(); torch.manual_seed(0); nets = [Net(), Net()]
    parts = nbdist.prepare(*nets, *[torch.optim.SGD(net.parameters(), 0.1) for net in nets], plan=Plan(accumulate=2))
    for number in range(4):
        with nbdist.accumulate():
            for model, optimizer in zip(parts[:2], parts[2:]):
                if first: optimizer.zero_grad()
                nbdist.backward(model(batch(rank + number)).square().mean())
                optimizer.step()
                if not first: optimizer.zero_grad()
    return torch.cat([values(model) for model in parts[:2]])
torch.equal(run(True), run(False)), state.current().steps"""
    assert value(ranks, code) == "(True, 2)"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("known", [True, False], ids=["length", "stream"])
def test_a_short_last_window_is_averaged_over_its_own_length(ranks: Kernel, strategy: str, known: bool) -> None:
    """Also where the end of the data is known only when it comes."""
    code = f"""
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(torch.arange(40.0).view(10, 4))
source = torch.arange(40.0).view(10, 4) if {known} else Stream()
torch.manual_seed(0); net = nn.Linear(4, 1).double(); twin = copy.deepcopy(net)
model, optimizer, loader = nbdist.prepare(
    net, torch.optim.SGD(net.parameters(), 1e-4), DataLoader(source, 1), plan=Plan(strategy={strategy!r}, accumulate=3))
count = 0
for batch_ in loader:
    with nbdist.accumulate(model):
        nbdist.backward(model(batch_.double()).square().mean()); optimizer.step(); optimizer.zero_grad()
        count += nbdist.sync_gradients()
alone = torch.optim.SGD(twin.parameters(), 1e-4)
for part in (torch.arange(24.0).view(6, 4), torch.arange(24.0, 40.0).view(4, 4)):
    twin(part.double()).square().mean().backward(); alone.step(); alone.zero_grad()
count, torch.allclose(values(model), values(twin), rtol=1e-12)"""
    assert value(ranks, code) == "(2, True)"


def test_a_loop_over_other_data_inside_a_window_does_not_end_it(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=3)
loaders = [DataLoader(torch.zeros(count, 4), 2) for count in (24, 4)]
train, valid = nbdist.prepare(*loaders, plan=state.current().plan)
told = []
for number, part in enumerate(train):
    with nbdist.accumulate(model):
        nbdist.backward(model(part).sum()); optimizer.step(); told.append(nbdist.sync_gradients())
    if number == 1:
        for other in valid: pass
told"""
    assert value(ranks, code) == "[False, False, True, False, False, True]"


def test_an_error_that_the_user_catches_leaves_ranks_at_the_same_micro_batch(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=2); told = []
for number in range(4):
    try:
        with nbdist.accumulate(model):
            if number == 0 and rank == 1: raise ValueError("a sample that can't be read")
            nbdist.backward(model(batch()).square().mean()); optimizer.step(); optimizer.zero_grad()
    except ValueError: pass
    told.append(nbdist.sync_gradients())
told"""
    assert value(ranks, code) == "[False, True, False, True]"


def test_an_interrupt_inside_a_window_begins_a_new_one_on_all_ranks(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=3)
for number in range(1 + rank):
    try:
        with nbdist.accumulate(model):
            nbdist.backward(model(batch()).square().mean())
            if number == rank: raise KeyboardInterrupt
    except KeyboardInterrupt: pass
told = []
for number in range(3):
    step(model, optimizer); told.append(nbdist.sync_gradients())
told, bool(nbdist.check(model))"""
    assert value(ranks, code) == "([False, False, True], True)"


@pytest.mark.torch_private
@pytest.mark.parametrize("settings", ["'none'", "'ddp'", "'fsdp'", "'fsdp', exchange='each'"])
def test_what_an_interrupted_window_has_gathered_is_in_no_later_step(ranks: Kernel, settings: str) -> None:
    """FSDP keeps it where `zero_grad` does not come to."""
    code = f"""
def run(interrupted):
    model, optimizer = prepared({settings}, accumulate=2)
    try:
        with nbdist.accumulate(model):
            if interrupted: nbdist.backward(model(batch(rank)).square().mean() * 100); raise KeyboardInterrupt
    except KeyboardInterrupt: pass
    if not interrupted: state.current().abandon_window()
    for _ in range(2): step(model, optimizer)
    return values(model)
torch.equal(run(True), run(False))"""
    assert value(ranks, code) == "True"


def test_a_new_training_begins_with_a_whole_window(ranks: Kernel) -> None:
    """Even though the earlier one was left in the middle of one, and still lives while the new one is prepared."""
    code = """
told = []
for steps in (2, 4):
    model, optimizer = prepared(accumulate=4)
    for _ in range(steps): step(model, optimizer); told.append(nbdist.sync_gradients())
told"""
    assert value(ranks, code) == "[False, False, False, False, False, True]"


def test_a_loader_may_be_prepared_inside_a_window(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=2); step(model, optimizer)
nbdist.prepare(DataLoader(torch.zeros(4, 4)), plan=state.current().plan); step(model, optimizer)
nbdist.sync_gradients()"""
    assert value(ranks, code) == "True"


def test_a_short_window_is_as_long_for_an_optimizer_whose_loss_comes_later(ranks: Kernel) -> None:
    """One steps before the other's backward, in a last micro-batch that nobody could foresee."""
    code = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(torch.arange(40.0).view(10, 4))
def run(source):
    torch.manual_seed(0); nets = [nn.Linear(4, 1).double() for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 1e-4) for net in nets]
    *parts, loader = nbdist.prepare(*nets, *optimizers, DataLoader(source, 1), plan=Plan(accumulate=3))
    for part in loader:
        with nbdist.accumulate():
            for model, optimizer in zip(parts[:2], parts[2:]):
                nbdist.backward(model(part.double()).square().mean()); optimizer.step(); optimizer.zero_grad()
    return torch.cat([values(model) for model in parts[:2]])
torch.allclose(run(Stream()), run(torch.arange(40.0).view(10, 4)), rtol=1e-12)"""
    assert value(ranks, code) == "True"


@pytest.mark.parametrize(("setting", "worth"), [("clip_grad_norm", 1.0), ("accumulate", 2), ("precision", "fp16")])
def test_a_closure_is_refused_where_its_gradients_would_escape_the_plan(
    ranks: Kernel, setting: str, worth: object
) -> None:
    code = f"""
model, optimizer = prepared({setting}={worth!r})
for _ in range(state.current().plan.accumulate):
    with nbdist.accumulate(model): optimizer.step(lambda: model(batch()).sum())"""
    assert f"a step with a closure can't be combined with {setting}" in refused(ranks, code)


def test_a_copy_of_a_prepared_optimizer_steps_as_any_optimizer(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=2)
nbdist.backward(model(batch()).square().mean()); optimizer.step(); optimizer.zero_grad()
with nbdist.accumulate(model):
    twin = copy.deepcopy(optimizer); parameter = twin.param_groups[0]["params"][0]
    before = parameter.detach().clone(); parameter.grad = torch.ones_like(parameter)
    twin.step(); twin.zero_grad()
torch.equal(parameter, before), parameter.grad"""
    assert value(ranks, code) == "(False, None)"


def test_accumulate_with_a_model_that_was_not_prepared_is_refused(ranks: Kernel) -> None:
    assert "a Net that was not prepared" in refused(ranks, "with nbdist.accumulate(Net()): pass")


# --- an interrupt of the session


@pytest.mark.torch_private
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_goes_on_after_an_interrupt(ranks: Kernel, strategy: str) -> None:
    on_ranks(ranks, f"import time\nmodel, optimizer = prepared({strategy!r}, accumulate=3, clip_grad_norm=1.0)")
    loop = """%%distributed
while True:
    step(model, optimizer); time.sleep(0.003)
    if state.current().steps % 5 == 0 and nbdist.sync_gradients(): print('five more')"""
    cell = ranks.start(loop)
    cell.wait_until(lambda seen: all("five more" in seen.lines.get(rank, []) for rank in (0, 1)), "steps of both ranks")
    ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    code = """
before = state.current().steps
for _ in range(6): step(model, optimizer)
state.current().steps - before, bool(torch.isfinite(values(model)).all())"""
    assert value(ranks, code) == "(2, True)"
    assert (
        value(ranks, "all_steps = nbdist.gather_object([state.current().steps]); all_steps[0] == all_steps[1]")
        == "True"
    )


@pytest.mark.torch_private
def test_a_cell_that_was_interrupted_in_the_background_goes_on_when_it_is_run_again(ranks: Kernel) -> None:
    on_ranks(
        ranks,
        """
import time
torch.manual_seed(0); net = Net(); optimizer = torch.optim.SGD(net.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
objects = net, optimizer, scheduler, DataLoader(torch.rand(4000, 4), 2, shuffle=True)
model, optimizer, scheduler, loader = nbdist.prepare(*objects, plan=Plan(strategy="fsdp", accumulate=3))""",
    )
    cell = """%%distributed --background
nbdist.prepare(model, optimizer, scheduler, loader, plan=state.current().plan)
for part in loader:
    with nbdist.accumulate(model):
        nbdist.backward(model(part).square().mean())
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
    time.sleep(0.003)
    if state.current().steps % 5 == 0 and nbdist.sync_gradients(): print('five more')"""
    told = []
    for _ in range(2):
        running = ranks.start(cell)
        assert running.finish().status == "ok"
        running.wait_late("five more")
        ranks.ok("%distributed interrupt")
        running.wait_late("all ranks stopped after step")
        told.append(value(ranks, "all_ranks = nbdist.gather_object([state.current().steps]); all_ranks"))
        assert "agree" in value(ranks, "nbdist.check(model, optimizer)")
    first, second = map(json.loads, told)
    assert first[0] == first[1] < second[0] == second[1]


@pytest.mark.torch_private
@pytest.mark.parametrize(("work", "said"), [("", False), ("norm(torch.ones(2, 2))", True)], ids=["idle", "forward"])
def test_statistics_of_a_lost_step_are_told_of_where_there_was_one(ranks: Kernel, work: str, said: bool) -> None:
    on_ranks(ranks, "norm = nn.BatchNorm1d(2); norm(torch.ones(2, 2))")
    outcome = ranks.fails(
        f"%%distributed\n{work}\nif rank == 0: dist.all_reduce(torch.ones(1))\nelse: 1 / 0", "RankError"
    )
    assert ("BatchNorm statistics of the lost step are kept" in str(outcome)) == said, str(outcome)
