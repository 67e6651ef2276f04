"""How many collectives this process of a job has entered, so that ranks can be told to be in step, or not."""

from __future__ import annotations

import sys

Entered = dict[str, list[int]]  # by group; one number for each of its backends that counts


def entered_collectives() -> Entered:
    """Return the counts of all groups that it is in. To be called once torch has been imported."""
    if "torch.distributed" not in sys.modules:
        return {}
    from nbdist.worker.groups import torch_groups

    return {name: list(torch_groups.entered(group)) for name, group in torch_groups.living().items()}


def more_entered(now: Entered, before: Entered) -> Entered:
    """Return how many were entered between two counts; of groups that are in both."""
    return {
        name: [later - earlier for later, earlier in zip(now[name], before[name], strict=True)]
        for name in now.keys() & before.keys()
        if len(now[name]) == len(before[name])
    }


def is_ahead(own: Entered, other: Entered) -> bool:
    """Return whether a rank has entered a collective that another rank of the group has not."""
    return any(
        mine > theirs
        for name in own.keys() & other.keys()
        for mine, theirs in zip(own[name], other[name], strict=False)
    )
