"""What a plan may be: values, combinations, and what ranks of a kind can do. Everything else is one UsageError."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbdist.base.text import did_you_mean
from nbdist.errors import UsageError
from nbdist.planning.kinds import STRATEGIES
from nbdist.planning.settings import CUDA_GRAPHS, SETTINGS, SHARDED, Settings, default_of, micro_batches_of

# --- values


def refined(plan: Settings) -> dict[str, Any]:
    """Return the values of all settings, in the one way to write them that a plan keeps.

    Raises:
        UsageError: A value is wrong.
    """
    return {name: setting.kind.refined(name, getattr(plan, name)) for name, setting in SETTINGS.items()}


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse settings that no plan has.

    Raises:
        UsageError: With the nearest name.
    """
    for name in names:
        if name not in SETTINGS:
            hint = did_you_mean(str(name), SETTINGS)
            raise UsageError(f"a plan has no setting {name!r}{hint} Available settings: {', '.join(SETTINGS)}")


# --- combinations


def refuse_contradictions(plan: Settings) -> None:
    """Refuse settings that exclude each other whatever the machine is.

    Raises:
        UsageError: With the reason, and what to set instead.
    """
    if strangers := _strangers(plan):
        raise UsageError(_tell_strangers(plan, strangers))
    if plan.fp8_recipe != default_of("fp8_recipe") and plan.precision != "fp8":
        raise UsageError(
            f"fp8_recipe {plan.fp8_recipe!r} is for precision 'fp8', and precision is {plan.precision!r}: set "
            f"precision to 'fp8', or fp8_recipe to {default_of('fp8_recipe')!r}"
        )
    if plan.strategy == "deepspeed" and plan.precision == "fp8":
        raise UsageError(
            "strategy 'deepspeed' excludes precision 'fp8': set precision to 'bf16', or strategy to 'fsdp'"
        )
    _refuse_compilation(plan)
    if plan.comm_hook_options and "powersgd" not in plan.comm_hook:
        raise UsageError(
            f"comm_hook {plan.comm_hook!r} has no options: leave comm_hook_options empty, "
            "or set comm_hook to 'powersgd' or 'batched_powersgd'"
        )
    _refuse_early_compression(plan)
    if plan.activation_budget is not None and plan.activation_checkpointing != "none":
        raise UsageError(
            f"activation_budget ({plan.activation_budget:g}) says how much is computed again, and so does "
            f"activation_checkpointing ({plan.activation_checkpointing!r}): set activation_checkpointing to 'none', or "
            "activation_budget to None"
        )
    if plan.activation_offload and plan.activation_checkpointing.startswith("selective"):
        raise UsageError(
            f"activation_offload excludes activation_checkpointing {plan.activation_checkpointing!r}, whose results "
            "torch keeps on the GPU. Set activation_checkpointing to 'full' or 'none', or activation_offload "
            "to False"
        )
    if plan.ema is not None and plan.local_sgd_steps:
        raise UsageError(
            f"ema ({plan.ema:g}) excludes local SGD ({plan.local_sgd_steps}): each rank would average weights of its "
            "own. Set ema to None, or local_sgd_steps to 0"
        )
    if plan.static_graph and (plan.accumulate > 1 or plan.local_sgd_steps):
        other = f"accumulate ({plan.accumulate})" if plan.accumulate > 1 else f"local SGD ({plan.local_sgd_steps})"
        raise UsageError(
            f"static_graph excludes {other}: DDP learns the graph in its first backward, which must exchange "
            "gradients. Leave static_graph off"
        )
    if plan.local_sgd_steps and plan.comm_hook != "none":
        raise UsageError(
            f"comm_hook {plan.comm_hook!r} compresses gradients, and local SGD exchanges none: "
            "set comm_hook to 'none', or local_sgd_steps to 0"
        )
    if plan.tp > 1:
        _refuse_with_tp(plan)
    for name, what in (("sequence_parallel", "tokens"), ("loss_parallel", "the loss")):
        if plan.tp == 1 and getattr(plan, name):
            raise UsageError(f"{name} divides {what} among the ranks of tp, and tp is 1: set tp to 2 or more")
    _refuse_with_cp(plan)
    if plan.ep > 1:
        _refuse_with_ep(plan)
    _refuse_with_pp(plan)
    if plan.seed_per_rank and plan.seed is None:
        raise UsageError("seed_per_rank adds the rank to the seed, but no seed is set: set seed, for example to 0")


_ONE_BATCH = "rank 0 would have to hand the same batch to several ranks"


def _refuse_with_tp(plan: Settings) -> None:
    _refuse_beside(plan, "tp", dispatch=_ONE_BATCH, offload="layers that are divided are not moved to the CPU yet")
    if plan.precision == "fp8":
        raise UsageError(f"tp ({plan.tp}) excludes precision 'fp8': set precision to 'bf16', or tp to 1")
    if plan.compile and plan.activation_checkpointing != "none":
        raise UsageError(
            f"tp ({plan.tp}) excludes compile with activation_checkpointing {plan.activation_checkpointing!r}: PyTorch "
            "fails to compile such blocks. Set compile to False, or activation_checkpointing to 'none'"
        )


def _refuse_with_cp(plan: Settings) -> None:
    if plan.cp == 1:
        if plan.cp_method != default_of("cp_method"):
            raise UsageError(
                f"cp_method {plan.cp_method!r} says how sequences that are divided meet, and cp is 1: set cp to 2 or "
                f"more, or cp_method to {default_of('cp_method')!r}"
            )
        return
    traced = "torch.compile can't trace the exchange of keys and values"
    _refuse_beside(plan, "cp", compile=traced, dispatch=_ONE_BATCH)


def _refuse_beside(plan: Settings, parallel: str, **reasons: str) -> None:
    """Refuse settings that can't be on beside a way to divide the model, for these reasons."""
    for name, why in reasons.items():
        if (value := getattr(plan, name)) != (off := default_of(name)):
            raise UsageError(
                f"{parallel} ({getattr(plan, parallel)}) excludes {name} ({value!r}): {why}. Set {name} to {off}, or "
                f"{parallel} to 1"
            )


def _refuse_with_ep(plan: Settings) -> None:
    _refuse_beside(
        plan,
        "ep",
        tp="experts are divided by one of both",
        cp="ranks with parts of one sequence don't exchange tokens with experts yet",
        compile="torch.compile can't trace how tokens travel to experts",
        offload="experts that are divided are not moved to the CPU yet",
        activation_offload="what experts keep for backward is not moved to the CPU yet",
    )
    if plan.precision in ("fp16", "fp8"):
        raise UsageError(f"ep ({plan.ep}) excludes precision {plan.precision!r}: set precision to 'bf16', or ep to 1")


def _refuse_with_pp(plan: Settings) -> None:
    if plan.pp == 1:
        for name in ("pp_schedule", "pp_micro_batches"):
            if (value := getattr(plan, name)) != default_of(name):
                raise UsageError(
                    f"{name} ({value!r}) is for pipelines, and pp is 1: set pp to 2 or more, or {name} to "
                    f"{default_of(name)!r}"
                )
        return
    if (parts := micro_batches_of(plan)) < plan.pp:
        raise UsageError(
            f"pp_micro_batches ({parts}) must be at least pp ({plan.pp}), as else some stages never have work: set "
            f"pp_micro_batches to {plan.pp} or more, or pp to {parts}"
        )
    _refuse_beside(
        plan,
        "pp",
        loss_parallel="the last stage computes the loss of micro-batches by itself",
        cp="sequences are not divided between stages yet",
        ep="experts of stages are not divided yet",
        compile="stages are not compiled yet",
        dispatch=_ONE_BATCH,
        offload="stages are not moved to the CPU yet",
        ema="each rank would average one stage only",
    )
    if plan.precision in ("fp16", "fp8"):
        raise UsageError(
            f"pp ({plan.pp}) excludes precision {plan.precision!r}: set precision to 'bf16' or 'fp32', or pp to 1"
        )


def _refuse_compilation(plan: Settings) -> None:
    for name in ("compile_dynamic", "compile_fullgraph"):
        if not plan.compile and (value := getattr(plan, name)) != default_of(name):
            raise UsageError(
                f"{name} ({value!r}) is for compiled models, and compile is off: set compile to True, or {name} to "
                f"{default_of(name)!r}"
            )
    if plan.compile_fullgraph and plan.activation_offload:
        raise UsageError(
            "compile_fullgraph excludes activation_offload, which breaks the graph at each block: set one of them to "
            "False"
        )
    if plan.compile in CUDA_GRAPHS and plan.accumulate > 1:
        raise UsageError(
            f"compile {plan.compile!r} excludes accumulate ({plan.accumulate}): gradients of one micro-batch live in "
            "memory that CUDA graphs overwrite in the next (pytorch/pytorch#169545). Set compile to True or "
            "'max-autotune-no-cudagraphs', or accumulate to 1"
        )
    if plan.compile in CUDA_GRAPHS and plan.compile_dynamic:
        raise UsageError(
            f"compile {plan.compile!r} excludes compile_dynamic (True): CUDA graphs have fixed shapes, so each new one "
            "is recorded, with memory of its own. Set compile_dynamic to None, or compile to True"
        )


def uncompiled(plan: Settings) -> dict[str, Any]:
    """Return the changes that take a plan to one that compiles nothing."""
    return with_parts_dropped(plan, {"compile": False})


def with_parts_dropped(plan: Settings, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to a plan; settings that belong to one they turn off go back to their defaults."""
    parts = [
        name
        for name, setting in SETTINGS.items()
        if setting.part_of in changes and not setting.is_on(changes[setting.part_of])
    ]
    return {name: default_of(name) for name in parts} | dict(changes)


def own_settings(plan: Settings, strategy: str) -> dict[str, Any]:
    """Return the changes that take a plan to another strategy, and what is not for that one back to its default."""
    strangers = [name for name in SETTINGS if not _is_for(plan, name, strategy)]
    return {"strategy": strategy, **{name: default_of(name) for name in strangers}}


def _is_for(plan: Settings, name: str, strategy: str) -> bool:
    if name == "shard_by" and (
        plan.activation_checkpointing != "none" or plan.activation_budget is not None or plan.activation_offload
    ):
        return True  # it says what a block is, and activation checkpointing and offload work by blocks, too
    return strategy in SETTINGS[name].owners


def _strangers(plan: Settings) -> list[str]:
    """Return settings that are not for the plan's strategy, and are set."""
    return [
        name for name in SETTINGS if not _is_for(plan, name, plan.strategy) and getattr(plan, name) != default_of(name)
    ]


def _tell_strangers(plan: Settings, strangers: Sequence[str]) -> str:
    reasons = "; ".join(f"{name} ({_told(getattr(plan, name))}), as {SETTINGS[name].why}" for name in strangers)
    undo = ", ".join(f"{name} to {_told(default_of(name))}" for name in strangers)
    others = [strategy for strategy in STRATEGIES if all(strategy in SETTINGS[name].owners for name in strangers)]
    instead = f", or strategy to {' or '.join(map(repr, others))}" if others else ""
    return f"strategy {plan.strategy!r} excludes {reasons}. Set {undo}{instead}"


def _told(value: object) -> str:
    return getattr(value, "__name__", repr(value))


def _refuse_early_compression(plan: Settings) -> None:
    options = plan.comm_hook_options
    remembers = options.get("use_error_feedback", True) or options.get("warm_start", True)
    if remembers and options.get("start_powerSGD_iter", 2) < 2:
        raise UsageError(
            "start_powerSGD_iter must be 2 or more with use_error_feedback or warm_start, as DDP rebuilds its buckets "
            "after the first step: set it to 2, or both of them to False"
        )


# --- ranks


def refuse_impossible(
    plan: Settings, world_size: int, backend: str | None, device: object, capability: tuple[int, int] | None
) -> None:
    """Refuse what ranks of a kind can't do. See `Plan.check`."""
    on_cpu = str(device).split(":")[0] == "cpu"
    whole_blocks = plan.strategy in (*SHARDED, "deepspeed")
    if plan.precision == "fp16" and whole_blocks and on_cpu:
        raise UsageError(
            f"precision 'fp16' under {plan.strategy} is for GPUs: whole blocks are then computed in float16, for which "
            "PyTorch lacks operations on the CPU, and which is no faster there than float32. Set precision to 'bf16'"
        )
    if plan.precision == "fp8":
        _refuse_fp8(on_cpu, capability)
    if plan.strategy == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "strategy 'deepspeed' needs DeepSpeed: `%pip install deepspeed`. Set strategy to 'fsdp' to go without"
        )
    if plan.activation_offload and on_cpu:
        raise UsageError(
            "activation_offload is for GPUs: the activations of CPU ranks are in CPU memory already. Set "
            "activation_offload to False"
        )
    if plan.comm_hook == "bf16" and backend and "nccl" not in backend:
        raise UsageError(
            f"comm_hook 'bf16' needs NCCL, and the ranks' backend is {backend}: PyTorch does not allow it. "
            "Set comm_hook to 'fp16' or 'powersgd', which work with every backend"
        )
    if plan.sync_batchnorm and on_cpu and world_size > 1:
        raise UsageError(
            "sync_batchnorm is for GPUs: PyTorch's SyncBatchNorm does not work on the CPU. Leave sync_batchnorm off"
        )
    groups, what = world_size, "the number of ranks"
    for name in ("tp", "cp", "pp", "replicas", "ep"):
        parts = getattr(plan, name) or 1
        if groups % parts:
            raise UsageError(
                f"{name} ({parts}) must divide {what}, which is {groups}: set {name} to {_divisors(groups)}"
            )
        if parts > 1:
            groups, what = groups // parts, f"{what} divided by {name} ({parts})"
    if plan.offload and plan.strategy in SHARDED and backend == "nccl":
        raise UsageError(
            "offload keeps shards in CPU memory, from which NCCL can't sum norms or look for infinite gradients: start "
            "the ranks with the backend cpu:gloo,cuda:nccl (the default), or set offload to False"
        )


def _divisors(number: int) -> str:
    return " or ".join(str(each) for each in range(1, number + 1) if number % each == 0)


def _refuse_fp8(on_cpu: bool, capability: tuple[int, int] | None) -> None:
    instead = "Set precision to 'bf16'"
    if on_cpu:
        raise UsageError(f"precision 'fp8' needs GPUs of compute capability 8.9 or more, not a CPU. {instead}")
    if capability is not None and capability < (8, 9):
        have = ".".join(map(str, capability))
        raise UsageError(
            f"precision 'fp8' needs GPUs of compute capability 8.9 or more, and these have {have}. {instead}"
        )
    if importlib.util.find_spec("torchao") is None:
        raise UsageError(f"precision 'fp8' needs torchao: `pip install torchao`. {instead} to go without")
