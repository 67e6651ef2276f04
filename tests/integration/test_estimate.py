"""The estimate: what a rank's step takes, told before anything is allocated, against what real steps take."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbdist.errors import NbdistError, UsageError
from nbdist.plan import Plan
from nbdist.train.estimate.child import answer_to
from nbdist.train.estimate.estimate import Estimate, estimate, estimate_each, packed
from nbdist.train.estimate.trial_step import TrialSetup, TrialTask
from testbed.kernel import Kernel
from testbed.train_estimate import SHAPES, ConvNet, Gpt, Mixture, Mlp, Untied

NONE = Plan(strategy="none")
FLOAT = 4  # bytes
MIB = 2**20
SETTINGS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp", "ema": 0.99},
    {"strategy": "fsdp", "precision": "bf16", "activation_checkpointing": "full", "accumulate": 2},
    {"strategy": "fsdp", "tp": 2},
]

pytestmark = pytest.mark.torch_private


@pytest.fixture(scope="module")
def training(ranks: Kernel) -> Kernel:
    ranks.ok("import nbdist\nfrom testbed.train_estimate import *\ncall = nbdist.get_session().call")
    return ranks


def real(
    kernel: Kernel, kind: type[nn.Module], settings: dict[str, Any], ranks: str = "[0, 1]"
) -> list[dict[str, int]]:
    """What each rank measures. Steps in bf16 take a minute on a CPU without AVX-512."""
    return list(kernel.value(f"call(measured, {kind.__name__}, **{settings!r})", limit=300))


def held(
    model: Any, batch: Any, *, on_gpu: bool = False, loss: Any = None, optimizer: Any = torch.optim.AdamW
) -> dict[str, int]:
    """What the process that estimates would find, in this process."""
    answer = answered(TrialTask(model, batch, optimizer, loss), on_gpu)
    assert "error" not in answer, answer
    return dict(answer["held"])


def answered(task: TrialTask, on_gpu: bool = False) -> dict[str, Any]:
    return answer_to(TrialSetup(NONE, world_size=1, has_group=False, on_gpu=on_gpu), packed(task))


def told(model: Any, batch: Any, plans: Sequence[Plan], world_size: int = 1) -> list[dict[str, Any]]:
    """What that process would tell of a model and plans, in this process."""
    task = packed(TrialTask(model, batch, torch.optim.AdamW, None))
    setups = [TrialSetup(plan, world_size=world_size, has_group=world_size > 1, on_gpu=False) for plan in plans]
    return [answer_to(setup, task) for setup in setups]


def totals(answers: list[dict[str, Any]]) -> list[int]:
    """All that is held at once, for each plan."""
    assert not any("error" in answer for answer in answers), answers
    return [sum(answer["held"].values()) - answer["held"]["gradients_whole"] for answer in answers]


# --- against real steps


@pytest.mark.parametrize("kind", [Mlp, Gpt, ConvNet])
def test_a_step_takes_what_was_estimated_within_ten_percent(training: Kernel, kind: type[nn.Module]) -> None:
    precisions = ("fp32", "bf16") if kind is Gpt else ("fp32",)  # a CPU is slow in bf16
    settings: list[dict[str, Any]] = [{"strategy": "none", "precision": precision} for precision in precisions]
    estimates = estimate_each(kind(), SHAPES[kind], [Plan(**each) for each in settings])
    for each, found in zip(settings, estimates, strict=True):
        assert found.total == pytest.approx(real(training, kind, each)[0]["total"], rel=0.1), each


def test_each_rank_takes_what_was_estimated_for_its_strategy(training: Kernel) -> None:
    """Within ten percent in all; parameters, gradients and the optimizer's state to the byte."""
    plans = [Plan(**settings) for settings in SETTINGS]
    for settings, found in zip(SETTINGS, estimate_each(Gpt(), SHAPES[Gpt], plans, world_size=2), strict=True):
        for rank in real(training, Gpt, settings):
            assert found.total == pytest.approx(rank.pop("total"), rel=0.1), settings
            assert {name: getattr(found, name) for name in rank} == rank, settings


def test_experts_on_several_ranks_are_estimated_as_each_gathers_its_own(training: Kernel) -> None:
    settings: dict[str, Any] = {"strategy": "fsdp", "ep": 2}
    found = estimate(Mixture(), SHAPES[Mixture], Plan(**settings), world_size=2)
    assert found.total < estimate(Mixture(), SHAPES[Mixture], Plan(strategy="fsdp"), world_size=2).total
    for rank in real(training, Mixture, settings):
        assert found.total == pytest.approx(rank.pop("total"), rel=0.1)
        assert {name: getattr(found, name) for name in rank} == rank


def test_the_embedding_and_the_head_are_estimated_as_they_are_gathered(training: Kernel) -> None:
    settings: dict[str, Any] = {"strategy": "fsdp", "precision": "bf16"}
    found = estimate(Untied(), SHAPES[Untied], Plan(**settings), world_size=2)
    for rank in real(training, Untied, settings):
        assert found.total == pytest.approx(rank.pop("total"), rel=0.1)
        assert {name: getattr(found, name) for name in rank} == rank


def test_an_optimizer_that_updates_all_tensors_at_once_takes_temporary_memory_of_shards() -> None:
    """As on a GPU, where AdamW does so; its square roots are one shard."""
    task = packed(TrialTask(Mlp(512, 8), (8, 512), torch.optim.AdamW, None))
    setup = TrialSetup(Plan(strategy="fsdp"), world_size=2, has_group=True, on_gpu=True)
    found = answer_to(setup, task)["held"]
    assert found["temporary"] == pytest.approx(found["parameters"], rel=0.1)


def test_activations_are_those_that_each_module_saves_and_flops_those_of_the_step() -> None:
    """Of three layers with a ReLU behind each, autograd saves the batch and what each ReLU returns."""
    (found,) = estimate_each(nn.Sequential(Mlp(64, 3)), (8, 64), [NONE], details=True)
    assert found.modules == {"*.*": 4 * 8 * 64 * FLOAT}
    assert found.flops == 2 * 8 * 64 * 64 * (3 * 3 - 1)  # the batch needs no gradient


PARTS = """
import torch, json
from nbdist.metrics.allocation.held_parts import held_parts
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32))
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(8, 64)).sum().backward(); optimizer.step()
tied, mine = model[0].weight.detach(), torch.zeros(1000)
(found,) = held_parts(globals())
print(found.device, found.parameters, found.buffers, found.gradients, found.optimizer, found.unknown)
print(found.largest[0].name)
"""


def test_what_is_held_now_is_told_apart_to_the_byte() -> None:
    """In a process of its own: all of a process's tensors are looked at."""
    done = subprocess.run([sys.executable, "-c", PARTS], check=False, capture_output=True, text=True)
    weights = (64 * 32 + 32 + 2 * 32) * FLOAT
    moments = 2 * weights + 4 * FLOAT  # and a number of steps for each parameter
    buffers = 2 * 32 * FLOAT + 8
    assert done.stdout.split() == ["cpu", str(weights), str(buffers), str(weights), str(moments), "None", "mine"], done


def test_the_magic_shows_what_is_held_and_what_checkpoints_give_back(training: Kernel) -> None:
    training.ok("%%distributed\nfrom testbed.train_estimate import Gpt, SHAPES\nheld_model = Gpt()")
    shown = training.ok("%distributed memory --parts --model held_model --batch SHAPES[Gpt]").stdout
    for words in (
        "largest other",
        "at the peak of a step, estimated",
        "blocks.*.down",
        "checkpointing each block would save",
    ):
        assert words in shown, shown
    more = re.search(r"(\d+) % more FLOPs", shown)
    assert more is not None and 0 < int(more[1]) < 34, shown  # at most the forward pass again
    refused = training.run("%distributed memory --parts --model held_model")
    assert "needs both" in str(refused)


# --- what a plan changes


def test_ranks_share_what_is_sharded() -> None:
    plans = [NONE, Plan(strategy="fsdp"), Plan(strategy="hsdp", replicas=2), Plan(gradient_as_bucket_view=False)]
    estimates = estimate_each(Mlp(256, 4), (8, 256), plans, world_size=8, device_memory=MIB)
    whole, sharded, hybrid, ddp = estimates
    assert whole.device_memory == MIB and not whole.fits
    assert [sharded.parameters * 8, hybrid.parameters * 4] == [whole.parameters] * 2
    assert [sharded.gradients_whole * 8, hybrid.gradients_whole * 4] == [whole.gradients_whole] * 2
    assert ddp.total - whole.total == whole.gradients_whole  # buckets of its own


def test_checkpointed_models_of_transformers_keep_less_the_less_is_saved() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=32
    )
    kinds: Any = ["none", "selective", "selective-half", "full"]
    plans = [Plan(strategy="fsdp", activation_checkpointing=kind) for kind in kinds]
    found = totals(told(lambda: LlamaForCausalLM(config), {"input_ids": (8, 256)}, plans, world_size=2))
    assert found == sorted(found, reverse=True) and len(set(found)) == len(kinds)


def test_a_budget_of_activations_is_between_all_and_none_of_them() -> None:
    plans = [NONE, NONE.replace(activation_budget=0.5), NONE.replace(activation_checkpointing="full")]
    found = totals(told(Gpt(), SHAPES[Gpt], plans))
    assert found == sorted(found, reverse=True) and len(set(found)) == 3


def test_gradients_that_are_exchanged_in_each_micro_batch_are_kept_as_shards() -> None:
    plans = [Plan(strategy="fsdp", accumulate=4, exchange=exchange) for exchange in ("last", "each")]
    answers = told(Mlp(256, 8), (8, 256), plans, world_size=8)
    last, each = totals(answers)
    assert last - each > 6 * answers[1]["held"]["gradients_whole"]  # of the eight parts seven are others'


def test_dropout_on_a_gpu_keeps_one_byte_for_each_element() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    on_cpu, on_gpu = (held(model, (1024, 64), on_gpu=on_gpu)["activations"] for on_gpu in (False, True))
    assert on_cpu - on_gpu == 1024 * 64 * (FLOAT - 1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


def test_attention_with_dropout_on_a_gpu_keeps_no_matrix_of_weights() -> None:
    on_cpu, on_gpu = (held(Attention(), (1, 2, 512, 64), on_gpu=on_gpu) for on_gpu in (False, True))
    assert on_gpu["activations"] < 2 * 512 * 512 * FLOAT < on_cpu["activations"]


def test_the_optimizer_of_a_gpu_takes_all_parameters_in_one_go() -> None:
    model = Mlp(256, 4)
    by_loop, at_once = (held(model, (8, 256), on_gpu=on_gpu) for on_gpu in (False, True))
    assert at_once["temporary"] >= at_once["parameters"] > by_loop["temporary"]


# --- what can be given


def test_model_batch_and_optimizer_come_in_many_forms() -> None:
    def model() -> nn.Module:
        return nn.Linear(256, 256)

    with torch.device("meta"):
        on_meta = model()
    real_one = model()
    shape, tensor = (8, 256), torch.zeros(8, 256)
    answers = [
        held(real_one, tensor, optimizer=torch.optim.AdamW(real_one.parameters())),
        held(on_meta, [shape]),
        held(model, {"input": tensor.to("meta")}, optimizer=partial(torch.optim.AdamW, lr=1e-2)),
    ]
    assert answers[0] == answers[1] == answers[2]


def test_shapes_are_of_tokens_if_the_model_begins_with_an_embedding() -> None:
    assert held(nn.Embedding(16, 4), (2, 8))["gradients_whole"] == 16 * 4 * FLOAT


def test_a_loss_gets_the_output_and_the_targets() -> None:
    batch = (torch.zeros(4, 16), torch.zeros(4, dtype=torch.int64))
    assert held(nn.Linear(16, 10), batch, loss=F.cross_entropy)["gradients_whole"] == (16 + 1) * 10 * FLOAT


def test_nothing_of_the_callers_changes() -> None:
    model = Mlp(64, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), model[0].weight.grad))
    estimate(model.eval(), torch.ones(2, 64), Plan(strategy="fsdp"), world_size=2, optimizer=optimizer)
    after = (model.state_dict(), optimizer.state_dict(), model[0].weight.grad)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not model.training and not torch.distributed.is_initialized()


# --- what is shown


@pytest.fixture
def shown() -> Estimate:
    return Estimate(
        parameters=3 * MIB,
        gradients=MIB,
        gradients_whole=3 * MIB,
        optimizer=6 * MIB,
        activations=8 * MIB,
        temporary=2 * MIB,
        device="a GPU",
        device_memory=200 * MIB,
        setting="ddp on 2 ranks, fp32",
        notes=("torch.compile is not modeled",),
    )


def test_it_is_told_as_a_table_and_a_bar(shown: Estimate) -> None:
    assert str(shown).splitlines() == [
        "one rank, ddp on 2 ranks, fp32",
        "parameters      3.0 MiB   15 %",
        "gradients       1.0 MiB    5 %  3.0 MiB after backward",
        "optimizer       6.0 MiB   30 %",
        "activations     8.0 MiB   40 %",
        "temporary       2.0 MiB   10 %",
        "outside torch       0 B    0 %",
        "total          20.0 MiB  100 %",
        "[####....................................]",
        "fits: 20.0 of 200 MiB, 10 % of a GPU",
        "torch.compile is not modeled",
    ]


def test_a_notebook_shows_it_with_the_same_words(shown: Estimate) -> None:
    page = shown._repr_html_()
    assert "width:10%" in page and "fits: 20.0 of 200 MiB, 10 % of a GPU" in page and "8.0 MiB" in page


def test_averaged_weights_have_a_line_of_their_own_if_there_are_any(shown: Estimate) -> None:
    assert "averages        3.0 MiB   13 %  of the weights" in str(replace(shown, averages=3 * MIB))


def test_what_does_not_fit_is_said(shown: Estimate) -> None:
    small = replace(shown, device_memory=10 * MIB)
    assert not small.fits and "does not fit: 20.0 of 10.0 MiB, 200 % of a GPU" in str(small)


# --- what is refused


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if x.sum().item() > 0 else 1)


def locked() -> nn.Module:
    model = nn.Linear(8, 8)
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


ALIEN = torch.optim.SGD([torch.zeros(2)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: estimate(cast(Any, 3), (8, 8)),
            "model is a int: give a torch.nn.Module, or a function that makes one",
        ),
        (lambda: estimate(Looks(), (8, 8)), r'_local_scalar_dense.* \(in forward, ".*", line \d+: .*x\.sum\(\)\.item'),
        (lambda: estimate(nn.DataParallel(Mlp(8)), (8, 8)), "wrapped in DataParallel already"),
        (lambda: estimate(locked(), (8, 8)), "give a function that makes the model"),
        (lambda: estimate(Mlp, (8, 8), optimizer=ALIEN), "pass a class, for example optimizer=torch.optim.SGD"),
        (lambda: estimate(Mlp(8), (8, 8), plan=cast(Any, "fsdp")), "plan='fsdp' is not a plan"),
        (lambda: estimate(Mlp(8), (8, 8), world_size=0), "world_size=0 must be a number of ranks"),
        (lambda: estimate(Mlp(8), (8, 8), optimizer="sgd"), "optimizer is a str: give a class"),
    ],
)
def test_what_cant_be_estimated_is_one_clear_error(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (TrialTask(nn.Linear(8, 8), (8, 9), torch.optim.SGD, None), "raised RuntimeError: .*same reduction dim"),
        (TrialTask(lambda: 3, (8, 8), torch.optim.SGD, None), "a function that returned a int: it must return"),
        (TrialTask(Mlp(8), (8, 8), ALIEN, None), "no parameter of this model: pass a class"),
        (
            TrialTask(Mlp(8), (8, 8), torch.optim.SGD, lambda output: output),
            r"one element, not a tensor of shape \(8, 8\)",
        ),
        (
            TrialTask(nn.Module(), (8, 8), torch.optim.SGD, None),
            "raised ValueError: optimizer got an empty parameter list",
        ),
    ],
)
def test_a_step_that_cant_be_made_is_one_clear_error(task: TrialTask, words: str) -> None:
    assert re.search(words, answered(task)["error"])


def ends() -> nn.Module:
    raise SystemExit("no more")


def test_a_process_that_ends_is_told() -> None:
    with pytest.raises(NbdistError, match="the process that estimates has ended: no more"):
        estimate(ends, (8, 8))


def test_without_torchs_tracker_all_but_temporary_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._tools.mem_tracker", None)
    answer = answered(TrialTask(Mlp(64, 2), (32, 64), torch.optim.AdamW, None))
    found, weights = answer["held"], 2 * (64 * 64 + 64) * FLOAT
    assert [found[name] for name in ("parameters", "gradients", "temporary")] == [weights, weights, 0]
    assert found["activations"] == 3 * 32 * 64 * FLOAT  # the batch, and what each ReLU returned
    assert "temporary memory is not known" in answer["notes"][0]
