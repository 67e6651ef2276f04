"""Strategies: a model becomes one that ranks train together, by torch's own DDP and FSDP2, or ready for DeepSpeed.

Independent of optimizers, loaders or loops. The order matters: layers are replaced first, then blocks are
checkpointed, then compiled, then sharded.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import UsageError
from nbdist.plan import Plan, Strategy
from nbdist.planning.settings import micro_batches_of
from nbdist.train import state as training
from nbdist.train.checkpoint.weights import Fitting, give_storage
from nbdist.train.collective.agreement import gather
from nbdist.train.loop import precision
from nbdist.train.prepare.meshes import mesh_of, mesh_of_experts, mesh_of_sequences, over_data, shards_of_experts
from nbdist.train.sharding.materialize import Materializer, refuse_without_initializer, take_from_rank_0
from nbdist.train.sharding.outside_calls import let_in, refuse_unknown_methods
from nbdist.train.sharding.zero import refuse_overruled
from nbdist.train.state import State
from nbdist.train.structure import divided_loss, float8, tensor_parallel
from nbdist.train.structure.activations import keep_less
from nbdist.train.structure.blocks import (
    Ends,
    compile_blocks,
    find_blocks,
    find_ends,
    is_batch_norm,
    refuse_without_blocks,
)
from nbdist.train.structure.quantized import is_wrapper
from nbdist.train.structure.shadow import restore, shadow
from nbdist.train.structure.shared_batch import SharedBatch
from nbdist.train.trial_ranks import have_values


def strategy_in_effect(plan: Plan) -> Strategy:
    """Return what the plan's strategy comes to here: "none" in one process, FSDP excepted, which can still offload."""
    if not training.has_group():
        return "none"
    return "none" if plan.strategy == "ddp" and training.world_size() == 1 else plan.strategy


def refuse_wrapped(model: nn.Module, plan: Plan) -> None:
    """Raise an error for wrapped models: pass models to `prepare` as their authors wrote them.

    Raises:
        UsageError: The model is wrapped or sharded already. The text says what to give instead.
    """
    refuse_overruled("prepare", model.parameters())
    if plan.strategy == "none":
        return
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"the {type(model.module).__name__} is wrapped in DistributedDataParallel already: give prepare the model "
            "it wraps, `model.module`, or leave it out of prepare"
        )
    kinds = {type(module).__name__ for module in model.modules()} & {"DistributedDataParallel", "DataParallel"}
    if kinds or type(model).__name__ in ("DeepSpeedEngine", "FullyShardedDataParallel"):
        kind = min(kinds, default=type(model).__name__)
        raise UsageError(f"the model is wrapped in {kind} already, or a part of it is: give prepare the bare model")
    if _is_sharded(model):
        raise UsageError(
            "the model is sharded already (fully_shard, or parameters that are DTensors): build it again and give "
            "prepare the bare model, or leave it out of prepare"
        )


def refuse_unfit(model: nn.Module, plan: Plan, *, has_weights: bool = False) -> None:
    """Raise an error for parts of the plan that don't fit the model, before anything changes.

    Args:
        model: As its author wrote it.
        plan: How it is to be made distributed.
        has_weights: Whether its values come from elsewhere.

    Raises:
        UsageError: `shard_by` fits no module, or `methods` no method, there is nothing to checkpoint or to compute in
            fp8, layers can't be divided by `tp`, sequences by `cp`, or the model by `pp`, a module on the meta device
            can't set its values, this torch's hook is broken, torchao does not know the recipe.
    """
    _blocks_of(model, plan)
    if plan.strategy == "deepspeed" and plan.precision != "fp32":
        _refuse_batch_norm(model, plan)
    if plan.tp > 1:
        styles = tensor_parallel.styles_of(model)
        tensor_parallel.refuse_indivisible(model, styles, plan.tp)
        if plan.loss_parallel:
            divided_loss.refuse_unfit(model, styles)
        if plan.sequence_parallel:
            from nbdist.train.sequences import sequence_parallel

            sequence_parallel.refuse_unfit(model, find_blocks(model, plan.shard_by), styles)
    if plan.cp > 1:
        from nbdist.train.sequences import context_parallel

        context_parallel.refuse_unfit(model, plan.cp, exchanges_heads=plan.cp_method == "ulysses", tp=plan.tp)
    if plan.ep > 1:
        from nbdist.train.experts import expert_parallel

        expert_parallel.refuse_unfit(model, plan.ep, shards_of_experts(plan))
    if plan.pp > 1:
        _refuse_unfit_for_stages(model, plan, has_weights)
    if not has_weights:
        refuse_without_initializer(model)
    refuse_unknown_methods(model, plan.methods or ())
    float8.refuse_small(model, plan)
    if plan.precision == "fp8":
        float8.config_of(plan)
    if plan.comm_hook == "batched_powersgd":
        _refuse_broken_hook()


def _refuse_unfit_for_stages(model: nn.Module, plan: Plan, has_weights: bool) -> None:
    from nbdist.train.pipeline import cutting

    if has_weights:
        raise UsageError(
            f"prepare can't read weights for {plan.pp} stages yet: build the model with its weights on the CPU, and "
            "leave weights out, or set pp to 1"
        )
    cutting.refuse_unfit(model, plan.pp)


def _refuse_batch_norm(model: nn.Module, plan: Plan) -> None:
    if any(is_batch_norm(module) and module.track_running_stats for module in model.modules()):
        raise UsageError(
            f"precision {plan.precision!r} under strategy 'deepspeed' converts the parameters of BatchNorm layers, but "
            "not their running statistics, which PyTorch refuses: set precision to 'fp32', or strategy to 'fsdp'"
        )


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def distribute(model: nn.Module, state: State, weights: Fitting | None = None) -> nn.Module:
    """Make a model one that trains as the state's plan says.

    Args:
        model: As its author wrote it; on any device, also meta.
        state: Says how. Its `replaced` learns which parameters stand for which earlier ones.
        weights: The values of its parameters; None: its own.

    Returns:
        The model: itself but under DDP, where it is wrapped; DeepSpeed's engine is made around it later.

    Raises:
        UsageError: The plan does not fit the model.
    """
    plan, strategy = state.plan, strategy_in_effect(state.plan)
    before = dict(model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        restore(module, "forward")  # of an earlier plan
    model = _with_other_layers(model, plan, state.device)
    if plan.cp > 1:
        _divide_sequences(model, state)
    styles = tensor_parallel.styles_of(model) if plan.tp > 1 else {}  # of the whole model, so that ties are seen
    if plan.pp > 1:
        _cut(model, state)
    blocks = _blocks_of(model, plan)
    keep_less(
        blocks,
        plan.activation_checkpointing,
        budget=plan.activation_budget if _budgets_blocks(plan) else None,
        offload=plan.activation_offload,
    )
    if strategy in ("fsdp", "hsdp"):
        distributed = _shard(model, blocks, state, styles, weights)
    else:
        if strategy == "deepspeed":
            precision.half_forward(model, plan)
        else:
            precision.autocast_forward(model, plan, state.device)
        if weights is None:
            Materializer(state.device).materialize(model.modules())
        else:
            give_storage(model, state.device)
        model.to(state.device)
        if weights is not None:
            weights.fill(model)
        if strategy == "deepspeed":
            take_from_rank_0(model.modules())
        distributed = _replicate(model, plan, state.device) if strategy == "ddp" else model
        if plan.compile:
            distributed.compile(**_compile_options(plan))  # DDP compiled around cuts the graph at its buckets
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in before.items():
        if after.get(name) is not parameter and name in after:
            state.replaced[parameter] = after[name]
    return distributed


def _blocks_of(model: nn.Module, plan: Plan) -> list[nn.Module]:
    blocks = find_blocks(model, plan.shard_by)
    if plan.activation_checkpointing != "none" or plan.activation_offload or _budgets_blocks(plan):
        refuse_without_blocks(model, blocks)
    return blocks


def _budgets_blocks(plan: Plan) -> bool:
    """Return whether blocks make up the budget of activations; in compiled models torch's partitioner keeps to it."""
    return plan.activation_budget is not None and not plan.compile


def _compile_options(plan: Plan) -> dict[str, Any]:
    """Return the arguments of `torch.compile`."""
    mode = plan.compile if isinstance(plan.compile, str) else None
    return {"mode": mode, "dynamic": plan.compile_dynamic, "fullgraph": plan.compile_fullgraph}


def _with_other_layers(model: nn.Module, plan: Plan, device: torch.device) -> nn.Module:
    if plan.sync_batchnorm and training.world_size() > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if plan.precision == "fp8":
        float8.convert(model, plan, device)
    return model


def _divide_sequences(model: nn.Module, state: State) -> None:
    from nbdist.metrics.events import data_parallel
    from nbdist.train.sequences import context_parallel

    def group() -> dist.ProcessGroup:
        return mesh_of_sequences(state).get_group("cp")  # type: ignore[no-any-return]

    data_parallel.note_divided_sequences(dist.get_process_group_ranks(group()))
    context_parallel.divide_sequences(
        model,
        group,
        exchanges_heads=state.plan.cp_method == "ulysses",
        sharing=training.batch_ranks,
        gather=gather,
    )


def _cut(model: nn.Module, state: State) -> None:
    """Leave this rank's stage of a model, with rank 0's values, and have calls run the pipeline."""
    from nbdist.train.pipeline import cutting
    from nbdist.train.pipeline.passing import Pipeline, run_through_stages
    from nbdist.train.pipeline.stages import Stages

    plan, mesh = state.plan, mesh_of(state)["pp"]
    stages = state.stages = Stages(mesh.get_local_rank(), plan.pp, mesh.get_group())

    def share(part: nn.Module) -> None:
        part.to(state.device)
        take_from_rank_0(part.modules())

    for parameter in cutting.cut(model, stages, share):
        state.replaced[parameter] = None
    dtype = precision.fsdp_policies(plan)[0].param_dtype
    pipeline = Pipeline(
        stages,
        schedule=plan.pp_schedule,
        micro_batches=micro_batches_of(plan),
        dtype=dtype or next(model.parameters()).dtype,
        device=state.device,
        batches=SharedBatch("model, by stages,", training.batch_ranks, gather),
        gather=gather,
    )
    run_through_stages(model, pipeline)


# --- DDP


def _replicate(model: nn.Module, plan: Plan, device: torch.device) -> nn.Module:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        take_from_rank_0(model.modules())  # DDP refuses what has nothing to train
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=plan.bucket_mb,
        find_unused_parameters=plan.find_unused_parameters,
        static_graph=plan.static_graph,
        gradient_as_bucket_view=plan.gradient_as_bucket_view,
        **_buffer_options(plan),
    )
    if plan.comm_hook != "none":
        _register_hook(wrapped, plan.comm_hook, plan.comm_hook_options)
    return wrapped


def _buffer_options(plan: Plan) -> dict[str, Any]:
    """Return DDP's argument for buffers, by the name that this version of torch has for it: 2.13 warns of the old."""
    if plan.broadcast_buffers:
        return {}  # as by default
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _register_hook(model: DistributedDataParallel, kind: str, options: Mapping[str, Any]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if kind in ("fp16", "bf16"):
        hook = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook
        model.register_comm_hook(None, hook)
        return
    state = powerSGD_hook.PowerSGDState(**{"process_group": None, **options})
    power_hook = powerSGD_hook.powerSGD_hook if kind == "powersgd" else powerSGD_hook.batched_powerSGD_hook
    model.register_comm_hook(state, power_hook)


def _refuse_broken_hook() -> None:
    """Raise an error for the batched hook of torch versions that pass a matrix instead of a batch of them."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    orthogonalize = getattr(powerSGD_hook, "_orthogonalize", None)
    try:
        if orthogonalize is not None:
            orthogonalize(torch.eye(2))
    except AssertionError:
        raise UsageError(
            f"the batched powerSGD hook of torch {torch.__version__} fails in the first step that it compresses: "
            "use comm_hook='powersgd'"
        ) from None


# --- FSDP2


def _shard(
    model: nn.Module, found: Sequence[nn.Module], state: State, styles: Mapping[str, str], weights: Fitting | None
) -> nn.Module:
    """Shard block by block, so that no more than one block is whole at a time beyond what the model has outside.

    With weights what is on the meta device is sharded there, and only shards get storage.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, register_fsdp_forward_method

    plan, device = state.plan, state.device
    mesh = mesh_of(state)
    blocks = _separable(model, found)
    if plan.compile:
        compile_blocks(model, found, _compile_options(plan))
    block_policy, root_policy = precision.fsdp_policies(plan)
    options: dict[str, Any] = {"mesh": over_data(mesh)}
    divide = _division(model, found, state, styles)
    if plan.reshard is not None:
        options["reshard_after_forward"] = plan.reshard
    if plan.pp > 1:  # between micro-batches parameters stay gathered, and hidden states in their type
        options["reshard_after_forward"] = False
        if not state.stages.is_last:
            root_policy = dataclasses.replace(root_policy, output_dtype=None)
    if plan.offload and device.type != "cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    materializer = Materializer(device) if weights is None else None
    embeddings, head = _ends(model, found)
    inside = _shard_experts(model, state, materializer, block_policy, options) if plan.ep > 1 else set()
    for group in _groups(model, embeddings, blocks, head, block_policy):
        below = [module for each in group.modules for module in each.modules() if module not in inside]
        _make_alike(below, None, materializer, device, shares=plan.pp == 1)
        divide(below, group.modules)
        kept = {"reshard_after_forward": False} if group.is_kept else {}
        fully_shard(list(group.modules), mp_policy=group.policy, **kept | options)
        inside.update(below)
    rest = [module for module in model.modules() if module not in inside]
    _make_alike(rest, None if inside else model, materializer, device, shares=plan.pp == 1)
    divide(rest, [model, *_outside(found, rest)])
    fully_shard(model, mp_policy=root_policy, **options)
    for embedding in embeddings:
        if type(embedding).forward is nn.Embedding.forward:
            embedding.set_unshard_in_backward(False)  # type: ignore[operator]  # a lookup's gradient takes no weight
    if weights is not None:
        give_storage(model, device, parameters_on=torch.device("cpu") if plan.offload else None)
        weights.fill(model)
    _prefetch([*embeddings, *blocks, *head[:1]], plan.prefetch)
    if plan.tp > 1 and plan.cp == plan.pp == 1 and have_values():  # else another watches
        SharedBatch("layers", training.batch_ranks, gather).watch(model)
    if callable(getattr(model, "generate", None)):
        register_fsdp_forward_method(model, "generate")
    let_in(model, plan.methods or ())
    return model


def _shard_experts(
    model: nn.Module, state: State, materializer: Materializer | None, policy: Any, options: dict[str, Any]
) -> set[nn.Module]:
    """Divide experts as `ep` says, and shard those that are left over the ranks that have the same.

    Returns:
        All modules that are sharded now.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    from nbdist.train.experts import expert_parallel

    mesh = mesh_of_experts(state)
    ep, shards = mesh["ep"].size(), mesh["efsdp"].size()

    def group() -> dist.ProcessGroup:
        return mesh_of_experts(state).get_group("ep")  # type: ignore[no-any-return]

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(expert_parallel.shard_dimension(parameter.shape, ep, shards) or 0)

    inside: set[nn.Module] = set()
    for experts in expert_parallel.experts_of(model).values():
        below = list(experts.modules())
        _make_alike(below, None, materializer, state.device, shares=True)
        shadow(experts, "forward", expert_parallel.divide(experts, mesh["ep"], group))
        own = {"mesh": over_data(mesh), "mp_policy": dataclasses.replace(policy, cast_forward_inputs=False)}
        fully_shard(experts, shard_placement_fn=placement, **options | own)
        inside.update(below)
    return inside


def _division(
    model: nn.Module, blocks: Sequence[nn.Module], state: State, styles: Mapping[str, str]
) -> Callable[[Sequence[nn.Module], Sequence[nn.Module]], None]:
    """Return what divides modules as `tp` says, which may be all of the model's, or some after others."""
    if state.plan.tp == 1:
        return lambda modules, gathered: None
    names = {module: name for name, module in model.named_modules()}
    tied = tensor_parallel.ties(model)
    others = divided_loss.divide_loss(model) if state.plan.loss_parallel else {}
    if state.plan.sequence_parallel:
        from nbdist.train.sequences import sequence_parallel

        others |= sequence_parallel.divide_tokens(model, blocks, styles, state.mesh["tp"])

    def divide(modules: Sequence[nn.Module], returned: Sequence[nn.Module]) -> None:
        named = [(names[module], module) for module in modules]
        tensor_parallel.divide(named, styles, state.mesh["tp"], returned, others)
        there = set(modules)
        tensor_parallel.tie_again([places for places in tied if there.issuperset(module for module, _ in places)])

    return divide


def _outside(blocks: Iterable[nn.Module], modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of the modules that are in no block, which may be compiled."""
    inside = {module for block in blocks for module in block.modules()}
    return [module for module in modules if module not in inside]


class _Group(NamedTuple):
    """Modules that are gathered in one all-gather.

    Attributes:
        modules: Gathered when the first of them is called.
        policy: FSDP's mixed precision.
        is_kept: Whether their parameters stay gathered from forward to backward unless the plan decides.
    """

    modules: Sequence[nn.Module]
    policy: Any
    is_kept: bool = False


def _groups(
    model: nn.Module,
    embeddings: Sequence[nn.Module],
    blocks: Sequence[nn.Module],
    head: Sequence[nn.Module],
    policy: Any,
) -> Iterator[_Group]:
    """Return what is gathered by itself; the rest of the model is one more group, from the beginning of forward."""
    norms = _norms(model) if policy.param_dtype is not None else []
    for group in [norms] if norms and _completes_groups() else [[norm] for norm in norms]:
        yield _Group(group, precision.full_precision_policy(), is_kept=_completes_groups())
    for module in [*embeddings, *(block for block in blocks if block not in norms)]:
        yield _Group([module], policy)
    if head:  # computed in the type of what it is given, as the rest of the model is
        yield _Group(head, dataclasses.replace(policy, cast_forward_inputs=False), is_kept=True)


def _ends(model: nn.Module, blocks: Sequence[nn.Module]) -> Ends:
    """Return the embeddings and the head that can be groups: those that share no parameter with the rest."""
    ends = find_ends(model, blocks)
    ends = Ends([each for each in ends.embeddings if next(each.parameters(), None) is not None], ends.head)
    is_apart = _completes_groups() and len(_separable(model, ends.head)) == len(ends.head)
    return Ends(_separable(model, ends.embeddings), ends.head if is_apart else [])


def _completes_groups() -> bool:
    """Return whether this torch ends the forward of a group if one of its modules was not called: 2.13 and newer do.

    Older ones would not gather such a group in the next step.
    """
    try:  # private, so it is looked for
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError:
        return False
    return hasattr(FSDPState, "_force_complete_incomplete_states")


def _norms(model: nn.Module) -> list[nn.Module]:
    """BatchNorm layers, which can't have parameters of another type than their running statistics."""
    found = [module for module in model.modules() if is_batch_norm(module) and module.track_running_stats]
    return _separable(model, [norm for norm in found if norm.affine])


def _make_alike(
    modules: Iterable[nn.Module],
    whole: nn.Module | None,
    materializer: Materializer | None,
    device: torch.device,
    *,
    shares: bool,
) -> None:
    """Bring modules that are about to be sharded to the device, with the values of rank 0 on all ranks.

    Without a materializer tensors on the meta device stay there. `shares`: whether they are on all ranks.
    """
    modules = list(modules)
    if materializer is not None:
        materializer.materialize(modules)
    if whole is not None and materializer is not None:
        whole.to(device)
    else:
        move_own(modules, device)
    if shares:
        take_from_rank_0(modules)


def move_own(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move what belongs to these modules but not to their children, which are sharded already."""
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if parameter.device != device and not parameter.is_meta:
                _move(parameter, device)
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    moved = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
    if is_wrapper(moved):  # as fp8 weights are: setting `data` of these leaves what is inside where it was
        torch.utils.swap_tensors(parameter, moved)
    else:
        parameter.data = moved.data


def _separable(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with the rest; the others are sharded with it, so that ties hold."""
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in {id(parameter): parameter for parameter in module.parameters(recurse=False)}.values()
    )
    found = []
    for block in blocks:
        within = Counter(
            id(parameter)
            for module in block.modules()
            for parameter in {id(parameter): parameter for parameter in module.parameters(recurse=False)}.values()
        )
        if all(holders[number] == count for number, count in within.items()):
            found.append(block)
    return found


def _prefetch(blocks: Sequence[Any], ahead: int) -> None:
    if not ahead:
        return
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[number + 1 : number + 1 + ahead]))
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, number - ahead) : number])))
