"""`nbdist.prepare`: ordinary PyTorch objects that train as the plan says, and one clear error where they can't."""

from __future__ import annotations

import pytest
import torch

from tests.support.cells import on_ranks, refused, value
from tests.support.harness import Kernel

SETUP = """
import copy, io, os, pickle, torch, nbdist
import torch.distributed as dist
from torch import nn
from nbdist.plan import Plan
from nbdist.train import state
from tests.support.train_models import *
"""


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, SETUP)


# --- what comes back


def test_objects_come_back_in_the_order_in_which_they_were_given(ranks: Kernel) -> None:
    code = """
net = Net(); optimizer = torch.optim.AdamW(net.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(torch.zeros(8, 4), 2)
a, b, c, d, e = nbdist.prepare(scheduler, loader, None, optimizer, net, plan=Plan())
a is scheduler, type(b).__mro__[1].__name__, c, d is optimizer, type(e).__name__, len(b)"""
    assert value(ranks, code) == "(True, 'DataLoader', None, True, 'DistributedDataParallel', 2)"


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_what_is_prepared_is_of_the_class_that_the_user_wrote(ranks: Kernel, strategy: str) -> None:
    code = f"""
net = Net()
model, optimizer = nbdist.prepare(net, torch.optim.AdamW(net.parameters()), plan=Plan(strategy={strategy!r}))
nbdist.unwrap(model) is net, isinstance(nbdist.unwrap(model), Net), type(optimizer) is torch.optim.AdamW"""
    assert value(ranks, code) == "(True, True, True)"


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_preparing_twice_changes_nothing(ranks: Kernel, strategy: str) -> None:
    code = f"""
plan = Plan(strategy={strategy!r}); model, optimizer = prepared({strategy!r})
before = optimizer.step
again = nbdist.prepare(model, optimizer, plan=plan)
again[0] is model, again[1] is optimizer, optimizer.step is before, len(state.current().models)"""
    assert value(ranks, code) == "(True, True, True, 1)"


@pytest.mark.parametrize(("tied", "apart"), [(False, True), (True, False)], ids=["", "tied"])
def test_the_embedding_of_a_language_model_is_whole_only_while_it_is_used(
    ranks: Kernel, tied: bool, apart: bool
) -> None:
    code = f"""
from torch.distributed.fsdp import FSDPModule
from tests.support.train_weights import llama
torch.manual_seed(rank)
model = llama(tie_word_embeddings={tied}); dist.broadcast(model.lm_head.weight.data, 0)
copied = copy.deepcopy(model)
for tensor in copied.state_dict().values(): dist.broadcast(tensor, 0)
model = nbdist.prepare(model, plan=Plan(strategy="fsdp"))
ids = torch.arange(12).reshape(2, 6)
losses = [each(input_ids=ids, labels=ids).loss for each in (model, copied)]
during = isinstance(model.model.embed_tokens.weight, torch.distributed.tensor.DTensor)
nbdist.backward(losses[0]); losses[1].backward()
gradient = model.get_input_embeddings().weight.grad.full_tensor()
(isinstance(model.model.embed_tokens, FSDPModule), during,
 torch.allclose(*losses), torch.allclose(gradient, copied.get_input_embeddings().weight.grad, atol=1e-6))"""
    assert value(ranks, code) == str((apart, apart, True, True))


def test_while_blocks_compute_neither_embedding_nor_head_is_whole(ranks: Kernel) -> None:
    code = """
torch.manual_seed(0); net = Language(); copied = copy.deepcopy(net)
model = nbdist.prepare(net, plan=Plan(strategy="fsdp")); seen = set()
look = lambda *_: seen.update(gathered(model))
for block in model.blocks:
    block.linear.register_forward_hook(look); block.linear.register_full_backward_pre_hook(look)
tokens = torch.arange(6).view(2, 3)
logits = model(tokens); during = gathered(model); logits.square().sum().backward()
copied(tokens).square().sum().backward()
grads = [torch.equal(own.grad.full_tensor(), other.grad) for own, other in zip(model.parameters(), copied.parameters())]
sorted({name.split(".")[0] for name in seen}), during, all(grads), gathered(model)"""
    kept = ["norm.weight", "norm.bias", "head.weight"]
    assert value(ranks, code) == str((["blocks"], kept, True, []))


def test_a_head_may_be_used_without_being_called(ranks: Kernel) -> None:
    code = """
class Fused(Language):
    def forward(self, tokens):
        self.head, head = nn.Identity(), self.head
        try: return nn.functional.linear(super().forward(tokens), head.weight)
        finally: self.head = head

torch.manual_seed(0); net = Fused(); copied = copy.deepcopy(net)
model = nbdist.prepare(net, plan=Plan(strategy="fsdp")); tokens = torch.arange(6).view(2, 3)
for _ in range(2):
    copied.zero_grad(); model.zero_grad()
    for each in (model, copied): each(tokens).square().sum().backward()
all(torch.equal(own.grad.full_tensor(), other.grad) for own, other in zip(model.parameters(), copied.parameters()))"""
    assert value(ranks, code) == "True"


def test_each_end_of_a_language_model_is_gathered_once_in_a_step(ranks: Kernel) -> None:
    code = """
from torch.distributed.tensor.debug import CommDebugMode
model = nbdist.prepare(Language(), plan=Plan(strategy="fsdp"))
for _ in range(2):
    with CommDebugMode() as sent:
        model(torch.arange(6).view(2, 3)).sum().backward()
{str(kind): count for kind, count in sent.get_comm_counts().items() if count}"""
    # Each of three blocks is gathered for forward and for backward.
    assert value(ranks, code) == "{'c10d._allgather_base_': 8, 'c10d._reduce_scatter_base_': 5}"


@pytest.mark.torch_private
def test_all_batchnorms_are_gathered_at_once(ranks: Kernel) -> None:
    code = """
from torch.distributed.tensor.debug import CommDebugMode
model = nbdist.prepare(Normed(), plan=Plan(strategy="fsdp", precision="bf16"))
for _ in range(2):
    with CommDebugMode() as sent:
        model(batch()).sum().backward()
{str(kind): count for kind, count in sent.get_comm_counts().items() if count}"""
    assert value(ranks, code) == "{'c10d._allgather_base_': 7, 'c10d._reduce_scatter_base_': 4}"


@pytest.mark.torch_private
@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_batchnorm_may_be_left_out_of_some_steps(ranks: Kernel, reshard: bool | None) -> None:
    code = f"""
found = []
ddp = Plan(precision="bf16", find_unused_parameters=True)
for plan in (ddp, Plan(strategy="fsdp", precision="bf16", reshard={reshard})):
    torch.manual_seed(0); net = Normed()
    model, optimizer = nbdist.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan=plan)
    found.append(losses(model, optimizer, [True, False, False, True]))
found[0] == found[1] or found"""
    assert value(ranks, code) == "True"


def test_small_tensors_go_to_the_other_ranks_together(ranks: Kernel) -> None:
    code = """
torch.manual_seed(rank)
net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(100)], nn.BatchNorm1d(8))
entered = lambda: dist.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
before = entered()
from nbdist.train.structure.materialize import take_from_rank_0
take_from_rank_0(net.modules())
calls = entered() - before
sums = nbdist.gather_object([[tensor.double().sum().item() for tensor in net.state_dict().values()]])
calls < 10, sums[0] == sums[1]"""
    assert value(ranks, code) == "(True, True)"


def test_large_and_transposed_tensors_come_from_rank_0_too(ranks: Kernel) -> None:
    code = """
from nbdist.train.structure import materialize
torch.manual_seed(rank)
net = nn.Linear(1024, 4 * 1024 + 1); net.weight = nn.Parameter(torch.randn(1024, 9 * 1024).t())
net.register_buffer("flags", torch.rand(7) > 0.5)
first = net.weight.data
materialize.take_from_rank_0(net.modules())
sums = nbdist.gather_object([[tensor.double().sum().item() for tensor in net.state_dict().values()]])
first.numel() * 4 > materialize._BUCKET, sums[0] == sums[1], net.weight.data is not None and net.weight.stride()"""
    assert value(ranks, code) == "(True, True, (1, 9216))"


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_tied_weights_stay_tied(ranks: Kernel, strategy: str) -> None:
    code = f"""
model, optimizer = prepared({strategy!r}); step(model, optimizer)
net = nbdist.unwrap(model)
net.head.weight is net.embed.weight"""
    assert value(ranks, code) == "True"


def test_a_block_that_shares_a_weight_with_the_rest_is_sharded_with_the_rest(ranks: Kernel) -> None:
    code = """
torch.manual_seed(0); net = Net(); net.blocks[1].linear.weight = net.embed.weight = net.head.weight
whole_before = values(net)
model = nbdist.prepare(net, plan=Plan(strategy="fsdp"))
tied = model.blocks[1].linear.weight is model.embed.weight
[hasattr(block, "unshard") for block in model.blocks], tied, torch.equal(values(model), whole_before)"""
    assert value(ranks, code) == "([True, False, True], True, True)"


def test_models_and_optimizers_can_be_prepared_one_after_the_other(ranks: Kernel) -> None:
    code = """
net = Net(); old = torch.optim.AdamW(net.parameters()); plan = Plan(strategy="fsdp")
model = nbdist.prepare(net, plan=plan)
new = torch.optim.AdamW(model.parameters())
old, new = nbdist.prepare(old, new, plan=plan)
[type(o.param_groups[0]["params"][0]).__name__ for o in (old, new)], step(model, old) == step(model, old)"""
    assert value(ranks, code) == "(['DTensor', 'DTensor'], False)"


def test_an_optimizer_keeps_what_it_has_learned_when_its_model_is_sharded(ranks: Kernel) -> None:
    code = """
def run(strategy):
    torch.manual_seed(0); net = Net(); optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    for _ in range(2): net(batch()).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    model, optimizer = nbdist.prepare(net, optimizer, plan=Plan(strategy=strategy))
    step(model, optimizer)
    return values(model)
torch.allclose(run("fsdp"), run("ddp"), rtol=1e-5)"""
    assert value(ranks, code) == "True"


def test_all_ranks_begin_with_the_values_of_rank_0(ranks: Kernel) -> None:
    code = """
def begun(strategy):
    torch.manual_seed(rank)
    return values(nbdist.prepare(Net(), plan=Plan(strategy=strategy)))
torch.manual_seed(0)
first = values(Net())
[torch.equal(begun(strategy), first) for strategy in ("ddp", "fsdp", "hsdp")]"""
    assert value(ranks, code) == "[True, True, True]"


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_models_on_the_meta_device_get_the_values_that_they_set_themselves(ranks: Kernel, strategy: str) -> None:
    code = f"""
with torch.device("meta"): net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
model, optimizer = nbdist.prepare(net, optimizer, plan=Plan(strategy={strategy!r}))
finite, tied = bool(values(model).isfinite().all()), net.head.weight is net.embed.weight
alike = {strategy!r} == "none" or len(set(nbdist.gather_object([values(model).sum().item()]))) == 1
finite, tied, alike, step(model, optimizer) != step(model, optimizer)"""
    assert value(ranks, code) == "(True, True, True, True)"


def test_a_meta_module_that_cannot_set_its_values_is_named(ranks: Kernel) -> None:
    code = """
with torch.device("meta"): net = nn.Sequential(nn.Linear(4, 4), Stubborn())
nbdist.prepare(net, plan=Plan(strategy="fsdp"))"""
    assert "1 (Stubborn)" in refused(ranks, code)


def test_a_cell_that_prepares_can_be_run_again(ranks: Kernel) -> None:
    """What nobody holds any more is not part of the training."""
    for _ in range(2):
        on_ranks(ranks, "model, optimizer = prepared('fsdp'); step(model, optimizer)")
    on_ranks(ranks, "other = None; model, optimizer = prepared('fsdp')")
    code = "state.current().tidy(); len(state.current().models), len(state.current().optimizers)"
    assert value(ranks, code) == "(1, 1)"


def test_a_model_given_again_bare_is_given_back_prepared(ranks: Kernel) -> None:
    code = """
net = Net(); optimizer = torch.optim.SGD(net.parameters(), 0.1); plan = Plan(precision="bf16")
first, second = (nbdist.prepare(net, optimizer, plan=plan)[0] for _ in range(2))
first is second, len(state.current().models)"""
    assert value(ranks, code).startswith("(True, ")


def test_another_plan_for_a_bare_model_leaves_nothing_of_the_earlier_one(ranks: Kernel) -> None:
    code = """
net = Net(); optimizer = torch.optim.SGD(net.parameters(), 0.1); earlier = Plan(
    strategy="none", precision="bf16", activation_checkpointing="full", accumulate=2, clip_grad_norm=0.001)
nbdist.prepare(net, optimizer, plan=earlier)
model, optimizer = nbdist.prepare(net, optimizer, plan=Plan())
seen = []; net.blocks[0].linear.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
before = values(model); step(model, optimizer)
[str(kind) for kind in seen], bool((values(model) - before).norm() > 0.01)"""
    assert value(ranks, code) == "(['torch.float32'], True)"


@pytest.mark.parametrize(("earlier", "kept"), [("ddp", "wrapped"), ("fsdp", "sharded")])
@pytest.mark.parametrize("given", ["net", "model"])
def test_a_model_of_an_earlier_plan_is_refused(ranks: Kernel, earlier: str, kept: str, given: str) -> None:
    code = f"""
net = Net(); model = nbdist.prepare(net, plan=Plan(strategy={earlier!r}))
nbdist.prepare({given}, plan=Plan(precision='bf16'))"""
    text = refused(ranks, code)
    assert f"the Net was prepared under an earlier plan ({earlier}), and is {kept} for it: build the model" in text


def test_another_plan_begins_a_new_training(ranks: Kernel) -> None:
    code = """
first, _ = prepared("ddp"); before = state.current()
second, _ = prepared("fsdp")
state.current() is before, first in state.current().models, state.current().plan.strategy"""
    assert value(ranks, code) == "(False, False, 'fsdp')"


def test_without_an_argument_the_plan_is_that_of_the_environment(ranks: Kernel) -> None:
    code = """
os.environ["NBDIST_PLAN"] = '{"strategy": "fsdp", "accumulate": 2}'
try: model = nbdist.prepare(Net())
finally: del os.environ["NBDIST_PLAN"]
type(model).__name__, state.current().plan.accumulate"""
    assert value(ranks, code) == "('FSDPNet', 2)"


# --- optimizers and schedulers stay what they are


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


# --- strategies and what goes with them


def test_blocks_are_the_repeated_modules_or_those_that_are_named(ranks: Kernel) -> None:
    code = """
def sharded(**settings):
    model = nbdist.prepare(Net(), plan=Plan(strategy="fsdp", **settings))
    return [name for name, module in model.named_modules() if hasattr(module, "unshard") and name]
has_bias = lambda module: isinstance(module, nn.Linear) and module.bias is not None
for found in (sharded(), sharded(shard_by="LayerNorm"), sharded(shard_by=has_bias)): print(*found)"""
    blocks = [f"blocks.{number}" for number in range(3)]  # `embed` shares its weight with `head`
    expected = [" ".join(f"{block}{inner}" for block in blocks) for inner in ("", ".norm", ".linear")]
    assert ranks.ok(f"%%distributed\n{code}").lines == {rank: expected for rank in (0, 1)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_blocks_are_found_in_lists_of_lists(ranks: Kernel, strategy: str) -> None:
    """A list computes nothing itself: it can be neither sharded nor computed again."""
    code = f"""
class Attention(Block): pass
class Forward(Block): pass
class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), Forward()]) for _ in range(2))
    def forward(self, x):
        for attention, forward in self.layers: x = forward(attention(x))
        return x
net = Transformer(); optimizer = torch.optim.SGD(net.parameters(), 0.1)
plan = Plan(strategy={strategy!r}, activation_checkpointing="full")
model, optimizer = nbdist.prepare(net, optimizer, plan=plan); step(model, optimizer)
blocks = [block for block in net.modules() if isinstance(block, Block)]
[block.calls for block in blocks], {{hasattr(block, "unshard") for block in blocks}}"""
    assert value(ranks, code) == f"([2, 2, 2, 2], {{{strategy == 'fsdp'}}})"


def test_a_list_of_modules_is_refused_as_a_block(ranks: Kernel) -> None:
    text = refused(ranks, "nbdist.prepare(Net(), plan=Plan(strategy='fsdp', shard_by='ModuleList'))")
    assert "shard_by fits a ModuleList, which computes nothing itself" in text


def test_shard_by_that_names_no_class_is_refused_with_the_classes(ranks: Kernel) -> None:
    text = refused(ranks, "nbdist.prepare(Net(), plan=Plan(strategy='fsdp', shard_by='Blok'))")
    assert "shard_by='Blok' names no class in Net, whose classes are Linear, ModuleList, Block, LayerNorm" in text


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["full", "selective", "selective-half"])
def test_activation_checkpointing_computes_blocks_again_with_the_same_result(
    ranks: Kernel, strategy: str, kind: str
) -> None:
    code = f"""
plain = trained({strategy!r})
model, optimizer = prepared({strategy!r}, activation_checkpointing={kind!r})
for _ in range(3): step(model, optimizer)
[block.calls for block in nbdist.unwrap(model).blocks], torch.equal(values(model), plain)"""
    assert value(ranks, code) == "([6, 6, 6], True)"


def test_offloaded_activations_of_sharded_blocks_give_the_same_result(ranks: Kernel) -> None:
    """By the function itself, as plans refuse it on the CPU."""
    code = """
from nbdist.train.structure.activations import keep_less
plain = trained("fsdp")
model, optimizer = prepared("fsdp")
keep_less(list(model.blocks), offload=True)
for _ in range(3): step(model, optimizer)
torch.equal(values(model), plain)"""
    assert value(ranks, code) == "True"


def test_fsdp_settings_do_not_change_the_result(ranks: Kernel) -> None:
    code = """
plain = trained("fsdp")
settings = {"prefetch": 2}, {"reshard": False}, {"offload": True}
[torch.equal(trained("fsdp", **setting), plain) for setting in settings]"""
    assert value(ranks, code) == "[True, True, True]"


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_batch_norm_keeps_full_precision_when_its_model_is_sharded_in_half(ranks: Kernel, strategy: str) -> None:
    code = f"""
def trained(strategy):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = nbdist.prepare(net, optimizer, plan=Plan(strategy=strategy, precision="bf16"))
    for _ in range(3):
        loss = step(model, optimizer)
    return loss, {{b.dtype for n, b in model.named_buffers() if "running" in n}}
(loss, types), (expected, _) = trained({strategy!r}), trained("ddp")
abs(loss - expected) < 0.02 * abs(expected), types"""
    assert value(ranks, code) == "(True, {torch.float32})"


def test_ddp_settings_do_not_change_the_result(ranks: Kernel) -> None:
    code = """
plain = trained()
settings = [{"bucket_mb": 0.0001}, {"gradient_as_bucket_view": False}]
settings += [{"find_unused_parameters": True}, {"static_graph": True}]
[torch.allclose(trained(**setting), plain, rtol=1e-6) for setting in settings]"""
    assert value(ranks, code) == "[True, True, True, True]"


def test_parameters_that_no_loss_reaches_may_be_looked_for(ranks: Kernel) -> None:
    code = """
class Half(Net):
    def forward(self, x): return self.blocks[rank](self.embed(x))  # another part on each rank
net = Half(); optimizer = torch.optim.SGD(net.parameters(), 0.1)
model, optimizer = nbdist.prepare(net, optimizer, plan=Plan(find_unused_parameters=True))
for _ in range(2): step(model, optimizer)
"ranks 0-1 agree" in str(nbdist.check(model))"""
    assert value(ranks, code) == "True"


def test_a_seed_may_be_another_one_on_each_rank(ranks: Kernel) -> None:
    code = "model = nbdist.prepare(Net(), plan=Plan(seed=7, seed_per_rank=True)); torch.initial_seed() - rank"
    assert value(ranks, code) == "7"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_models_stay_of_their_class_and_train_alike(ranks: Kernel, strategy: str) -> None:
    code = f"""
choose = getattr(torch.compiler, "set_default_backend", lambda _: None)  # without it this takes a minute
choose("aot_eager")
plain = trained({strategy!r}, accumulate=2)
model, optimizer = prepared({strategy!r}, accumulate=2, compile=True)
for _ in range(3): step(model, optimizer)
choose(None)
type(nbdist.unwrap(model)).__name__.removeprefix("FSDP"), torch.allclose(values(model), plain, rtol=1e-5)"""
    assert value(ranks, code) == "('Net', True)"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_budget_of_activations_changes_no_bit_of_the_result(ranks: Kernel, strategy: str) -> None:
    code = f"""
plain, lean = trained({strategy!r}, accumulate=2), trained({strategy!r}, accumulate=2, activation_budget=0.5)
torch.equal(plain, lean)"""
    assert value(ranks, code) == "True"


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="this torch has inductor only")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_compiler_gets_the_mode_and_what_the_plan_says_of_sizes(ranks: Kernel, strategy: str) -> None:
    code = f"""
from torch._dynamo.backends.debugging import aot_eager
modes, symbols = set(), set()
def spy(graph, inputs, mode=None):
    modes.add(mode)
    symbols.add(any(isinstance(each, torch.SymInt) for each in inputs))
    return aot_eager(graph, inputs)
torch._dynamo.reset()
if "spy" not in torch._dynamo.list_backends(): torch._dynamo.register_backend(spy, name="spy")
torch.compiler.set_default_backend("spy")
plain = trained({strategy!r})
same = torch.allclose(trained({strategy!r}, compile="max-autotune", compile_dynamic=False), plain, rtol=1e-5)
torch.compiler.set_default_backend(None)
modes, symbols, same"""
    assert value(ranks, code) == "({'max-autotune'}, {False}, True)"


@pytest.mark.parametrize(("hook", "bound"), [("fp16", 2**-10), ("powersgd", 0.5)])
def test_comm_hooks_stay_within_their_error(ranks: Kernel, hook: str, bound: float) -> None:
    """Half precisions round each gradient; low-rank ones lose more of it, and make up for it in later steps."""
    low_rank = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1, "min_compression_rate": 1}  # 4 x 4 as 4 + 4
    options = low_rank if hook == "powersgd" else {}
    code = f"""
torch.manual_seed(0); start = values(Net())
exact, hooked = trained(steps=4), trained(steps=4, comm_hook={hook!r}, comm_hook_options={options})
bool((hooked - exact).norm() <= {bound} * (exact - start).norm()), torch.equal(hooked, exact)"""
    assert value(ranks, code) == "(True, False)"


@pytest.mark.torch_private
def test_a_hook_that_is_broken_in_this_torch_is_refused_before_it_fails(ranks: Kernel) -> None:
    code = """
try: trained(comm_hook="batched_powersgd", steps=4, comm_hook_options={"start_powerSGD_iter": 2}); told = "works"
except nbdist.UsageError as error: told = str(error)
told == "works" or "use comm_hook='powersgd'" in told"""
    assert value(ranks, code) == "True"


def test_settings_that_do_not_fit_the_hook_are_refused(ranks: Kernel) -> None:
    code = "nbdist.prepare(Net(), plan=Plan(comm_hook='powersgd', comm_hook_options={'rank': 2}))"
    assert "rank" in refused(ranks, code)


# --- bad input


def test_a_model_that_is_wrapped_already_is_refused(ranks: Kernel) -> None:
    text = refused(ranks, "nbdist.prepare(nn.parallel.DistributedDataParallel(Net()), plan=Plan())")
    assert "the Net is wrapped in DistributedDataParallel already: give prepare the model it wraps" in text


def test_a_model_that_is_sharded_already_is_refused(ranks: Kernel) -> None:
    code = "from torch.distributed.fsdp import fully_shard\nnbdist.prepare(fully_shard(Net()), plan=Plan())"
    assert "the model is sharded already" in refused(ranks, code)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_optimizer_of_other_parameters_is_refused_before_anything_changes(ranks: Kernel, strategy: str) -> None:
    code = f"""
net = Net()
nbdist.prepare(net, torch.optim.AdamW(Net().parameters()), plan=Plan(strategy={strategy!r}))"""
    assert "14 of the parameters of AdamW belong to no prepared model" in refused(ranks, code)
    assert value(ranks, "type(net).__name__, type(net.embed.weight).__name__") == "('Net', 'Parameter')"


@pytest.mark.parametrize(
    "settings",
    ["strategy='fsdp', shard_by='Blok'", "activation_checkpointing='full', shard_by=lambda module: False"],
)
def test_a_plan_that_does_not_fit_its_model_leaves_the_training_before_as_it_was(ranks: Kernel, settings: str) -> None:
    code = "model, optimizer = prepared()\nnbdist.prepare(Net(), plan=Plan(" + settings + "))"
    assert "whose classes are" in refused(ranks, code)
    assert value(ranks, "optimizer in state.current().optimizers, step(model, optimizer) > step(model, optimizer)") == (
        "(True, True)"
    )


def test_functions_in_the_plan_are_compared_by_name(ranks: Kernel) -> None:
    """Their addresses differ from rank to rank."""
    code = """
import functools
shard_by = functools.partial(lambda kind, module: isinstance(module, kind), Block)
type(nbdist.prepare(Net(), plan=Plan(strategy="fsdp", shard_by=shard_by))).__name__"""
    assert value(ranks, code) == "'FSDPNet'"


def test_a_scaler_of_the_users_own_is_refused(ranks: Kernel) -> None:
    text = refused(ranks, "nbdist.prepare(torch.amp.GradScaler('cpu'), plan=Plan())")
    assert "leave it out, and set precision='fp16'" in text


def test_ranks_that_disagree_on_the_plan_are_told_so(ranks: Kernel) -> None:
    text = refused(ranks, "nbdist.prepare(Net(), plan=Plan(accumulate=1 + rank))")
    assert "ranks called prepare with different plans: rank 0 with Plan(); rank 1 with Plan(accumulate=2)" in text


def test_ranks_that_bring_different_objects_are_told_so(ranks: Kernel) -> None:
    text = refused(ranks, "nbdist.prepare(*[Net(2 + rank)], plan=Plan())")
    assert "rank 0 with Net (" in text and "; rank 1 with Net (" in text


def test_what_is_wrong_on_one_rank_raises_on_all(ranks: Kernel) -> None:
    code = "try: nbdist.prepare('net' if rank else Net())\nexcept nbdist.UsageError as error: print(error)"
    told = ranks.ok(f"%%distributed\n{code}").lines
    assert told[0][0].startswith("rank 1: prepare can't handle 'str' objects")
    assert told[1][0].startswith("prepare can't handle 'str' objects")


def test_sync_batchnorm_without_gpus_is_refused(ranks: Kernel) -> None:
    assert "sync_batchnorm" in refused(ranks, "nbdist.prepare(Net(), plan=Plan(sync_batchnorm=True))")
