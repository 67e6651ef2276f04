"""`nbdist.prepare`: ordinary PyTorch objects that train as the plan says, and one clear error where they can't."""

from __future__ import annotations

import pytest

from testbed.kernel import Kernel
from tests.support.cells import TRAINING, on_ranks, refused, value


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, TRAINING)


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


def test_ranks_prepare_together_though_one_of_them_has_freed_what_was_prepared_before(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nkept = nbdist.prepare(nn.Linear(4, 4), plan=Plan('fsdp'))")
    ranks.ok("%%distributed -r 1\nimport gc\ndel kept\ngc.collect()")
    ranks.ok("%%distributed\nmodel = nbdist.prepare(nn.Linear(4, 4), plan=Plan('fsdp'))\nmodel(torch.ones(1, 4))")


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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_in_another_order_are_named(ranks: Kernel, strategy: str) -> None:
    """DDP sends buffers by their place: each would get the other's values."""
    code = f"""
net = nn.Linear(2, 2)
for name in sorted("ab", reverse=bool(rank)): net.register_buffer(name, torch.zeros(3))
nbdist.prepare(net, plan=Plan({strategy!r}))"""
    first = "The first difference: 'a' (3,) float32 on rank 0, 'b' (3,) float32 on rank 1. Build the model the same way"
    assert first in refused(ranks, code)


DATA = "from torch.utils.data import *\ndata = TensorDataset(torch.arange(64).float().view(64, 1))\n"


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (
            "DistributedSampler(data, 2, rank, seed=1000 * rank + 5)",
            ["rank 0 with DataLoader(TensorDataset of 64 samples, DistributedSampler(seed=5, ", "(seed=1005, "],
        ),
        ("random_split(data, [48, 16], torch.Generator().manual_seed(rank))[0]", ["Subset of 48 samples, indices "]),
        ("Subset(data, range(40 + rank))", ["Subset of 40 samples", "Subset of 41 samples"]),
        ("ConcatDataset([data] * (rank + 1))", ["of 64 samples", "of 128 samples"]),
    ],
    ids=["seed", "split", "length", "parts"],
)
def test_data_or_a_sampler_that_differs_is_named(ranks: Kernel, loader: str, words: list[str]) -> None:
    code = f"""
{DATA}
given = {loader}
loader = DataLoader(data, 4, sampler=given) if isinstance(given, Sampler) else DataLoader(given, 4)
nbdist.prepare(loader, plan=Plan())"""
    error = refused(ranks, code)
    assert all(each in error for each in words) and "make data and samplers with the same seed on all ranks" in error


def test_a_generator_of_numpy_is_compared(ranks: Kernel) -> None:
    code = f"""
{DATA}
import numpy
class Shuffled(Sampler):
    def __init__(self): self.random = numpy.random.default_rng(rank)
    def __iter__(self): return iter(self.random.permutation(64))
    def __len__(self): return 64
nbdist.prepare(DataLoader(data, 4, sampler=Shuffled()), plan=Plan())"""
    assert "Shuffled(random=" in refused(ranks, code)


def test_a_split_of_datasets_is_compared(ranks: Kernel) -> None:
    code = """
import datasets
datasets.disable_progress_bars()
rows = datasets.Dataset.from_dict({"x": list(range(64))}).train_test_split(0.25, seed=rank)["train"]
nbdist.prepare(DataLoader(rows, 4), plan=Plan())"""
    assert "Dataset of 48 samples, rows " in refused(ranks, code)


def test_other_samples_alone_are_a_warning(ranks: Kernel) -> None:
    code = """
from torch.utils.data import TensorDataset
torch.manual_seed(rank)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loader = nbdist.prepare(DataLoader(TensorDataset(torch.randn(8, 2)), 2), plan=Plan())
[str(each.message) for each in caught]"""
    assert "rank 1 holds other samples than rank 0. Each rank takes its share" in value(ranks, code)


@pytest.mark.parametrize(
    ("loader", "settings"),
    [
        ("nbdist.prepare_loader(DataLoader(Subset(data, range(32 * rank, 32 * rank + 32)), 4), sharded=True)", ""),
        ("DataLoader(Subset(data, range(40 + rank)), 4)", "'none'"),
        ("DataLoader(data if rank == 0 else TensorDataset(torch.zeros(1, 1)), 4)", "dispatch=True"),
        ("DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank))", ""),
        ("DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(rank))", ""),
        ("DataLoader(Stream(), 4)", ""),
        ("DataLoader(Odd(), 4, sampler=[1, 2])", ""),
    ],
    ids=["sharded", "alone", "dispatched", "shared", "agreed", "stream", "odd"],
)
def test_what_may_differ_is_not_compared(ranks: Kernel, loader: str, settings: str) -> None:
    code = f"""
{DATA}
class Stream(IterableDataset):
    def __iter__(self): return iter(range(rank + 3))
class Odd(Dataset):
    def __len__(self): raise RuntimeError("unknown")
    def __eq__(self, other): raise RuntimeError("never")
    def __getattr__(self, name): return rank
    def __getitem__(self, at): raise AssertionError("an item was asked for")
with warnings.catch_warnings():
    warnings.simplefilter("error")
    loader = nbdist.prepare({loader}, plan=Plan({settings}))
isinstance(loader, DataLoader)"""
    assert value(ranks, code) == "True"


def test_what_is_wrong_on_one_rank_raises_on_all(ranks: Kernel) -> None:
    code = "try: nbdist.prepare('net' if rank else Net())\nexcept nbdist.UsageError as error: print(error)"
    told = ranks.ok(f"%%distributed\n{code}").lines
    assert told[0][0].startswith("rank 1: prepare can't handle 'str' objects")
    assert told[1][0].startswith("prepare can't handle 'str' objects")


def test_sync_batchnorm_without_gpus_is_refused(ranks: Kernel) -> None:
    assert "sync_batchnorm" in refused(ranks, "nbdist.prepare(Net(), plan=Plan(sync_batchnorm=True))")
