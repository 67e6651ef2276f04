"""Sequence parallelism: where layers are not divided, each rank of a tensor parallel group has some of the tokens.

Between the layers that tensor parallelism divides, as in norms, all ranks of a group would compute the same for all
tokens, and keep it for backward. Whole sequences are gathered where a divided layer takes them, and what comes out of
it is summed for this rank's tokens only. Independent of plans. Method: Korthikanti et al., arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from nbdist.errors import UsageError
from nbdist.train.structure.language_model import is_from_transformers
from nbdist.train.structure.tensor_parallel import Whole, own_storage

_TOKENS = 1  # the dimension of hidden states: batch, tokens, features


def refuse_unfit(model: nn.Module, blocks: Sequence[nn.Module], styles: Mapping[str, str]) -> None:
    """Refuse a model whose tokens can't be divided between its layers.

    Args:
        model: As its author wrote it.
        blocks: Its blocks, in the order in which they are called.
        styles: The style of each module that is divided, by name.

    Raises:
        UsageError: With the reason.
    """
    if why := _why_not(model, blocks, styles):
        raise UsageError(
            f"sequence_parallel can't divide the tokens of {type(model).__name__}: {why}. Set it to False: tp alone "
            "can divide this model"
        )


def _why_not(model: Any, blocks: Sequence[nn.Module], styles: Mapping[str, str]) -> str:
    if not is_from_transformers(model):
        return "only models of transformers call their blocks in a way that is known"
    if len({type(block) for block in blocks}) != 1:
        return f"its blocks must be of one class, and are of {len({type(block) for block in blocks})}"
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        if why := _why_not_block(block, names, styles):
            return why
    return ""


def _why_not_block(block: nn.Module, names: Mapping[nn.Module, str], styles: Mapping[str, str]) -> str:
    parts = _parts(block, names, styles)
    inside = {module for part in parts for module in part.modules()}
    if not parts or block in parts:
        return f"{names[block]} has no modules of their own for the layers that are divided"
    for module in block.modules():
        if any(f"{names[module]}.{name}" in styles for name, _ in module.named_parameters(recurse=False)):
            return f"{names[module]} has experts"
        if module in inside or next(module.parameters(recurse=False), None) is None:
            continue
        if names[module] in styles or "norm" not in type(module).__name__.lower():
            return f"{names[module]} ({type(module).__name__}) is not a norm, and may need all tokens"
    return ""


def _parts(block: nn.Module, names: Mapping[nn.Module, str], styles: Mapping[str, str]) -> list[nn.Module]:
    """Return the smallest modules in a block that have layers of both kinds: attention and MLP."""

    def has(module: nn.Module, kind: str) -> bool:
        return any(styles.get(names[each], "").startswith(kind) for each in module.modules())

    both = [module for module in block.modules() if has(module, "colwise") and has(module, "rowwise")]
    return [module for module in both if not any(other in both for other in module.modules() if other is not module)]


def divide_tokens(
    model: nn.Module, blocks: Sequence[nn.Module], styles: Mapping[str, str], mesh: DeviceMesh
) -> dict[str, ParallelStyle]:
    """Have the blocks of a model divide tokens among the ranks that divide its layers.

    Args:
        model: Not refused, and not divided yet.
        blocks: As of `refuse_unfit`, and so are the styles.
        mesh: The ranks.

    Returns:
        How modules in blocks must be divided instead of in their own style, by name.
    """
    names = {module: name for name, module in model.named_modules()}
    tokens = _Tokens(mesh)
    blocks[0].register_forward_pre_hook(tokens.divide, with_kwargs=True)
    blocks[-1].register_forward_hook(tokens.gather)
    return {name: style for block in blocks for name, style in _styles_in(block, names, styles, tokens)}


def _styles_in(
    block: nn.Module, names: Mapping[nn.Module, str], styles: Mapping[str, str], tokens: _Tokens
) -> Iterator[tuple[str, ParallelStyle]]:
    parts = _parts(block, names, styles)
    inside = {module for part in parts for module in part.modules()}
    for part in parts:
        part.register_forward_pre_hook(tokens.bring_together, with_kwargs=True)
    for module in block.modules():
        style = styles.get(names[module], "")
        if style.startswith("rowwise"):
            taken = None if style == "rowwise" else Replicate()  # others cut their part from a whole input
            yield names[module], RowwiseParallel(input_layouts=taken, output_layouts=Shard(_TOKENS))
        elif module not in inside and next(module.parameters(recurse=False), None) is not None:
            yield names[module], Whole(Partial())


class _Tokens:
    """Hooks that divide hidden states by tokens, and gather them.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._length = 0

    def divide(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave this rank's tokens of what the first block is called with."""
        hidden, others = _taken(args, kwargs)
        self._length = hidden.shape[_TOKENS]
        if torch.is_grad_enabled() and self._length % self._mesh.size():
            raise UsageError(
                f"sequences of {self._length} tokens can't be divided by tp ({self._mesh.size()}), as "
                "sequence_parallel needs in training: pad them, as with pad_to_multiple_of in transformers' collators, "
                "or set sequence_parallel to False"
            )
        return _given(self._brought(hidden, Replicate(), Shard(_TOKENS)).to_local(), others, kwargs)

    def bring_together(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a module all tokens, as a DTensor, so that gradients of all its layers are summed in one go."""
        hidden, others = _taken(args, kwargs)
        return _given(self._brought(hidden, Shard(_TOKENS), Replicate()), others, kwargs)

    def gather(self, block: nn.Module, args: object, result: Any) -> Any:
        """Return all tokens from the last block."""
        if isinstance(result, tuple):
            return (self.gather(block, args, result[0]), *result[1:])
        whole = self._brought(result, Shard(_TOKENS), Replicate()).to_local()
        return whole if torch.compiler.is_compiling() else own_storage(whole)  # what is compiled returns no views

    def _brought(self, hidden: torch.Tensor, here: Placement, there: Placement) -> DTensor:
        shape: dict[str, Any] = {}
        if not torch.is_grad_enabled():  # of any length, as when generating; blocks are not computed again then
            whole = torch.Size((hidden.shape[0], self._length, *hidden.shape[2:]))
            shape = {"shape": whole, "stride": torch.empty(whole, device="meta").stride()}
        return DTensor.from_local(hidden, self._mesh, [here], run_check=False, **shape).redistribute(placements=[there])


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return the hidden states that a module of transformers is called with, and its other positional arguments."""
    return (args[0], args[1:]) if args else (kwargs["hidden_states"], ())


def _given(hidden: torch.Tensor, others: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Return arguments with other hidden states."""
    if "hidden_states" in kwargs:
        return others, {**kwargs, "hidden_states": hidden}
    return (hidden, *others), kwargs
