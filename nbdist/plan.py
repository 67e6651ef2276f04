"""The plan: how models are made distributed. Values only; knows nothing of torch, ranks or notebooks.

What can't be is in `planning.rules`, how a plan is told in `planning.words`, what others read of it in
`planning.variables`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from nbdist.errors import UsageError
from nbdist.planning import describe, rules, variables

PLAN_VARIABLE = "NBDIST_PLAN"
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # set by Accelerate's launchers, and by notebook_launcher

Strategy = Literal["none", "ddp", "fsdp", "hsdp"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How models, optimizers and loaders are made distributed.

    >>> print(Plan(strategy="fsdp", precision="bf16", accumulate=4).table(world_size=8))

    Attributes:
        strategy: "none", "ddp", "fsdp" (FSDP2) or "hsdp" (sharded inside a node, replicated between nodes).
        precision: "fp32" ("no" is the same), "bf16", "fp16", "fp8".
        fp8_recipe: torchao's recipe for fp8: "tensorwise" (fastest), "rowwise", or "rowwise_with_gw_hp" (most exact).
        accumulate: Micro-batches for each optimizer step.
        clip_grad_norm: Largest norm of each optimizer's gradients together; None: not clipped.
        ema: How much of the averaged weights stays in each optimizer step, such as 0.999; None: none are kept.
        compile: Whether models are compiled (each block, under fsdp and hsdp): False, True, or a mode of
            `torch.compile`: "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs" ("default" is True).
        compile_dynamic: `torch.compile`'s `dynamic`: whether shapes are symbols; None: once they have changed.
        compile_fullgraph: `torch.compile`'s `fullgraph`: whether what would break the graph is an error.
        activation_checkpointing: "none", "full" (each block), "selective" (all but the expensive operations), or
            "selective-half" (and every second matrix product of linear layers).
        activation_budget: How much of the memory of activations may be kept, from 0 to less than 1; the others are
            computed again in backward. Compiled models choose operations, others blocks; None: all are kept.
        activation_offload: Whether activations of blocks wait in CPU memory for backward; with "full" checkpointing
            the inputs of blocks.
        comm_hook: DDP's communication hook: "none", "fp16", "bf16", "powersgd", "batched_powersgd".
        comm_hook_options: Settings of the hook, as torch names them (`matrix_approximation_rank`, ...).
        bucket_mb: Size of DDP's buckets, MiB.
        find_unused_parameters: DDP's argument.
        static_graph: DDP's argument.
        gradient_as_bucket_view: DDP's argument.
        sync_batchnorm: Whether BatchNorm layers become SyncBatchNorm.
        shard_by: What FSDP shards as one block: a class name, several, a function of a module; None: found.
        reshard: FSDP: whether parameters are freed after forward; None: torch's default.
        prefetch: FSDP: how many blocks are gathered ahead; 0: as torch does.
        exchange: FSDP: which micro-batch of a window exchanges gradients: the "last", until which each rank keeps whole
            ones, or "each", so that it keeps shards, and more is sent.
        offload: FSDP: whether parameters, gradients and optimizer state live in CPU memory.
        replicas: HSDP: how many groups hold the whole model; None: one for each node.
        local_sgd_steps: Average parameters every so many steps, and at the end of a prepared loader, but no gradients;
            0: no local SGD.
        seed: Seed of all random generators; None: not touched.
        seed_per_rank: Whether each rank adds its rank to the seed.
        deterministic: Whether only deterministic algorithms are used.
        tf32: Whether float32 matrix products may use TF32; None: not touched.
        numa: Whether each rank is bound to the cores and the memory next to its GPU.
        gc_interval: Collect garbage every so many optimizer steps instead of whenever Python wants to; 0: Python's way.
        dispatch: Whether rank 0 alone reads the data and hands each rank its part.
        even_batches: Whether the tail of the data is filled up so that all ranks see as many batches.

    Raises:
        UsageError: A value is wrong, or two settings exclude each other whatever the machine is.
    """

    strategy: Strategy = "ddp"
    precision: Precision = "fp32"
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    accumulate: int = 1
    clip_grad_norm: float | None = None
    ema: float | None = None
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = False
    compile_dynamic: bool | None = None
    compile_fullgraph: bool = False
    activation_checkpointing: Literal["none", "full", "selective", "selective-half"] = "none"
    activation_budget: float | None = None
    activation_offload: bool = False
    comm_hook: Literal["none", "fp16", "bf16", "powersgd", "batched_powersgd"] = "none"
    comm_hook_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    bucket_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    sync_batchnorm: bool = False
    shard_by: str | tuple[str, ...] | Callable[[Any], bool] | None = None
    reshard: bool | None = None
    prefetch: int = 0
    exchange: Literal["last", "each"] = "last"
    offload: bool = False
    replicas: int | None = None
    local_sgd_steps: int = 0
    seed: int | None = None
    seed_per_rank: bool = False
    deterministic: bool = False
    tf32: bool | None = None
    numa: bool = False
    gc_interval: int = 0
    dispatch: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        for name, value in rules.refined(self).items():
            object.__setattr__(self, name, value)
        rules.refuse_contradictions(self)

    def check(
        self,
        *,
        world_size: int = 1,
        backend: str | None = None,
        device: object = None,
        capability: tuple[int, int] | None = None,
    ) -> None:
        """Refuse what these ranks can't do. What is not given is not judged.

        Args:
            world_size: Number of ranks.
            backend: Backend of their process group: "gloo", "nccl", "cpu:gloo,cuda:nccl", ...
            device: Where they compute: "cpu", "cuda:0", a `torch.device`.
            capability: Compute capability of their GPUs, as `torch.cuda.get_device_capability()` tells.

        Raises:
            UsageError: With the reason, and what to set instead.
        """
        rules.refuse_impossible(self, world_size, backend, device, capability)

    def table(self, *, world_size: int | None = None, device: object = None) -> str:
        """What will be done for each setting, and why, as aligned text. Settings that do nothing are left out.

        Args:
            world_size: Number of ranks; None: not known yet.
            device: Where they compute: "cpu", "cuda:0", a `torch.device`; None: not known yet.
        """
        return describe.table(self, world_size, device)

    def diff(self, other: Plan) -> list[str]:
        """How another plan differs from this one: a line like "precision: fp32 -> bf16" for each setting."""
        return [
            f"{name}: {describe.show(getattr(self, name))} -> {describe.show(getattr(other, name))}"
            for name in setting_names()
            if getattr(self, name) != getattr(other, name)
        ]

    def replace(self, **changes: Any) -> Plan:
        """A plan with other values for these settings.

        Raises:
            UsageError: There is no such setting, its value is wrong, or the plan would contradict itself.
        """
        rules.refuse_unknown(changes, setting_names())
        return replace(self, **changes)

    def environment(self, *, world_size: int = 1, device: object = None) -> dict[str, str]:
        """The variables by which Accelerate's `Accelerator()` and transformers' `TrainingArguments` follow this plan.

        They follow precision, fsdp and hsdp with their settings, activation checkpointing under these, compilation;
        `Accelerator` also accumulation, which `TrainingArguments` takes as its own argument. Clipping, hooks, local
        SGD and seeds are arguments of theirs and have no variable. Both shard on GPUs only: CPU ranks get DDP.

        Args:
            world_size: Number of ranks, which hsdp divides.
            device: Where they compute; without being told, Accelerate takes CPU ranks for single processes.
        """
        return variables.environment(self, world_size, device)

    def to_json(self) -> str:
        """All settings as JSON on one line.

        Raises:
            UsageError: `shard_by` is a function, which JSON can't hold.
        """
        if callable(self.shard_by):
            raise UsageError(
                f"shard_by is a function ({describe.show(self.shard_by)}), which can't leave its process: "
                "name classes (shard_by='Block'), or hand the plan over where the model is: prepare(..., plan=plan)"
            )
        return json.dumps({name: getattr(self, name) for name in setting_names()})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Settings that are missing have their defaults.

        Raises:
            UsageError: It is no JSON object, or a setting is unknown or wrong.
        """
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise UsageError(f"a plan is a JSON object like {_EXAMPLE}, and this is not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise UsageError(f"a plan is a JSON object like {_EXAMPLE}, not {text[:60]!r}")
        rules.refuse_unknown(settings, setting_names())
        return cls(**settings)

    @classmethod
    def from_environment(cls) -> Plan:
        """The plan that NBDIST_PLAN holds (JSON, or the path of a file with JSON); without it the default plan.

        Launchers may say the precision alone, in ACCELERATE_MIXED_PRECISION: the default plan follows them.

        Raises:
            UsageError: It holds something else; the text names the variable.
        """
        text = os.environ.get(PLAN_VARIABLE, "").strip()
        if not text:
            return cls._of_launcher()
        source = PLAN_VARIABLE
        if not text.startswith("{"):
            source = f"{PLAN_VARIABLE}={text}"
            text = _read(text)
        try:
            return cls.from_json(text)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    @classmethod
    def _of_launcher(cls) -> Plan:
        precision: Any = os.environ.get(PRECISION_VARIABLE) or "no"
        try:
            return cls(precision=precision)
        except UsageError as error:
            raise UsageError(f"{PRECISION_VARIABLE}: {error}") from None


_EXAMPLE = '{"strategy": "fsdp", "precision": "bf16"}'


def setting_names() -> list[str]:
    """The names of a plan's settings, in the order in which they are told."""
    return [setting.name for setting in fields(Plan)]


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"{PLAN_VARIABLE} is {path!r}, neither JSON nor a file that can be read ({why}): "
            f"set it to {_EXAMPLE}, or to the path of a file that holds such"
        ) from None
