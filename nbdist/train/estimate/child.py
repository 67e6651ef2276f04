"""The process that estimates: takes settings and a task, and returns the memory that a step takes with each setting.

Watches the step with torch's memory tracker, and which modules keep which activations for the backward pass.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import pickle
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nbdist.base import trees
from nbdist.errors import UsageError
from nbdist.metrics.compute.counting import Counting
from nbdist.planning.rules import own_settings, uncompiled, with_parts_dropped
from nbdist.train import state as training
from nbdist.train.estimate.trial_step import CPU, KernelsOfGpu, Step, TrialSetup, make_step, nothing_moves
from nbdist.train.prepare import meshes, strategies

_REST = "outside of modules"


def details_of(step: Step) -> dict[str, Any]:
    """Return what a step keeps by module, and what it computes.

    Args:
        step: Which is used up.

    Returns:
        "modules": bytes that are saved in the forward pass of one micro-batch, by the innermost module that runs then;
        "flops": of the step, None if they can't be counted here.
    """
    return {"flops": _flops(step), "modules": _saved_by_module(step)}


def _flops(step: Step) -> int | None:
    with Counting() as counting:
        step()
    step.forget_gradients()
    return None if counting.tally.uncounted else counting.tally.hardware


def _saved_by_module(step: Step) -> dict[str, int]:
    """Run a forward pass and note what autograd saves, each storage once; parameters are no activations."""
    running = [_REST]
    saved: Counter[str] = Counter()
    known = {tensor.untyped_storage()._cdata for tensor in step.model.parameters()}
    kept: list[torch.Tensor] = []  # so that no other storage gets the place of one

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        base = tensor._base if tensor._base is not None else tensor
        if storage._cdata not in known and not isinstance(base, nn.Parameter):
            known.add(storage._cdata)
            kept.append(tensor)
            saved[running[-1]] += storage.nbytes()
        return tensor

    handles = []
    for name, module in step.model.named_modules():
        label = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name) or type(module).__name__
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: running.append(label), prepend=True))
        handles.append(module.register_forward_hook(lambda *_: _leave(running), always_call=True))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.forward()
    del loss
    for handle in handles:
        handle.remove()
    return dict(saved.most_common())


def _leave(running: list[str]) -> None:
    running.pop()


class CountedFakeTensorMode(FakeTensorMode):
    """A mode that knows how many times it has been entered.

    DTensor enters it once more to find the whole shape of what an operation on shards returns. Meshes are made beside
    it: they look for the rank's own place among their values.
    """

    entered = 0
    _is_aside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_aside:
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def with_real_meshes(self) -> Iterator[None]:
        """Make meshes of real tensors: FSDP makes one for each parameter whose layer is divided among ranks."""
        original = DeviceMesh.__init__

        @functools.wraps(original)
        def init(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
            self._is_aside = True
            try:
                original(mesh, *args, **kwargs)
            finally:
                self._is_aside = False

        DeviceMesh.__init__ = init  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            DeviceMesh.__init__ = original  # type: ignore[method-assign]

    def __enter__(self) -> Any:
        self.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered -= 1
        super().__exit__(*error)


def tracker_of(mode: CountedFakeTensorMode) -> Any:
    """Return a tracker of what is held under this mode, which has been entered already.

    With some versions of torch (seen: 2.11), an operation on shards also counted with its whole shape: the temporary
    memory of AdamW's multi-tensor step was 7 shards instead of one.

    Raises:
        ImportError: This version of torch has no such tracker.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    entered = mode.entered

    class ShardTracker(MemTracker):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if mode.entered > entered:
                return func(*args, **kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    return ShardTracker()


_MIB = 2**20
_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
_POWER = ("powersgd", "batched_powersgd")


def main() -> None:
    """Take settings and a task from stdin; for each setting write bytes by category, or what went wrong, to stdout.

    Each answer is a line of JSON.
    """
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what the model prints is no answer
        settings: list[TrialSetup] = pickle.load(sys.stdin.buffer)
        task = sys.stdin.buffer.read()
        for setting in settings:
            answers.write(json.dumps(answer_to(setting, task)) + "\n")


def answer_to(setting: TrialSetup, task: bytes) -> dict[str, Any]:
    """Return the memory of one rank's step.

    Args:
        setting: How the step is made.
        task: A pickled `TrialTask`. It is unpickled for each setting, as making a model distributed changes it.

    Returns:
        "held": bytes by category, and "notes": what they don't tell; with what `details_of` returns, if that is asked
        for; or "error": what went wrong.
    """
    try:
        return _measure(setting, task)
    except UsageError as error:
        return {"error": str(error)}
    except Exception as error:  # the model is the user's; the process that asked shows it
        return {"error": _explained(error)}
    finally:
        if training.has_group():
            dist.destroy_process_group()


def _measure(setting: TrialSetup, task: bytes) -> dict[str, Any]:
    notes: list[str] = []
    state = _begin(setting, notes)
    with ExitStack() as stack:
        mode = stack.enter_context(CountedFakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mode.with_real_meshes())
        stack.enter_context(nothing_moves())
        if setting.on_gpu:
            stack.enter_context(KernelsOfGpu())
        step = _second_step(task, state, setting)
        try:
            held = _watched(step, mode)
        except Exception as error:  # the first step has worked, so it is the tracker that has not
            notes.append(f"temporary memory is not known, for torch's MemTracker does not work here: {error}")
            held = _added_up(_second_step(task, state, setting))
        found = details_of(_second_step(task, state, setting)) if setting.details else {}
    _add_buckets(held, setting)
    return {"held": held, "notes": notes, **found}


def _begin(setting: TrialSetup, notes: list[str]) -> training.State:
    if setting.has_group or setting.world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=setting.world_size)
    plan = setting.plan
    if plan.pp > 1:
        raise UsageError(f"the memory of {plan.pp} stages can't be estimated yet: set pp to 1")
    if plan.compile:
        notes.append("torch.compile is not modeled: it frees or fuses some activations away")
        if plan.activation_budget is not None:
            notes.append("the activation budget is estimated as a share of the blocks; the compiler can do better")
    if plan.ep > 1:
        notes.append("all experts are assumed to get the same number of tokens")
    if plan.activation_offload:
        notes.append("activations are counted as if they stayed: activation_offload is not modeled")
        plan = plan.replace(activation_offload=False)
    if plan.precision == "fp8":
        notes.append("fp8 is counted as bf16")
        plan = plan.replace(**with_parts_dropped(plan, {"precision": "bf16"}))
    if plan.strategy == "ddp":
        plan = plan.replace(**own_settings(plan, "none"))
    state = training.State(plan.replace(**uncompiled(plan), sync_batchnorm=False), CPU)
    if strategies.strategy_in_effect(plan) in ("fsdp", "hsdp"):
        state.mesh = meshes.make_mesh(plan, CPU)  # it looks at ranks' numbers, which must be real
        if plan.cp > 1:
            state.mesh_of_sequences = meshes.make_mesh_of_sequences(plan, CPU)
        if plan.ep > 1:
            state.mesh_of_experts = meshes.make_mesh_of_experts(plan, CPU)
    return state


def _second_step(task: bytes, state: training.State, setting: TrialSetup) -> Step:
    """Return a step for which the optimizer's state is there."""
    step = make_step(pickle.loads(task), state, setting)
    step()
    step.forget_gradients()
    return step


# --- what is watched


def _watched(step: Step, mode: CountedFakeTensorMode) -> dict[str, int]:
    """Return the bytes by category when most is held in a step, and of all gradients after backward."""
    tracker = tracker_of(mode)
    tracker.track_external(step.model, step.optimizer, *_tensors(step.batch))
    step.between = tracker.reset_mod_stats
    with tracker:
        step()
    by_kind = {}
    for kinds in tracker.get_tracker_snapshot("peak").values():
        for kind, amount in kinds.items():
            by_kind[str(getattr(kind, "value", kind))] = amount
    parameters = _bytes([*step.model.parameters(), *step.model.buffers()])
    optimizer = _bytes(step.optimizer_state)
    gathered = by_kind["Parameter"] + by_kind["Buffer"] - parameters
    of_step = by_kind["Optstate"] - optimizer
    return {
        "parameters": parameters,
        "gradients": by_kind["Gradient"],
        "gradients_whole": _bytes(step.gradients),
        "optimizer": optimizer,
        "averages": _bytes(step.state.averages.values()),
        "activations": by_kind["Activation"] + by_kind["Other"],
        "temporary": by_kind["Temp"] + gathered + of_step,
    }


def _added_up(step: Step) -> dict[str, int]:
    """Add up what a step must hold, as if it were held at once, without the tracker."""
    gradients = _bytes(parameter for parameter in step.model.parameters() if parameter.requires_grad)
    saved: list[torch.Tensor] = list(_tensors(step.batch))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor._base if tensor._base is not None else tensor, nn.Parameter):
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.forward()
    return {
        "parameters": _bytes([*step.model.parameters(), *step.model.buffers()]),
        "gradients": gradients,
        "gradients_whole": gradients,
        "optimizer": _bytes(step.optimizer_state),
        "averages": _bytes(step.state.averages.values()),
        "activations": _bytes(saved),
        "temporary": 0,
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return what tensors take here, each storage once; of a sharded one its shard, with what fills it up."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in trees.leaves(value) if isinstance(leaf, torch.Tensor)]


def _add_buckets(held: dict[str, int], setting: TrialSetup) -> None:
    """Add what DDP and its communication hook hold besides the gradients."""
    plan, gradients = setting.plan, held["gradients_whole"]
    if strategies.strategy_in_effect(plan) != "ddp":
        return
    bucket = min(int(plan.bucket_mb * _MIB), gradients)
    if not plan.gradient_as_bucket_view:
        held["temporary"] += gradients
    if plan.comm_hook in ("fp16", "bf16"):
        held["temporary"] += bucket // 2
    elif plan.comm_hook in _POWER:
        feedback = plan.comm_hook_options.get("use_error_feedback", True)
        held["temporary"] += gradients + bucket if feedback else 0


# --- what went wrong


def _explained(error: Exception) -> str:
    where = _users_line(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        why = f"what it does depends on the values of tensors, by {error.func}"
    elif isinstance(error, UnsupportedOperatorException):
        why = f"the output sizes of {error.func} are unknown: register a fake for it (torch.library)"
    elif isinstance(error, UnsupportedFakeTensorException):
        why = str(error)
    else:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"the step that was to be estimated raised {type(error).__name__}: {first}{where}"
    return f"this model can't be estimated: {why}{where}"


def _users_line(error: Exception) -> str:
    """Return the innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename
        if os.path.isabs(name) and not name.startswith(_OURS):
            code = linecache.getline(name, frame.lineno or 0).strip()
            return f' (in {frame.name}, "{name}", line {frame.lineno}{f": {code}" if code else ""})'
    return ""
