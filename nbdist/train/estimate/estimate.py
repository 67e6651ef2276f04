"""What a training step will take: bytes of each rank by category, before anything is allocated.

Owns what is asked and how the answer is shown. The step is made by `child` in a process of its own, so that nothing of
the caller's changes.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import nn

from nbdist.base.checks import is_whole
from nbdist.base.code_pickler import CodePickler
from nbdist.base.text import part_of, percent, size
from nbdist.errors import NbdistError, UsageError
from nbdist.metrics.node import host
from nbdist.plan import Plan
from nbdist.planning.describe import savings
from nbdist.train import state as training
from nbdist.train.estimate.trial_step import TrialSetup, TrialTask
from nbdist.train.prepare.strategies import refuse_wrapped

# Of each process on a GPU. 426 MiB were measured before a first kernel (unslothai/unsloth-zoo#1053: PyTorch 2.10,
# CUDA 13), about 400 MB are usual (pytorch/pytorch#109888); kernels are loaded on top when they are first used.
_CUDA_CONTEXT = 512 << 20
# Of each rank among several. Buffers are 4 MiB for each channel (NVIDIA/nccl#391), their number depends on links and
# algorithms (NVIDIA/nccl#864), so this is an order of magnitude.
_NCCL = 512 << 20
_BAR = 40  # characters
_CHILD = "from nbdist.train.estimate.child import main; main()"
_SHARDED = ("fsdp", "hsdp")
_OFFLOADED = ("parameters", "gradients", "optimizer", "averages")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of one rank (the fullest) in a training step, in bytes, at the moment when it is most.

    Attributes:
        parameters: Parameters and buffers; a rank's shard under FSDP.
        gradients: Gradients that are there at that moment, whole ones included that FSDP has not reduced yet.
        gradients_whole: Gradients after backward.
        optimizer: The optimizer's state.
        averages: Averaged weights, if the plan has `ema`.
        activations: What forward keeps for backward, and the batch.
        temporary: All else: gradients of activations, parameters that FSDP has gathered, buckets of DDP.
        outside_torch: CUDA context and NCCL, which torch's counters don't show; an order of magnitude. 0 on the CPU.
        offloaded: What stays in CPU memory, beyond `total`.
        device: Name of what the rank computes on.
        device_memory: Bytes that the rank has there.
        modules: Activations that each module keeps in one micro-batch, without what its parts keep, "*" for numbers of
            layers; empty unless asked for (`estimate_each`).
        flops: Of a step, with what is computed again; None unless asked for, or not known.
        setting: What was estimated, in words.
        notes: What these figures don't tell.
    """

    parameters: int
    gradients: int
    gradients_whole: int
    optimizer: int
    activations: int
    temporary: int
    averages: int = 0
    outside_torch: int = 0
    offloaded: int = 0
    device: str = "cpu"
    device_memory: int
    modules: Mapping[str, int] = field(default_factory=dict)
    flops: int | None = None
    setting: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        """All that is held on the device at once, bytes."""
        return sum(amount for _, amount, _ in self._rows())

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.total <= self.device_memory

    def _rows(self) -> Iterator[tuple[str, int, str]]:
        whole = f"{size(self.gradients_whole)} after backward" if self.gradients_whole > self.gradients else ""
        yield "parameters", self.parameters, ""
        yield "gradients", self.gradients, whole
        yield "optimizer", self.optimizer, ""
        if self.averages:
            yield "averages", self.averages, "of the weights"
        yield "activations", self.activations, ""
        yield "temporary", self.temporary, ""
        yield "outside torch", self.outside_torch, "CUDA context, NCCL: about" if self.outside_torch else ""

    def _verdict(self) -> str:
        share = percent(self.total / self.device_memory) if self.device_memory else "more than all"
        word = "fits" if self.fits else "does not fit"
        return f"{word}: {part_of(self.total, self.device_memory)}, {share} of {self.device}"

    def _remarks(self) -> list[str]:
        kept = f"kept in CPU memory: {size(self.offloaded)} ({', '.join(_OFFLOADED)})"
        return [*([kept] if self.offloaded else []), *self.notes]

    def __str__(self) -> str:
        rows = [*self._rows(), ("total", self.total, "")]
        amounts = [size(amount) for _, amount, _ in rows]
        width = max(map(len, amounts))
        lines = [f"one rank, {self.setting}"] if self.setting else []
        for (name, amount, remark), shown in zip(rows, amounts, strict=True):
            share = percent(amount / max(1, self.total))
            lines.append(f"{name:<13}  {shown:>{width}}  {share:>5}  {remark}".rstrip())
        filled = min(_BAR, round(_BAR * self.total / max(1, self.device_memory)))
        lines += [f"[{'#' * filled}{'.' * (_BAR - filled)}]", self._verdict()]
        return "\n".join([*lines, *self._remarks()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{name}</td><td>{size(amount)}</td>"
            f"<td>{percent(amount / max(1, self.total))}</td>"
            f"<td style='text-align:left'>{html.escape(remark)}</td></tr>"
            for name, amount, remark in [*self._rows(), ("<b>total</b>", self.total, "")]
        )
        remarks = "".join(f"<div>{html.escape(remark)}</div>" for remark in self._remarks())
        part = min(100.0, 100 * self.total / max(1, self.device_memory))
        color = "#2e8b57" if self.fits else "#c0392b"
        return (
            f"<div>one rank, {html.escape(self.setting)}</div><table>{rows}</table>"
            f"<div style='width:20em;height:0.9em;border:1px solid currentColor'>"
            f"<div style='width:{part:.0f}%;height:100%;background:{color}'></div></div>"
            f"<div>{html.escape(self._verdict())}</div>{remarks}"
        )


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    plan: Plan | None = None,
    *,
    world_size: int | None = None,
    optimizer: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    device_memory: int | None = None,
) -> Estimate:
    """Return how much memory a rank will need to train a model by a plan.

    >>> nbdist.estimate(model, {"input_ids": (8, 1024)}, nbdist.Plan(strategy="fsdp"), world_size=8)

    A step in training mode is made on tensors without values, in a process of its own: nothing is allocated on the
    device, and neither model nor optimizer change. It is a step after the first, so the optimizer's state is there.
    Each rank estimates for itself; one is enough.

    Args:
        model: As `prepare` takes it, also on the meta device, or a function that makes it, which runs in that process.
        batch: One micro-batch of one rank. A mapping is given to the model as keywords, a tuple or list as arguments,
            anything else as the only argument. In place of a tensor its shape will do, a tuple of integers: that is
            float32, or int64 if the model begins with an embedding.
        plan: By default the one in effect, as with `prepare`.
        world_size: Number of ranks; by default as many as there are.
        optimizer: A class such as `torch.optim.SGD`, a function that makes an optimizer of parameters, or an optimizer
            of this model. By default `torch.optim.AdamW`.
        loss: Makes the loss. With it a tuple or list of a batch is `(inputs, *targets)`, and the loss
            `loss(model(inputs), *targets)`. By default it is the output's `loss` if there is one, else the output's
            sum.
        device_memory: Bytes that a rank has; by default those of its GPU, or its share of this machine's memory.

    Returns:
        Bytes by category. On a GPU what the allocator can't use comes on top.

    Raises:
        UsageError: The model is wrapped already, can't travel to the other process, or does what tensors without
            values can't do; the text names the operation and the line.
        NbdistError: The process that estimates has ended.
    """
    plans = [training.current().plan if plan is None else plan]
    options = {"world_size": world_size, "optimizer": optimizer, "loss": loss, "device_memory": device_memory}
    with contextlib.closing(estimate_each(model, batch, plans, **options)) as found:
        return next(found)


def estimate_each(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    plans: Sequence[Plan],
    *,
    world_size: int | None = None,
    optimizer: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    device_memory: int | None = None,
    details: bool = False,
) -> Generator[Estimate, None, None]:
    """Yield estimates for several plans, as `estimate` makes them, from one process. Each comes as soon as it is there.

    To be closed if it is not read to its end. What can't be estimated raises when its turn has come. With `details`,
    activations are found by module and FLOPs are counted, which takes two more steps.
    """
    ranks = training.world_size() if world_size is None else world_size
    if not is_whole(ranks, 1):
        raise UsageError(f"world_size={world_size!r} must be a number of ranks, 1 or more")
    for plan in plans:
        if not isinstance(plan, Plan):
            raise UsageError(f"plan={plan!r} is not a plan: pass plan=nbdist.Plan(strategy='fsdp')")
        plan.check(world_size=ranks)
        _refuse_unusable(model, optimizer, plan)
    device = training.default_device()
    settings = [TrialSetup(plan, ranks, training.has_group(), device.type == "cuda", details) for plan in plans]
    memory = _memory_of(device) if device_memory is None else device_memory
    task = TrialTask(model, batch, optimizer or torch.optim.AdamW, loss)
    with contextlib.closing(_answers(settings, task)) as answers:
        for setting, answer in zip(settings, answers, strict=True):
            yield _judged(setting, answer, device, memory)


def _judged(setting: TrialSetup, answer: dict[str, Any], device: torch.device, memory: int) -> Estimate:
    """Return what the step holds where."""
    held, notes = answer["held"], answer["notes"]
    plan, on_gpu, offloaded = setting.plan, setting.on_gpu, 0
    if plan.offload and on_gpu and plan.strategy in _SHARDED:
        offloaded = sum(held["gradients_whole" if name == "gradients" else name] for name in _OFFLOADED)
        held = held | dict.fromkeys((*_OFFLOADED, "gradients_whole"), 0)
    if on_gpu:
        notes = [*notes, "counted with the CPU's kernels; workspaces of cuBLAS and cuDNN are not"]
    return Estimate(
        **held,
        outside_torch=outside_torch(setting.world_size) if on_gpu else 0,
        offloaded=offloaded,
        device=torch.cuda.get_device_name(device) if on_gpu else "this machine's memory",
        device_memory=memory,
        modules=answer.get("modules", {}),
        flops=answer.get("flops"),
        setting=_in_words(plan, setting.world_size),
        notes=tuple(notes),
    )


def outside_torch(world_size: int) -> int:
    """Return the rough bytes that a rank takes on its GPU outside torch's count: CUDA context and NCCL."""
    return _CUDA_CONTEXT + (_NCCL if world_size > 1 else 0)


def _refuse_unusable(model: Any, optimizer: Any, plan: Plan) -> None:
    if plan.strategy == "deepspeed":
        raise UsageError(
            "what DeepSpeed keeps can't be estimated: estimate strategy 'fsdp' instead, whose ranks hold about what "
            "they hold in stage 3, and 'ddp' for what they hold without ZeRO"
        )
    if not callable(model):
        raise UsageError(f"model is a {type(model).__name__}: give a torch.nn.Module, or a function that makes one")
    if isinstance(model, nn.Module):
        refuse_wrapped(model, plan if plan.strategy != "none" else Plan())
    elif isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "a function creates the model, so the optimizer can't have its parameters yet: pass a class, for example "
            f"optimizer=torch.optim.{type(optimizer).__name__}"
        )
    if optimizer is not None and not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}: give a class such as torch.optim.SGD")


# --- the other process


def _answers(settings: list[TrialSetup], task: TrialTask) -> Generator[dict[str, Any], None, None]:
    """Yield what the process that estimates answers for each setting."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "CUDA_VISIBLE_DEVICES": "",  # so that it takes nothing of the GPU
    }
    with tempfile.TemporaryFile() as questions, tempfile.TemporaryFile() as complaints:
        questions.write(packed(settings) + packed(task))
        questions.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD], stdin=questions, stdout=subprocess.PIPE, stderr=complaints, env=environment
        )
        with child:
            try:
                assert child.stdout is not None
                for _ in settings:
                    line = child.stdout.readline()
                    if not line:
                        raise NbdistError(f"the process that estimates has ended: {_last_words(child, complaints)}")
                    yield _checked(json.loads(line))
            finally:
                child.kill()


def _last_words(child: subprocess.Popen[bytes], complaints: IO[bytes]) -> str:
    code = child.wait()
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise UsageError(answer["error"])
    return answer


def packed(value: list[TrialSetup] | TrialTask) -> bytes:
    """Return what the process that estimates reads."""
    target = io.BytesIO()
    try:
        _PicklerWithoutValues(target).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the model, the batch or the loss can't be sent to the process that estimates ({error}): "
            "give a function that makes the model, as estimate(lambda: Model(...), batch)"
        ) from None
    return target.getvalue()


class _PicklerWithoutValues(CodePickler):
    """Tensors travel as their shapes. One that stands in several places is one on the other side, too."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape, stride = tuple(value.shape), value.stride()
            return _empty, (shape, stride, value.dtype, value.requires_grad, isinstance(value, nn.Parameter))
        return super().reducer_override(value)


def _empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


# --- words and figures


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host.memory()[0] // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _in_words(plan: Plan, ranks: int) -> str:
    words = [f"{plan.strategy} on {ranks} rank{'s' * (ranks > 1)}", plan.precision]
    if plan.accumulate > 1:
        words.append(f"accumulate {plan.accumulate}{', exchanged in each' if plan.exchange == 'each' else ''}")
    return ", ".join(words + savings(plan))
