"""Another default group in place of the one that there was, of more or fewer ranks; what becomes of the other groups.

Independent of models or cells. What connects the new group is `Collectives.renew`, on all its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.base.ranks import describe_ranks
from nbdist.worker.groups import torch_groups
from nbdist.worker.groups.flight_record import group_label
from nbdist.worker.groups.process_groups import Collectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GONE = (
    "this process group was created before the number of ranks changed (`%distributed shrink`, `grow`): create it "
    "again with `dist.new_group(...)` on all ranks, and create device meshes and sharded models again, too"
)


@dataclass(frozen=True)
class ResizedGroups:
    """What has changed.

    Attributes:
        before: The old default group; None if there was none.
        now: The new one.
        dropped: Other groups that can't be used any more, in words.
        kept: The groups that were given up. A gloo group whose last owner is a reducer ends its threads with Python's
            lock held, and hangs: to be let go of when no model has them any more.
    """

    before: ProcessGroup | None = None
    now: ProcessGroup | None = None
    dropped: list[str] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


def resize_groups(
    collectives: Collectives, name: str, numbers: Mapping[int, int], rank: int, size: int
) -> ResizedGroups:
    """Make another default group, with stand-ins for its backends. On the main thread, while nothing runs.

    Groups of ranks that all stay go on, under their new numbers; the others are dropped, and the old default one.

    Args:
        collectives: The groups of this rank.
        name: Of the new group, the same on all ranks, and one that no group has had; "": make none.
        numbers: The new numbers of the ranks that stay, by their old ones.
        rank: The new number of this rank.
        size: The new number of ranks.

    Raises:
        RuntimeError: torch lacks what this takes.
    """
    living = torch_groups.living()
    old_name = collectives.name_of(None)
    before, now = None, None
    if name and old_name:
        recipe = torch_groups.recipe(old_name, living[old_name])
        before = torch_groups.unset_default()
        collectives.stand_in(name, msgspec.structs.replace(recipe, members=list(range(size))), rank)
        now = torch_groups.living()[name]
    others = {known: group for known, group in living.items() if known != old_name}
    lost = {known: group for known, group in others.items() if not numbers.keys() >= set(torch_groups.members(group))}
    for known, group in others.items():
        if known not in lost:
            torch_groups.renumber(group, numbers)
    dropped = [_describe(known, group) for known, group in lost.items()]
    for known in [*lost, *([old_name] if now is not None else [])]:
        collectives.drop(known, _GONE)
    return ResizedGroups(before, now, dropped, [before, *lost.values()])


def _describe(name: str, group: ProcessGroup) -> str:
    label = group_label(name, str(getattr(group, "group_desc", "")))
    return f"{label} (of {describe_ranks(torch_groups.members(group))} before)"
