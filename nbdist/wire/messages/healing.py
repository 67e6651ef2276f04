"""How ranks that have died are replaced, between the notebook, the controller, the agent and the ranks."""

from __future__ import annotations

import msgspec

from nbdist.wire.base.message import Message
from nbdist.wire.messages.life import Place, RankInfo


class GroupRecipe(msgspec.Struct, array_like=True, frozen=True):
    """What a new member of a process group must know to take its place.

    members: global ranks, in the order of their ranks in the group. description: torch's `group_desc`. kinds: of its
    backends, by device type. backend, config: as `get_backend` and `get_backend_config` have them. timeout: seconds.
    default: whether it is the default group.
    """

    members: list[int]
    description: str
    kinds: dict[str, str]
    backend: str
    config: str
    timeout: float
    default: bool


class Heal(Message, frozen=True):
    """Replace dead ranks by new processes, which take their places in all groups. kill: end those that live first.

    machines: whether to wait for other machines, if those of the ranks are lost.
    """

    ranks: list[int]
    kill: bool = False
    machines: bool = False


class Shrink(Message, frozen=True):
    """Go on without the ranks that have died, and without these, which are ended first: fewer ranks, renumbered."""

    ranks: list[int]


class Grow(Message, frozen=True):
    """Add ranks; all are numbered machine by machine afterwards.

    count: on each machine. gpus: of this machine, all that its ranks may use; None: none. nodes: which machines; empty:
    all. machines: instead, on so many that have yet to join.
    """

    count: int
    gpus: list[str] | None
    nodes: list[int] = []
    machines: int = 0


class GiveUpHeal(Message, frozen=True):
    """Stop a Heal that is under way; the newcomers end."""


class SetupCell(msgspec.Struct, frozen=True):
    """A cell that newcomers run: as of Execute. marked: by the user."""

    code: str
    number: int
    offset: int
    marked: bool
    ranks: list[int]


class Adopt(Message, frozen=True):
    """Take the place of a dead rank in its groups, of which each is made with stand-ins for its backends.

    recipes: of all groups that have a newcomer, by name.
    """

    recipes: dict[str, GroupRecipe]


class Replaced(Message, frozen=True):
    """The newcomers are up, and may be set up before they join their groups: collectives there do nothing yet.

    numbers: if they are more ranks, the numbers of those that were there, by the ones that these had. cells: what has
    run on the ranks so far, in its order.
    """

    ranks: list[RankInfo]
    cells: list[SetupCell]
    numbers: dict[int, int] = {}


class JoinGroups(Message, frozen=True):
    """The newcomers are set up: bring them into their groups."""


class Healed(Message, frozen=True):
    """The newcomers have joined their groups.

    generation: of the process groups from now on. groups: how many were rebuilt. text: what else there is to know.
    """

    generation: int
    groups: int
    text: str


class HealFailed(Message, frozen=True):
    """The ranks could not be replaced. Those that lived before are as they were, and no newcomer is left."""

    text: str


class Post(msgspec.Struct, frozen=True):
    """What a rank is among all.

    count: of ranks on its node. place: of these among all ranks. gpu: which of its node's GPUs it has, counted on from
    the first if there are fewer. gpus: that its node's ranks may use; None: as at the start.
    """

    rank: int
    count: int
    place: Place
    gpu: int
    gpus: list[str] | None = None


class Resize(Message, frozen=True):
    """Be one of another number of ranks, with a new default group that is yet to be connected.

    numbers: of all ranks that stay, by those that they had; the groups of others are given up.
    group: the name of the new default group; "": there is none.
    """

    post: Post
    numbers: dict[int, int]
    group: str


class Renumbered(Message, frozen=True):
    """From now on ranks have these numbers, by those that they had; the others are gone. ranks: all of them."""

    numbers: dict[int, int]
    ranks: list[RankInfo]


class Respawn(Message, frozen=True):
    """Fork a rank of an incarnation into a slot. life: the number of processes that the slot has had before."""

    incarnation: int
    slot: int
    life: int
    post: Post


class EndRanks(Message, frozen=True):
    """End the ranks in some slots of an incarnation by force."""

    incarnation: int
    slots: list[int]
