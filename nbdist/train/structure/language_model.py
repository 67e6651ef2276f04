"""What a model of transformers says of itself, where a plan replaces a part of it. Independent of plans."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_from_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of transformers."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def has_causal_loss(model: Any) -> bool:
    """Return whether a model of transformers computes its loss by transformers' `ForCausalLMLoss`."""
    return bool(model.loss_function.__name__ == "ForCausalLMLoss")
