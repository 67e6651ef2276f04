"""Which variables make Accelerate and transformers follow a plan: the names are theirs."""

from __future__ import annotations

from nbdist.planning.settings import SHARDED, Settings

# All that `environment` may hold: who sets one plan after another removes these first.
NAMES = (
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_DYNAMO_MODE",
    "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    "ACCELERATE_FP8_BACKEND",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "FSDP_VERSION",
    "PARALLELISM_CONFIG_CP_SIZE",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE",
    "PARALLELISM_CONFIG_TP_SIZE",
)


def environment(plan: Settings, world_size: int, device: object) -> dict[str, str]:
    """See `Plan.environment`."""
    found: dict[str, str] = {"ACCELERATE_MIXED_PRECISION": "no" if plan.precision == "fp32" else plan.precision}
    if plan.precision == "fp8":
        found["ACCELERATE_FP8_BACKEND"] = "AO"
    if plan.accumulate > 1:  # even a 1 here would win over the argument of `Accelerator`
        found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(plan.accumulate)
    if plan.compile:
        found |= _compilation(plan)
    on_cpu = str(device).split(":")[0] == "cpu"
    if on_cpu and world_size > 1:  # else Accelerate looks for GPUs, and takes a rank without for a single process
        found["ACCELERATE_USE_CPU"] = "true"
    if plan.strategy in SHARDED:
        found |= _sharding(plan)
    if not on_cpu:  # where it is an error there
        found |= _mesh(plan, world_size)
    return found


def _mesh(plan: Settings, world_size: int) -> dict[str, str]:
    replicas = plan.replicas or 1
    parts = replicas * plan.tp * plan.cp
    if parts == 1 or plan.pp > 1:  # Accelerate has no stages
        return {}
    sizes = {"DP_REPLICATE": replicas, "DP_SHARD": world_size // parts, "TP": plan.tp, "CP": plan.cp}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | {
        f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()
    }


def _compilation(plan: Settings) -> dict[str, str]:
    found = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    if isinstance(plan.compile, str):
        found["ACCELERATE_DYNAMO_MODE"] = plan.compile
    if plan.compile_dynamic is not None:
        found["ACCELERATE_DYNAMO_USE_DYNAMIC"] = _flag(plan.compile_dynamic)
    if plan.compile_fullgraph:
        found["ACCELERATE_DYNAMO_USE_FULLGRAPH"] = "true"
    return found


def _sharding(plan: Settings) -> dict[str, str]:
    found = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_OFFLOAD_PARAMS": _flag(plan.offload),
        "FSDP_RESHARD_AFTER_FORWARD": _flag(plan.reshard is not False),
        "FSDP_ACTIVATION_CHECKPOINTING": _flag(plan.activation_checkpointing != "none"),
    }
    if plan.compile:
        found["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    if plan.shard_by is not None and not callable(plan.shard_by):
        names = [plan.shard_by] if isinstance(plan.shard_by, str) else plan.shard_by
        found["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(names)
    return found


def _flag(value: bool) -> str:
    return "true" if value else "false"
