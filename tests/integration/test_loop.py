"""The loop of a user: windows, clipping, fp16, values of all ranks, turns. Names and meanings are Accelerate's."""

from __future__ import annotations

import json

import pytest

from testbed.kernel import Kernel
from tests.support.cells import on_ranks, refused, value

SETUP = """
import copy, os, warnings, torch, nbdist
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nbdist.plan import Plan
from nbdist.train import state
from tests.support.train_models import *
"""


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, SETUP)


# --- windows

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
    assert ("BatchNorm statistics of the lost step stay" in str(outcome)) == said, str(outcome)


# --- precision


def test_autocast_follows_the_plan_and_before_there_is_one_the_launchers_environment(ranks: Kernel) -> None:
    code = """
def inside():
    with nbdist.autocast(): return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
nbdist.free_memory(); told = [inside()]
os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"; told.append(inside())
kept = prepared("ddp"); told.append(inside())
kept = prepared("ddp", precision="bf16"); told.append(inside())
os.environ["ACCELERATE_MIXED_PRECISION"] = "bf61"; nbdist.free_memory()
try: inside()
except nbdist.UsageError as error: told.append(str(error))
finally: del os.environ["ACCELERATE_MIXED_PRECISION"]
for line in told: print(str(line).removeprefix("torch."))"""
    refusal = "ACCELERATE_MIXED_PRECISION=bf61 is not a precision: allowed are no, bf16, fp16 and fp8"
    lines = ["float32", "bfloat16", "float32", "bfloat16", refusal]
    assert ranks.ok(f"%%distributed\n{code}").lines == {0: lines, 1: lines}


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_under_bf16_a_model_computes_in_it_and_returns_float32(ranks: Kernel, strategy: str) -> None:
    code = f"""
model, optimizer = prepared({strategy!r}, precision="bf16"); seen = []
nbdist.unwrap(model).blocks[0].linear.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
result = model(batch()).dtype
[str(kind) for kind in (seen[0], result, optimizer.param_groups[0]["params"][0].dtype)]"""
    assert value(ranks, code) == "['torch.bfloat16', 'torch.float32', 'torch.float32']"


def test_fp16_skips_a_step_whose_gradient_is_infinite_counts_it_and_says_so_once(ranks: Kernel) -> None:
    code = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, optimizer = prepared(precision="fp16")
    scheduler = nbdist.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), plan=state.current().plan)
    told = []
    for bad in (True, False, True, False):
        before = values(model)
        with nbdist.accumulate(model):
            nbdist.backward(model(batch(rank)).square().mean() * (float("inf") if bad and rank == 1 else 1.0))
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
        told.append(torch.equal(before, values(model)))
said = [warning for warning in caught if "fp16: an optimizer step was skipped" in str(warning.message)]
current = state.current()
summary = told, current.steps, current.skipped_steps, scheduler.last_epoch, current.scaler.get_scale()
len(said) == (rank == 0), summary"""
    told = on_ranks(ranks, code)
    assert told == ["[0-1] (True, ([True, False, True, False], 2, 2, 2, 16384.0))"]


def test_fp16_that_goes_on_skipping_steps_says_so_again(ranks: Kernel) -> None:
    code = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, optimizer = prepared("none", precision="fp16")
    for _ in range(12):
        nbdist.backward(model(batch()).sum() * float("nan")); optimizer.step(); optimizer.zero_grad()
said = [warning for warning in caught if "fp16" in str(warning.message)]
rank != 0 or ["10 optimizer steps were skipped" in str(said[1].message), len(said)]"""
    assert "\n".join(on_ranks(ranks, code)) == "[0] [True, 2]\n[1] True"


def test_an_infinite_shard_on_one_rank_skips_the_step_on_all(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared("fsdp")
state.current().scaler = torch.amp.GradScaler("cpu")
told = []
for bad in (True, False):
    before = values(model)
    with nbdist.accumulate(model):
        nbdist.backward(model(batch(rank)).square().mean())
        if bad and rank == 1: nbdist.unwrap(model).blocks[0].linear.weight.grad.to_local()[0, 0] = float("nan")
        optimizer.step(); optimizer.zero_grad()
    told.append(torch.equal(before, values(model)))
told, state.current().skipped_steps"""
    assert value(ranks, code) == "([True, False], 1)"


def test_fp16_with_two_optimizers_gives_each_gradients_of_the_loss(ranks: Kernel) -> None:
    code = """
def run(precision):
    torch.manual_seed(0); nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    parts = nbdist.prepare(*nets, *optimizers, plan=Plan(precision=precision))
    if precision == "fp16": state.current().scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    for number in range(4):
        for model, optimizer in zip(parts[:2], parts[2:]):
            nbdist.backward(model(batch(rank)).square().mean())
            optimizer.step(); optimizer.zero_grad()
    return torch.cat([values(model) for model in parts[:2]])
exact, half = run("fp32"), run("fp16")
now = state.current()
torch.allclose(half, exact, rtol=0.02, atol=1e-3), now.skipped_steps, now.scaler.get_scale() > 64"""
    assert value(ranks, code) == "(True, 0, True)"


def test_fp16_goes_on_after_an_interrupt_between_clipping_and_the_step(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(precision="fp16")
try:
    with nbdist.accumulate(model):
        nbdist.backward(model(batch(rank)).square().mean()); nbdist.clip_grad_norm_(model.parameters(), 1.0)
        raise KeyboardInterrupt
except KeyboardInterrupt: pass
scale = state.current().scaler.get_scale()
for _ in range(2): step(model, optimizer)
state.current().steps, state.current().scaler.get_scale() == scale"""
    assert value(ranks, code) == "(2, True)"


@pytest.mark.parametrize("earlier", [0, 1])
def test_under_fp16_a_loss_that_was_not_scaled_is_told_instead_of_vanishing(ranks: Kernel, earlier: int) -> None:
    code = f"""
model, optimizer = prepared(precision="fp16")
for _ in range({earlier}): step(model, optimizer)
model(batch()).square().mean().backward(); optimizer.step()"""
    assert "call nbdist.backward(loss) instead of loss.backward()" in refused(ranks, code)


# --- clipping


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp", "hsdp"])
def test_norms_are_those_of_the_whole_model(ranks: Kernel, strategy: str) -> None:
    code = f"""
model, optimizer = prepared({strategy!r})
for kind in (2.0, 1.0, float("inf")):
    optimizer.zero_grad()
    nbdist.backward(model(batch()).square().mean())
    gradients = torch.cat([whole(parameter.grad).flatten() for parameter in model.parameters()])
    norm = nbdist.clip_grad_norm_(model.parameters(), 0.1, kind)
    clipped = torch.cat([whole(parameter.grad).flatten() for parameter in model.parameters()])
    torch.testing.assert_close(norm, gradients.norm(kind))
    torch.testing.assert_close(clipped.norm(kind), torch.tensor(0.1), rtol=1e-4, atol=0)
nbdist.clip_grad_value_(model, 0.01)
max(whole(parameter.grad).abs().max().item() for parameter in model.parameters()) <= 0.01"""
    assert value(ranks, code) == "True"


def test_nothing_is_clipped_inside_a_window(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=2); told = []
for number in range(2):
    with nbdist.accumulate(model):
        nbdist.backward(model(batch()).square().mean())
        told.append(nbdist.clip_grad_norm_(model.parameters(), 0.1) is None)
told"""
    assert value(ranks, code) == "[True, False]"


@pytest.mark.parametrize("limit", ["0", "-1.0", "float('nan')", "'1'"])
def test_a_limit_that_is_no_positive_number_is_refused(ranks: Kernel, limit: str) -> None:
    text = refused(ranks, f"model, _ = prepared(); nbdist.clip_grad_norm_(model.parameters(), {limit})")
    assert "must be a number above 0" in text


# --- local SGD


@pytest.mark.parametrize("way", ["context", "plan"])
def test_local_sgd_of_period_1_equals_ddp(ranks: Kernel, way: str) -> None:
    code = f"""
def run(local, by_plan):
    torch.manual_seed(0); net = Net().double()
    model, optimizer = nbdist.prepare(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        plan=Plan(local_sgd_steps=int(local and by_plan)))
    with nbdist.LocalSGD(model, local_sgd_steps=1, enabled=local and not by_plan) as averaging:
        for _ in range(4):
            with nbdist.accumulate(model):
                nbdist.backward(model(batch(rank, torch.float64)).square().mean())
                optimizer.step(); optimizer.zero_grad(); averaging.step()
    return values(model)
torch.allclose(run(True, {way == "plan"}), run(False, False), rtol=1e-12, atol=1e-14)"""
    assert value(ranks, code) == "True"


def test_local_sgd_lets_ranks_go_apart_between_averages_and_brings_them_together_at_the_end(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(); told = []
with nbdist.LocalSGD(model, local_sgd_steps=2) as averaging:
    for _ in range(3):
        step(model, optimizer); averaging.step()
        told.append(bool(nbdist.check(model)))
told, bool(nbdist.check(model))"""
    assert value(ranks, code) == "([False, True, False], True)"


def test_local_sgd_with_a_sharded_model_is_refused(ranks: Kernel) -> None:
    text = refused(ranks, "model, _ = prepared('fsdp'); nbdist.LocalSGD(model, 2)")
    assert "needs a whole model on each rank" in text


# --- values of all ranks


def test_gather_joins_tensors_of_any_type_in_the_order_of_ranks(ranks: Kernel) -> None:
    code = """
told = []
for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
    joined = nbdist.gather(torch.full((2, 1), rank, dtype=kind))
    told.append(joined.flatten().to(torch.complex64).real.tolist() == [0, 0, 1, 1])
across = nbdist.gather(torch.arange(4).view(2, 2).t() + rank)
all(told), nbdist.gather(torch.tensor(rank)).tolist(), across[:, 0].tolist()"""
    assert value(ranks, code) == "(True, [0, 1], [0, 1, 1, 2])"


def test_gather_keeps_the_structure(ranks: Kernel) -> None:
    code = """
import collections
Pair = collections.namedtuple("Pair", "a b")
result = nbdist.gather({"x": [torch.tensor([rank])], "y": Pair(torch.tensor(rank), (torch.ones(0, 3),))})
type(result["y"]).__name__, result["x"][0].tolist(), result["y"].a.tolist(), tuple(result["y"].b[0].shape)"""
    assert value(ranks, code) == "('Pair', [0, 1], [0, 1], (0, 3))"


@pytest.mark.parametrize(
    "call",
    [
        "gather(loss)",
        "gather({'loss': loss})",
        "gather_for_metrics(loss)",
        "reduce(loss, 'mean')",
        "broadcast(loss)",
        "check_trigger()",
    ],
)
def test_a_number_of_each_rank_costs_one_collective(ranks: Kernel, call: str) -> None:
    code = f"""
gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
loss = torch.tensor(0.5 + rank)
before = gloo._get_sequence_number_for_group()
nbdist.{call}
gloo._get_sequence_number_for_group() - before"""
    assert value(ranks, code) == "1"


def test_numbers_of_any_type_come_as_they_are(ranks: Kernel) -> None:
    """Those of 32 bits travel with the comparison of the calls, the others after it."""
    code = """
special = [1.5 + rank, -0.0, float("inf"), -float("inf"), 65504.0]
kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
samples = [torch.tensor(number, dtype=kind) for number in special for kind in kinds]
whole = [torch.int64, torch.int32, torch.int16, torch.int8]
samples += [torch.tensor(number - rank, dtype=kind) for number in (-1, 127) for kind in whole]
samples += [torch.tensor(rank, dtype=torch.uint8), torch.tensor(rank == 0), torch.tensor(1j + rank)]
wrong = []
for sample in samples:
    for shaped in (sample, sample[None], sample[None, None], sample.expand(2)[:1]):
        dist.all_gather_object(parts := [None, None], shaped)
        together, first = nbdist.gather(shaped), nbdist.broadcast(shaped.clone())
        expected = torch.stack(parts) if sample is shaped else torch.cat(parts)
        same = torch.equal(together, expected) and together.dtype == sample.dtype and together.shape == expected.shape
        if not same or not torch.equal(first, parts[0]) or first.shape != shaped.shape:
            wrong.append(shaped)
wrong"""
    assert value(ranks, code) == "[]"


def test_sums_of_numbers_have_the_type_and_shape_that_other_sums_have(ranks: Kernel) -> None:
    code = """
told = []
for kind in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool):
    for reduction in ("sum", "mean"):
        small = nbdist.reduce(torch.tensor([rank], dtype=kind), reduction, scale=3.0)
        large = nbdist.reduce(torch.tensor([rank] * 3, dtype=kind), reduction, scale=3.0)
        told.append(torch.equal(small, large[:1]) and small.dtype == large.dtype)
set(told), nbdist.reduce(torch.tensor(1.0 + rank, requires_grad=True))"""
    assert value(ranks, code) == "({True}, tensor(3.))"


def test_a_number_that_is_elsewhere_on_one_rank_is_told_on_all(ranks: Kernel) -> None:
    """Where it can be read at once it travels with the comparison: who has it on a device expects another exchange."""
    code = "nbdist.gather(torch.tensor(1.0, device='cpu' if rank == 0 else 'meta'))"
    assert "rank 0 with it: [] torch.float32 on the CPU; rank 1 with it: [] torch.float32" in refused(ranks, code)


@pytest.mark.parametrize("function", ["gather", "reduce", "broadcast"])
def test_shapes_that_differ_are_told_on_all_ranks(ranks: Kernel, function: str) -> None:
    text = refused(ranks, f"nbdist.{function}([torch.ones(2 + rank, 3)])")
    assert f"ranks called {function} with different tensors: rank 0 with [0]: [2, 3] torch.float32; rank 1" in text


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            "broadcast(torch.ones(1), rank)",
            "broadcast with different arguments: rank 0 with from_process=0; rank 1 with from_process=1",
        ),
        (
            "reduce(torch.ones(1), ['sum', 'mean'][rank])",
            "reduce with different arguments: rank 0 with reduction='sum', scale=1.0",
        ),
        ("reduce(torch.ones(1), ['sum', 'max'][rank])", 'is unknown: allowed are "mean", "sum" and "none"'),
        (
            "broadcast_object_list([0] * (1 + rank))",
            "rank 0 with 1 objects, from_process=0; rank 1 with 2 objects",
        ),
    ],
)
def test_other_arguments_on_a_rank_are_told_on_all(ranks: Kernel, call: str, told: str) -> None:
    assert told in refused(ranks, f"nbdist.{call}")


@pytest.mark.parametrize(
    ("call", "name"), [("gather(torch.ones(1))", "gather"), ("gather_object([1])", "gather_object")]
)
def test_ranks_that_call_different_functions_are_told_so(ranks: Kernel, call: str, name: str) -> None:
    text = refused(ranks, f"nbdist.prepare(Net(), plan=Plan()) if rank == 0 else nbdist.{call}")
    assert f"rank 0 called prepare, rank 1 {name}: call the same on all ranks" in text


def test_an_exchange_of_the_users_own_is_not_taken_for_an_answer(own_ranks: Kernel) -> None:
    """Its bytes would be read as a length of petabytes."""
    code = "import nbdist, torch\nresult = [None, None]"
    own_ranks.ok(f"%%distributed\n{code}")
    cell = "if rank == 0: nbdist.gather(torch.ones(1))\nelse: torch.distributed.all_gather_object(result, 'mine')"
    outcome = own_ranks.fails(f"%%distributed\n{cell}", "RankError")
    assert "gather was called here while rank 1 is in a different collective" in outcome.traceback


def test_what_is_no_tensor_on_one_rank_is_told_on_all(ranks: Kernel) -> None:
    text = refused(ranks, "nbdist.gather({'a': torch.ones(1) if rank == 0 else 'one'})")
    assert "rank 1: gather takes tensors, or lists, tuples and dicts of them, and ['a'] is of type str" in text


def test_objects_of_all_ranks_are_joined(ranks: Kernel) -> None:
    assert value(ranks, "nbdist.gather_object([f'rank {rank}'] * (1 + rank))") == "['rank 0', 'rank 1', 'rank 1']"
    assert "gather_object takes a list, not int" in refused(ranks, "nbdist.gather_object(3 if rank else [3])")


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_metrics_count_no_sample_twice(ranks: Kernel, even: bool) -> None:
    code = f"""
loader = nbdist.prepare(DataLoader(torch.arange(11), 2), plan=Plan(even_batches={even}))
seen, objects = [], []
for part in loader:
    seen += nbdist.gather_for_metrics({{"sample": part}})["sample"].tolist()
    objects += nbdist.gather_for_metrics([f"{{number}}" for number in part.tolist()])
seen == list(range(11)), objects == [str(number) for number in range(11)]"""
    assert value(ranks, code) == "(True, True)"


def test_metrics_of_ranks_that_train_alone_are_all_kept(ranks: Kernel) -> None:
    code = """
loader = nbdist.prepare(DataLoader(torch.arange(3), 2), plan=Plan(strategy="none"))
[nbdist.gather_for_metrics(part).tolist() for part in loader]"""
    assert value(ranks, code) == "[[0, 1, 0, 1], [2, 2]]"


def test_tensors_are_padded_to_the_longest(ranks: Kernel) -> None:
    code = """
mine = torch.full((1 + rank, 2), float(rank))
behind = nbdist.pad_across_processes(mine, pad_index=-1)
in_front = nbdist.pad_across_processes([mine.t()], dim=1, pad_first=True)[0]
number = nbdist.pad_across_processes(torch.tensor(rank)).item()
nbdist.gather(behind)[:, 0].tolist(), nbdist.gather(in_front)[:, 0].tolist(), number == rank"""
    assert value(ranks, code) == "([0.0, -1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], True)"


def test_reduce_and_broadcast(ranks: Kernel) -> None:
    code = """
mine = torch.tensor([float(rank)])
told = nbdist.reduce(mine, scale=2.0).item(), nbdist.reduce({"a": mine}, "mean")["a"].item(), mine.item() == rank
flags = nbdist.reduce(torch.tensor([rank == 1, True])).tolist(), nbdist.reduce(torch.tensor([rank]), "mean").item()
nbdist.broadcast(mine, from_process=1)
told, flags, mine.item(), nbdist.broadcast_object_list([rank, "a"], from_process=1)"""
    assert value(ranks, code) == "((2.0, 0.5, True), ([1, 2], 0.5), 1.0, [1, 'a'])"
    assert "is unknown: allowed are" in refused(ranks, "nbdist.reduce(torch.ones(1), 'max')")
    assert "from_process=2 is not a rank: there are ranks 0-1" in refused(ranks, "nbdist.broadcast(torch.ones(1), 2)")


# --- turns


def test_inputs_are_split_between_ranks(ranks: Kernel) -> None:
    code = """
def share(inputs, **more):
    with nbdist.split_between_processes(inputs, **more) as mine: return nbdist.gather_object([mine])
print(share([1, 2, 3]), share([1, 2, 3], apply_padding=True), share("abc"), share({"a": (1, 2), "b": [3, 4]}))
tensors = [part.tolist() for part in share(torch.arange(3), apply_padding=True)]
print(share([1]), share([1], apply_padding=True), share([]), tensors)
"""
    shown = ranks.ok(f"%%distributed\n{code}").lines[0]
    assert shown[0] == "[[1, 2], [3]] [[1, 2], [3, 3]] ['ab', 'c'] [{'a': (1,), 'b': [3]}, {'a': (2,), 'b': [4]}]"
    assert shown[1] == "[[1], []] [[1], [1]] [[], []] [[0, 1], [2, 2]]"


def test_arrays_and_datasets_are_split_as_what_they_are(ranks: Kernel) -> None:
    code = """
import datasets, numpy
def share(inputs):
    with nbdist.split_between_processes(inputs, apply_padding=True) as mine: return nbdist.gather_object([mine])
arrays, tables = share(numpy.arange(3)), share(datasets.Dataset.from_dict({"a": [0, 1, 2]}))
[part.tolist() for part in arrays], [list(part["a"]) for part in tables], type(tables[0]).__name__"""
    assert value(ranks, code) == "([[0, 1], [2, 2]], [[0, 1], [2, 2]], 'Dataset')"


def test_the_main_process_goes_first_even_if_it_fails(ranks: Kernel) -> None:
    code = """
store = dist.distributed_c10d._get_default_store()
with nbdist.main_process_first():
    place = store.add(f"turn {turn}", 1)
try:
    with nbdist.local_main_process_first():
        if rank == 0: raise ValueError
except ValueError: pass
main = [nbdist.is_main_process(), nbdist.is_local_main_process(), not nbdist.is_last_process()]
[place == rank + 1, *(answer == (rank == 0) for answer in main)]"""
    assert value(ranks, "turn = 1\n" + code) == "[True, True, True, True]"


def test_print_and_on_main_process_are_for_rank_0(ranks: Kernel) -> None:
    code = """
@nbdist.on_main_process
def greet(name): print("hello", name); return name
answer = greet("you"); nbdist.print("once", answer, sep="-"); nbdist.wait_for_everyone()"""
    assert ranks.ok(f"%%distributed\n{code}").lines == {0: ["hello you", "once-you"]}


def test_a_trigger_of_one_rank_is_seen_by_all_once(ranks: Kernel) -> None:
    code = "if rank == 1: nbdist.set_trigger()\nnbdist.check_trigger(), nbdist.check_trigger()"
    assert value(ranks, code) == "(True, False)"


def test_ranks_with_different_numbers_of_batches_join(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(find_unused_parameters=False)
loader = nbdist.prepare(DataLoader(torch.ones(5, 4), 1), plan=state.current().plan)
count = 0
with nbdist.join_uneven_inputs([model], even_batches=False):
    for part in loader:
        optimizer.zero_grad(); nbdist.backward(model(part).square().mean()); optimizer.step(); count += 1
nbdist.gather_object([count]), loader.even_batches, bool(nbdist.check(model))"""
    assert value(ranks, code) == "([3, 2], True, True)"


def test_sharded_models_can_not_join(ranks: Kernel) -> None:
    code = "model, _ = prepared('fsdp')\nwith nbdist.join_uneven_inputs([model]): pass"
    assert "works for DDP, and FSDPNet is sharded" in refused(ranks, code)


def test_the_batch_size_is_made_smaller_on_all_ranks_until_it_fits_on_each(ranks: Kernel) -> None:
    code = """
tried = []
@nbdist.find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda size: size // 2)
def train(batch_size, name):
    tried.append(batch_size)
    if batch_size > (4 if rank == 0 else 2): raise torch.OutOfMemoryError("CUDA out of memory.")
    return name
train("done"), tried"""
    assert value(ranks, code) == "('done', [8, 4, 2])"
    never = "@nbdist.find_executable_batch_size\ndef train(batch_size): raise MemoryError\ntrain()"
    assert "not even a batch of 1" in refused(ranks, never)


def test_ranks_that_were_short_of_memory_in_different_micro_batches_begin_a_window_together(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=3)
@nbdist.find_executable_batch_size(starting_batch_size=2, reduce_batch_size_fn=lambda size: size // 2)
def train(batch_size):
    told = []
    for number in range(3):
        with nbdist.accumulate(model):
            if batch_size == 2 and number == 1 - rank: raise torch.OutOfMemoryError("CUDA out of memory.")
            nbdist.backward(model(batch()).square().mean()); optimizer.step(); optimizer.zero_grad()
        told.append(nbdist.sync_gradients())
    return told
train()"""
    assert value(ranks, code) == "[False, False, True]"


def test_a_batch_size_that_the_caller_gives_or_that_does_not_shrink_is_refused(ranks: Kernel) -> None:
    begun = "@nbdist.find_executable_batch_size(reduce_batch_size_fn=lambda size: size)\ndef train(batch_size):"
    assert "the batch size, is given by find_executable" in refused(ranks, f"{begun} pass\ntrain(64)")
    assert "gave 128 for 128, which did not fit" in refused(ranks, f"{begun} raise MemoryError\ntrain()")


def test_free_memory_lets_go_of_what_was_prepared(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared()
model, optimizer = nbdist.free_memory(model, optimizer)
model, optimizer, len(state.current().models)"""
    assert value(ranks, code) == "(None, None, 0)"
