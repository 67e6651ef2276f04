"""Sharding, replication and what goes with them: the settings of a plan, seen in the models that it prepares."""

from __future__ import annotations

import pytest
import torch

from testbed.kernel import Kernel
from tests.support.cells import TRAINING, on_ranks, refused, value


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, TRAINING)


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
from nbdist.train.sharding.materialize import take_from_rank_0
take_from_rank_0(net.modules())
calls = entered() - before
sums = nbdist.gather_object([[tensor.double().sum().item() for tensor in net.state_dict().values()]])
calls < 10, sums[0] == sums[1]"""
    assert value(ranks, code) == "(True, True)"


def test_large_and_transposed_tensors_come_from_rank_0_too(ranks: Kernel) -> None:
    code = """
from nbdist.train.sharding import materialize
torch.manual_seed(rank)
net = nn.Linear(1024, 4 * 1024 + 1); net.weight = nn.Parameter(torch.randn(1024, 9 * 1024).t())
net.register_buffer("flags", torch.rand(7) > 0.5)
first = net.weight.data
materialize.take_from_rank_0(net.modules())
sums = nbdist.gather_object([[tensor.double().sum().item() for tensor in net.state_dict().values()]])
first.numel() * 4 > materialize.BUCKET, sums[0] == sums[1], net.weight.data is not None and net.weight.stride()"""
    assert value(ranks, code) == "(True, True, (1, 9216))"


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


@pytest.mark.parametrize(("broadcast", "mean"), [(True, 0.1), (False, 0.19)])
def test_ranks_begin_with_the_buffers_of_rank_0_or_each_with_its_own(
    ranks: Kernel, broadcast: bool, mean: float
) -> None:
    """Rank 1's batches are all 1, and rank 0's all 0; each forward moves the running mean by a tenth."""
    code = f"""
model = nbdist.prepare(nn.BatchNorm1d(1), plan=Plan("ddp", broadcast_buffers={broadcast}))
for _ in range(2): model(torch.full((4, 1), float(rank)))
means = model.module.running_mean.clone(); dist.all_reduce(means); round(float(means), 6)"""
    assert value(ranks, code) == str(mean)


@pytest.mark.parametrize("broadcast", [True, False])
def test_a_model_is_replicated_without_a_warning(ranks: Kernel, broadcast: bool) -> None:
    code = f"""
import warnings
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    nbdist.prepare(nn.BatchNorm1d(1), plan=Plan("ddp", broadcast_buffers={broadcast}))
[str(each.message) for each in given]"""
    assert value(ranks, code) == "[]"


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
