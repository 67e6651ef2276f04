"""Mixtures of experts that ranks divide (`tp`), or of which each has some (`ep`), with what belongs to a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel

FSDP = "Plan('fsdp')"
TP = "Plan('fsdp', tp=2)"
TP_OF_REPLICAS = "Plan('hsdp', tp=2, replicas=2)"
EP = "Plan('fsdp', ep=2)"
EP_OF_ALL = "Plan('fsdp', ep=4)"
EP_OF_REPLICAS = "Plan('hsdp', ep=2, replicas=2)"


@pytest.fixture(scope="module")
def four() -> Iterator[Kernel]:
    """A kernel with four ranks."""
    with shared_kernel(4) as kernel:
        kernel.ok(
            "import nbdist\nfrom nbdist import Plan\nfrom tests.support import train_experts as experts\n"
            "call = nbdist.get_session().call"
        )
        yield kernel


def on_ranks(kernel: Kernel, function: str, arguments: str) -> list[Any]:
    return list(kernel.value(f"call(experts.{function}, {arguments})"))


@pytest.mark.parametrize("plan", [TP, TP_OF_REPLICAS, EP, EP_OF_ALL, EP_OF_REPLICAS])
@pytest.mark.parametrize("steps", ["foreach", "fused"])
def test_experts_train_as_in_one_process(four: Kernel, plan: str, steps: str) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'qwen3', {plan}, {steps!r}")) < 1e-12


@pytest.mark.parametrize("plan", [TP, EP])
def test_so_they_do_to_the_precision_of_a_router_that_computes_in_float32(four: Kernel, plan: str) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'mixtral', {plan}")) < 1e-6


def test_so_they_do_in_float32_multiplied_all_at_once(four: Kernel) -> None:
    assert max(on_ranks(four, "distance_in_float32", EP)) < 1e-5


@pytest.mark.parametrize("plan", [TP, EP])
@pytest.mark.parametrize(
    "more", ["activation_checkpointing='full'", "activation_checkpointing='selective'", "accumulate=2, exchange='each'"]
)
def test_so_they_do_with_tied_weights_and_other_settings(four: Kernel, plan: str, more: str) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'qwen3 tied', {plan[:-1]}, {more})")) < 1e-12


def test_a_rank_whose_experts_no_token_chooses_takes_part(four: Kernel) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'qwen3 idle', {EP_OF_ALL}")) < 1e-12


def test_fewer_experts_than_ranks_are_sharded_by_their_rows(four: Kernel) -> None:
    assert max(on_ranks(four, "distance_from_one_process", f"'qwen3', {EP}, 'default', 2")) < 1e-12


def test_the_norm_is_that_of_all_gradients(four: Kernel) -> None:
    for found, wanted in on_ranks(four, "norm_and_that_of_one_process", EP):
        assert found == pytest.approx(wanted, rel=1e-12)


def test_ranks_that_wait_for_tokens_of_one_that_fails_are_freed_and_train_on(four: Kernel) -> None:
    four.ok(
        "%%distributed\nfrom nbdist import Plan\nfrom tests.support import train_experts as experts\n"
        f"model, optimizer = experts.training({EP})"
    )
    failing = "%%distributed\nexperts.fail_on_the_last_rank_where_others_exchange_tokens(model, optimizer)"
    assert "no token" in four.fails(failing, "RankError").traceback
    four.ok("%%distributed\nassert experts.distance_after_a_step(model, optimizer) < 1e-12")


@pytest.mark.parametrize("more", ["", ", activation_checkpointing='full'"])
def test_the_load_is_the_tokens_of_each_expert_from_all_ranks(four: Kernel, more: str) -> None:
    plan = EP_OF_ALL.replace(")", f"{more})")
    for found, wanted in on_ranks(four, "loads_and_those_of_one_process", plan):
        assert found == wanted


def test_the_load_of_experts_that_are_whole_is_refused(four: Kernel) -> None:
    outcome = four.run("call(experts.loads_and_those_of_one_process, Plan('fsdp'))")
    assert (
        "the experts of FSDPQwen3MoeForCausalLM are not divided: prepare it with a plan whose ep is" in outcome.evalue
    )


def test_parameters_of_different_numbers_of_experts_are_refused_with_the_numbers(four: Kernel) -> None:
    outcome = four.run(f"call(experts.prepare_uneven_experts, {EP})")
    assert "the same number of experts, but experts.up of 4, experts.down of 2" in outcome.evalue


def test_an_interrupt_stops_ranks_that_exchange_tokens_after_the_same_step(four: Kernel) -> None:
    four.ok(
        "%%distributed\nfrom nbdist import Plan\nfrom tests.support import train_experts as experts\n"
        f"model, optimizer = experts.training({EP})"
    )
    cell = four.start("%%distributed\nwhile True:\n    experts.step(model, optimizer, experts.text())\n    print('go')")
    cell.wait_for_ranks(4, "go")
    four.interrupt()
    assert "all ranks stopped after step" in cell.finish().evalue
    four.ok("%%distributed\nassert experts.distance_of_gradients(model) < 1e-12")


def test_ranks_generate_text_of_their_own(four: Kernel) -> None:
    assert on_ranks(four, "distance_of_generated", EP) == [0] * 4


@pytest.mark.parametrize(
    ("saved", "loaded"), [(TP, FSDP), (FSDP, TP), (TP, TP_OF_REPLICAS), (EP, FSDP), (FSDP, EP_OF_REPLICAS), (TP, EP)]
)
def test_a_checkpoint_fits_another_division_of_experts(four: Kernel, saved: str, loaded: str, tmp_path: Path) -> None:
    arguments = f"{saved}, {loaded}, {str(tmp_path / 'saved')!r}"
    assert max(on_ranks(four, "distance_after_loading", arguments)) < 1e-12


@pytest.mark.parametrize("plan", [TP, EP])
def test_experts_that_are_built_nowhere_read_their_parts(four: Kernel, plan: str, tmp_path: Path) -> None:
    assert max(on_ranks(four, "distance_after_reading", f"{plan}, {str(tmp_path / 'weights')!r}")) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            f"'qwen3', {EP_OF_ALL}, 6",
            "gate_up_proj is of 6 experts, which can't be divided by ep (4): set ep to one of",
        ),
        (f"'llama', {EP}", "ep (2) divides experts, and LlamaForCausalLM does not say that it has any: set ep to 1"),
        ("'qwen3', Plan('fsdp', ep=3)", "ep (3) must divide the number of ranks, which is 4: set ep to 1 or 2 or 4"),
        ("'qwen3', Plan('hsdp', ep=3)", "ep (3) must divide the number of ranks, which is 4: set ep to 1 or 2 or 4"),
    ],
)
def test_what_can_not_be_divided_is_refused_with_the_numbers(four: Kernel, arguments: str, says: str) -> None:
    assert says in four.run(f"call(experts.prepared, {arguments})").evalue


def test_the_mesh_has_its_dimensions_by_name_and_neighbors_divide_experts(four: Kernel) -> None:
    found = on_ranks(four, "mesh_of", EP_OF_REPLICAS)
    assert [names for names, _ in found] == [("dp_replicate", "efsdp", "ep")] * 4
    assert [ranks for _, ranks in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
