"""fp8 by torchao: which linear layers compute in it, and by which recipe. Independent of strategies or loops."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.planning.settings import SHARDED
from nbdist.train.structure.blocks import find_blocks

_CAPABILITY = (8, 9)
_MULTIPLE = 16  # the matrix sizes that the hardware takes


def refuse_small(model: nn.Module, plan: Plan) -> None:
    """Raise an error for a model without a layer that fp8 makes faster.

    Raises:
        UsageError: With what to set instead.
    """
    if plan.precision == "fp8" and not chosen_layers(model, plan):
        raise UsageError(
            f"precision 'fp8' does nothing in {type(model).__name__}: besides the output layer and tied weights it "
            f"has no linear layer that is large enough for the recipe {plan.fp8_recipe!r}. Set precision to 'bf16'"
        )


def chosen_layers(model: nn.Module, plan: Plan) -> list[str]:
    """Return the names of the linear layers that compute in fp8.

    Left out are the output layer, whose errors reach the loss at once; layers that share a weight, which would be torn
    apart; and those for which fp8 is slower than bf16.
    """
    holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    output = _output_layer(model, plan)
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and layer is not output
        and holders[id(layer.weight)] == 1
        and _is_large(layer.out_features, layer.in_features, plan.fp8_recipe)
    ]


def _output_layer(model: nn.Module, plan: Plan) -> nn.Module | None:
    """Return what a model of transformers says it is, else the last linear layer, if it is not a part of a block."""
    if callable(tell := getattr(model, "get_output_embeddings", None)):
        return tell()  # type: ignore[no-any-return]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inside = {part for block in find_blocks(model, plan.shard_by) for part in block.modules() if part is not block}
    return linear[-1] if linear and linear[-1] not in inside else None


def _is_large(rows: int, columns: int, recipe: str) -> bool:
    """Return whether a layer is large, by torchao's own measurements on an H100."""
    if rows % _MULTIPLE or columns % _MULTIPLE:
        return False
    if recipe == "tensorwise":
        return rows > 1024 or columns > 4096
    return rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)


def convert(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Let the chosen layers of a model compute in fp8, in place.

    Raises:
        UsageError: There is no torchao, or the device can't compute in fp8.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise UsageError("fp8 needs a GPU of compute capability 8.9 or more (L4, H100): use precision bf16 here")
    config = config_of(plan)
    from torchao.float8 import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        convert_to_float8_training,
    )

    chosen = set(chosen_layers(model, plan))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)


def config_of(plan: Plan) -> Any:
    """Return the settings of torchao for a plan's recipe.

    Raises:
        UsageError: There is no torchao, or it does not know the recipe.
    """
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError:
        raise UsageError("fp8 needs torchao: run `pip install torchao`, or use precision bf16") from None
    try:
        config: Any = Float8LinearConfig.from_recipe_name(plan.fp8_recipe)
    except ValueError:
        raise UsageError(
            f"the torchao that is installed has no recipe {plan.fp8_recipe!r}: run `pip install -U torchao`, or set "
            "fp8_recipe to 'tensorwise'"
        ) from None
    return dataclasses.replace(config, enable_fsdp_float8_all_gather=True) if _gathers_in_fp8(plan) else config


def after_step(models: Iterable[nn.Module], plan: Plan) -> None:
    """Compute the scales of all weights in one exchange, where each layer would make its own in the next forward."""
    if plan.precision != "fp8" or not _gathers_in_fp8(plan):
        return
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute: Any = precompute_float8_dynamic_scale_for_fsdp
    for model in models:
        precompute(model)


def _gathers_in_fp8(plan: Plan) -> bool:
    """Return whether shards are cast before they are gathered, which needs one scale per weight."""
    return plan.strategy in SHARDED and plan.fp8_recipe == "tensorwise"
