"""Who comes to a set of ranks while it lives, and who leaves it: one replacement at a time.

A replacement of ranks whose machines are lost waits until others have come.

Decides whether they may come; `replacement` brings them in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.ranks.membership import Membership
from nbdist.controller.ranks.replacement import MembershipChange, Replacement
from nbdist.wire.messages.cells import Execute, InOrder
from nbdist.wire.messages.healing import Grow, Heal, HealFailed, Shrink
from nbdist.wire.messages.output import Notice
from nbdist.wire.messages.rank_processes import Ready

_NO_STORE = "the rendezvous store of this session has ended, so groups can't be rebuilt: `%distributed restart`"


class Invitations(Protocol):
    """What the table of nodes does for this module."""

    due_to_come: float

    def recall(self, counts: Mapping[int, int]) -> None:
        """Have other machines come in place of lost nodes, each of which had so many ranks."""

    def uninvite(self) -> None:
        """Let nobody in any more who is invited and has not come."""

    def call_for(self, count: int, ranks: int) -> None:
        """Have more machines come, each of which is to have so many ranks."""

    def call_again(self) -> None:
        """Have those come once more that are lost."""

    @property
    def came(self) -> list[int]:
        """Those that were called for, once all of them have come."""

    def let_go(self) -> None:
        """Do without them."""

    def keep(self) -> None:
        """Count them among the others."""


class Newcomers:
    """Those who come.

    Args:
        membership: Who the ranks are.
        nodes: Asks for other machines.
        patience: Seconds without progress after which a replacement fails.
    """

    def __init__(self, membership: Membership, nodes: Invitations, patience: float) -> None:
        self._membership = membership
        self._roster = membership.roster
        self._tell = membership.outbox.to_notebook
        self._nodes = nodes
        self._patience = patience
        self._store_lost = False
        self._replacement: Replacement | None = None
        self._waiting: Heal | Grow | None = None  # for machines

    @property
    def waiting(self) -> bool:
        """Whether a replacement waits for machines."""
        return self._waiting is not None

    # --- requests

    def heal(self, message: Heal, now: float) -> None:
        """Replace ranks, once there are machines for them."""
        if why := self._hindrance() or self._cannot_heal(message):
            self._tell(HealFailed(why))
            return
        self._waiting = message
        self.machine_lost()
        self.machine_came(now)

    def machine_came(self, now: float) -> None:
        """Begin the replacement that waits for machines, if none is missing."""
        message = self._waiting
        if isinstance(message, Grow):
            self._called_came(message, now)
            return
        if message is None or self._without_machine(message):
            return
        self._stop_waiting()
        if why := self._cannot_heal(message):  # others have died meanwhile
            self._tell(HealFailed(why))
        else:
            self._begin(MembershipChange(message.ranks, self._alive(message)), now)

    def machine_lost(self) -> None:
        """Have machines come that the replacement waits for, if any are missing."""
        if isinstance(self._waiting, Grow):
            self._nodes.call_again()
        if isinstance(self._waiting, Heal) and (ranks := self._without_machine(self._waiting)):
            where = self._roster.where
            lost = {where.node_of(rank) for rank in ranks}
            self._nodes.recall({node: where.shares[node].count for node in lost})

    def _called_came(self, message: Grow, now: float) -> None:
        """Add ranks on the machines that were called for, if none is missing."""
        if not self._nodes.came:
            return
        self._waiting = None
        self._nodes.uninvite()
        if why := self._cannot_grow(self._nodes.came, message.count):  # others have died meanwhile
            self._nodes.let_go()
            self._tell(HealFailed(why))
            return
        for node in self._nodes.came:
            self._membership.open(node)
        self._add(self._nodes.came, message, now)

    def _stop_waiting(self) -> None:
        called, self._waiting = isinstance(self._waiting, Grow), None
        if called:
            self._nodes.let_go()
        else:
            self._nodes.uninvite()

    def _alive(self, message: Heal) -> list[int]:
        return [rank for rank in message.ranks if not self._roster.ranks[rank].dead]

    def _without_machine(self, message: Heal) -> list[int]:
        return [rank for rank in message.ranks if not self._roster.where.has_node(rank)]

    def shrink(self, message: Shrink, now: float) -> None:
        """Go on without some ranks, and without those that have died."""
        leaving = {*message.ranks, *self._roster.dead()}
        staying = sorted(self._roster.ranks.keys() - leaving)
        if why := self._hindrance() or ("" if staying else "no rank would be left"):
            self._tell(HealFailed(why))
            return
        alive = sorted(rank for rank in message.ranks if not self._roster.ranks[rank].dead)
        self._begin(MembershipChange([], alive, {rank: number for number, rank in enumerate(staying)}), now)

    def grow(self, message: Grow, now: float) -> None:
        """Add ranks."""
        where = self._roster.where
        nodes = [] if message.machines else message.nodes or where.working()
        if why := self._hindrance() or self._cannot_grow(nodes, message.count):
            self._tell(HealFailed(why))
        elif message.machines:
            self._waiting = message
            self._nodes.call_for(message.machines, message.count)
        else:
            self._add(nodes, message, now)

    def _add(self, nodes: Sequence[int], message: Grow, now: float) -> None:
        where = self._roster.where
        newcomers = where.expect(dict.fromkeys(nodes, message.count), message.gpus)
        staying = {rank: where.numbers[rank] for rank in sorted(self._roster.ranks)}
        coming = {rank: where.numbers[rank] for rank in newcomers}
        self._begin(MembershipChange(newcomers, [], staying, coming), now)

    def _begin(self, change: MembershipChange, now: float) -> None:
        self._replacement = Replacement(self._membership, change, self._patience, now)
        self.tick(now)

    def _hindrance(self) -> str:
        """Return why nobody can come or go now; "" if they can."""
        if self._replacement is not None or self._waiting is not None:
            return "ranks are already being replaced, added, or removed: wait until that is done"
        if not self._roster.up or self._roster.ending:
            return "the ranks are about to start or end. Try again afterwards"
        return _NO_STORE if self._store_lost else ""

    def _cannot_heal(self, message: Heal) -> str:
        """Return why ranks can't be replaced; "" if they can."""
        alive, gone = self._alive(message), self._without_machine(message)
        if alive and not message.kill:
            return f"{describe_ranks(alive)} must end before being replaced: `%distributed heal --kill` does both"
        if not set(self._roster.ranks) - set(message.ranks) - set(self._roster.dead()):
            return "no other rank is left to restore the process groups from: `%distributed restart` starts fresh ranks"
        if gone and not message.machines:
            return (
                f"the machine that {describe_ranks(gone)} ran on is lost: `%distributed heal` in a cell waits for "
                "another machine, `%distributed shrink` continues with the other ranks"
            )
        return ""

    def _cannot_grow(self, nodes: Sequence[int], count: int) -> str:
        """Return why so many ranks can't be added to each of these machines; "" if they can."""
        if self._roster.dead():
            return "some ranks have died: use `%distributed heal` or `%distributed shrink` first"
        where = self._roster.where
        for node in nodes if "nccl" in self._roster.backend else ():
            free = where.gpus_of(node) - len(where.on_node(node))
            if node and count > free:  # those of this machine are known to the notebook
                return (
                    f"{where.host_of(node)} has {counted(where.gpus_of(node), 'GPU')}, {max(0, free)} without a rank, "
                    "and this session's process group uses nccl, which needs a GPU for each rank"
                )
        return ""

    def join_groups(self, now: float) -> None:
        """Bring newcomers into their groups."""
        if self._replacement is not None:
            self._replacement.join_groups(now)

    def give_up(self) -> None:
        """Stop replacing ranks, at the user's request."""
        if self._waiting is not None:
            self.fail("it was interrupted")
        elif self._replacement is not None:
            self._replacement.interrupt()

    # --- cells

    def holds(self, message: Execute) -> bool:
        """Return whether a cell has to wait for the end of a replacement. It is noted if it has not to."""
        if self._replacement is not None:
            return not self._roster.are_apart(message.ranks)
        self._membership.history.add(message)
        return False

    # --- events

    @property
    def due(self) -> float | None:
        """When to call `tick` at the latest."""
        return self._replacement.due if self._replacement is not None else None

    def tick(self, now: float) -> None:
        """Go on with what is under way, as far as it can."""
        if self._waiting is not None and now >= self._nodes.due_to_come:
            again = "`%distributed heal` waits again, `%distributed shrink` continues with the other ranks"
            self.fail(f"no machine joined in time. {again if isinstance(self._waiting, Heal) else 'Try again'}")
        if self._replacement is None:
            return
        self._replacement.go_on(now)
        if self._replacement.over:
            if self._replacement.undone:
                self._nodes.let_go()
            else:
                self._nodes.keep()
            self._replacement = None

    def ready(self, rank: Rank, message: Ready, now: float) -> bool:
        """Note that a newcomer is up, or why it is not. False if this rank is none."""
        if self._replacement is None or self._roster.newcomers.get(rank.rank) is not rank:
            return False
        self._replacement.ready(rank, message, now)
        return True

    def get_on(self, now: float) -> None:
        """Note that what newcomers are forked from makes progress."""
        if self._replacement is not None:
            self._replacement.get_on(now)

    def in_order(self, rank: int, report: InOrder) -> bool:
        """Note that a newcomer has adopted its groups. False if this is not about that."""
        return self._replacement is not None and self._replacement.in_order(rank, report)

    def cause(self, rank: int) -> str:
        """Return why a rank has ended, if that was our doing."""
        return self._replacement.cause(rank) if self._replacement is not None else ""

    def ended(self, rank: int, how: str) -> None:
        """Note the end of a rank."""
        if self._replacement is not None:
            self._replacement.ended(rank, how)

    def fail(self, why: str) -> None:
        """Give up what is under way, if anything is."""
        if self._waiting is not None:
            self._stop_waiting()
            self._tell(HealFailed(why))
        if self._replacement is not None:
            self._replacement.fail(why)

    def lose_store(self, pid: int, what: str) -> None:
        """Note that the rendezvous store has ended, and report it."""
        self._store_lost = True
        self.fail(f"{_NO_STORE} ({what})")
        self._tell(
            Notice(
                f"the rendezvous store of this session (pid {pid}) has ended, {what}: existing groups keep working, "
                "but no new group can be created. `%distributed restart` starts fresh ranks."
            )
        )
