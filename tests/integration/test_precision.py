"""The precision of a training, clipped gradients, and local SGD: the loop follows the plan."""

from __future__ import annotations

import pytest

from testbed.kernel import Kernel
from tests.support.cells import TRAINING, on_ranks, refused, value


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, TRAINING)


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
