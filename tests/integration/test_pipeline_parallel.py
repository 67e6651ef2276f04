"""Language models of transformers that are cut into stages (`pp`), with what belongs to a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel

IMPORTS = (
    "import nbdist\nfrom nbdist import Plan\nfrom tests.support import train_pipeline as piped\n"
    "call = nbdist.get_session().call"
)
PP = "Plan('fsdp', pp=2)"
BOTH = "Plan('fsdp', pp=2, tp=2)"


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


MODEL = """%%distributed
import torch, nbdist
from nbdist import Plan
from tests.support import train_pipeline as piped
model = piped.make("llama tied")
model, optimizer = nbdist.prepare(model, torch.optim.AdamW(model.parameters()), plan=Plan("fsdp", pp=4))
batch = next(iter(piped.batches(piped.SEQUENCES)))
"""
IS_RIGHT = "%%distributed\nprint(piped.distance_of_gradients('llama tied', model) < 1e-12)"
RIGHT_ON_ALL = {rank: ["True"] for rank in range(4)}


def on_ranks(kernel: Kernel, function: str, arguments: str) -> list[Any]:
    return list(kernel.value(f"call(piped.{function}, {arguments})"))


def trains_alike(kernel: Kernel, arguments: str) -> bool:
    """Whether losses, which transformers computes in float32, and parameters are those of one process."""
    found = on_ranks(kernel, "distance_from_one_process", arguments)
    return all(loss < 1e-6 and parameters < 1e-12 for loss, parameters in found)


@pytest.mark.parametrize(
    "plan",
    [PP, "Plan('fsdp', pp=2, pp_schedule='gpipe')", "Plan('fsdp', pp=2, activation_checkpointing='full')"],
    ids=["1f1b", "gpipe", "checkpointed"],
)
def test_a_model_in_stages_trains_as_one_process_does_however_labels_are_spread(two: Kernel, plan: str) -> None:
    assert trains_alike(two, f"'llama', {plan}")


@pytest.mark.parametrize("arguments", ["'llama tied', {}", "'llama tied', {}, True", "'qwen3', {}"])
def test_so_do_tied_ends_a_fused_optimizer_and_other_models(two: Kernel, arguments: str) -> None:
    assert trains_alike(two, arguments.format(PP))


@pytest.mark.parametrize("plan", [PP, "Plan('fsdp', pp=4)"], ids=["sharded", "four stages"])
@pytest.mark.parametrize("kind", ["llama", "llama tied"])
def test_four_ranks_train_as_one_process_does(four: Kernel, kind: str, plan: str) -> None:
    assert trains_alike(four, f"{kind!r}, {plan}")


@pytest.mark.parametrize("more", ["", ", sequence_parallel=True", ", activation_checkpointing='full'"])
@pytest.mark.parametrize("kind", ["llama", "llama tied"])
def test_stages_whose_layers_are_divided_train_as_one_process_does(four: Kernel, kind: str, more: str) -> None:
    assert trains_alike(four, f"{kind!r}, Plan('fsdp', pp=2, tp=2{more})")


def test_a_checkpoint_of_stages_whose_layers_are_divided_fits_whole_models(four: Kernel, tmp_path: Path) -> None:
    for number, (saved, loaded) in enumerate([(BOTH, "Plan('fsdp')"), ("Plan('fsdp')", BOTH), (PP, BOTH)]):
        arguments = f"{saved}, {loaded}, {str(tmp_path / str(number))!r}"
        assert max(on_ranks(four, "distance_after_loading", arguments)) < 1e-12
    assert max(on_ranks(four, "distance_of_saved_model", f"'llama tied', {BOTH}, {str(tmp_path / 'saved')!r}")) == 0


def test_a_window_of_batches_has_the_mean_of_their_gradients(two: Kernel) -> None:
    assert trains_alike(two, "'llama', Plan('fsdp', pp=2, pp_micro_batches=2, accumulate=2)")


def test_evaluation_gives_all_ranks_the_logits_of_any_number_of_rows(two: Kernel) -> None:
    found = on_ranks(two, "distance_of_evaluation", f"'llama', {PP}")
    assert all(loss < 1e-6 and logits < 1e-12 for loss, logits in found)


def test_a_checkpoint_of_stages_fits_whole_models(two: Kernel, tmp_path: Path) -> None:
    for number, (saved, loaded) in enumerate([(PP, "Plan('fsdp')"), ("Plan('fsdp')", PP)]):
        arguments = f"{saved}, {loaded}, {str(tmp_path / str(number))!r}"
        assert max(on_ranks(two, "distance_after_loading", arguments)) < 1e-12


def test_weights_are_saved_and_loaded_under_the_names_of_the_whole_model(two: Kernel, tmp_path: Path) -> None:
    assert max(on_ranks(two, "distance_of_saved_model", f"'llama tied', {PP}, {str(tmp_path / 'saved')!r}")) == 0
    assert max(on_ranks(two, "distance_of_loaded_model", f"'llama tied', {PP}, {str(tmp_path / 'loaded')!r}")) == 0


def test_each_sample_counts_once(four: Kernel) -> None:
    for plan in (PP, BOTH):
        assert on_ranks(four, "samples_seen", f"{plan}, 13") == [list(range(13))] * 4


def test_stages_are_the_outermost_dimension_of_the_mesh(four: Kernel) -> None:
    found = on_ranks(four, "mesh_of", PP)
    assert [names for names, _ in found] == [("pp", "dp_shard")] * 4
    assert [ranks for _, ranks in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert on_ranks(four, "mesh_of", BOTH)[0] == (("pp", "dp_shard", "tp"), [0, 2])


def test_rows_that_can_not_be_divided_are_refused_in_the_first_batch(two: Kernel) -> None:
    outcome = two.run(f"call(piped.called_with_rows, {PP}, 6)")
    assert "6 rows of a batch can't be cut into 4 micro-batches" in outcome.evalue


def test_ranks_of_a_pipeline_that_got_different_batches_are_refused(two: Kernel) -> None:
    outcome = two.run(f"call(piped.called_with_batches_of_ranks, {PP})")
    assert "ranks 0 and 1 divide the model, by stages, of one batch, but got different ones" in outcome.evalue


def test_an_interrupt_stops_all_stages_after_the_same_step(four: Kernel) -> None:
    four.ok(MODEL)
    cell = four.start("%%distributed\nwhile True:\n    piped.step(model, optimizer, batch)\n    print('go')")
    cell.wait_for_ranks(4, "go")
    four.interrupt()
    assert "all ranks stopped after step" in cell.finish().evalue
    assert four.ok(IS_RIGHT).lines == RIGHT_ON_ALL


def test_what_a_stage_raises_is_shown_and_the_others_are_freed(four: Kernel) -> None:
    four.ok(MODEL)
    failing = """%%distributed
def fail(module, args):
    raise ValueError("in a layer")
if rank == 3:
    hook = model.base_model.layers[-1].register_forward_pre_hook(fail)
piped.step(model, optimizer, batch)"""
    assert four.run(failing).evalue.startswith("rank 3 raised ValueError: in a layer")
    four.ok("%%distributed\nif rank == 3: hook.remove()")
    assert four.ok(IS_RIGHT).lines == RIGHT_ON_ALL


def test_stages_that_were_freed_from_waiting_train_on(four: Kernel) -> None:
    four.ok(MODEL)
    four.ok("%%distributed\npiped.step(model, optimizer, batch)")
    cell = four.start("%%distributed\nimport time\nprint('go')\ntime.sleep(600) if rank == 0 else model(**batch)")
    cell.wait_for_ranks(4, "go")
    four.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    assert four.ok(IS_RIGHT).lines == RIGHT_ON_ALL
