"""Layers of transformers' models that are divided among ranks (`tp`), with what belongs to a training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel

TP = "Plan('fsdp', tp=2)"
TOKENS = "Plan('fsdp', tp=2, sequence_parallel=True)"
LOSS = "Plan('fsdp', tp=2, loss_parallel=True)"
BOTH = "Plan('hsdp', tp=2, replicas=2)"


@pytest.fixture(scope="module")
def four() -> Iterator[Kernel]:
    """A kernel with four ranks."""
    with shared_kernel(4) as kernel:
        kernel.ok(
            "import nbdist\nfrom nbdist import Plan\nfrom tests.support import train_tensor_parallel as divided\n"
            "call = nbdist.get_session().call\n"
            "from nbdist.client.ranks.observers import Observer, subscribe\n"
            "class Laps(Observer):\n    def cell_ended(self, task): self.replies = task.replies\n"
            "laps = Laps(); subscribe(laps)"
        )
        kernel.ok("%%distributed\nfrom tests.support import train_tensor_parallel as divided")
        yield kernel


def on_ranks(kernel: Kernel, function: str, arguments: str) -> list[Any]:
    return list(kernel.value(f"call(divided.{function}, {arguments})"))


@pytest.mark.parametrize("plan", [TP, BOTH, TOKENS], ids=["fsdp", "hsdp", "sequence parallel"])
@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen3"])
def test_a_divided_model_trains_as_one_process_does(four: Kernel, kind: str, plan: str) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"{kind!r}, {plan}")) < 1e-12


def test_so_it_does_with_a_fused_optimizer(four: Kernel) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'llama tied', {TP}, True")) < 1e-12


@pytest.mark.parametrize("kind", ["llama", "llama tied"])
@pytest.mark.parametrize(
    ("changes", "limit"),  # transformers computes the loss in float32
    [("", 1e-6), ("cp=2", 1e-6), ("accumulate=2", 1e-6), ("precision='bf16'", 1e-2)],
)
def test_a_loss_on_divided_logits_trains_as_one_on_whole_ones_does(
    four: Kernel, kind: str, changes: str, limit: float
) -> None:
    plan = f"Plan('fsdp', tp=2, {changes})"
    arguments = f"{kind!r}, {plan}, {plan}.replace(loss_parallel=True)"
    assert max(on_ranks(four, "distance_of_plans", arguments)) < limit


@pytest.mark.parametrize("changes", ["", "cp=2", "accumulate=2", "activation_checkpointing='full'"])
def test_tokens_divided_between_layers_train_as_whole_sequences_do(four: Kernel, changes: str) -> None:
    plan = f"Plan('fsdp', tp=2, {changes})"
    arguments = f"'llama tied', {plan}, {plan}.replace(sequence_parallel=True)"
    assert max(on_ranks(four, "distance_of_plans", arguments)) < 1e-12


@pytest.mark.slow
def test_blocks_that_are_compiled_whole_divide_tokens_too(four: Kernel) -> None:
    four.ok("from tests.support import train_equality as equality")
    plan = f"{TP}.replace(compile=True)"
    arguments = f"'llama tied', {plan}, {plan}.replace(sequence_parallel=True)"
    assert max(four.value(f"call(divided.distance_of_plans, {arguments})", limit=300)) < 1e-6
    assert four.value("call(equality.graph_breaks)") == [0] * 4


def test_a_layer_between_divided_ones_has_some_of_the_tokens(four: Kernel) -> None:
    found = on_ranks(four, "tokens_of_norms", f"{TOKENS}, 8")
    assert found == [{"input_layernorm": 4, "post_attention_layernorm": 4, "norm": 8}] * 4


def test_sequences_that_can_not_be_divided_are_refused_in_training_with_what_to_set(four: Kernel) -> None:
    outcome = four.run(f"call(divided.tokens_of_norms, {TOKENS}, 7)")
    assert "sequences of 7 tokens can't be divided by tp (2)" in outcome.evalue
    assert "set sequence_parallel to False" in outcome.evalue


def test_text_of_any_length_is_generated_with_divided_tokens(four: Kernel) -> None:
    assert on_ranks(four, "generates_as_one_process", TOKENS) == [True] * 4


def test_a_model_whose_blocks_are_not_known_can_not_divide_tokens(four: Kernel) -> None:
    outcome = four.run(f"call(divided.prepare_own_model, {TOKENS})")
    assert "sequence_parallel can't divide the tokens of Sequential: only models of transformers" in outcome.evalue


@pytest.mark.parametrize("plan", [TP, LOSS, TOKENS], ids=["", "loss parallel", "sequence parallel"])
@pytest.mark.parametrize("kind", ["llama", "llama tied"])
def test_a_step_of_a_divided_model_warns_of_nothing(four: Kernel, kind: str, plan: str) -> None:
    assert on_ranks(four, "warnings_of_a_step", f"{kind!r}, {plan}") == [[]] * 4


def test_logits_are_divided_in_training_and_whole_in_evaluation(four: Kernel) -> None:
    for found in on_ranks(four, "logits_of", LOSS):
        assert (found["part"], found["whole"]) == ([16, 8, 32], [16, 8, 64])
        assert found["distance"] < 1e-12


def test_a_model_without_a_loss_of_transformers_can_not_divide_it(four: Kernel) -> None:
    outcome = four.run(f"call(divided.prepare_own_model, {LOSS})")
    assert "loss_parallel can't divide the loss of Sequential: only models of transformers" in outcome.evalue


@pytest.mark.parametrize("kind", ["llama", "llama tied"])
def test_words_that_are_looked_up_have_arrived_when_compiled_blocks_read_them(four: Kernel, kind: str) -> None:
    assert on_ranks(four, "type_of_embedded", f"{kind!r}, {TP}") == ["torch.Tensor"] * 4


@pytest.mark.parametrize("count", [12, 13])
def test_each_sample_counts_once(four: Kernel, count: int) -> None:
    for function in ("samples_seen", "objects_seen"):
        assert on_ranks(four, function, f"{TP}, {count}") == [list(range(count))] * 4


@pytest.mark.parametrize(("saved", "loaded"), [(TP, "Plan('fsdp')"), ("Plan('fsdp')", TP), (TP, BOTH)])
def test_a_checkpoint_fits_another_division(four: Kernel, saved: str, loaded: str, tmp_path: Path) -> None:
    arguments = f"{saved}, {loaded}, {str(tmp_path / 'saved')!r}"
    assert max(on_ranks(four, "distance_after_loading", arguments)) < 1e-12


def test_a_model_that_is_built_nowhere_reads_its_parts_of_each_layer(four: Kernel, tmp_path: Path) -> None:
    assert max(on_ranks(four, "distance_after_reading", f"{TP}, {str(tmp_path / 'weights')!r}")) == 0


@pytest.mark.torch_private
def test_ranks_that_divide_layers_count_their_batch_once_and_their_share_of_its_flops(four: Kernel) -> None:
    found = {}
    for plan, sharing in ((TP, ["ranks 0-1 share", "ranks 2-3 share"]), ("Plan('fsdp')", [])):
        four.ok("%distributed tflops on")
        shown = four.ok(f"%%distributed\nfrom nbdist import Plan\ndivided.train_on_words({plan})").stdout
        assert re.findall(r"ranks \S+ share", " ".join(shown.split())) == sharing
        found[plan] = four.value("{reply.steps.flops for reply in laps.replies.values()}")
    four.ok("%distributed tflops off")
    assert {2 * flops for flops in found[TP]} == found["Plan('fsdp')"]


def test_heads_that_can_not_be_divided_are_refused_with_their_numbers(four: Kernel) -> None:
    outcome = four.run("call(divided.distance_from_one_process, 'llama', Plan('fsdp', tp=4))")
    assert outcome.ename == "RankError"
    assert "2 key and value heads can't be divided by tp (4): set tp to one of 1, 2" in outcome.evalue


def test_ranks_that_divide_layers_and_got_different_batches_are_refused(four: Kernel) -> None:
    outcome = four.run(f"call(divided.called_with_batches_of_ranks, {TP})")
    assert "ranks 0 and 1 divide the layers of one batch, but got different ones ([4, 8], [4, 8]" in outcome.evalue


def test_ranks_that_can_not_be_divided_are_refused(four: Kernel) -> None:
    outcome = four.run("call(divided.distance_from_one_process, 'llama', Plan('fsdp', tp=3))")
    assert "tp (3) must divide the number of ranks, which is 4: set tp to 1 or 2 or 4" in outcome.evalue


def test_the_mesh_has_its_dimensions_by_name_and_neighbors_divide_layers(four: Kernel) -> None:
    found = on_ranks(four, "mesh_of", BOTH)
    assert [names for names, _ in found] == [("dp_replicate", "dp_shard", "tp")] * 4
    assert [ranks for _, ranks in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
