"""Pipeline parallelism: a language model of transformers is cut into stages of layers, each on ranks of its own.

The model stays the user's object, of the user's class, with the names of the whole; parts that other ranks have are
stand-ins, through which hidden states pass unchanged. So each stage computes by the model's own forward. Independent
of plans, and of how batches pass through stages.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from nbdist.base.text import counted
from nbdist.errors import UsageError
from nbdist.train.pipeline.stages import Stages, TensorForm, mark
from nbdist.train.structure.language_model import has_causal_loss, is_from_transformers

_PARTS = {"embed_tokens", "layers", "norm"}  # of the model below the head, by the names of transformers' pp_plan


class Elsewhere(nn.Module):
    """Stands for a part that another stage has.

    Args:
        part: What it stands for.
    """

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        kind = getattr(part, "attention_type", None)  # which models ask their layers for
        if kind is not None:
            self.attention_type = kind

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what came in."""
        return hidden


class Layers(NamedTuple):
    """The layers of one stage: from the first to before the last."""

    start: int
    stop: int


def layers_of_stages(layers: int, stages: int) -> list[Layers]:
    """Return the layers of each stage, so that stages have about as much to compute.

    The embedding and the head count as a layer each. What does not divide goes to stages in the middle first.

    Args:
        layers: How many the model has, at least one for each stage.
        stages: How many there are to be.
    """
    each, left = divmod(layers + 2, stages)
    counts = [each] * stages
    for stage in [*range(1, stages - 1), 0, stages - 1][:left]:
        counts[stage] += 1
    counts[0] -= 1
    counts[-1] -= 1
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [Layers(end - count, end) for end, count in zip(ends, counts, strict=True)]


# --- which models


def refuse_unfit(model: nn.Module, stages: int) -> None:
    """Refuse a model that can't be cut into so many stages.

    Args:
        model: As its author wrote it.
        stages: How many there are to be.

    Raises:
        UsageError: With the reason.
    """
    if why := _why_not(model):
        raise UsageError(f"pp ({stages}) can't cut {type(model).__name__} into stages: {why}. Set pp to 1")
    layers = len(_body(model).layers)
    if layers < stages:
        raise UsageError(
            f"pp ({stages}) is more than the {counted(layers, 'layer')} of {type(model).__name__}: set pp to {layers} "
            "or less"
        )


def _why_not(model: nn.Module) -> str:
    """Return why a model can't be cut; empty if it can."""
    if not is_from_transformers(model):
        return "only models of transformers say which parts they consist of"
    base, plan = _body(model), getattr(model.config, "base_model_pp_plan", None)
    if base is model or set(plan or ()) != _PARTS or any(not hasattr(base, name) for name in _PARTS):
        return "it does not consist of an embedding, layers, a norm and a head (base_model_pp_plan of its config)"
    if not isinstance(getattr(model, "lm_head", None), nn.Linear) or not _computes_usual_loss(model):
        return "it does not compute its loss by transformers' ForCausalLMLoss of the logits of its lm_head"
    if getattr(model.config, "output_router_logits", False):
        return "the loss that balances its experts (output_router_logits) needs all stages"
    cut = [base.embed_tokens, base.layers, base.norm, model.lm_head]
    inside = {id(parameter) for part in cut for parameter in part.parameters()}
    if other := next((name for name, each in model.named_parameters() if id(each) not in inside), None):
        return f"{other} belongs to none of these: its embedding, layers, norm and head"
    if other := next(
        (name for name in model.state_dict() if name not in dict(model.named_parameters(remove_duplicate=False))), None
    ):
        return f"it keeps {other}, which is not a parameter"
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return "it is on the meta device, and stages can't read weights by themselves yet: build it on the CPU"
    return "" if _passes_hidden_states_on(model) else "it computes something between its layers"


def _body(model: Any) -> Any:
    return model.base_model


def _computes_usual_loss(model: Any) -> bool:
    try:
        source = inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
    is_usual = re.search(r"self\.loss_function\(\s*(logits=)?logits,\s*(labels=)?labels,", source) is not None
    return is_usual and has_causal_loss(model)


@torch.no_grad()
def _passes_hidden_states_on(model: Any) -> bool:
    """Return whether a model without its layers returns the hidden states that it is given, as a middle stage must."""
    weight = model.lm_head.weight
    hidden = torch.linspace(-1, 1, 2 * model.config.hidden_size, dtype=weight.dtype, device=weight.device)
    hidden = hidden.reshape(1, 2, -1)
    with _without_layers(model), contextlib.suppress(Exception):  # of a model that asks its layers for more
        passed = _body(model)(inputs_embeds=hidden, use_cache=False, return_dict=True).last_hidden_state
        return bool(torch.equal(passed, hidden))
    return False


@contextlib.contextmanager
def _without_layers(model: Any) -> Iterator[None]:
    base = _body(model)
    layers, norm = base.layers, base.norm
    base.layers, base.norm = nn.ModuleList(Elsewhere(layer) for layer in layers), Elsewhere()
    try:
        yield
    finally:
        base.layers, base.norm = layers, norm


# --- the model


def cut(model: Any, stages: Stages, share: Callable[[nn.Module], None]) -> list[torch.Tensor]:
    """Leave a rank's stage of a model.

    Args:
        model: As its author wrote it, not refused.
        stages: Which stage is this rank's. It learns of the whole model.
        share: Called with each part on all ranks in the same order, before it may be dropped.

    Returns:
        The parameters that are on other ranks only.
    """
    base = _body(model)
    layers = layers_of_stages(len(base.layers), stages.count)
    before = dict(model.named_parameters())
    is_tied = model.lm_head.weight is base.embed_tokens.weight
    first, last = stages.is_first, stages.is_last
    stages.forms = _forms(model, layers)
    stages.size = sum(parameter.numel() for parameter in before.values())
    mark(model, stages)
    if is_tied and (first or last):
        stages.tied = f"{model.base_model_prefix}.embed_tokens.weight"
    for part in (base.embed_tokens, base.norm, model.lm_head):
        share(part)
    own = layers[stages.number]
    for number, layer in enumerate(base.layers):
        share(layer)
        if not own.start <= number < own.stop:
            base.layers[number] = Elsewhere(layer)
    if not first and not (last and is_tied):  # the last stage keeps a tied embedding for its name
        base.embed_tokens = Elsewhere()
    if not last:
        base.norm, model.lm_head = Elsewhere(), Elsewhere()
    left = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in before.values() if id(parameter) not in left]


def _forms(model: Any, layers: list[Layers]) -> dict[str, TensorForm]:
    """Return the tensors of a whole model, each once, by name."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    prefix = f"{model.base_model_prefix}.layers."

    def stage_of(name: str) -> int:
        if name.startswith(prefix):
            number = int(name.removeprefix(prefix).split(".")[0])
            return next(stage for stage, own in enumerate(layers) if own.start <= number < own.stop)
        return 0 if name.startswith(f"{model.base_model_prefix}.embed_tokens.") else len(layers) - 1

    return {
        name: TensorForm(tensor.shape, tensor.dtype, stage_of(name))
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
