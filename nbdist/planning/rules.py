"""What a plan may hold: values, combinations, and what ranks of a kind can do. Everything else is one UsageError."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from nbdist.plan import Plan

CHOICES: Mapping[str, Sequence[str]] = {
    "strategy": ("none", "ddp", "fsdp", "hsdp"),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "fp8_recipe": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "exchange": ("last", "each"),
    "activation_checkpointing": ("none", "full", "selective", "selective-half"),
    "comm_hook": ("none", "fp16", "bf16", "powersgd", "batched_powersgd"),
}
SWITCHES = (
    "activation_offload",
    "compile_fullgraph",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "sync_batchnorm",
    "offload",
    "seed_per_rank",
    "deterministic",
    "numa",
    "dispatch",
    "even_batches",
)
OPTIONAL_SWITCHES = ("compile_dynamic", "reshard", "tf32")
# What a setting that is on or off may name beside these: how it is on.
WAYS: Mapping[str, Sequence[str]] = {
    "compile": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
}
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes of torch.compile that use them
SHARDED = ("fsdp", "hsdp")

_COUNTS = {"accumulate": 1, "prefetch": 0, "local_sgd_steps": 0, "gc_interval": 0}  # and the least they may be
_OPTIONAL_COUNTS = {"replicas": 1, "seed": 0}
_SEEDS = 2**32  # numpy takes no larger one
_LIMIT = 2**31

# Which strategies a setting is for, and why the others have no use for it.
OWNERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "comm_hook": (("ddp",), "only DDP has communication hooks"),
    "bucket_mb": (("ddp",), "only DDP has buckets"),
    "compile_fullgraph": (("none", *SHARDED), "torch.compile can't trace DDP's own forward: it breaks the graph"),
    "find_unused_parameters": (("ddp",), "only DDP waits for the gradient of every parameter"),
    "static_graph": (("ddp",), "only DDP has an order of gradients to learn"),
    "gradient_as_bucket_view": (("ddp",), "only DDP has buckets"),
    "local_sgd_steps": (("ddp",), "a rank steps alone only if it holds the whole model"),
    "sync_batchnorm": (("ddp", *SHARDED), "ranks don't train together otherwise"),
    "shard_by": (SHARDED, "nothing is split into blocks otherwise"),
    "reshard": (SHARDED, "nothing is gathered otherwise"),
    "prefetch": (SHARDED, "nothing is gathered otherwise"),
    "exchange": (SHARDED, "whole gradients are kept otherwise, whenever they are exchanged"),
    "offload": (SHARDED, "PyTorch moves only shards to the CPU"),
    "replicas": (("hsdp",), "only hsdp has groups of ranks that hold the whole model"),
}


# Settings that only say more of another one, and when that one is on.
_PARTS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "fp8_recipe": ("precision", lambda precision: precision == "fp8"),
    "compile_dynamic": ("compile", bool),
    "compile_fullgraph": ("compile", bool),
    "comm_hook_options": ("comm_hook", lambda hook: "powersgd" in hook),
}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LIMIT


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_seed(value: object) -> bool:
    return _is_count(value) or value == 0


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


# The settings of torch's PowerSGDState: whether a value will do, and what will.
HOOK_OPTIONS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "matrix_approximation_rank": (_is_count, "a whole number of 1 or more"),
    "start_powerSGD_iter": (_is_count, "a whole number of 1 or more"),
    "min_compression_rate": (_is_number, "a number of 0 or more"),
    "use_error_feedback": (_is_switch, "True or False"),
    "warm_start": (_is_switch, "True or False"),
    "orthogonalization_epsilon": (_is_number, "a number of 0 or more"),
    "random_seed": (_is_seed, "a whole number of 0 or more"),
    "compression_stats_logging_frequency": (_is_count, "a whole number of 1 or more"),
    "batch_tensors_with_same_shape": (_is_switch, "True or False"),
}


# --- values


def refined(plan: Plan) -> dict[str, Any]:
    """The values of all settings that have several ways to be written, in the one way that a plan keeps.

    Raises:
        UsageError: A value is wrong.
    """
    values: dict[str, Any] = {name: choose(name, getattr(plan, name)) for name in CHOICES}
    for name in SWITCHES:
        _expect(name, getattr(plan, name), _is_switch, "True or False")
    values |= {name: choose_way(name, getattr(plan, name)) for name in WAYS}
    for name in OPTIONAL_SWITCHES:
        _expect(name, getattr(plan, name), lambda value: value is None or _is_switch(value), "True, False or None")
    for name, least in (_COUNTS | _OPTIONAL_COUNTS).items():
        _refuse_count(name, getattr(plan, name), least)
    values["clip_grad_norm"] = _amount("clip_grad_norm", plan.clip_grad_norm)
    values["ema"] = _decay(plan.ema)
    values["activation_budget"] = _share(plan.activation_budget)
    values["bucket_mb"] = _amount("bucket_mb", plan.bucket_mb)
    values["shard_by"] = _blocks(plan.shard_by)
    values["comm_hook_options"] = _hook_options(plan.comm_hook_options)
    return values


def choose(name: str, value: object) -> str:
    """The value of a setting that has a few to choose among.

    Raises:
        UsageError: It is none of them; the text names the nearest.
    """
    allowed = CHOICES[name]
    if name == "precision" and value == "no":
        return "fp32"
    if isinstance(value, str) and value in allowed:
        return value
    raise UsageError(_unknown(name, value, allowed))


def choose_way(name: str, value: object) -> bool | str:
    """The value of a setting that is on or off, or on in one of several ways; "default" is plainly on.

    Raises:
        UsageError: It is none of them; the text names the nearest.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in WAYS[name]:
        return value == "default" or value
    raise UsageError(_unknown(name, value, (True, False, *WAYS[name])))


def refuse_unknown(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse settings that no plan has.

    Raises:
        UsageError: With the nearest name.
    """
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f": did you mean {close[0]!r}?" if close else "."
            raise UsageError(f"a plan has no setting {name!r}{hint} It has {', '.join(known)}")


def _unknown(name: str, value: object, allowed: Sequence[object]) -> str:
    words = [word for word in allowed if isinstance(word, str)]
    close = difflib.get_close_matches(str(value).lower(), words, 1)
    hint = f": did you mean {close[0]!r}?" if close else "."
    return f"{name} {value!r} is unknown{hint} Allowed are {', '.join(map(repr, allowed))}"


def _expect(name: str, value: object, holds: Callable[[object], bool], allowed: str) -> None:
    if not holds(value):
        raise UsageError(f"{name} must be {allowed}, not {value!r}")


def _refuse_count(name: str, value: object, least: int) -> None:
    if value is None and name in _OPTIONAL_COUNTS:
        return
    most = _SEEDS if name == "seed" else _LIMIT
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < most:
        allowed = f"a whole number of {least} or more"
        if isinstance(value, int) and value >= most:
            allowed = f"a whole number less than {most}"
        raise UsageError(f"{name} must be {allowed}{', or None' if name in _OPTIONAL_COUNTS else ''}, not {value!r}")


def _amount(name: str, value: object) -> float | None:
    if value is None and name == "clip_grad_norm":
        return None
    if not isinstance(value, (int, float)) or not _is_number(value) or value == 0:
        raise UsageError(
            f"{name} must be a number of more than 0{', or None' if name == 'clip_grad_norm' else ''}, not {value!r}"
        )
    return float(value)


def _decay(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not _is_number(value) or not 0 < value < 1:
        raise UsageError(f"ema must be a number between 0 and 1, such as 0.999, or None, not {value!r}")
    return value


def _share(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not _is_number(value) or value >= 1:
        raise UsageError(
            f"activation_budget must be a number from 0 to less than 1, such as 0.5, or None, not {value!r}"
        )
    return float(value)


def _blocks(value: object) -> Any:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, (list, tuple)):
        if names and all(isinstance(name, str) and name.isidentifier() for name in names):
            return value if isinstance(value, str) else tuple(names)
    elif not isinstance(value, type) and (value is None or callable(value)):
        return value
    hint = f" (its name is {value.__name__!r})" if isinstance(value, type) else ""
    raise UsageError(
        f"shard_by must be the name of a module's class like 'Block', several of them, a function that says of a "
        f"module whether it is a block, or None; not {value!r}{hint}"
    )


def _hook_options(options: object) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise UsageError(
            f"comm_hook_options must be a dictionary like {{'matrix_approximation_rank': 2}}, not {options!r}"
        )
    for name, value in options.items():
        if name not in HOOK_OPTIONS:
            raise UsageError(_unknown("the comm_hook option", name, list(HOOK_OPTIONS)))
        _expect(f"the comm_hook option {name}", value, *HOOK_OPTIONS[name])
    return dict(options)


# --- combinations


def refuse_contradictions(plan: Plan) -> None:
    """Refuse settings that exclude each other whatever the machine is.

    Raises:
        UsageError: With the reason, and what to set instead.
    """
    if strangers := _strangers(plan):
        raise UsageError(_tell_strangers(plan, strangers))
    if plan.fp8_recipe != default_of(plan, "fp8_recipe") and plan.precision != "fp8":
        raise UsageError(
            f"fp8_recipe {plan.fp8_recipe!r} is for precision 'fp8', and precision is {plan.precision!r}: set "
            f"precision to 'fp8', or fp8_recipe to {default_of(plan, 'fp8_recipe')!r}"
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
    if plan.seed_per_rank and plan.seed is None:
        raise UsageError("seed_per_rank adds the rank to the seed, and there is none: set seed, for example to 0")


def _refuse_compilation(plan: Plan) -> None:
    for name in ("compile_dynamic", "compile_fullgraph"):
        if not plan.compile and (value := getattr(plan, name)) != default_of(plan, name):
            raise UsageError(
                f"{name} ({value!r}) is for compiled models, and compile is off: set compile to True, or {name} to "
                f"{default_of(plan, name)!r}"
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


def uncompiled(plan: Plan) -> dict[str, Any]:
    """The changes that take a plan to one that compiles nothing."""
    return with_parts_dropped(plan, {"compile": False})


def with_parts_dropped(plan: Plan, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to a plan, and with a setting that they turn off what only says more of it, back to its default."""
    parts = [name for name, (whole, is_on) in _PARTS.items() if whole in changes and not is_on(changes[whole])]
    return {name: default_of(plan, name) for name in parts} | dict(changes)


def own_settings(plan: Plan, strategy: str) -> dict[str, Any]:
    """The changes that take a plan to another strategy, and what is not for that one back to its default."""
    strangers = [name for name in OWNERS if not _is_for(plan, name, strategy)]
    if "comm_hook" in strangers:
        strangers.append("comm_hook_options")
    return {"strategy": strategy, **{name: default_of(plan, name) for name in strangers}}


def default_of(plan: Plan, name: str) -> Any:
    """The default of a setting."""
    setting = next(setting for setting in fields(plan) if setting.name == name)
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def _is_for(plan: Plan, name: str, strategy: str) -> bool:
    if name == "shard_by" and (
        plan.activation_checkpointing != "none" or plan.activation_budget is not None or plan.activation_offload
    ):
        return True  # it says what a block is, and activation checkpointing and offload work by blocks, too
    return strategy in OWNERS[name][0]


def _strangers(plan: Plan) -> list[str]:
    """Settings that are not for the plan's strategy, and are set."""
    return [
        name
        for name in OWNERS
        if not _is_for(plan, name, plan.strategy) and getattr(plan, name) != default_of(plan, name)
    ]


def _tell_strangers(plan: Plan, strangers: Sequence[str]) -> str:
    reasons = "; ".join(f"{name} ({_told(getattr(plan, name))}), as {OWNERS[name][1]}" for name in strangers)
    undo = ", ".join(f"{name} to {_told(default_of(plan, name))}" for name in strangers)
    others = [strategy for strategy in CHOICES["strategy"] if all(strategy in OWNERS[name][0] for name in strangers)]
    instead = f", or strategy to {' or '.join(map(repr, others))}" if others else ""
    return f"strategy {plan.strategy!r} excludes {reasons}. Set {undo}{instead}"


def _told(value: object) -> str:
    return getattr(value, "__name__", repr(value))


def _refuse_early_compression(plan: Plan) -> None:
    options = plan.comm_hook_options
    remembers = options.get("use_error_feedback", True) or options.get("warm_start", True)
    if remembers and options.get("start_powerSGD_iter", 2) < 2:
        raise UsageError(
            "start_powerSGD_iter must be 2 or more with use_error_feedback or warm_start, as DDP rebuilds its buckets "
            "after the first step: set it to 2, or both of them to False"
        )


# --- ranks


def refuse_impossible(
    plan: Plan, world_size: int, backend: str | None, device: object, capability: tuple[int, int] | None
) -> None:
    """Refuse what ranks of a kind can't do. See `Plan.check`."""
    on_cpu = str(device).split(":")[0] == "cpu"
    sharded = plan.strategy in SHARDED
    if plan.precision == "fp16" and sharded and on_cpu:
        raise UsageError(
            f"precision 'fp16' under {plan.strategy} is for GPUs: whole blocks are then computed in float16, for which "
            "PyTorch lacks operations on the CPU, and which is no faster there than float32. Set precision to 'bf16'"
        )
    if plan.precision == "fp8":
        _refuse_fp8(on_cpu, capability)
    if plan.activation_offload and on_cpu:
        raise UsageError(
            "activation_offload is for GPUs: the activations of CPU ranks are in CPU memory already. Set "
            "activation_offload to False"
        )
    if plan.comm_hook == "bf16" and backend and "nccl" not in backend:
        raise UsageError(
            f"comm_hook 'bf16' needs NCCL, and the ranks' backend is {backend}: PyTorch refuses it. Set comm_hook to "
            "'fp16' or 'powersgd', which go everywhere"
        )
    if plan.sync_batchnorm and on_cpu and world_size > 1:
        raise UsageError(
            "sync_batchnorm is for GPUs: PyTorch's SyncBatchNorm does not work on the CPU. Leave sync_batchnorm off"
        )
    if plan.replicas is not None and world_size % plan.replicas:
        fitting = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise UsageError(
            f"replicas ({plan.replicas}) must divide the number of ranks, which is {world_size}: "
            f"set replicas to {' or '.join(map(str, fitting))}"
        )
    if plan.offload and backend == "nccl":
        raise UsageError(
            "offload keeps shards in CPU memory, from which NCCL can't sum norms or look for infinite gradients: start "
            "the ranks with the backend cpu:gloo,cuda:nccl (the default), or set offload to False"
        )


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
