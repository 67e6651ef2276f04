"""How evenly tokens are spread over the experts of a mixture. Independent of plans."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from nbdist.errors import UsageError
from nbdist.train.experts.expert_parallel import exchanges_of


def expert_load(model: nn.Module) -> dict[str, list[int]]:
    """Return how many tokens each expert has got since the last call, from all ranks. To be called on all ranks.

    >>> for name, tokens in nbdist.expert_load(model).items():
    ...     print(name, max(tokens) / (sum(tokens) / len(tokens)))

    Tokens are counted while the plan divides experts (`ep`), in training and evaluation; a token that is given to two
    experts counts for both.

    Args:
        model: As `prepare` returned it.

    Returns:
        For each module of experts, by name, the tokens of each expert, in the order of their numbers.

    Raises:
        UsageError: The experts of the model are not divided.
    """
    exchanges = exchanges_of(model)
    if not exchanges:
        raise UsageError(
            f"expert_load counts tokens on their way to other ranks, and the experts of {type(model).__name__} are not "
            "divided: prepare it with a plan whose ep is 2 or more"
        )
    found = {}
    for name, exchange in exchanges.items():
        tokens = exchange.take_tokens()
        dist.all_reduce(tokens)
        found[name] = tokens.tolist()
    return found
