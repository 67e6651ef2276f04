"""What plans ask for and only a GPU can do: offload, fp8, compiled blocks, recomputation, determinism, binding."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbdist
from tests.gpu.conftest import Record, value, values

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_models_train(pair: nbdist.Session, strategy: str, record_property: Record) -> None:
    for fell, broken, first, tenth in values(pair, f"programs.compiled({strategy!r})"):
        record_property(f"{strategy}", f"{broken} graph breaks, step 1 {first:.1f} s, step 10 {1e3 * tenth:.1f} ms")
        assert fell and tenth < first


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_offloaded_training_clips_saves_and_loads(pair: nbdist.Session, precision: str, tmp_path: Path) -> None:
    if value(pair, "device.type") == "cpu":
        pytest.skip("offload needs a GPU")
    assert value(pair, f"programs.offloaded({str(tmp_path)!r}, {precision!r})") == (True, True, True)


def test_recomputation_gives_the_same_gradients_with_less_memory(pair: nbdist.Session, record_property: Record) -> None:
    found = {kind: values(pair, f"programs.checkpointed({kind!r})")[0] for kind in ("none", "selective", "full")}
    norms, peaks = zip(*found.values(), strict=True)
    assert norms == (pytest.approx(norms[0], rel=1e-4),) * 3
    record_property("MiB at most (none, selective, full)", peaks)
    assert peaks == tuple(sorted(peaks, reverse=True))


@pytest.mark.parametrize("kind", ["none", "full"])
def test_offloaded_activations_give_the_same_gradients_with_less_memory(
    pair: nbdist.Session, kind: str, record_property: Record
) -> None:
    if value(pair, "device.type") == "cpu":
        pytest.skip("activation_offload needs a GPU")
    found = [values(pair, f"programs.checkpointed({kind!r}, {offload})")[0] for offload in (False, True)]
    norms, peaks = zip(*found, strict=True)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    record_property(f"MiB at most ({kind}, offloaded)", peaks)
    assert peaks[1] < peaks[0]


def test_a_deterministic_plan_works_after_a_first_product(two: nbdist.Session) -> None:
    assert value(two, "programs.deterministic_after_a_product()") == 64.0**3


def test_a_plan_with_tf32_works_after_torch_s_new_setting(two: nbdist.Session) -> None:
    assert value(two, "programs.tf32_after_the_new_setting()") == "tf32"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_fp8_trains_and_keeps_weights_tied(pair: nbdist.Session, strategy: str, tied: bool) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    if value(pair, "device.type") == "cpu":
        pytest.skip("fp8 needs a GPU")
    assert value(pair, f"programs.fp8({strategy!r}, {tied})") == (True, True)


def test_a_plan_without_numa_gives_all_threads_their_cores_back(two: nbdist.Session, record_property: Record) -> None:
    before, bound, alone, after = values(two, "programs.cores_before_during_and_after_numa()")[0]
    record_property("cores of threads (fewest, most) before, bound, exclusive, after", [before, bound, alone, after])
    assert after == before


def test_an_asynchronous_save_blocks_less_than_one_that_waits(
    pair: nbdist.Session, tmp_path: Path, device: str, record_property: Record
) -> None:
    width = 2048 if device == "cuda" else 256
    waited, behind, step = values(pair, f"programs.saved_twice({str(tmp_path)!r}, {width})")[0]
    record_property(
        "seconds of a save, an asynchronous one, the step after", [round(x, 3) for x in (waited, behind, step)]
    )
    assert device == "cpu" or behind < waited
