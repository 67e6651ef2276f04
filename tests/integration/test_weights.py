"""A model on the meta device comes up with its weights: each rank reads its part, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from nbdist.errors import UsageError
from testbed.kernel import Kernel
from tests.conftest import shared_kernel
from tests.support.cells import on_ranks, refused, value
from tests.support.train_weights import fake_hub, filled, gpt2, llama, on_meta, prepared, without_prefix

SETUP = """
import os, torch, nbdist
import torch.distributed.checkpoint as dcp
from pathlib import Path
from torch import nn
from nbdist.plan import Plan
from nbdist.train import state
from tests.support.train_weights import *
"""
NOWHERE = "http://127.0.0.1:9"  # the port that discards: nobody listens


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def two(cache: Path) -> Iterator[Kernel]:
    with shared_kernel(2, HF_HUB_CACHE=str(cache), HF_ENDPOINT=NOWHERE) as kernel:
        on_ranks(kernel, SETUP)
        yield kernel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several files."""
    path = tmp_path_factory.mktemp("llama")
    filled().save_pretrained(path, max_shard_size="4KB")  # type: ignore[operator]
    assert len(list(path.glob("model-*.safetensors"))) > 3
    return path


# --- what comes up


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp", "hsdp"])
def test_a_model_comes_up_as_it_was_saved(two: Kernel, folder: Path, strategy: str) -> None:
    """Rotary frequencies, which no file holds, and the tie of embedding and head included."""
    code = f"""
model = prepared(on_meta(), {str(folder)!r}, {strategy!r}); net = nbdist.unwrap(model)
alike(model, filled()), net.lm_head.weight is net.model.embed_tokens.weight"""
    assert value(two, code) == "(True, True)"


def test_it_trains_as_one_that_was_built_in_memory(two: Kernel, folder: Path) -> None:
    code = f"""
def trained(model, weights):
    state.forget(); optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = nbdist.prepare(model, optimizer, plan=Plan(strategy="fsdp"), weights=weights)
    for step in range(3):
        tokens = torch.arange(8).view(1, 8) + rank + step
        nbdist.backward(model(tokens, labels=tokens).loss); optimizer.step(); optimizer.zero_grad()
    return model
alike(trained(on_meta(), {str(folder)!r}), trained(filled(), None))"""
    assert value(two, code) == "True"


def test_a_model_with_values_gets_others(two: Kernel, folder: Path) -> None:
    assert value(two, f"alike(prepared(llama(), {str(folder)!r}), filled())") == "True"


def test_values_are_converted_to_the_types_of_the_model(two: Kernel, folder: Path) -> None:
    code = f"alike(prepared(on_meta().bfloat16(), {str(folder)!r}), filled().bfloat16())"
    assert value(two, code) == "True"


def test_one_file_will_do(two: Kernel, tmp_path: Path) -> None:
    filled().save_pretrained(tmp_path)  # type: ignore[operator]
    paths = [str(tmp_path), str(tmp_path / "model.safetensors")]
    code = f"[alike(prepared(on_meta(), path), filled()) for path in {paths}]"
    assert value(two, code) == "[True, True]"


def test_files_of_the_model_inside_will_do(two: Kernel, tmp_path: Path) -> None:
    """As GPT-2's on the hub, whose names lack the prefix, and which hold masks that are no weights."""
    tensors = {
        name: value.contiguous() for name, value in filled(gpt2).state_dict().items() if name != "lm_head.weight"
    }
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    save_file(without_prefix(tensors, "transformer."), tmp_path / "model.safetensors")
    assert value(two, f"alike(prepared(on_meta(gpt2), {str(tmp_path)!r}), filled(gpt2))") == "True"


def test_a_name_on_the_hub_is_found_in_its_cache(two: Kernel, cache: Path) -> None:
    fake_hub(cache, "tiny/llama", filled())
    assert value(two, "alike(prepared(on_meta(), 'tiny/llama'), filled())") == "True"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_state_dict_on_rank_0_reaches_all_ranks(two: Kernel, strategy: str) -> None:
    code = f"alike(prepared(on_meta(), filled().state_dict() if rank == 0 else {{}}, {strategy!r}), filled())"
    assert value(two, code) == "True"


def test_what_rank_0_can_not_send_is_an_error_on_all_ranks(two: Kernel) -> None:
    code = """
told = None
try: prepared(on_meta(), on_meta().state_dict() if rank == 0 else {})
except nbdist.CheckpointError as error: told = str(error)
'meta' in told"""
    assert value(two, code) == "True"


def test_a_checkpoint_of_save_state_is_read_without_its_optimizer(two: Kernel, tmp_path: Path) -> None:
    code = f"""
state.forget(); net = filled(); optimizer = torch.optim.AdamW(net.parameters())
model, optimizer = nbdist.prepare(net, optimizer, plan=Plan(strategy="fsdp"))
nbdist.backward(model(torch.arange(8).view(1, 8)).logits.sum()); optimizer.zero_grad(); optimizer.step()
nbdist.save_state({str(tmp_path / "one")!r})
alike(prepared(on_meta(), {str(tmp_path / "one")!r}, "ddp"), filled())"""
    assert value(two, code) == "True"


def test_a_folder_of_torch_s_checkpoints_is_read(two: Kernel, tmp_path: Path) -> None:
    code = f"""
dcp.save({{"model": filled().state_dict(), "step": 3}}, checkpoint_id={str(tmp_path)!r})
alike(prepared(on_meta(), {str(tmp_path)!r}), filled())"""
    assert value(two, code) == "True"


def test_pickled_weights_are_read_as_tensors_only_and_that_is_said(two: Kernel, tmp_path: Path) -> None:
    torch.save(filled().state_dict(), tmp_path / "pytorch_model.bin")
    outcome = two.ok(f"%%distributed\nmodel = prepared(on_meta(), {str(tmp_path)!r})")
    assert "holds pickled weights: they are read with weights_only=True, so no code in them is run" in outcome.stderr
    assert value(two, "alike(model, filled())") == "True"


# --- what it costs


def test_a_rank_holds_its_shard_and_one_tensor(two: Kernel, tmp_path: Path) -> None:
    """By the peak of resident memory. 32 tensors of 2 MiB, half of them a rank's own."""
    save_file({f"{number}.weight": torch.ones(512, 1024) for number in range(32)}, tmp_path / "model.safetensors")
    code = f"""
def peak(weights):
    net = on_meta(lambda: nn.Sequential(*[nn.Linear(1024, 512, bias=False) for _ in range(32)]))
    status = lambda name: int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) >> 10
    before = status("VmRSS"); Path("/proc/self/clear_refs").write_text("5")
    model = prepared(net, weights)
    return status("VmHWM") - before
peak({str(tmp_path)!r})  # loads what libraries load once
shard, largest, around = 32, 2, 4
peak({str(tmp_path)!r}) <= shard + largest + around"""
    assert value(two, code) == "True"


# --- what is refused


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("'/nowhere/at/all'", "/nowhere/at/all does not exist: give a folder with weights, or the name of a model"),
        ("'/proc'", "/proc holds no weights: it has neither model.safetensors nor model.safetensors.index.json"),
        (
            "'nobody/nothing'",
            "'nobody/nothing' is neither a folder here nor a complete model in the hub's cache, and downloading it",
        ),
        ("3", "invalid weights of type int: give a folder, the name of a model on the Hugging Face hub"),
        ("{}", "weights on rank 0 are not a state dict of a model (names to tensors): it is empty"),
        (
            "{} if rank else {'lm_head': 3}",
            "weights on rank 0 are not a state dict of a model (names to tensors): 'lm_head'",
        ),
        ("'tiny/half'", "'tiny/half' is neither a folder here nor a complete model in the hub's cache"),
    ],
)
def test_weights_that_are_not_there_are_one_error_on_all_ranks(
    two: Kernel, cache: Path, weights: str, words: str
) -> None:
    if "half" in weights:
        next(fake_hub(cache, "tiny/half", filled()).glob("model-*")).unlink()
    assert words in refused(two, f"prepared(on_meta(), {weights})")


def test_other_weights_are_refused_with_names_and_shapes_and_nothing_changes(two: Kernel, folder: Path) -> None:
    code = f"model = on_meta(hidden_size=24, num_hidden_layers=1)\nprepared(model, {str(folder)!r})"
    text = refused(two, code)
    assert "holds another model: model.embed_tokens.weight is [63, 16] there and [63, 24] here" in text
    assert "Nothing was loaded" in text
    assert value(two, "{p.device.type for p in model.parameters()}, state.is_begun()") == "({'meta'}, False)"


def test_what_only_one_rank_finds_missing_is_refused_on_all(two: Kernel, folder: Path) -> None:
    text = refused(two, f"prepared(on_meta(), {str(folder)!r} if rank == 0 else '/nowhere/at/all')")
    assert "/nowhere/at/all does not exist" in text


def test_ranks_must_name_the_same_weights(two: Kernel, folder: Path) -> None:
    text = refused(two, f"prepared(on_meta(), {str(folder)!r} + '/' * rank)")
    assert "ranks called prepare with different objects" in text and f"weights='{folder}/'" in text


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_half_written_folder_is_refused_before_anything_changes(two: Kernel, tmp_path: Path, damage: str) -> None:
    filled().save_pretrained(tmp_path, max_shard_size="4KB")  # type: ignore[operator]
    file = max(tmp_path.glob("model-*.safetensors"), key=lambda path: path.stat().st_size)
    if damage == "cut":
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
    else:
        file.unlink()
    text = refused(two, f"prepared(on_meta(), {str(tmp_path)!r})")
    assert f"{file.name} can't be read" in text if damage == "cut" else f"lacks {file.name} (1 of" in text


def test_pickles_that_hold_code_are_refused_and_not_run(two: Kernel, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"weight": Touch()}, tmp_path / "pytorch_model.bin")
    assert "holds more than tensors, and loading it would run code" in refused(
        two, f"prepared(on_meta(), {str(tmp_path)!r})"
    )
    assert not (tmp_path / "ran").exists()


class Masked(torch.nn.Linear):
    """Its mask is in no file, and it does not set it again."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)


def test_buffers_that_nobody_can_set_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(dict(Masked().state_dict()), tmp_path / "model.safetensors")
    model = on_meta(Masked)
    with pytest.raises(UsageError, match=r"buffers on the meta device are in no file, and nothing sets them: mask\."):
        prepared(model, tmp_path, "none")
    assert model.mask.is_meta


def test_a_model_that_is_only_partly_on_the_meta_device_is_refused(folder: Path) -> None:
    model = on_meta()
    model.model.norm.to_empty(device="cpu")  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="some of the model's parameters are on the meta device, and some are not"):
        prepared(model, folder, "none")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_buffer_of_any_type_shows_whether_it_was_set(tmp_path: Path, kind: torch.dtype) -> None:
    class Buffered(torch.nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "mask"):
                cast(torch.Tensor, self.mask).fill_(1)

    save_file(dict(torch.nn.Linear(4, 4).state_dict()), tmp_path / "model.safetensors")
    model = on_meta(lambda: Buffered(4, 4))
    model.register_buffer("mask", torch.ones(4, dtype=kind, device="meta"), persistent=False)
    assert cast(Any, prepared(model, tmp_path, "none")).mask.tolist() == [1, 1, 1, 1]


def test_weights_are_for_one_model(folder: Path) -> None:
    from nbdist.train.prepare.prepare import prepare

    with pytest.raises(UsageError, match="weights are for one model, but prepare got 2"):
        prepare(llama(), llama(), weights=folder)
