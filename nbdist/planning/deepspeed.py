"""DeepSpeed's JSON configuration, in both directions: of a plan, and as settings of a plan. The keys are DeepSpeed's.

Independent of DeepSpeed itself, and of what a plan may hold: values that are read are judged by the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nbdist.errors import UsageError
from nbdist.planning.reading import Reading, switch
from nbdist.planning.settings import Precision, Settings

AUTO = "auto"  # what Accelerate and transformers fill in

# --- of a plan


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a plan says to DeepSpeed.

    Attributes:
        micro_batch: Samples that a rank computes at a time; "auto" in a file for Accelerate or transformers.
        accumulate: Micro-batches for each optimizer step.
        clip: Largest norm of the gradients; 0: any. Always written, as DeepSpeed clips to 1.0 where nothing is.
        precision: "fp32", "bf16" or "fp16".
        stage: Of ZeRO.
        offload: Whether optimizer state, and in stage 3 parameters, live in CPU memory.
    """

    micro_batch: int | Literal["auto"]
    accumulate: int
    clip: float
    precision: Precision
    stage: int
    offload: bool

    @classmethod
    def of(cls, plan: Settings, micro_batch: int | Literal["auto"] = "auto") -> DeepSpeedConfig:
        """Return what this plan says."""
        return cls(
            micro_batch, plan.accumulate, plan.clip_grad_norm or 0.0, plan.precision, plan.stage, bool(plan.offload)
        )

    def entries(self) -> dict[str, Any]:
        """Return the configuration as `deepspeed.initialize` takes it."""
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": self.clip,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage},
        }
        if self.precision != "fp32":
            found[self.precision] = {"enabled": True}
        if self.offload:
            found["zero_force_ds_cpu_optimizer"] = False  # the user's own optimizer steps there
            found["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3:
                found["zero_optimization"]["offload_param"] = {"device": "cpu"}
        return found

    def write(self, path: str | Path) -> Path:
        """Write the configuration as a JSON file.

        Raises:
            UsageError: It can't be written.
        """
        file = Path(path).expanduser()
        try:
            file.write_text(json.dumps(self.entries(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{file} can't be written ({error.strerror}): give another path") from None
        return file


# --- from a file

_DEFAULT_CLIPPING = 1.0
_DEFAULTS: Mapping[str, tuple[object, ...]] = {  # what changes nothing that needs a word
    "bf16.immediate_grad_update": (True,),
    "fp16.auto_cast": (False,),
    "fp16.consecutive_hysteresis": (False,),
    "fp16.hysteresis": (2,),
    "fp16.initial_scale_power": (16,),
    "fp16.loss_scale": (0,),
    "fp16.loss_scale_window": (1000,),
    "fp16.min_loss_scale": (1,),
    "offload_optimizer.pin_memory": (False,),
    "offload_param.pin_memory": (False,),
    "wall_clock_breakdown": (False,),
    "zero_allow_untested_optimizer": (True, False),
    "zero_force_ds_cpu_optimizer": (True, False),
    "zero_optimization.allgather_bucket_size": (5e8,),
    "zero_optimization.allgather_partitions": (True,),
    "zero_optimization.contiguous_gradients": (True,),
    "zero_optimization.overlap_comm": (None,),
    "zero_optimization.reduce_bucket_size": (5e8,),
    "zero_optimization.reduce_scatter": (True,),
    "zero_optimization.round_robin_gradients": (False,),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True, False),
    "zero_optimization.stage3_max_live_parameters": (1e9,),
    "zero_optimization.stage3_max_reuse_distance": (1e9,),
    "zero_optimization.stage3_param_persistence_threshold": (1e5,),
    "zero_optimization.stage3_prefetch_bucket_size": (5e7,),
    "zero_optimization.sub_group_size": (1e9,),
}
_HINTS = {
    "optimizer": "make the optimizer in your code and give it to `prepare`",
    "scheduler": "make the scheduler in your code and give it to `prepare`",
    "train_batch_size": "batches are those of your loader",
    "train_micro_batch_size_per_gpu": "batches are those of your loader",
    "activation_checkpointing": "set activation_checkpointing in the plan: `--activation-checkpointing full`",
    "steps_per_print": "DeepSpeed prints nothing here",
}
_SECTIONS = ("zero_optimization", "bf16", "fp16")
_OFF: tuple[object, ...] = (None, AUTO, {}, [])


def read(path: str | Path) -> Reading:
    """Return what a configuration file of DeepSpeed says. What is "auto" in it is left to the plan.

    Args:
        path: The file, JSON.

    Raises:
        UsageError: It can't be read, or asks for what no plan can do.
    """
    file = Path(path).expanduser()
    try:
        return translated(file, _entries(file))
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def translated(file: Path, entries: Mapping[str, Any]) -> Reading:
    """Return what a configuration of DeepSpeed that stands in this file says.

    Raises:
        UsageError: It asks for what no plan can do.
    """
    return _Translation(file, dict(_flat(entries))).reading()


def _entries(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"it can't be read ({error.strerror}): give the path of a JSON file of DeepSpeed") from None
    except ValueError as error:
        raise UsageError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError('it is not a configuration of DeepSpeed, which is a JSON object like {"bf16": ...}')
    return found


def _flat(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all entries; those of the sections that a plan knows of as "section.key"."""
    for key, value in found.items():
        if key not in _SECTIONS:
            yield key, value
            continue
        if not isinstance(value, Mapping):
            raise UsageError(f"{key} must be an object, not {value!r}")
        for name, entry in value.items():
            if name in ("offload_optimizer", "offload_param") and isinstance(entry, Mapping):
                yield from ((f"{name}.{inner}", each) for inner, each in entry.items())
            else:
                yield f"{key}.{name}", entry


class _Translation:
    """One file's entries, of which each is taken once; what is left has no equivalent."""

    def __init__(self, file: Path, entries: dict[str, Any]) -> None:
        self._entries = entries
        self._found = Reading(file)

    def reading(self) -> Reading:
        self._zero()
        self._precision()
        self._set("accumulate", self._entries.pop("gradient_accumulation_steps", 1))
        self._clipping()
        for name, value in self._entries.items():
            if value not in _OFF and value not in _DEFAULTS.get(name, ()):
                self._found.note(name, value) if name not in _HINTS else self._hint(name, value)
        return self._found

    def _hint(self, name: str, value: object) -> None:
        told = value["type"] if isinstance(value, Mapping) and "type" in value else value
        self._found.note(name, told, _HINTS[name])

    def _set(self, name: str, value: object) -> None:
        if value != AUTO:
            self._found.settings[name] = value

    def _zero(self) -> None:
        stage = self._entries.pop("zero_optimization.stage", 0)
        devices = {kind: self._entries.pop(f"offload_{kind}.device", None) or "none" for kind in ("optimizer", "param")}
        if stage == 0 and not isinstance(stage, bool):
            self._found.settings["strategy"] = "ddp"
            self._found.note("stage", 0, "ZeRO splits nothing then, so the strategy is ddp")
            return
        self._found.settings["strategy"] = "deepspeed"
        self._set("stage", stage)
        for kind, device in devices.items():
            if device not in ("none", "cpu", AUTO):
                self._found.note(f"offload_{kind}.device", device, "a plan offloads to CPU memory only")
        if devices["optimizer"] == "cpu":
            self._found.settings["offload"] = True
            if stage == 3 and devices["param"] == "none":
                self._found.note("offload_optimizer", "cpu", "in stage 3 the plan's offload moves parameters as well")
        elif devices["param"] == "cpu":
            self._found.note("offload_param", "cpu", "a plan offloads parameters together with optimizer state only")
        elif AUTO not in devices.values():
            self._found.settings["offload"] = False

    def _precision(self) -> None:
        enabled = {kind: self._entries.pop(f"{kind}.enabled", False) for kind in ("bf16", "fp16")}
        chosen = [kind for kind, value in enabled.items() if value != AUTO and switch(f"{kind}.enabled", value)]
        if chosen:
            self._found.settings["precision"] = chosen[0]
        elif AUTO not in enabled.values():
            self._found.settings["precision"] = "fp32"

    def _clipping(self) -> None:
        norm = self._entries.pop("gradient_clipping", None)
        if norm is None:
            self._found.note(
                "gradient_clipping", "not set", "DeepSpeed then clips to a norm of 1.0, and so does the plan"
            )
            norm = _DEFAULT_CLIPPING
        self._set("clip_grad_norm", None if norm in (0, False) else norm)
