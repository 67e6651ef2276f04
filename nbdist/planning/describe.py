"""A plan in words: for each setting what will be done and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from nbdist.planning.rules import CUDA_GRAPHS, SHARDED, default_of

if TYPE_CHECKING:
    from nbdist.plan import Plan

Row = tuple[str, str, str]
Teller = Callable[["Plan", str], str]

_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def show(value: object) -> str:
    """A setting's value for people."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{name}={show(entry)}" for name, entry in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return "not set" if value is None else str(getattr(value, "__name__", value))


def table(plan: Plan, world_size: int | None, device: object) -> str:
    """See `Plan.table`."""
    kind = str(device).split(":")[0] if device is not None else ""
    rows = list(_rows(plan, world_size, kind))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name:<{first}}  {value:<{second}}  {text}" for name, value, text in rows]
    return "\n".join([*lines, "All else is as PyTorch does it by itself."])


def _rows(plan: Plan, world_size: int | None, kind: str) -> Iterator[Row]:
    yield "strategy", plan.strategy, _strategy(plan, world_size)
    yield "precision", plan.precision, _precision(plan)
    for name, tell in _TELLERS.items():
        value = getattr(plan, name)
        if value != default_of(plan, name):
            yield name, show(value), tell if isinstance(tell, str) else tell(plan, kind)


def _strategy(plan: Plan, world_size: int | None) -> str:
    ranks = "all ranks" if world_size is None else f"{world_size} ranks"
    if plan.strategy == "none":
        return "one process: nothing to exchange" if world_size == 1 else "each rank trains by itself: nothing is sent"
    if world_size == 1:
        return "one rank only: nothing to exchange"
    if plan.strategy == "ddp" and plan.local_sgd_steps:
        return "each rank holds the whole model, and steps alone"
    if plan.strategy == "ddp":
        return (
            f"each rank holds the whole model; gradients are averaged over {ranks} during backward, "
            f"in buckets of {plan.bucket_mb:g} MiB"
        )
    state = "parameters, gradients and optimizer state are split"
    if plan.strategy == "fsdp":
        return f"{state} over {ranks}; each block is gathered when it is needed"
    if plan.replicas is None:
        return f"{state} over the ranks of each node; gradients are averaged between nodes"
    groups = f"{plan.replicas} group{'s' if plan.replicas > 1 else ''} of ranks"
    return f"{state} inside each of {groups}; gradients are averaged between groups"


def _precision(plan: Plan) -> str:
    if plan.precision == "fp32":
        return "nothing is cast: computed as the model's parameters are, float32 in general"
    if plan.precision == "fp8":
        slow = "" if plan.compile else "; without compile that is slower than bf16"
        return (
            f"the products of large linear layers are computed in float8 (torchao, {plan.fp8_recipe}), the output "
            f"layer and all else in bfloat16{slow}"
        )
    kind = _TYPES[plan.precision]
    scaled = "; the loss is scaled, and a step with an overflow is skipped" if plan.precision == "fp16" else ""
    if plan.strategy in SHARDED:
        return f"blocks are gathered and computed in {kind}; the optimizer steps in the parameters' own type{scaled}"
    return f"autocast: matrix products in {kind}; parameters keep their own type{scaled}"


def _accumulate(plan: Plan, kind: str) -> str:
    when = "each of them" if plan.exchange == "each" else "the last of them only"
    sent = "" if plan.strategy == "none" else f"; gradients are exchanged in {when}"
    return f"an optimizer step every {plan.accumulate} micro-batches{sent}"


def _clip(plan: Plan, kind: str) -> str:
    whole = " (that of all shards together)" if plan.strategy in SHARDED else ""
    return f"before each step gradients are scaled down to this norm{whole}, if theirs is larger"


def _ema(plan: Plan, kind: str) -> str:
    return "each step is averaged into a second copy of the weights, which `with nbdist.averaged(model):` swaps in"


def _compile(plan: Plan, kind: str) -> str:
    what = "each block is compiled; equal blocks share the code"
    again = "; a graph is recorded again when parameters are gathered elsewhere, so the first steps are slow"
    if plan.strategy not in SHARDED:
        what, again = "the whole model is compiled, in its first step", ""
    return what + _MODES.get(plan.compile, "") + (again if plan.compile in CUDA_GRAPHS else "")


_MODES: Mapping[bool | str, str] = {
    "reduce-overhead": "; CUDA graphs spare the launching of kernels, for more memory",
    "max-autotune": "; kernels are timed against each other, which takes minutes, and CUDA graphs launch them",
    "max-autotune-no-cudagraphs": "; kernels are timed against each other, which takes minutes",
}


def _dynamic(plan: Plan, kind: str) -> str:
    if plan.compile_dynamic:
        return "sizes are symbols from the first step on: one code for all of them, a slower one"
    return "each new size of inputs is compiled by itself"


def _checkpointing(plan: Plan, kind: str) -> str:
    if plan.activation_checkpointing == "full":
        return "blocks keep only their inputs and compute the rest again in backward: less memory, more work"
    kept = (
        "expensive operations" if plan.activation_checkpointing == "selective" else "attention and every second product"
    )
    return f"blocks keep the results of {kept} and compute the others again in backward"


def _budget(plan: Plan, kind: str) -> str:
    if plan.compile:
        return (
            "the compiler keeps what is slowest to compute again, up to this share, and computes the rest in backward"
        )
    return "this share of the blocks keeps its activations; the others are computed again in backward"


def _offload(plan: Plan, kind: str) -> str:
    what = (
        "the inputs of blocks wait"
        if plan.activation_checkpointing == "full"
        else "what blocks keep for backward waits"
    )
    return f"{what} in pinned CPU memory until backward: less memory on the GPU, more traffic to the CPU"


def _hook(plan: Plan, kind: str) -> str:
    if plan.comm_hook in ("fp16", "bf16"):
        return f"gradients travel as {_TYPES[plan.comm_hook]}: half the bytes of float32"
    options = plan.comm_hook_options
    what = "each bucket as one matrix" if plan.comm_hook.startswith("batched") else "each parameter by itself"
    rank, start = options.get("matrix_approximation_rank", 1), options.get("start_powerSGD_iter", 1000)
    return f"from step {start} on gradients travel as factors of rank {rank}, {what}"


def _blocks(plan: Plan, kind: str) -> str:
    if callable(plan.shard_by):
        return "this function says which modules are blocks"
    return f"each module of class {show(plan.shard_by).replace(', ', ' or ')} is a block"


def _reshard(plan: Plan, kind: str) -> str:
    if plan.reshard:
        return "parameters are freed after forward and gathered again for backward"
    return "parameters stay gathered from forward to backward: less traffic, more memory"


def _exchange(plan: Plan, kind: str) -> str:
    if plan.accumulate == 1:
        return "nothing to do: each micro-batch makes a step"
    return "between micro-batches ranks keep shards of gradients, not whole ones: less memory, more traffic"


def _tf32(plan: Plan, kind: str) -> str:
    if not plan.tf32:
        return "float32 matrix products are exact"
    return "float32 matrix products keep 10 bits of the mantissa, and are faster"


def _seed(plan: Plan, kind: str) -> str:
    return f"all random generators start from {plan.seed}{' plus the rank' if plan.seed_per_rank else ', on all ranks'}"


def _on_gpus(tell: str | Teller) -> Teller:
    """For a setting that does nothing on ranks without a GPU."""

    def teller(plan: Plan, kind: str) -> str:
        if kind == "cpu":
            return "nothing to do: these ranks have no GPU"
        return tell if isinstance(tell, str) else tell(plan, kind)

    return teller


# The settings that have a row of their own, if they are set. The strategy's row tells of bucket_mb and replicas,
# others of comm_hook_options and seed_per_rank.
_TELLERS: dict[str, str | Teller] = {
    "accumulate": _accumulate,
    "clip_grad_norm": _clip,
    "ema": _ema,
    "compile": _compile,
    "compile_dynamic": _dynamic,
    "compile_fullgraph": "what would break the graph in two is an error",
    "activation_checkpointing": _checkpointing,
    "activation_budget": _budget,
    "activation_offload": _offload,
    "comm_hook": _hook,
    "find_unused_parameters": "each backward looks for parameters without a gradient, which takes time",
    "static_graph": "every step has the same graph, so DDP learns its order once",
    "gradient_as_bucket_view": "gradients are copied into the buckets, which takes their memory twice",
    "sync_batchnorm": "BatchNorm layers use the mean and the variance over all ranks",
    "shard_by": _blocks,
    "reshard": _reshard,
    "prefetch": lambda plan, kind: f"blocks are gathered {plan.prefetch} ahead of the one that computes",
    "exchange": _exchange,
    "offload": _on_gpus("parameters, gradients and optimizer state live in CPU memory, where the optimizer steps"),
    "local_sgd_steps": lambda plan, kind: (
        f"parameters are averaged every {plan.local_sgd_steps} steps, gradients never"
    ),
    "seed": _seed,
    "deterministic": "only deterministic algorithms; an operation that has none raises",
    "tf32": _on_gpus(_tf32),
    "numa": _on_gpus("each rank is bound to the cores and the memory next to its GPU"),
    "gc_interval": lambda plan, kind: f"garbage is collected every {plan.gc_interval} steps, on all ranks at once",
    "dispatch": "rank 0 alone reads the data, and hands each rank its part",
    "even_batches": "ranks may see one batch more or less than others",
}
