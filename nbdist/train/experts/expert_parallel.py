"""Expert parallelism: each rank of a group has some of a mixture's experts, and tokens travel to them and back.

Which modules are experts the model itself says (transformers' `ep_plan`), or the user. Each rank has tokens of its own.
Independent of plans, of sharding, and of how a model chooses experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from nbdist.base.text import counted
from nbdist.errors import UsageError
from nbdist.train.experts.gathered import showing_local
from nbdist.train.trial_ranks import have_values

# As transformers names them: of a module whose tokens are exchanged, and of a parameter that begins with [expert, ...].
_EXCHANGED, _OF_EXPERTS = "ep_dispatch_experts", "grouped_gemm"
_EXCHANGE = "_nbdist_exchange"


# --- which models


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose experts can be divided, by name; none if the model does not say which they are."""
    patterns = getattr(model, "ep_plan", None)
    if not isinstance(patterns, Mapping):
        return {}
    named = [pattern for pattern, style in patterns.items() if style == _EXCHANGED]
    return {name: module for name, module in model.named_modules() if any(_fits(each, name) for each in named)}


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(r"[^.]+".join(re.escape(part) for part in pattern.split("*")), name) is not None


def refuse_unfit(model: nn.Module, ep: int, shards: int) -> None:
    """Refuse a model whose experts can't be divided among so many ranks.

    Args:
        model: As its author wrote it.
        ep: Among how many.
        shards: How many ranks have the same experts, and shard them.

    Raises:
        UsageError: With the reason.
    """
    experts = experts_of(model)
    if not experts:
        raise UsageError(
            f"ep ({ep}) divides experts, and {type(model).__name__} does not say that it has any: set ep to 1. A model "
            'of your own says so by ep_plan, such as {"layers.*.experts": "ep_dispatch_experts", '
            '"layers.*.experts.up": "grouped_gemm"}'
        )
    named = [pattern for pattern, style in model.ep_plan.items() if style == _OF_EXPERTS]  # type: ignore[union-attr, operator]
    for name, module in experts.items():
        parameters = dict(module.named_parameters(name))
        if others := [each for each in parameters if not any(_fits(pattern, each) for pattern in named)]:
            raise UsageError(
                f"ep ({ep}) can't divide the experts of {name}: the model's ep_plan does not say that "
                f"{', '.join(others)} begins with a dimension of experts. Set ep to 1"
            )
        _refuse_other_numbers(name, parameters)
        for each, parameter in parameters.items():
            _refuse_indivisible(each, parameter, ep, shards)


def _refuse_other_numbers(name: str, parameters: Mapping[str, nn.Parameter]) -> None:
    counts = {each: parameter.shape[0] if parameter.ndim else 0 for each, parameter in parameters.items()}
    if len(set(counts.values())) != 1:
        told = ", ".join(f"{each} of {count}" for each, count in counts.items()) or "it has no parameters"
        raise UsageError(
            f"ep can't divide {name}: all its parameters must be of the same number of experts, but {told}. "
            "Name another module in ep_plan, or set ep to 1"
        )


def _refuse_indivisible(name: str, parameter: nn.Parameter, ep: int, shards: int) -> None:
    count = parameter.shape[0]
    if count % ep:
        fitting = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise UsageError(
            f"{name} is of {counted(count, 'expert')}, which can't be divided by ep ({ep}): set ep to one of {fitting}"
        )
    if shard_dimension(parameter.shape, ep, shards) is None:
        raise UsageError(
            f"{name} is {list(parameter.shape)}: with ep ({ep}) the {shards} ranks that have the same experts shard "
            f"them, and {shards} divides neither {count // ep} nor another of these sizes. Set ep to another number"
        )


def shard_dimension(shape: Sequence[int], ep: int, shards: int) -> int | None:
    """Return by which dimension ranks with the same experts shard a parameter of all of them; None: by none.

    Args:
        shape: Of the parameter, with all experts.
        ep: Among how many ranks experts are divided.
        shards: How many ranks have the same.
    """
    own = [shape[0] // ep, *shape[1:]]
    return next((dimension for dimension, size in enumerate(own) if size % shards == 0), None)


# --- the experts


def divide(experts: nn.Module, mesh: DeviceMesh, group: Callable[[], dist.ProcessGroup]) -> Exchange:
    """Leave this rank's experts in a module.

    All ranks have the same values before. Gradients become the mean over the ranks of the group, as those of parameters
    that all of them have.

    Args:
        experts: Called with tokens, and for each of them the numbers and the weights of its experts.
        mesh: The ranks, in one dimension.
        group: Returns their group.

    Returns:
        What is to take the place of its forward.
    """
    names = [name for name, _ in experts.named_parameters()]
    for name in names:
        parameter = experts.get_parameter(name)
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
        count = parameter.shape[0]
    experts.__class__ = showing_local(type(experts), tuple(names))
    if "num_experts" in vars(experts):
        experts.num_experts = count // mesh.size()  # type: ignore[assignment]
    exchange = Exchange(group, count, mesh.device_type)
    setattr(experts, _EXCHANGE, exchange)
    return exchange


def exchanges_of(model: nn.Module) -> dict[str, Exchange]:
    """Return what exchanges the tokens of experts that were divided, by the name of their module."""
    found = ((name, vars(module).get(_EXCHANGE)) for name, module in model.named_modules())
    return {name: exchange for name, exchange in found if exchange is not None}


class Exchange:
    """What takes the place of the forward of experts: tokens travel to theirs, and back.

    Args:
        group: As of `divide`.
        count: The number of all experts.
        device: On which tokens are.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], count: int, device: str) -> None:
        self._group = group
        self._count = count
        self._tokens = torch.zeros(count, dtype=torch.long, device=device)

    def take_tokens(self) -> torch.Tensor:
        """Return how many of this rank's tokens each expert has got since the last call."""
        taken, self._tokens = self._tokens, torch.zeros_like(self._tokens)
        return taken

    def __call__(
        self,
        original: Callable[..., Any],
        experts: nn.Module,
        /,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Call experts with the tokens of all ranks that are theirs, and return what became of this rank's."""
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen)
        group = self._group()
        if have_values(group):
            sent = torch.zeros_like(self._tokens).scatter_add_(0, chosen, torch.ones_like(chosen))
            if torch._C._current_graph_task_id() == -1:  # else a checkpointed block is computed again
                self._tokens += sent
            routes = _routes(sent, group)
        else:
            routes = _even_routes(chosen, group)
        tokens = _travel(hidden_states[order // top_k_index.size(-1)], routes, routes.ranks)
        computed = _computed(original, experts, tokens, routes.experts)
        back = _travel(computed, routes.reversed(), 1 / routes.ranks)
        results = torch.empty_like(back)
        results[order] = back
        weighted = results.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=1).to(hidden_states.dtype)


def _computed(
    original: Callable[..., Any], experts: nn.Module, tokens: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """Return what each token's one expert makes of it. Without tokens all that backward needs is still there."""
    if len(tokens):
        result: torch.Tensor = original(experts, tokens, numbers[:, None], tokens.new_ones(len(tokens), 1))
        return result
    empty = tokens.sum(dim=0, keepdim=True)
    nothing: torch.Tensor = original(experts, empty, numbers.new_zeros(1, 1), tokens.new_ones(1, 1))
    return nothing[:0]


class _Routes(NamedTuple):
    """How tokens, in the order of their experts, travel among the ranks of a group.

    Attributes:
        group: The ranks.
        sent: How many this rank sends to each.
        received: How many it gets from each.
        experts: The number of the expert of each token that it gets, among its own.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    experts: torch.Tensor

    @property
    def ranks(self) -> int:
        return len(self.sent)

    def reversed(self) -> _Routes:
        return self._replace(sent=self.received, received=self.sent)


def _routes(tokens: torch.Tensor, group: dist.ProcessGroup) -> _Routes:
    """Return the routes of tokens, of which each of all experts gets so many."""
    ranks = dist.get_world_size(group)
    sent = tokens.view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sent_rows, received_rows = torch.stack([sent.sum(dim=1), received.sum(dim=1)]).tolist()  # waits for the GPU, once
    own = torch.arange(sent.shape[1], device=sent.device).repeat(ranks)
    numbers = own.repeat_interleave(received.reshape(-1), output_size=sum(received_rows))
    return _Routes(group, sent_rows, received_rows, numbers)


def _even_routes(chosen: torch.Tensor, group: dist.ProcessGroup) -> _Routes:
    """Return the routes in an estimate, which assumes that all experts get the same number of tokens."""
    ranks, rows = dist.get_world_size(group), len(chosen)
    to_each = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    return _Routes(group, to_each, to_each, torch.zeros_like(chosen))


class _Travel(torch.autograd.Function):
    """Rows of tensors on their routes; their gradients travel back, multiplied by a factor.

    Experts get the gradients of the tokens of all ranks, where other parameters get the mean over ranks. So what
    reaches the experts is divided by the number of ranks, and what leaves them multiplied again.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, routes: _Routes, factor: float) -> torch.Tensor:
        ctx.routes, ctx.factor = routes, factor
        return _travelled(rows, routes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _travelled(gradient, ctx.routes.reversed()) * ctx.factor, None, None


def _travel(rows: torch.Tensor, routes: _Routes, factor: float) -> torch.Tensor:
    return _Travel.apply(rows, routes, factor)  # type: ignore[no-any-return, no-untyped-call]


def _travelled(rows: torch.Tensor, routes: _Routes) -> torch.Tensor:
    arrived = rows.new_empty(sum(routes.received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), routes.received, routes.sent, group=routes.group)
    return arrived
