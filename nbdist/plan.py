"""The plan: how models are made distributed. Values only; independent of torch, ranks or notebooks.

Its settings are declared in `planning.settings`; what can't be is in `planning.rules`, how a plan is described in
`planning.describe`, what others read of it in `planning.variables`, what is read of Accelerate's file in
`planning.accelerate_config`, what DeepSpeed's file says in `planning.deepspeed`.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.errors import UsageError
from nbdist.planning import accelerate_config, describe, rules, variables
from nbdist.planning.settings import SETTINGS, Precision, Settings, Strategy, show

__all__ = ["PLAN_VARIABLE", "PRECISION_VARIABLE", "Plan", "Precision", "Strategy"]

PLAN_VARIABLE = "NBDIST_PLAN"
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # set by Accelerate's launchers, and by notebook_launcher


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """How models, optimizers and loaders are made distributed.

    >>> print(Plan("fsdp", precision="bf16", accumulate=4).table(world_size=8))

    Raises:
        UsageError: A value is wrong, or two settings exclude each other whatever the machine is.
    """

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
        """Return what will be done for each setting, and why, as aligned text. Settings that do nothing are left out.

        Args:
            world_size: Number of ranks; None: not known yet.
            device: Where they compute: "cpu", "cuda:0", a `torch.device`; None: not known yet.
        """
        return describe.table(self, world_size, device)

    def diff(self, other: Plan) -> list[str]:
        """Return how another plan differs from this one: a line like "precision: fp32 -> bf16" for each setting."""
        return [
            f"{name}: {show(getattr(self, name))} -> {show(getattr(other, name))}"
            for name in SETTINGS
            if getattr(self, name) != getattr(other, name)
        ]

    def replace(self, **changes: Any) -> Plan:
        """Return a plan with other values for these settings.

        Raises:
            UsageError: There is no such setting, its value is wrong, or the plan would contradict itself.
        """
        rules.refuse_unknown(changes)
        return replace(self, **changes)

    def environment(self, *, world_size: int = 1, device: object = None) -> dict[str, str]:
        """Return variables by which Accelerate's `Accelerator()` and transformers' `TrainingArguments` follow the plan.

        They follow precision, fsdp and hsdp with their settings, activation checkpointing under these, compilation;
        `Accelerator` also accumulation, which `TrainingArguments` takes as its own argument. Clipping, hooks, local
        SGD and seeds are arguments of theirs and have no variable. Both shard on GPUs only: CPU ranks get DDP.

        Args:
            world_size: Number of ranks, which hsdp divides.
            device: Where they compute; without being told, Accelerate takes CPU ranks for single processes.
        """
        return variables.environment(self, world_size, device)

    def to_json(self) -> str:
        """Return all settings as JSON on one line.

        Raises:
            UsageError: `shard_by` is a function, which JSON can't hold.
        """
        if callable(self.shard_by):
            raise UsageError(
                f"shard_by is a function ({show(self.shard_by)}), which can't leave its process: "
                "name classes (shard_by='Block'), or hand the plan over where the model is: prepare(..., plan=plan)"
            )
        return json.dumps({name: getattr(self, name) for name in SETTINGS})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote. Settings that are missing have their defaults.

        Raises:
            UsageError: It is not a JSON object, or a setting is unknown or wrong.
        """
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise UsageError(f"a plan is a JSON object like {_EXAMPLE}, and this is not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise UsageError(f"a plan is a JSON object like {_EXAMPLE}, not {text[:60]!r}")
        rules.refuse_unknown(settings)
        return cls(**settings)

    @classmethod
    def from_accelerate(cls, path: str | Path | None = None) -> Plan:
        """Return the plan that follows a configuration file of Accelerate. Warns of each entry without equivalent.

        Args:
            path: The file, YAML or JSON; None: where `accelerate config` writes.

        Raises:
            UsageError: It can't be read, asks for what no plan can do, or PyYAML is missing.
        """
        reading = accelerate_config.read(path)
        for note in reading.notes:
            warnings.warn(note, stacklevel=2)
        try:
            return cls(**reading.settings)
        except UsageError as error:
            raise UsageError(f"{reading.file}: {error}") from None

    @classmethod
    def from_environment(cls) -> Plan:
        """Return the plan that NBDIST_PLAN holds (JSON, or the path of a file with JSON); without it the default plan.

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


Plan.__doc__ = f"{Plan.__doc__}\n    Attributes:{(Settings.__doc__ or '').partition('Attributes:')[2]}"

_EXAMPLE = '{"strategy": "fsdp", "precision": "bf16"}'


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"{PLAN_VARIABLE} is {path!r}, neither JSON nor a file that can be read ({why}): "
            f"set it to {_EXAMPLE}, or to the path of a file that holds one"
        ) from None
