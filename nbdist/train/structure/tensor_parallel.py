"""Tensor parallelism: each layer is divided among the ranks of a group, by torch's own styles.

Which layers, and how, the model itself says (transformers' `tp_plan`), or the user. All other parameters become
replicated DTensors of the same mesh, so that optimizers and clipping see one kind of parameter. Independent of plans,
and of what else is done to a model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from nbdist.base.text import counted, did_you_mean
from nbdist.errors import UsageError
from nbdist.train.experts import divided_experts
from nbdist.train.experts.divided_experts import PARAMETER_STYLES, DividedExperts
from nbdist.train.experts.gathered import showing_local


class Whole(ParallelStyle):
    """Each rank has all of the module's own parameters, and computes with plain tensors as if it were alone.

    Args:
        gradient: How gradients of the parameters relate on the ranks: equal, or to be summed.
    """

    def __init__(self, gradient: Placement) -> None:
        self._gradient = gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parameters = dict(module.named_parameters(recurse=False))
        for name, parameter in parameters.items():
            whole = distribute_tensor(parameter.detach(), device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
        module.__class__ = showing_local(type(module), tuple(parameters), self._gradient)
        return module


class _Apart(torch.autograd.Function):
    """The same tensor, but no view of another: FSDP warns of views that modules return, as in-place changes fail."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        whole: torch.Tensor = tensor.wait() if hasattr(tensor, "wait") else tensor  # of a collective under way
        place = whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride()
        return whole.new_empty(0).set_(*place)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


_GATHERED: Callable[[], ParallelStyle] = lambda: ColwiseParallel(output_layouts=Replicate())  # noqa: E731

# By the name that transformers gives a style, and which of a weight's dimensions is divided; None: none.
STYLES: Mapping[str, tuple[Callable[[], ParallelStyle], int | None]] = {
    "colwise": (ColwiseParallel, 0),
    "colwise_gather_output": (_GATHERED, 0),
    "colwise_rep": (_GATHERED, 0),
    "rowwise": (RowwiseParallel, 1),
    "rowwise_split_input": (lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "rowwise_rep": (lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "embedding_rowwise": (lambda: RowwiseParallel(input_layouts=Replicate()), 0),
    "replicated_with_grad_allreduce": (lambda: Whole(Partial()), None),
}


def styles_of(model: nn.Module) -> dict[str, str]:
    """Return the style of each module that is divided, and of each parameter of experts that are, by its name.

    Args:
        model: As its author wrote it. Its `tp_plan` has styles by name, where `*` stands for one part, as in
            "layers.*.attention.q".

    Raises:
        UsageError: The model does not say how, a name fits nothing, or nbdist does not know a style.
    """
    patterns = getattr(model, "tp_plan", None)
    if not isinstance(patterns, Mapping) or not patterns:
        raise UsageError(
            f"{type(model).__name__} does not say how tensor parallelism divides its layers: give it a style for each, "
            'like model.tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or leave tp at 1'
        )
    names, parameters = dict(model.named_modules()), dict(model.named_parameters())
    is_shared = hasattr(getattr(model, "config", None), "base_model_tp_plan")  # by models with and without a layer
    found: dict[str, str] = {}
    for pattern, style in patterns.items():
        fits = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*"))).fullmatch
        matching = [name for name in (*names, *parameters) if fits(name)]
        if not matching and not is_shared:
            raise UsageError(f"no module of {type(model).__name__} is named {pattern!r}{did_you_mean(pattern, names)}")
        if style not in STYLES and not is_shared and style not in _OF_EXPERTS:
            known = ", ".join([*STYLES, *_OF_EXPERTS])
            raise UsageError(f"unknown style {style!r} of {pattern}{did_you_mean(style, STYLES)} Known styles: {known}")
        found |= dict.fromkeys(matching, style)
    _refuse_unknown(model, found, parameters)
    return found | _tied_embeddings(model, found)


_OF_EXPERTS = (divided_experts.STYLE, *(style for style in PARAMETER_STYLES if style not in STYLES))


def _refuse_unknown(model: nn.Module, styles: Mapping[str, str], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a model that divides a layer in a way that is none of those known here."""
    experts = {name for name, style in styles.items() if style == divided_experts.STYLE and name not in parameters}
    for name, style in styles.items():
        owner = name.rpartition(".")[0]
        is_known = style in STYLES or name in experts
        if name in parameters:
            is_known = owner in experts and style in PARAMETER_STYLES and parameters[name].dim() == _EXPERT_DIMENSIONS
        if not is_known:
            raise UsageError(
                f"tp can't divide {type(model).__name__} yet: {name} is divided in the style {style!r}, which is not "
                "supported. Set tp to 1: fsdp alone can shard this model"
            )
    for name in experts:
        whole = [each for each, _ in model.get_submodule(name).named_parameters(name) if each not in styles]
        if whole:
            raise UsageError(
                f"tp can't divide {type(model).__name__} yet: its plan divides the experts of {name}, but not "
                f"{', '.join(whole)}. Set tp to 1: fsdp alone can shard this model"
            )


_EXPERT_DIMENSIONS = 3  # expert, rows, columns


def _tied_embeddings(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return styles for embeddings that share the weight of a head, which is divided: both must be, in the same way."""
    modules = dict(model.named_modules())
    divided = {
        id(modules[name].weight) for name, style in styles.items() if style.startswith("colwise") and name in modules
    }
    return {
        name: "embedding_rowwise"
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and id(module.weight) in divided and name not in styles
    }


def refuse_indivisible(model: nn.Module, styles: Mapping[str, str], size: int) -> None:
    """Refuse a model whose layers can't be divided into so many parts.

    Raises:
        UsageError: With the names and the numbers.
    """
    config = getattr(model, "config", None)
    for name, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key and value heads")):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            raise UsageError(
                f"{counted(count, what.removesuffix('s'))} can't be divided by tp ({size}): {_allowed(count)}"
            )
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, style in styles.items():
        if name in parameters:
            _refuse_indivisible_experts(name, style, parameters[name], size)
        if name not in modules or style not in STYLES:
            continue
        dimension, weight = STYLES[style][1], getattr(modules[name], "weight", None)
        if dimension is not None and weight is not None and weight.shape[dimension] % size:
            count = weight.shape[dimension]
            raise UsageError(
                f"{name} has a weight of {list(weight.shape)}, and {count} can't be divided by tp ({size}): "
                f"{_allowed(count)}, or pad it"
            )


def _refuse_indivisible_experts(name: str, style: str, parameter: torch.Tensor, size: int) -> None:
    count, matrices = divided_experts.dimension_of(style, parameter)
    if count % size:
        packed = f", and is {matrices} matrices of {count}" if matrices > 1 else ""
        raise UsageError(
            f"{name} is {list(parameter.shape)}{packed}, and {count} can't be divided by tp ({size}): {_allowed(count)}"
        )


def _allowed(count: int) -> str:
    fitting = [str(size) for size in range(1, min(count, 64) + 1) if count % size == 0]
    return f"set tp to one of {', '.join(fitting)}"


def divide(
    modules: Iterable[tuple[str, nn.Module]],
    styles: Mapping[str, str],
    mesh: DeviceMesh,
    returned: Collection[nn.Module],
    others: Mapping[str, ParallelStyle],
) -> None:
    """Divide modules among the ranks of a mesh of one dimension. All ranks have the same values, or none (meta).

    Args:
        modules: By name; what is below them is not looked at.
        styles: As of `styles_of`.
        mesh: The ranks.
        returned: Those of the modules whose result may be that of a module that FSDP gathers, which must be no view.
        others: What stands for the styles of some modules.
    """
    for name, module in modules:
        if next(module.parameters(recurse=False), None) is None:
            continue
        if name in others:
            parallelize_module(module, mesh, others[name], src_data_rank=None)
        elif styles.get(name) == divided_experts.STYLE:
            own = {each: styles[f"{name}.{each}"] for each, _ in module.named_parameters(recurse=False)}
            parallelize_module(module, mesh, DividedExperts(own), src_data_rank=None)
        elif name in styles:
            parallelize_module(module, mesh, STYLES[styles[name]][0](), src_data_rank=None)
            if module in returned or isinstance(module, nn.Embedding):  # compiled blocks read results that are there
                module.register_forward_hook(_take_apart)
        else:
            parallelize_module(module, mesh, Whole(Replicate()), src_data_rank=None)


def _take_apart(module: nn.Module, inputs: object, output: Any) -> Any:
    return own_storage(output) if isinstance(output, torch.Tensor) else output


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor as none that is a view of another, nor still on its way: FSDP warns of views."""
    return _Apart.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that has several."""
    places: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((module, name))
    return [found for found in places.values() if len(found) > 1]


def tie_again(tied: Iterable[list[tuple[nn.Module, str]]]) -> None:
    """Have places share their parameter again, which were divided one by one."""
    for (first, name), *others in tied:
        shared = first._parameters[name]
        for module, other in others:
            module._parameters[other] = shared
