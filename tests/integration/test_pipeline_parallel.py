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


@pytest.mark.parametrize("kind", ["llama", "llama tied"])
def test_stages_that_are_sharded_train_as_one_process_does(four: Kernel, kind: str) -> None:
    assert trains_alike(four, f"{kind!r}, {PP}")


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
    assert on_ranks(four, "samples_seen", f"{PP}, 13") == [list(range(13))] * 4


def test_stages_are_the_outermost_dimension_of_the_mesh(four: Kernel) -> None:
    found = on_ranks(four, "mesh_of", PP)
    assert [names for names, _ in found] == [("pp", "dp_shard")] * 4
    assert [ranks for _, ranks in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_rows_that_can_not_be_divided_are_refused_in_the_first_batch(two: Kernel) -> None:
    outcome = two.run(f"call(piped.called_with_rows, {PP}, 6)")
    assert "6 rows of a batch can't be cut into 4 micro-batches" in outcome.evalue


def test_ranks_of_a_pipeline_that_got_different_batches_are_refused(two: Kernel) -> None:
    outcome = two.run(f"call(piped.called_with_batches_of_ranks, {PP})")
    assert "ranks 0 and 1 divide the model, by stages, of one batch, but got different ones" in outcome.evalue
