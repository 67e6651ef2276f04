"""Accelerate's configuration file as a plan: its own classes write it, its launcher judges it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.planning.accelerate_config import default_file, read

FSDP2 = {  # the answers that `accelerate config` proposes
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
}
FSDP1 = {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_sync_module_states": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def write(file: Path, distributed_type: str = "MULTI_GPU", **settings: Any) -> Path:
    """Write what `accelerate config` writes."""
    common = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "use_cpu": False, "debug": False}
    common |= {"num_processes": -1, "gpu_ids": "all", "rdzv_backend": "static", "same_network": True}
    ClusterConfig(**{"distributed_type": distributed_type, **common, **settings}).to_yaml_file(file)
    return file


def settings_of(file: Path) -> dict[str, Any]:
    """Return the settings that differ from the default plan's, where nothing has to be said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = Plan.from_accelerate(file)
    return {name: value for name, value in vars(plan).items() if value != getattr(Plan(), name)}


# --- settings


@pytest.mark.parametrize("kind", ["NO", "MULTI_GPU", "MULTI_CPU"])
def test_whole_models_on_each_rank_are_ddp(file: Path, kind: str) -> None:
    assert settings_of(write(file, kind)) == {}


@pytest.mark.parametrize(("precision", "set_to"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8")])
def test_precision_is_kept(file: Path, precision: str, set_to: str) -> None:
    assert settings_of(write(file, mixed_precision=precision)) == {"precision": set_to}


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {"reshard": True, "shard_by": "LlamaDecoderLayer"}),
        ({"fsdp_reshard_after_forward": False}, {"reshard": False, "shard_by": "LlamaDecoderLayer"}),
        ({"fsdp_transformer_layer_cls_to_wrap": "A, B"}, {"reshard": True, "shard_by": ("A", "B")}),
        ({"fsdp_transformer_layer_cls_to_wrap": ""}, {"reshard": True}),
        (
            {"fsdp_offload_params": True, "fsdp_activation_checkpointing": True},
            {
                "reshard": True,
                "shard_by": "LlamaDecoderLayer",
                "offload": True,
                "activation_checkpointing": "full",
            },
        ),
    ],
)
def test_fsdp_is_kept(file: Path, changes: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(write(file, "FSDP", fsdp_config=FSDP2 | changes)) == {"strategy": "fsdp", **settings}


@pytest.mark.parametrize(
    ("sharding", "settings"),
    [
        ("FULL_SHARD", {"strategy": "fsdp", "reshard": True}),
        ("SHARD_GRAD_OP", {"strategy": "fsdp", "reshard": False}),
        ("HYBRID_SHARD", {"strategy": "hsdp", "reshard": True}),
        ("HYBRID_SHARD_ZERO2", {"strategy": "hsdp", "reshard": False}),
        ("NO_SHARD", {}),
    ],
)
def test_strategies_of_fsdp1_become_fsdp2_s(file: Path, sharding: str, settings: dict[str, Any]) -> None:
    write(file, "FSDP", fsdp_config=FSDP1 | {"fsdp_reshard_after_forward": sharding, "fsdp_offload_params": False})
    reading = read(file)
    assert {"strategy": "ddp", **settings} == reading.settings
    assert [note.partition(":")[0] for note in reading.notes] == ["fsdp_version"]


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"dp_replicate_size": 1, "dp_shard_size": 8, "tp_size": 1, "cp_size": 1}, {"strategy": "fsdp"}),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, {"strategy": "hsdp", "replicas": 2}),
        ({"dp_shard_size": 2, "tp_size": 4}, {"strategy": "fsdp", "tp": 4}),
        ({"dp_shard_size": 2, "cp_size": 2}, {"strategy": "fsdp", "cp": 2}),
        ({"dp_replicate_size": 2, "tp_size": 2}, {"strategy": "hsdp", "replicas": 2, "tp": 2}),
    ],
)
def test_sizes_of_the_mesh_are_kept(file: Path, sizes: dict[str, int], settings: dict[str, Any]) -> None:
    parallel = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    write(file, "FSDP", fsdp_config={"fsdp_version": 2}, parallelism_config=parallel)
    assert settings_of(file) == settings


@pytest.mark.parametrize(
    ("dynamo", "settings"),
    [
        ({"dynamo_backend": "NO"}, {}),
        ({"dynamo_backend": "INDUCTOR"}, {"compile": True}),
        (
            {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False},
            {"compile": True, "compile_dynamic": False},
        ),
        ({"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}, {"compile": "max-autotune"}),
    ],
)
def test_compilation_is_kept(file: Path, dynamo: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(write(file, dynamo_config=dynamo)) == settings


def test_under_fsdp_a_graph_break_may_be_an_error(file: Path) -> None:
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_use_fullgraph": True, "dynamo_use_regional_compilation": True}
    write(file, "FSDP", fsdp_config={"fsdp_version": 2}, dynamo_config=dynamo)
    assert settings_of(file) == {"strategy": "fsdp", "compile": True, "compile_fullgraph": True}


def test_accumulation_and_affinity_are_kept(file: Path) -> None:
    write(file, enable_cpu_affinity=True)
    file.write_text(f"{file.read_text()}gradient_accumulation_steps: 4\n")
    assert settings_of(file) == {"accumulate": 4, "numa": True}


def test_words_for_true_and_false_are_read(file: Path) -> None:
    write(file, "FSDP", fsdp_config={"fsdp_version": 2, "offload_params": "true", "activation_checkpointing": "False"})
    assert settings_of(file) == {"strategy": "fsdp", "offload": True}


@pytest.mark.parametrize(
    "settings",
    [
        {"mixed_precision": "bf16"},
        {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead"}},
        {"distributed_type": "FSDP", "fsdp_config": FSDP2},
        {
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": FSDP2 | {"fsdp_activation_checkpointing": True, "fsdp_reshard_after_forward": False},
        },
        {
            "distributed_type": "FSDP",
            "fsdp_config": FSDP2,
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
            },
        },
        *(
            {
                "distributed_type": "FSDP",
                "fsdp_config": FSDP2,
                "parallelism_config": {"parallelism_config_dp_shard_size": 2, f"parallelism_config_{name}_size": 2},
            }
            for name in ("tp", "cp")
        ),
    ],
)
def test_the_plan_sets_the_variables_that_accelerate_s_launcher_sets(file: Path, settings: dict[str, Any]) -> None:
    write(file, **settings | {"num_processes": 4})
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "x.py"]))
    theirs = prepare_multi_gpu_env(arguments)
    ours = Plan(**read(file).settings).environment(world_size=4, device="cuda:0")
    regional = ours.pop("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", None)  # a choice of ours
    assert regional is None
    assert {name: value.lower() for name, value in ours.items()} == {
        name: str(theirs.get(name)).lower() for name in ours
    }


# --- what has no equivalent


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (
            {"num_processes": 4},
            "num_processes: 4: the number of ranks is not part of a plan: `%distributed start -n 4`",
        ),
        ({"num_machines": 2}, "num_machines: 2: machines are not part of a plan"),
        ({"gpu_ids": "0,2"}, "gpu_ids: 0,2: GPUs are not part of a plan: set CUDA_VISIBLE_DEVICES=0,2"),
        ({"use_cpu": True}, "use_cpu: true: devices are not part of a plan"),
        ({"debug": True}, "debug: true: no setting of a plan has this effect"),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, "dynamo_backend: EAGER: models are compiled by inductor only"),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_fullgraph": True}},
            "dynamo_use_fullgraph: true: DDP's own forward breaks the graph",
        ),
        ({"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, "backend: TE: float8 is torchao's here"),
    ],
)
def test_each_entry_without_equivalent_is_named_in_a_line(file: Path, settings: dict[str, Any], note: str) -> None:
    (said,) = read(write(file, **settings)).notes
    assert said.startswith(note) and "\n" not in said


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}, ["fsdp_auto_wrap_policy"]),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, ["fsdp_state_dict_type"]),
        ({"fsdp_cpu_ram_efficient_loading": True}, ["fsdp_cpu_ram_efficient_loading"]),
        ({"fsdp_forward_prefetch": True, "fsdp_version": 1}, ["fsdp_version", "fsdp_forward_prefetch"]),
        ({"fsdp_something_new": 3}, ["fsdp_something_new"]),
    ],
)
def test_entries_of_fsdp_without_equivalent_are_named(file: Path, changes: dict[str, Any], notes: list[str]) -> None:
    write(file, "FSDP", fsdp_config=FSDP2 | changes)
    assert sorted(note.partition(":")[0] for note in read(file).notes) == sorted(notes)


def test_python_warns_of_them(file: Path) -> None:
    write(file, mixed_precision="bf16", num_processes=2)
    with pytest.warns(UserWarning, match="num_processes: 2"):
        assert Plan.from_accelerate(file) == Plan(precision="bf16")


# --- what is refused


@pytest.mark.parametrize("kind", ["MEGATRON_LM", "XLA", "MULTI_XPU"])
def test_strategies_of_others_are_refused(file: Path, kind: str) -> None:
    write(file, kind)
    with pytest.raises(UsageError, match=f"{file}: distributed_type {kind} has no equivalent") as refused:
        read(file)
    assert "\n" not in str(refused.value)


def test_sagemaker_is_refused(file: Path) -> None:
    write(file)
    file.write_text(file.read_text().replace("LOCAL_MACHINE", "AMAZON_SAGEMAKER"))
    with pytest.raises(UsageError, match="SageMaker"):
        read(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "it is not YAML"),
        ("a: 1", "it is not a configuration of Accelerate"),
        ("- a", "it is not a configuration of Accelerate"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: perhaps}",
            "fsdp_offload_params must be true or false, not 'perhaps'",
        ),
        (
            "distributed_type: FSDP\nparallelism_config: {tp_size: many}",
            "parallelism_config_tp_size must be a whole number of 1 or more, not 'many'",
        ),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp7", "precision 'fp7' is unknown"),
    ],
)
def test_what_is_wrong_is_one_error_that_names_the_file(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as refused:
        Plan.from_accelerate(file)
    assert str(refused.value).startswith(f"{file}: {message}")


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file.*accelerate config"):
        read(file)


def test_without_pyyaml_the_error_says_what_to_install(file: Path) -> None:
    write(file)
    program = (
        "import sys; sys.modules['yaml'] = None\n"
        "from nbdist.errors import UsageError\nfrom nbdist.plan import Plan\n"
        f"try: Plan.from_accelerate({str(file)!r})\nexcept UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install pyyaml" in done.stdout


def test_without_a_path_the_file_is_where_accelerate_config_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = "from accelerate.commands.config.config_args import default_yaml_config_file as f; print(f)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert str(default_file()) == done.stdout.strip()
