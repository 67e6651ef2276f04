"""DeepSpeed's JSON configuration: what a plan writes, and what a plan takes from a file as others have one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.planning import accelerate_config
from nbdist.planning.deepspeed import DeepSpeedConfig, read

# As the documentation of transformers has it.
FOR_TRAINER: dict[str, Any] = {
    "fp16": {"enabled": False},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ds.json"


def settings_of(file: Path, entries: dict[str, Any]) -> dict[str, Any]:
    """Return what a file with these entries sets, beside those that DeepSpeed's defaults set."""
    file.write_text(json.dumps({"gradient_clipping": "auto", **entries}))
    defaults = {"strategy": "ddp", "precision": "fp32", "accumulate": 1}
    return {name: value for name, value in read(file).settings.items() if defaults.get(name, "") != value}


def notes_of(file: Path, entries: dict[str, Any]) -> list[str]:
    file.write_text(json.dumps({"gradient_clipping": "auto", "zero_optimization": {"stage": 2}} | entries))
    return read(file).notes


# --- what a plan writes


def test_a_plan_says_everything_that_deepspeed_would_decide_otherwise() -> None:
    assert DeepSpeedConfig.of(Plan(strategy="deepspeed")).entries() == {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # without it DeepSpeed clips to 1.0
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }


def test_settings_of_a_plan_have_their_names_there() -> None:
    plan = Plan(strategy="deepspeed", stage=3, precision="bf16", accumulate=4, clip_grad_norm=0.5, offload=True)
    found = DeepSpeedConfig.of(plan, micro_batch=8).entries()
    assert found["train_micro_batch_size_per_gpu"] == 8
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (4, 0.5)
    assert found["bf16"] == {"enabled": True} and "fp16" not in found
    assert found["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    assert found["zero_force_ds_cpu_optimizer"] is False


def test_parameters_stay_on_the_gpu_before_stage_3() -> None:
    found = DeepSpeedConfig.of(Plan(strategy="deepspeed", stage=2, offload=True)).entries()
    assert found["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(strategy="deepspeed"),
        Plan(strategy="deepspeed", stage=1, precision="fp16", accumulate=2),
        Plan(strategy="deepspeed", stage=3, precision="bf16", clip_grad_norm=1.5, offload=True),
    ],
)
def test_a_written_file_is_read_as_the_same_plan(file: Path, plan: Plan) -> None:
    DeepSpeedConfig.of(plan).write(file)
    reading = read(file)
    assert Plan(**reading.settings) == plan and not reading.notes


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none/ds\.json can't be written"):
        DeepSpeedConfig.of(Plan(strategy="deepspeed")).write(tmp_path / "none" / "ds.json")


# --- what a file says


def test_a_file_for_trainer_leaves_what_is_auto_to_the_plan(file: Path) -> None:
    file.write_text(json.dumps(FOR_TRAINER))
    reading = read(file)
    assert reading.settings == {"strategy": "deepspeed", "stage": 3, "offload": True}
    assert sorted(note.partition(":")[0] for note in reading.notes) == [
        "optimizer",
        "overlap_comm",
        "pin_memory",
        "pin_memory",
        "scheduler",
    ]


@pytest.mark.parametrize(
    ("entries", "settings"),
    [
        ({"zero_optimization": {"stage": 1}}, {"strategy": "deepspeed", "stage": 1, "offload": False}),
        ({"zero_optimization": {"stage": 0}}, {}),
        ({}, {}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {"precision": "fp16"}),
        ({"gradient_accumulation_steps": 8}, {"accumulate": 8}),
        ({"gradient_clipping": 0.5}, {"clip_grad_norm": 0.5}),
        ({"gradient_clipping": 0}, {"clip_grad_norm": None}),
    ],
)
def test_entries_become_settings(file: Path, entries: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(file, entries) == settings


def test_clipping_that_is_not_set_is_what_deepspeed_takes(file: Path) -> None:
    file.write_text("{}")
    reading = read(file)
    assert reading.settings["clip_grad_norm"] == 1.0 and reading.notes[-1].startswith("gradient_clipping: not set")


@pytest.mark.parametrize(
    ("entries", "note"),
    [
        ({"zero_optimization": {"stage": 0}}, "stage: 0: ZeRO splits nothing then, so the strategy is ddp"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "device: nvme: a plan offloads to CPU memory only",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer: cpu: in stage 3 the plan's offload moves parameters as well",
        ),
        ({"train_batch_size": 64}, "train_batch_size: 64: batches are those of your loader"),
        ({"optimizer": {"type": "Adam"}}, "optimizer: Adam: make the optimizer in your code and give it to `prepare`"),
        ({"fp16": {"enabled": "auto", "loss_scale": 128}}, "loss_scale: 128: no setting of a plan has this effect"),
        (
            {"flops_profiler": {"enabled": True}},
            "flops_profiler: {'enabled': True}: no setting of a plan has this effect",
        ),
    ],
)
def test_entries_without_equivalent_are_named(file: Path, entries: dict[str, Any], note: str) -> None:
    assert notes_of(file, entries) == [note]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "it is not a configuration of DeepSpeed"),
        ("{", "it is not JSON"),
        ('{"bf16": true}', "bf16 must be an object, not True"),
        ('{"bf16": {"enabled": 3}}', "bf16.enabled must be true or false, not 3"),
    ],
)
def test_a_file_that_says_something_else_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as refused:
        read(file)
    assert str(refused.value).startswith(f"{file}: ") and message in str(refused.value)


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="it can't be read"):
        read(file)


# --- Accelerate's file


def accelerate(folder: Path, **entries: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(
        json.dumps({"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": entries})
    )
    return file


def test_what_accelerate_config_asks_of_deepspeed_becomes_the_plan(tmp_path: Path) -> None:
    file = accelerate(
        tmp_path,
        deepspeed_multinode_launcher="standard",
        gradient_accumulation_steps=4,
        gradient_clipping=0.5,
        offload_optimizer_device="cpu",
        offload_param_device="cpu",
        zero3_init_flag=False,
        zero3_save_16bit_model=True,
        zero_stage=3,
    )
    reading = accelerate_config.read(file)
    assert not reading.notes
    assert Plan(**reading.settings) == Plan(
        strategy="deepspeed", stage=3, precision="bf16", accumulate=4, clip_grad_norm=0.5, offload=True
    )


def test_a_file_of_deepspeed_that_accelerates_names_is_read_where_it_lies(tmp_path: Path) -> None:
    DeepSpeedConfig.of(Plan(strategy="deepspeed", stage=1, accumulate=2)).write(tmp_path / "zero.json")
    reading = accelerate_config.read(accelerate(tmp_path, deepspeed_config_file="zero.json"))
    assert reading.settings["stage"] == 1 and reading.settings["accumulate"] == 2
