"""Sequences of transformers' language models that are divided among ranks (`cp`), with what belongs to a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel

IMPORTS = (
    "import nbdist\nfrom nbdist import Plan\nfrom tests.support import train_context_parallel as divided\n"
    "call = nbdist.get_session().call"
)
CP = "Plan('fsdp', cp=2)"
BOTH = "Plan('fsdp', cp=2, tp=2)"
HEADS = "Plan('fsdp', cp=2, cp_method='ulysses')"


@pytest.fixture(scope="module")
def two() -> Iterator[Kernel]:
    """A kernel with two ranks."""
    with shared_kernel(2) as kernel:
        kernel.ok(IMPORTS)
        yield kernel


@pytest.fixture(scope="module")
def four() -> Iterator[Kernel]:
    """A kernel with four ranks."""
    with shared_kernel(4) as kernel:
        kernel.ok(IMPORTS)
        yield kernel


def on_ranks(kernel: Kernel, function: str, arguments: str) -> list[Any]:
    return list(kernel.value(f"call(divided.{function}, {arguments})"))


@pytest.mark.parametrize("plan", [CP, HEADS], ids=["gather", "ulysses"])
@pytest.mark.parametrize("samples", ["plain", "few labels", "odd length", "padded left", "padded right", "documents"])
def test_two_ranks_that_divide_sequences_train_as_one_process_does(two: Kernel, samples: str, plan: str) -> None:
    assert max(on_ranks(two, "distance_from_one_process", f"'llama', {samples!r}, {plan}")) < 1e-12


@pytest.mark.parametrize("plan", [CP, HEADS], ids=["gather", "ulysses"])
@pytest.mark.parametrize("samples", ["plain", "padded left"])
def test_so_they_do_where_tokens_see_only_those_before_them(two: Kernel, samples: str, plan: str) -> None:
    assert max(on_ranks(two, "distance_from_one_process", f"'mistral', {samples!r}, {plan}")) < 1e-12


@pytest.mark.parametrize(
    "plan",
    [
        "Plan('fsdp', cp=2, accumulate=2)",
        "Plan('fsdp', cp=4)",
        "Plan('fsdp', cp=4, cp_method='ulysses')",
        "Plan('fsdp', cp=2, activation_checkpointing='full')",
        "Plan('fsdp', cp=2, cp_method='ulysses', activation_checkpointing='selective')",
        "Plan('hsdp', cp=2, replicas=2)",
        "Plan('fsdp', cp=2, tp=2)",
        "Plan('fsdp', cp=2, tp=2, cp_method='ulysses', accumulate=2, activation_checkpointing='full')",
    ],
)
def test_four_ranks_that_divide_sequences_train_as_one_process_does(four: Kernel, plan: str) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'llama', 'few labels', {plan}")) < 1e-12


def test_a_step_in_half_precision_is_as_near_as_rounding(two: Kernel) -> None:
    assert max(on_ranks(two, "difference_between_precisions", CP)) < 0.03


@pytest.mark.parametrize(
    ("saved", "loaded"), [(CP, "Plan('fsdp')"), ("Plan('fsdp')", HEADS), (BOTH, "Plan('fsdp')"), (CP, BOTH)]
)
def test_a_checkpoint_fits_another_division(four: Kernel, saved: str, loaded: str, tmp_path: Path) -> None:
    arguments = f"{saved}, {loaded}, {str(tmp_path / 'saved')!r}"
    assert max(on_ranks(four, "distance_after_loading", arguments)) < 1e-12


@pytest.mark.parametrize("plan", [CP, BOTH])
def test_each_loss_and_each_sample_counts_once(four: Kernel, plan: str) -> None:
    assert on_ranks(four, "losses_seen", plan) == [(4, 8)] * 4


@pytest.mark.parametrize("plan", [CP, HEADS])
def test_without_labels_each_rank_has_the_logits_of_all_tokens(two: Kernel, plan: str) -> None:
    assert max(on_ranks(two, "distance_of_logits", plan)) < 1e-12


def test_a_prepared_model_writes_text_as_one_process_does(two: Kernel) -> None:
    assert on_ranks(two, "continued", CP) == [True, True]


def test_a_model_that_trains_without_labels_is_warned_of(two: Kernel) -> None:
    outcome = two.ok(f"call(divided.trained_without_labels, {CP})")
    assert "each rank computes whole sequences, and cp saves no memory" in str(outcome)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("called_with_batches_of_ranks, " + CP, "ranks 0 and 1 divide the sequences of one batch, but got different"),
        (f"called_with, {CP}, pixel_values=divided.torch.ones(1)", "does not know how to divide pixel_values"),
        (f"called_with, {CP}, attention_mask=divided.torch.ones(8, 1, 16, 16)", "divides attention_mask along"),
        (f"called_with, {CP}, past_key_values=()", "can't divide sequences that go on from earlier ones"),
        ("called_with, Plan('fsdp', cp=3)", "cp (3) must divide the number of ranks, which is 2: set cp to 1 or 2"),
    ],
)
def test_what_can_not_be_divided_is_refused_on_all_ranks(two: Kernel, call: str, says: str) -> None:
    outcome = two.run(f"call(divided.{call})")
    assert outcome.ename == "RankError"
    assert says in outcome.evalue


def test_the_mesh_has_those_that_divide_sequences_by_name(four: Kernel) -> None:
    found = on_ranks(four, "mesh_of", "Plan('hsdp', cp=2, replicas=1)")
    assert [names for names, _, _ in found] == [("dp_replicate", "dp_shard", "cp")] * 4
    assert [ranks for _, ranks, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert found[0][2] == ("dp_replicate", "dp_shard_cp")
    found = on_ranks(four, "mesh_of", BOTH)
    assert [names for names, _, _ in found] == [("dp_shard", "cp", "tp")] * 4
    assert [ranks for _, ranks, _ in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_an_estimate_counts_the_activations_of_a_rank_s_tokens(two: Kernel) -> None:
    kinds = ("Plan('fsdp')", "Plan('fsdp', cp=4)")
    alone, divided = (two.value(f"divided.estimated_activations({plan})") for plan in kinds)
    assert divided < alone / 3


def test_a_step_counts_a_batch_that_ranks_divide_once(two: Kernel) -> None:
    two.ok("%distributed tflops on")
    cell = "from nbdist import Plan\nfrom tests.support import train_context_parallel as divided\n"
    outcome = two.ok(f"%%distributed\n{cell}kept = divided.trained_for_a_while({CP})")
    assert "ranks 0-1 share their batches" in " ".join(str(outcome).split())


@pytest.mark.parametrize("plan", [CP, HEADS], ids=["gather", "ulysses"])
def test_an_interrupt_stops_ranks_that_divide_sequences_after_the_same_step(two: Kernel, plan: str) -> None:
    _train_in_the_notebook(two, plan)
    cell = two.start("%%distributed\nwhile True:\n    divided.step(model, optimizer, batch)\n    print('go')")
    cell.wait_for_ranks(2, "go")
    two.interrupt()
    assert "all ranks stopped after step" in cell.finish().evalue
    two.ok("%%distributed\nassert divided.distance_of_gradients(model) < 1e-12")


@pytest.mark.parametrize("plan", [CP, HEADS], ids=["gather", "ulysses"])
def test_ranks_that_wait_for_keys_and_values_are_freed_and_train_on(two: Kernel, plan: str) -> None:
    _train_in_the_notebook(two, plan)
    cell = two.start("%%distributed\nimport time\nprint('go')\ntime.sleep(600) if rank == 0 else model(**batch)")
    cell.wait_for_ranks(2, "go")
    two.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    two.ok("%%distributed\nassert divided.distance_of_gradients(model) < 1e-12")


def _train_in_the_notebook(kernel: Kernel, plan: str) -> None:
    kernel.ok(
        "%%distributed\nfrom nbdist import Plan\nfrom tests.support import train_context_parallel as divided\n"
        f"model, optimizer = divided.training({plan})\nbatch = divided.whole(divided.text())\n"
        "divided.step(model, optimizer, batch)"
    )
