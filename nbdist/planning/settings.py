"""The settings of a plan: each declared once, with its values, its default, whom it is for, its flag and its words.

Rules, flags and tables read them here. Independent of how settings go together, of torch, ranks or notebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from nbdist.planning.kinds import (
    STRATEGIES,
    Blocks,
    Choice,
    Count,
    Kind,
    Methods,
    Number,
    OptionalSwitch,
    Options,
    Setting,
    Switch,
    Tell,
    Teller,
    Way,
    is_amount,
    is_count,
    is_switch,
)

Strategy = Literal["none", "ddp", "fsdp", "hsdp", "deepspeed"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]

SHARDED = ("fsdp", "hsdp")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes of torch.compile that use them
TYPES = {"bf16": "bfloat16", "fp16": "float16"}

_EVERY = "every strategy"
_DDP = "ddp"
_FSDP = "fsdp and hsdp"
_DEEPSPEED = "deepspeed"
_DATA = "data"
_RANK = "each rank"


_OWNERS = {
    _DDP: ("ddp",),
    _FSDP: SHARDED,
    _DEEPSPEED: ("deepspeed",),
}  # of a group's settings in general; the others are for all strategies
_UNTRIED = "it is not tested with DeepSpeed yet"
_TORCHS = tuple(strategy for strategy in STRATEGIES if strategy != "deepspeed")


def _setting(default: Any, kind: Kind, group: str, help: str, *, positional: bool = False, **more: Any) -> Any:
    setting = Setting(kind, group, help, **{"owners": _OWNERS.get(group, STRATEGIES)} | more)
    if default is dict:
        return field(default_factory=dict, hash=False, metadata={"setting": setting})
    return field(default=default, metadata={"setting": setting}, kw_only=not positional)


def _with_tp(help: str, tell: str) -> Any:
    """Return a field for what ranks that divide layers may divide as well."""
    why = "the other strategies need each layer whole"
    return _setting(False, Switch(), _FSDP, help, why=why, part_of="tp", is_on=lambda tp: tp > 1, tell=tell)


# --- what is told of settings that are set


def show(value: object) -> str:
    """Return a setting's value for people."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{name}={show(entry)}" for name, entry in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return "not set" if value is None else str(getattr(value, "__name__", value))


def _accumulate(plan: Settings, kind: str) -> str:
    in_each = plan.exchange == "each" or (plan.strategy == "deepspeed" and plan.stage > 1)
    when = "each of them" if in_each else "the last of them only"
    sent = "" if plan.strategy == "none" else f"; gradients are exchanged in {when}"
    return f"an optimizer step every {plan.accumulate} micro-batches{sent}"


def _clip(plan: Settings, kind: str) -> str:
    whole = " (that of all shards together)" if plan.strategy in (*SHARDED, "deepspeed") else ""
    return f"before each step gradients are scaled down to this norm{whole}, if theirs is larger"


def _compile(plan: Settings, kind: str) -> str:
    what = "each block is compiled; equal blocks share the code"
    again = "; a graph is recorded again when parameters are gathered elsewhere, so the first steps are slow"
    if plan.strategy not in SHARDED:
        what, again = "the whole model is compiled, in its first step", ""
    return what + _MODES.get(plan.compile, "") + (again if plan.compile in CUDA_GRAPHS else "")


_MODES: Mapping[bool | str, str] = {
    "reduce-overhead": "; CUDA graphs avoid kernel launches, but take more memory",
    "max-autotune": "; kernels are timed against each other, which takes minutes, and CUDA graphs launch them",
    "max-autotune-no-cudagraphs": "; kernels are timed against each other, which takes minutes",
}


def _dynamic(plan: Settings, kind: str) -> str:
    if plan.compile_dynamic:
        return "sizes are symbolic from the first step: one compiled version for all of them, but a slower one"
    return "each new input size is compiled separately"


def _checkpointing(plan: Settings, kind: str) -> str:
    if plan.activation_checkpointing == "full":
        return "blocks keep only their inputs and compute the rest again in backward: less memory, more work"
    kept = (
        "expensive operations" if plan.activation_checkpointing == "selective" else "attention and every second product"
    )
    return f"blocks keep the results of {kept} and compute the others again in backward"


def _budget(plan: Settings, kind: str) -> str:
    if plan.compile:
        return (
            "the compiler keeps what is slowest to compute again, up to this share, and computes the rest in backward"
        )
    return "this share of the blocks keeps its activations; the others are computed again in backward"


def _offload(plan: Settings, kind: str) -> str:
    what = (
        "the inputs of blocks wait"
        if plan.activation_checkpointing == "full"
        else "what blocks keep for backward waits"
    )
    return f"{what} in pinned CPU memory until backward: less memory on the GPU, more traffic to the CPU"


def _hook(plan: Settings, kind: str) -> str:
    if plan.comm_hook in ("fp16", "bf16"):
        return f"gradients travel as {TYPES[plan.comm_hook]}: half the bytes of float32"
    options = plan.comm_hook_options
    what = "each bucket as one matrix" if plan.comm_hook.startswith("batched") else "each parameter separately"
    rank, start = options.get("matrix_approximation_rank", 1), options.get("start_powerSGD_iter", 1000)
    return f"from step {start} on gradients travel as factors of rank {rank}, {what}"


def _methods(plan: Settings, kind: str) -> str:
    return f"{show(plan.methods)} may be called from outside forward, and the methods that are found"


def _shard_by(plan: Settings, kind: str) -> str:
    if callable(plan.shard_by):
        return "this function says which modules are blocks"
    return f"each module of class {show(plan.shard_by).replace(', ', ' or ')} is a block"


def _reshard(plan: Settings, kind: str) -> str:
    if plan.reshard:
        return "parameters are freed after forward and gathered again for backward"
    return "parameters stay gathered from forward to backward: less traffic, more memory"


def _exchange(plan: Settings, kind: str) -> str:
    if plan.accumulate == 1:
        return "nothing to do: each micro-batch makes a step"
    return "between micro-batches ranks keep shards of gradients, not whole ones: less memory, more traffic"


def _offloaded(plan: Settings, kind: str) -> str:
    if plan.strategy == "deepspeed" and plan.stage < 3:
        return "optimizer state lives in CPU memory, where the optimizer steps"
    return "parameters, gradients and optimizer state live in CPU memory, where the optimizer steps"


def _tf32(plan: Settings, kind: str) -> str:
    if not plan.tf32:
        return "float32 matrix products are exact"
    return "float32 matrix products keep 10 bits of the mantissa, and are faster"


def _numa(plan: Settings, kind: str) -> str:
    if plan.numa == "exclusive":
        return "each rank is bound to its own cores next to its GPU, and to the memory there"
    return "each rank is bound to the cores and the memory next to its GPU"


def _seed(plan: Settings, kind: str) -> str:
    return f"all random generators start from {plan.seed}{' plus the rank' if plan.seed_per_rank else ', on all ranks'}"


def micro_batches_of(plan: Settings) -> int:
    """Return into how many micro-batches a pipeline cuts each batch."""
    return plan.pp_micro_batches or 2 * plan.pp


def _pipeline(plan: Settings, kind: str) -> str:
    parts = micro_batches_of(plan)
    waiting = (plan.pp - 1) / (parts + plan.pp - 1)  # the bubble of GPipe and 1F1B, if stages take equally long
    return (
        f"each model is cut into {plan.pp} stages of layers, on ranks of their own, through which {parts} parts of "
        f"each batch pass; a stage waits at least {waiting:.0%} of the time"
    )


def _on_gpus(tell: Tell) -> Teller:
    """Return the description of a setting that does nothing on ranks without a GPU."""

    def teller(plan: Settings, kind: str) -> str:
        if kind == "cpu":
            return "nothing to do: these ranks have no GPU"
        return tell if isinstance(tell, str) else tell(plan, kind)

    return teller


# --- the settings


def _is_seed(value: object) -> bool:
    return is_count(value) or value == 0


_SEEDS = 2**32  # numpy takes no larger one

# The settings of torch's PowerSGDState: whether a value will do, and what will.
_HOOK_OPTIONS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "matrix_approximation_rank": (is_count, "a whole number of 1 or more"),
    "start_powerSGD_iter": (is_count, "a whole number of 1 or more"),
    "min_compression_rate": (is_amount, "a number of 0 or more"),
    "use_error_feedback": (is_switch, "True or False"),
    "warm_start": (is_switch, "True or False"),
    "orthogonalization_epsilon": (is_amount, "a number of 0 or more"),
    "random_seed": (_is_seed, "a whole number of 0 or more"),
    "compression_stats_logging_frequency": (is_count, "a whole number of 1 or more"),
    "batch_tensors_with_same_shape": (is_switch, "True or False"),
}


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)  # of these `Plan` has its own
class Settings:
    """The values of all settings.

    Attributes:
        strategy: "none", "ddp", "fsdp" (FSDP2), "hsdp" (sharded inside a node, replicated between nodes) or "deepspeed"
            (DeepSpeed's ZeRO, by an engine of its own).
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
        broadcast_buffers: DDP's argument: whether rank 0's buffers, such as BatchNorm's statistics, go to all ranks
            before each forward.
        sync_batchnorm: Whether BatchNorm layers become SyncBatchNorm.
        shard_by: What FSDP shards as one block: a class name, several, a function of a module; None: found.
        methods: FSDP: methods besides forward that are called from outside it: "encode", "decoder.logits". Those whose
            source shows that they use parameters are found.
        reshard: FSDP: whether parameters are freed after forward; None: torch's default.
        prefetch: FSDP: how many blocks are gathered ahead; 0: as torch does.
        exchange: FSDP: which micro-batch of a window exchanges gradients: the "last", until which each rank keeps whole
            ones, or "each", so that it keeps shards, and more is sent.
        offload: FSDP and DeepSpeed: whether parameters, gradients and optimizer state live in CPU memory; DeepSpeed's
            stages 1 and 2 leave parameters on the GPU.
        replicas: HSDP: how many groups hold the whole model; None: one for each node.
        tp: Tensor parallel: among how many ranks each layer is divided, as the model's `tp_plan` says. They get the
            same batch. 1: off.
        sequence_parallel: With tp: whether each rank has some of the tokens only where layers are not divided, as in
            norms, for models of transformers.
        loss_parallel: With tp: whether a language model of transformers computes its loss on logits that stay divided
            over the vocabulary; `logits` is a DTensor in training then.
        cp: Context parallel: among how many ranks each sequence is divided, for language models of transformers. They
            get the same batch. 1: off.
        cp_method: How attention sees whole sequences then: "gather" (each rank gathers all keys and values), or
            "ulysses" (each rank computes some of the heads).
        ep: Expert parallel: among how many of the ranks with a shard the experts of a mixture are divided. Each has
            its own batch. 1: off.
        pp: Pipeline parallel: into how many stages a language model of transformers is cut, each on other ranks. The
            ranks of a pipeline get the same batch. 1: off.
        pp_schedule: In which order a stage computes micro-batches: "1f1b" (one forward, one backward), or "gpipe" (all
            forwards first).
        pp_micro_batches: Into how many micro-batches each batch is cut, at least `pp`; None: twice `pp`.
        stage: DeepSpeed: what ZeRO splits over ranks: 1: optimizer state, 2: also gradients, 3: also parameters.
        local_sgd_steps: Average parameters every so many steps, and at the end of a prepared loader, but no gradients;
            0: no local SGD.
        seed: Seed of all random generators; None: not touched.
        seed_per_rank: Whether each rank adds its rank to the seed.
        deterministic: Whether only deterministic algorithms are used.
        tf32: Whether float32 matrix products may use TF32; None: not touched.
        numa: Whether each rank is bound to the cores and the memory next to its GPU; "exclusive": to a part of these
            cores that no other rank has.
        gc_interval: Collect garbage every so many optimizer steps instead of whenever Python wants to; 0: Python's way.
        dispatch: Whether rank 0 alone reads the data and hands each rank its part.
        even_batches: Whether the tail of the data is filled up so that all ranks see as many batches.
    """

    strategy: Strategy = _setting("ddp", Choice(*STRATEGIES), "", "how models are distributed", positional=True)
    precision: Precision = _setting(
        "fp32", Choice("fp32", "bf16", "fp16", "fp8", no="fp32"), _EVERY, "type for computations"
    )
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = _setting(
        "tensorwise",
        Choice("tensorwise", "rowwise", "rowwise_with_gw_hp"),
        _EVERY,
        "how fp8 scales: tensorwise is fastest",
        part_of="precision",
        is_on=lambda precision: precision == "fp8",
    )
    accumulate: int = _setting(
        1, Count(1), _EVERY, "micro-batches for each optimizer step", metavar="N", tell=_accumulate
    )
    clip_grad_norm: float | None = _setting(
        None,
        Number("greater than 0", lambda norm: norm > 0),
        _EVERY,
        "largest norm of the gradients, or none",
        metavar="NORM",
        tell=_clip,
    )
    ema: float | None = _setting(
        None,
        Number("between 0 and 1, such as 0.999", lambda decay: 0 < decay < 1),
        _EVERY,
        "average the weights of all steps, such as 0.999, or none",
        metavar="DECAY",
        owners=_TORCHS,
        why="DeepSpeed's optimizer holds the weights that would be averaged",
        tell="each step is averaged into a second copy of the weights, which `with nbdist.averaged(model):` swaps in",
    )
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = _setting(
        False,
        Way("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        _EVERY,
        "compile models; a mode is one of torch.compile's, such as max-autotune",
        metavar="MODE",
        owners=_TORCHS,
        why=_UNTRIED,
        tell=_compile,
    )
    compile_dynamic: bool | None = _setting(
        None,
        OptionalSwitch(),
        _EVERY,
        "input sizes are symbolic",
        owners=_TORCHS,
        why=_UNTRIED,
        part_of="compile",
        tell=_dynamic,
    )
    compile_fullgraph: bool = _setting(
        False,
        Switch(),
        _EVERY,
        "a graph break is an error",
        owners=("none", *SHARDED),
        why="torch.compile can't trace the forward of DDP or DeepSpeed: it breaks the graph",
        part_of="compile",
        tell="a graph break is an error",
    )
    activation_checkpointing: Literal["none", "full", "selective", "selective-half"] = _setting(
        "none",
        Choice("none", "full", "selective", "selective-half"),
        _EVERY,
        "what is computed again in backward",
        tell=_checkpointing,
    )
    activation_budget: float | None = _setting(
        None,
        Number("from 0 to less than 1, such as 0.5", lambda share: share < 1),
        _EVERY,
        "how much of the activations is kept, such as 0.5, or none: all",
        metavar="SHARE",
        tell=_budget,
    )
    activation_offload: bool = _setting(
        False,
        Switch(),
        _EVERY,
        "activations wait in CPU memory for backward",
        owners=_TORCHS,
        why=_UNTRIED,
        tell=_offload,
    )
    comm_hook: Literal["none", "fp16", "bf16", "powersgd", "batched_powersgd"] = _setting(
        "none",
        Choice("none", "fp16", "bf16", "powersgd", "batched_powersgd"),
        _DDP,
        "how gradients are compressed",
        why="only DDP has communication hooks",
        tell=_hook,
    )
    comm_hook_options: Mapping[str, Any] = _setting(
        dict,
        Options("comm_hook", "{'matrix_approximation_rank': 2}", _HOOK_OPTIONS),
        _DDP,
        "options of the hook, named as in torch: matrix_approximation_rank=2",
        metavar="NAME=VALUE",
        why="only DDP has communication hooks",
        part_of="comm_hook",
        is_on=lambda hook: "powersgd" in hook,
    )
    bucket_mb: float = _setting(
        25.0,
        Number("greater than 0", lambda size: size > 0, optional=False),
        _DDP,
        "size of the buckets",
        metavar="MIB",
        why="only DDP has buckets",
    )
    find_unused_parameters: bool = _setting(
        False,
        Switch(),
        _DDP,
        "for models that don't use all parameters in each step",
        why="only DDP waits for the gradient of every parameter",
        tell="each backward looks for parameters without a gradient, which takes time",
    )
    static_graph: bool = _setting(
        False,
        Switch(),
        _DDP,
        "each step has the same graph",
        why="only DDP has an order of gradients to learn",
        tell="every step has the same graph, so DDP learns its order once",
    )
    gradient_as_bucket_view: bool = _setting(
        True,
        Switch(),
        _DDP,
        "gradients live in the buckets",
        why="only DDP has buckets",
        tell="gradients are copied into the buckets, which takes their memory twice",
    )
    broadcast_buffers: bool = _setting(
        True,
        Switch(),
        _DDP,
        "rank 0's buffers go to all ranks before each forward",
        why="only DDP exchanges buffers",
        tell="each rank keeps its own buffers, such as BatchNorm's statistics; rank 0's are saved",
    )
    sync_batchnorm: bool = _setting(
        False,
        Switch(),
        _EVERY,
        "BatchNorm over all ranks",
        owners=("ddp", *SHARDED),
        why="ranks don't train together otherwise, and it is not tested with DeepSpeed yet",
        tell="BatchNorm layers use the mean and the variance over all ranks",
    )
    shard_by: str | tuple[str, ...] | Callable[[Any], bool] | None = _setting(
        None,
        Blocks(),
        _FSDP,
        "classes that are blocks: Block or Block,Head; none: automatic",
        metavar="CLASS",
        why="nothing is split into blocks otherwise",
        tell=_shard_by,
    )
    methods: str | tuple[str, ...] | None = _setting(
        None,
        Methods(),
        _FSDP,
        "methods called from outside forward: encode or decoder.logits,encode",
        metavar="METHOD",
        why="only FSDP gathers blocks",
        tell=_methods,
    )
    reshard: bool | None = _setting(
        None,
        OptionalSwitch(),
        _FSDP,
        "free parameters after forward",
        why="only FSDP gathers blocks",
        tell=_reshard,
    )
    prefetch: int = _setting(
        0,
        Count(),
        _FSDP,
        "blocks that are gathered ahead",
        metavar="N",
        why="only FSDP gathers blocks",
        tell=lambda plan, kind: f"blocks are gathered {plan.prefetch} ahead of the one that computes",
    )
    exchange: Literal["last", "each"] = _setting(
        "last",
        Choice("last", "each"),
        _FSDP,
        "gradients in each micro-batch (less memory), or in the last",
        why="whole gradients are kept otherwise, whenever they are exchanged",
        tell=_exchange,
    )
    offload: bool = _setting(
        False,
        Switch(),
        _FSDP,
        "keep parameters, gradients and optimizer state in CPU memory",
        owners=(*SHARDED, "deepspeed"),
        why="only shards are moved to the CPU",
        tell=_on_gpus(_offloaded),
    )
    replicas: int | None = _setting(
        None,
        Count(1, optional=True),
        _FSDP,
        "hsdp: number of groups that each hold the whole model; none: one per node",
        metavar="N",
        owners=("hsdp",),
        why="only hsdp has groups of ranks that hold the whole model",
    )
    tp: int = _setting(
        1,
        Count(1),
        _FSDP,
        "tensor parallel: ranks that divide each layer, on one batch",
        metavar="N",
        why="the other strategies need each layer whole",
        tell=lambda plan, kind: (
            f"each layer is divided among {plan.tp} ranks with neighboring numbers, which get the same batch"
        ),
    )
    sequence_parallel: bool = _with_tp(
        "between divided layers, each rank computes some of the tokens",
        "between divided layers, each rank computes and keeps some of the tokens",
    )
    loss_parallel: bool = _with_tp(
        "each rank computes the loss of its part of the vocabulary",
        "each rank computes the loss of its part of the vocabulary, and logits are not gathered",
    )
    cp: int = _setting(
        1,
        Count(1),
        _FSDP,
        "context parallel: ranks that divide each sequence, on one batch",
        metavar="N",
        why="the other strategies give each rank whole sequences",
        tell=lambda plan, kind: f"each sequence is divided among {plan.cp} ranks, which get the same batch",
    )
    cp_method: Literal["gather", "ulysses"] = _setting(
        "gather",
        Choice("gather", "ulysses"),
        _FSDP,
        "each rank gathers keys and values, or has some heads (ulysses)",
        why="the other strategies give each rank whole sequences",
        part_of="cp",
        is_on=lambda cp: cp > 1,
        tell="each rank computes attention of some of the heads over whole sequences",
    )
    ep: int = _setting(
        1,
        Count(1),
        _FSDP,
        "expert parallel: ranks that divide experts, each with its own batch",
        metavar="N",
        why="the other strategies need each layer whole",
        tell=lambda plan, kind: f"each rank has 1/{plan.ep} of the experts, and tokens travel to theirs and back",
    )
    pp: int = _setting(
        1,
        Count(1),
        _FSDP,
        "pipeline parallel: stages that a model is cut into, on one batch",
        metavar="N",
        owners=("fsdp",),
        why="the other strategies keep or replicate whole models",
        tell=_pipeline,
    )
    pp_schedule: Literal["1f1b", "gpipe"] = _setting(
        "1f1b",
        Choice("1f1b", "gpipe"),
        _FSDP,
        "the order of forwards and backwards in a pipeline",
        owners=("fsdp",),
        why="the other strategies have no stages",
        part_of="pp",
        is_on=lambda pp: pp > 1,
        tell="each stage computes all forwards of a batch, then all backwards: more memory",
    )
    pp_micro_batches: int | None = _setting(
        None,
        Count(1, optional=True),
        _FSDP,
        "parts of each batch in a pipeline; none: twice pp",
        metavar="N",
        owners=("fsdp",),
        why="the other strategies have no stages",
        part_of="pp",
        is_on=lambda pp: pp > 1,
    )
    stage: int = _setting(
        2,
        Count(1, 4),
        _DEEPSPEED,
        "what ZeRO splits: 1 optimizer state, 2 also gradients, 3 also parameters",
        metavar="N",
        why="only DeepSpeed has stages of ZeRO",
    )
    local_sgd_steps: int = _setting(
        0,
        Count(),
        _DDP,
        "average parameters every N steps instead of gradients; 0: off",
        metavar="N",
        why="a rank steps alone only if it holds the whole model",
        tell=lambda plan, kind: f"parameters are averaged every {plan.local_sgd_steps} steps, gradients never",
    )
    seed: int | None = _setting(
        None, Count(0, _SEEDS, optional=True), _RANK, "seed of all random generators, or none", metavar="N", tell=_seed
    )
    seed_per_rank: bool = _setting(False, Switch(), _RANK, "add the rank to the seed")
    deterministic: bool = _setting(
        False,
        Switch(),
        _RANK,
        "deterministic algorithms only",
        tell="only deterministic algorithms; an operation that has none raises",
    )
    tf32: bool | None = _setting(None, OptionalSwitch(), _RANK, "TF32 for float32 products", tell=_on_gpus(_tf32))
    numa: bool | Literal["exclusive"] = _setting(
        False,
        Way("exclusive"),
        _RANK,
        "bind to the cores and memory next to the GPU; exclusive: each rank to its own cores",
        metavar="MODE",
        tell=_on_gpus(_numa),
    )
    gc_interval: int = _setting(
        0,
        Count(),
        _RANK,
        "collect garbage every N steps; 0: when Python does",
        metavar="N",
        tell=lambda plan, kind: f"garbage is collected every {plan.gc_interval} steps, on all ranks at the same time",
    )
    dispatch: bool = _setting(
        False,
        Switch(),
        _DATA,
        "rank 0 alone reads the data",
        tell="only rank 0 reads the data, and sends each rank its part",
    )
    even_batches: bool = _setting(
        True,
        Switch(),
        _DATA,
        "the same number of batches on all ranks",
        tell="ranks may see one batch more or less than others",
    )


SETTINGS: Mapping[str, Setting] = {each.name: each.metadata["setting"] for each in fields(Settings)}


def default_of(name: str) -> Any:
    """Return the default of a setting."""
    each = Settings.__dataclass_fields__[name]
    return each.default if each.default_factory is MISSING else each.default_factory()
