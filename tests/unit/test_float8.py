"""fp8: which layers compute in it, and that parameters of classes of their own are moved whole. Needs no GPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.planning.settings import SETTINGS
from nbdist.train.loop.precision import warn_of_emulation
from nbdist.train.prepare import strategies
from nbdist.train.structure.float8 import chosen_layers, config_of

FP8 = Plan(precision="fp8")
GPU = torch.device("cuda", 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2048, 8192)
        self.down = nn.Linear(8192, 2048)
        self.narrow = nn.Linear(2048, 512)
        self.odd = nn.Linear(2048, 4099)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 2048)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.Linear(2048, 32000)
        self.head = nn.Linear(2048, 32000)
        if tied:
            self.middle.weight = self.embed.weight


@pytest.fixture(autouse=True)
def _without_values() -> object:
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_output_layer_and_small_layers_are_left_out(recipe: str) -> None:
    expected = [f"blocks.{number}.{name}" for number in range(2) for name in ("up", "down")]
    if recipe == "rowwise":
        expected = [name for name in expected if "up" in name]
    assert chosen_layers(Model(), FP8.replace(fp8_recipe=recipe)) == [*expected, "middle"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("recipe", cast(Any, SETTINGS["fp8_recipe"].kind).words)
def test_every_recipe_is_one_of_torchao(recipe: str, strategy: str) -> None:
    pytest.importorskip("torchao")
    config = config_of(FP8.replace(fp8_recipe=recipe, strategy=strategy))
    assert config.enable_fsdp_float8_all_gather == (recipe == "tensorwise" and strategy == "fsdp")


def test_tied_weights_are_left_out_so_that_they_stay_tied() -> None:
    assert "middle" not in chosen_layers(Model(tied=True), FP8)


def test_a_model_of_transformers_names_its_output_layer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=2048, num_attention_heads=16))
    assert {name.split(".")[-1] for name in chosen_layers(model, FP8)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_a_model_without_large_layers_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'fp8' does nothing in Sequential: .* Set precision to 'bf16'"):
        strategies.refuse_unfit(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), FP8)


def test_a_parameter_of_a_class_of_its_own_is_moved_with_what_is_inside() -> None:
    layer = nn.Linear(4, 4, bias=False, device="cpu")
    layer.weight = nn.Parameter(TwoTensor(torch.ones(4, 4, device="cpu"), torch.ones(4, 4, device="cpu")))
    parameter = layer.weight
    strategies.move_own([layer], torch.device("meta"))
    assert layer.weight is parameter
    assert {parameter.device.type, parameter.a.device.type, parameter.b.device.type} == {"meta"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("precision", "emulates", "told"), [("bf16", True, 1), ("bf16", False, 0), ("fp16", True, 0)])
def test_a_gpu_that_only_emulates_bf16_is_reported(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, precision: str, emulates: bool, told: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not emulates)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    warn_of_emulation(Plan(precision=precision), GPU)  # type: ignore[arg-type]
    texts = [str(warning.message) for warning in recwarn]
    assert len(texts) == told and all("Tesla T4 only emulates bfloat16" in text for text in texts)
