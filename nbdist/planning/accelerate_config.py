"""Accelerate's configuration file as settings of a plan: the keys are theirs.

Independent of what a plan may hold: values are handed on as the file means them, and the plan judges them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbdist.base.checks import check_whole
from nbdist.errors import UsageError
from nbdist.planning import deepspeed
from nbdist.planning.reading import NO_EQUIVALENT, Reading, switch

_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
_SHARDING = {  # FSDP1's strategies, by name and by number: strategy, reshard
    ("FULL_SHARD", "1"): ("fsdp", True),
    ("SHARD_GRAD_OP", "2"): ("fsdp", False),
    ("NO_SHARD", "3"): ("ddp", None),
    ("HYBRID_SHARD", "4"): ("hsdp", True),
    ("HYBRID_SHARD_ZERO2", "5"): ("hsdp", False),
}
_OFF: tuple[object, ...] = (None, "", "no", "NO", False, {}, [])

# What changes nothing that a plan is about, with the values that need no word; None: any.
_SILENT: dict[str, tuple[object, ...] | None] = {
    "compute_environment": None,
    "machine_rank": None,
    "main_training_function": None,
    "rdzv_backend": None,
    "same_network": None,
    "num_machines": (1,),
    "num_processes": (-1,),
    "gpu_ids": ("all",),
    "fsdp_config.fsdp_version": (2,),
    "fsdp_config.fsdp_sync_module_states": (True,),
    "fsdp_config.fsdp_use_orig_params": (True,),
    "fsdp_config.fsdp_backward_prefetch": ("BACKWARD_PRE",),
    "fsdp_config.fsdp_state_dict_type": ("SHARDED_STATE_DICT",),
    "fp8_config.backend": ("AO",),
    "deepspeed_config.deepspeed_hostfile": None,
    "deepspeed_config.deepspeed_multinode_launcher": None,
    "deepspeed_config.zero3_save_16bit_model": None,
}
_HINTS = {
    "num_processes": "the number of ranks is not part of a plan: `%distributed start -n {value}`",
    "num_machines": "machines are not part of a plan: `%distributed start --help` lists the ways to use several",
    "gpu_ids": "GPUs are not part of a plan: set CUDA_VISIBLE_DEVICES={value} before the ranks start",
    "use_cpu": "devices are not part of a plan: ranks use the GPUs that they see (CUDA_VISIBLE_DEVICES)",
    "fsdp_config.fsdp_version": "sharding is FSDP2 here",
    "fsdp_config.fsdp_state_dict_type": "`save_state` writes shards, which any number of ranks can load; `save_model` "
    "writes the whole model",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "create the model on meta and call `prepare(..., weights=name)`",
    "deepspeed_config.zero3_init_flag": "create the model on meta and call `prepare(..., weights=name)`",
    "fp8_config.backend": "float8 is torchao's here",
}


def default_file() -> Path:
    """Return where `accelerate config` writes."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def read(path: str | Path | None = None) -> Reading:
    """Return what a configuration file of Accelerate says.

    Args:
        path: The file, YAML or JSON; None: where `accelerate config` writes.

    Raises:
        UsageError: It can't be read, or asks for what no plan can do.
    """
    file = default_file() if path is None else Path(path).expanduser()
    try:
        return _Translation(file, _entries(file)).reading()
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def _entries(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"it can't be read ({why}). `accelerate config` writes one, or give another path") from None
    try:
        import yaml
    except ImportError:
        raise UsageError("Accelerate's configuration needs PyYAML: `%pip install pyyaml`") from None
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"it is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or "distributed_type" not in found:
        raise UsageError("it is not a configuration of Accelerate, which names a distributed_type")
    return _flat(found)


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return all entries in one dictionary: those of a section as "section.key", with the prefix that some omit."""
    flat: dict[str, Any] = {}
    for key, value in found.items():
        if not isinstance(value, Mapping):
            flat[str(key)] = value
            continue
        prefix = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "parallelism_config": "parallelism_config_"}
        for name, entry in value.items():
            start = prefix.get(key, "")
            flat[f"{key}.{start}{str(name).removeprefix(start)}"] = entry
    if "dynamo_backend" in flat:  # as older versions wrote it
        flat.setdefault("dynamo_config.dynamo_backend", flat.pop("dynamo_backend"))
    return flat


class _Translation:
    """One file's entries, of which each is taken once; what is left has no equivalent."""

    def __init__(self, file: Path, entries: dict[str, Any]) -> None:
        self._entries = entries
        self._found = Reading(file)

    def reading(self) -> Reading:
        self._refuse_others()
        self._precision()
        self._affinity()
        kind = self._take("distributed_type")
        if kind == "DEEPSPEED":
            self._deepspeed()
        else:
            self._found.settings["strategy"] = self._sharding() if kind == "FSDP" else "ddp"
        self._mesh()
        self._compilation()
        self._left()
        return self._found

    def _refuse_others(self) -> None:
        kind = self._entries["distributed_type"]
        if self._entries.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
            raise UsageError("it is for SageMaker, which starts its own processes: no plan can follow it")
        if kind not in _KINDS:
            raise UsageError(
                f"distributed_type {kind} has no equivalent: a plan follows {', '.join(_KINDS)}. Choose one "
                "of them with `accelerate config`, or set a plan by hand: `%distributed plan --help`"
            )

    def _precision(self) -> None:
        if (precision := self._take("mixed_precision")) not in _OFF:
            self._found.settings["precision"] = precision
        if (steps := self._take("gradient_accumulation_steps")) is not None:
            self._found.settings["accumulate"] = steps

    def _affinity(self) -> None:
        if self._take_switch("enable_cpu_affinity"):
            self._found.settings["numa"] = True

    def _deepspeed(self) -> None:
        """Take what DeepSpeed's own file says, or what stands here in its place."""
        section = "deepspeed_config."
        config = self._take(f"{section}deepspeed_config_file")
        if config not in _OFF:
            found = deepspeed.read(self._found.file.parent / Path(str(config)).expanduser())
        else:
            devices = {kind: self._take(f"{section}offload_{kind}_device") for kind in ("optimizer", "param")}
            stage = self._take(f"{section}zero_stage")
            zero = {f"offload_{kind}": {"device": device} for kind, device in devices.items()}
            entries = {
                "bf16": {"enabled": deepspeed.AUTO},  # the precision stands outside
                "gradient_accumulation_steps": self._take(f"{section}gradient_accumulation_steps") or 1,
                "gradient_clipping": self._take(f"{section}gradient_clipping"),
                "zero_optimization": {"stage": 2 if stage is None else stage, **zero},
            }
            found = deepspeed.translated(self._found.file, entries)
        self._found.settings |= found.settings
        self._found.notes += found.notes

    def _sharding(self) -> str:
        settings = self._found.settings
        strategy, settings["reshard"] = self._sharding_strategy()
        if strategy == "ddp":
            del settings["reshard"]
            self._drop("fsdp_config.", "NO_SHARD keeps the whole model on each rank")
            return strategy
        if self._take_switch("fsdp_config.fsdp_offload_params"):
            settings["offload"] = True
        if self._take_switch("fsdp_config.fsdp_activation_checkpointing"):
            settings["activation_checkpointing"] = "full"
        self._blocks()
        return strategy

    def _sharding_strategy(self) -> tuple[str, bool | None]:
        value = self._take("fsdp_config.fsdp_sharding_strategy")
        if (newer := self._take("fsdp_config.fsdp_reshard_after_forward")) is not None:
            value = newer
        if value is None:
            return "fsdp", None
        for names, meaning in _SHARDING.items():
            if not isinstance(value, bool) and str(value) in names:
                return meaning
        return "fsdp", switch("fsdp_reshard_after_forward", value)

    def _blocks(self) -> None:
        policy = self._take("fsdp_config.fsdp_auto_wrap_policy")
        classes = self._take("fsdp_config.fsdp_transformer_layer_cls_to_wrap")
        names = [name.strip() for name in str(classes or "").split(",") if name.strip()]
        if names:
            self._found.settings["shard_by"] = names[0] if len(names) == 1 else tuple(names)
        if policy not in (*_OFF, "TRANSFORMER_BASED_WRAP"):
            self._note("fsdp_config.fsdp_auto_wrap_policy", policy, "blocks are found in the model, or named: shard_by")
            self._take("fsdp_config.fsdp_min_num_params")

    def _mesh(self) -> None:
        settings = self._found.settings
        section = "parallelism_config.parallelism_config_"
        names = ("dp_replicate", "dp_shard", "tp", "cp")
        sizes = {name: self._take_size(f"{section}{name}_size") for name in names}
        if sizes["dp_replicate"] > 1 and settings["strategy"] != "ddp":
            settings |= {"strategy": "hsdp", "replicas": sizes["dp_replicate"]}
        for name in ("tp", "cp"):
            if sizes[name] > 1:
                settings[name] = sizes[name]
        if sizes["cp"] == 1:
            self._take(f"{section}cp_comm_strategy")

    def _compilation(self) -> None:
        settings, section = self._found.settings, "dynamo_config.dynamo_"
        backend = self._take(f"{section}backend")
        mode = self._take(f"{section}mode")
        dynamic, whole, regional = (
            self._take_switch(f"{section}use_{name}") for name in ("dynamic", "fullgraph", "regional_compilation")
        )
        if backend in _OFF:
            return
        if str(backend).upper() != "INDUCTOR":
            return self._note(f"{section}backend", backend, "models are compiled by inductor only: compile stays off")
        settings["compile"] = mode or True
        if dynamic is not None:
            settings["compile_dynamic"] = dynamic
        if whole and settings["strategy"] == "ddp":
            self._note(f"{section}use_fullgraph", True, "DDP's own forward breaks the graph")
        elif whole:
            settings["compile_fullgraph"] = True
        if regional and settings["strategy"] == "ddp":
            self._note(f"{section}use_regional_compilation", True, "under ddp, the model is compiled as a whole")

    def _take(self, name: str) -> Any:
        return self._entries.pop(name, None)

    def _take_switch(self, name: str) -> bool | None:
        value = self._take(name)
        return None if value is None else switch(name.rpartition(".")[2], value)

    def _take_size(self, name: str) -> int:
        value = self._take(name)
        return 1 if value is None else check_whole(name.rpartition(".")[2], value, 1)

    def _drop(self, prefix: str, why: str) -> None:
        for name in [name for name in self._entries if name.startswith(prefix)]:
            if (value := self._take(name)) not in _OFF and not _is_silent(name, value):
                self._note(name, value, why)

    def _note(self, name: str, value: object, why: str) -> None:
        self._found.note(name, value, why)

    def _left(self) -> None:
        for name, value in self._entries.items():
            if value not in _OFF and not _is_silent(name, value):
                self._note(name, value, _HINTS.get(name, NO_EQUIVALENT).format(value=value))


def _is_silent(name: str, value: object) -> bool:
    return name in _SILENT and ((values := _SILENT[name]) is None or value in values)
