"""Context parallelism: ranks divide the sequences of each batch that a language model of transformers is called with.

The model is called with whole batches, and takes this rank's tokens of them. Its loss is that of the whole batch, the
mean over all tokens that have a label, wherever they are. Independent of plans and loaders.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.base.text import counted
from nbdist.errors import UsageError
from nbdist.train.sequences.sequence_parts import sum_of_losses
from nbdist.train.structure.language_model import has_causal_loss, is_from_transformers
from nbdist.train.structure.shadow import shadow
from nbdist.train.structure.shared_batch import SharedBatch
from nbdist.train.trial_ranks import have_values

_LAYERS = {"full_attention", "sliding_attention", "dense", "sparse", "mlp", "moe"}  # others mix tokens in other ways
_UNDIVIDED_LOSS = (
    "the model was called without labels, so each rank computes whole sequences, and cp saves no memory: pass labels, "
    "so that the model computes the loss"
)


# --- which models


def refuse_unfit(model: nn.Module, ranks: int, *, exchanges_heads: bool, tp: int = 1) -> None:
    """Refuse a model whose sequences can't be divided among so many ranks.

    Args:
        model: As its author wrote it.
        ranks: Among how many.
        exchanges_heads: Whether each rank is to compute attention of some heads.
        tp: Among how many ranks its heads are divided already.

    Raises:
        UsageError: With the reason.
    """
    if why := _why_not(model):
        raise UsageError(
            f"cp ({ranks}) can't divide the sequences of {type(model).__name__}: {why}. Set cp to 1; tp "
            "divides layers instead"
        )
    heads = getattr(model.config, "num_attention_heads", 0) // tp
    if exchanges_heads and heads % ranks:
        fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        left = f" that tp ({tp}) leaves to each rank" if tp > 1 else ""
        raise UsageError(
            f"{counted(heads, 'attention head')}{left} can't be divided by cp ({ranks}), as cp_method 'ulysses' needs: "
            f"set cp to one of {fitting}, or cp_method to 'gather'"
        )


def _why_not(model: nn.Module) -> str:
    """Return why a model's sequences can't be divided; empty if they can."""
    if not is_from_transformers(model):
        return "only models of transformers let nbdist replace their attention"
    if not (getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_sdpa", False)):
        return "its attention can't be replaced by transformers' AttentionInterface"
    config = model.config
    if why := _why_not_by_layers(model, config):
        return why
    if not has_causal_loss(model) or not _hands_on_to_loss(model):
        return "it does not compute its loss by transformers' ForCausalLMLoss, as loss_function(..., **kwargs)"
    if getattr(config, "output_router_logits", False):
        return "the loss that balances its experts (output_router_logits) can't be divided"
    return ""


def _why_not_by_layers(model: nn.Module, config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        return "it does not read from left to right only"
    if config.sub_configs:
        return "it takes more than text"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others or getattr(model, "_is_stateful", False) or any(isinstance(each, nn.Conv1d) for each in model.modules()):
        named = f" ({', '.join(others)})" if others else ""
        return f"some of its layers bring tokens together in other ways than attention does{named}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "PyTorch's attention does not cap its products (attn_logit_softcapping)"
    if kinds := sorted(_rotations(getattr(config, "rope_parameters", None)) & {"dynamic", "longrope"}):
        return f"its rotary embedding ({', '.join(kinds)}) depends on the length of what each rank has"
    return ""


def _hands_on_to_loss(model: nn.Module) -> bool:
    """Return whether its forward gives its loss what it was called with, as far as its source shows."""
    try:
        source = inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
    return re.search(r"self\.loss_function\(.*?\*\*kwargs", source, re.DOTALL) is not None


def _rotations(parameters: Any) -> set[str]:
    """Return the kinds of rotary embeddings: one for all layers, or one for each type of layer."""
    if not isinstance(parameters, Mapping):
        return set()
    own = {kind} if isinstance(kind := parameters.get("rope_type"), str) else set()
    return own.union(*(_rotations(each) for each in parameters.values()))


# --- the model


def divide_sequences(
    model: nn.Module,
    group: Callable[[], dist.ProcessGroup],
    *,
    exchanges_heads: bool,
    sharing: Callable[[], Sequence[Sequence[int]]],
    gather: Callable[[str], Sequence[str]],
) -> None:
    """Have a model take this rank's tokens of each batch that it is called with.

    Args:
        model: As its author wrote it, not refused.
        group: Returns the ranks among which sequences are divided.
        exchanges_heads: Whether each rank computes attention of some heads; else it gathers keys and values.
        sharing: Returns the ranks that get each batch.
        gather: Returns what each of all ranks says.
    """
    from nbdist.train.sequences import divided_attention

    divided_attention.register()
    model.set_attn_implementation(divided_attention.NAME)  # type: ignore[operator]
    names = tuple(inspect.signature(type(model).forward).parameters)[1:]
    shadow(model, "forward", _Forward(names, group, exchanges_heads, sharing, gather))


class _Forward:
    """What takes the place of a model's forward.

    Args:
        names: Of its arguments.
        group: As of `divide_sequences`, and so are the others.
    """

    def __init__(
        self,
        names: Sequence[str],
        group: Callable[[], dist.ProcessGroup],
        exchanges_heads: bool,
        sharing: Callable[[], Sequence[Sequence[int]]],
        gather: Callable[[str], Sequence[str]],
    ) -> None:
        self._names = names
        self._group = group
        self._exchanges_heads = exchanges_heads
        self._batches = SharedBatch("sequences", sharing, gather)
        self._warned = False

    def __call__(self, original: Callable[..., Any], model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model with this rank's tokens, if it is to compute the loss; else with all of them."""
        from nbdist.train.sequences import divided_batch
        from nbdist.train.sequences.divided_attention import dividing

        batch = {
            name: value for name, value in (*zip(self._names, args, strict=False), *kwargs.items()) if value is not None
        }
        if "labels" not in batch and "shift_labels" not in batch:
            self._warn_of_whole_sequences()
            return original(model, *args, **kwargs)
        divided_batch.refuse_unknown(batch)
        if "position_ids" not in batch and not _rotations(getattr(model.config, "rope_parameters", None)):
            raise UsageError(
                f"{type(model).__name__} counts positions by itself, which it can't for a part of a sequence: with cp, "
                "give it position_ids, such as torch.arange(length)[None]"
            )
        group = self._group()
        if have_values(group):
            self._batches.compare(batch)
        batch.setdefault("use_cache", _caches(model))
        part, layout = divided_batch.divided(batch, group, exchanges_heads=self._exchanges_heads)
        with dividing(layout):
            result = original(model, **part)
        if isinstance(result, tuple):
            return (sum_of_losses(result[0], group), *result[1:])
        result.loss = sum_of_losses(result.loss, group)
        return result

    def _warn_of_whole_sequences(self) -> None:
        if torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(_UNDIVIDED_LOSS, stacklevel=4)


def _caches(model: Any) -> bool:
    """Return whether a model makes a cache if nobody says so."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")  # the second is older, and warned of
    checkpoints = next((bool(getattr(model, name)) for name in names if hasattr(type(model), name)), False)
    return bool(getattr(model.config, "use_cache", False)) and not (model.training and checkpoints)
