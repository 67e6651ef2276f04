"""The process groups of a rank that lives on: where they stand, how a stuck one is freed, how a broken one is renewed.

Independent of cells, models or sockets; torch's private parts: `torch_groups`.

An interrupt between two collectives leaves ranks a collective apart, and then sums are silently wrong. So ranks compare
how many collectives each has entered, and a group that is out of step gets a new backend inside the living ProcessGroup
object: models, meshes and the user's own handles stay valid.

gloo can't abort. But a gloo device keeps its connections in one epoll set of its own, which appears when the backend is
made; shutting down exactly these connections frees a rank at once, and nothing of the user's is among them. Only their
reading side: when a write fails in gloo's own thread, the operation is lost, and who waits for it waits forever. For
the same reason the peers must not notice: a copy of each descriptor keeps the connection open until all are renewed.
While a group is made, a rank may wait for a peer to connect: this rank then connects in its place, and hangs up.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nbdist.base import limits
from nbdist.base.ranks import describe_ranks
from nbdist.errors import StaleGroupError, UsageError
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.messages.healing import GroupRecipe
from nbdist.wire.messages.rank_processes import StoreAddress
from nbdist.wire.questions.stopping import GroupState
from nbdist.worker.cell import failures, stacks
from nbdist.worker.groups import descriptors, torch_groups
from nbdist.worker.groups.creation import Creation
from nbdist.worker.groups.flight_record import Record, group_label
from nbdist.worker.groups.timeouts import Timeouts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend
    from torch.distributed import ProcessGroup, Store

_FIRST_SLOT = 16  # torch's own backend types lie below; a type can be used once in a ProcessGroup's life
_LAST_SLOT = 254
RENEWAL_LIMIT = timedelta(seconds=limits.RENEWAL)
_STORE_LIMIT = timedelta(seconds=60)  # at the start many ranks share few cores
_OWN = "nbdist-own-"  # begins the name of a group that only one rank has
_UNKNOWN_GROUP = re.compile(r"process group|is not (registered|initialized)|group .* (registered|initialized)", re.I)
_STALE = (
    "not all of its ranks had this process group (they were interrupted while they made it, or some have "
    "destroyed it), so it was dropped: create it again with `dist.new_group(...)` on all ranks"
)


@dataclass(frozen=True)
class _Epoll:
    """The epoll set of a gloo device: its listener's inode, and its number of descriptors with all peers connected."""

    listener: str
    size: int


@dataclass
class _Group:
    """What is kept of a process group, by its name."""

    epolls: dict[int, _Epoll] = field(default_factory=dict)  # of its gloo devices, by descriptor
    entered: tuple[int, ...] = ()  # collectives entered when the present cell began, by backend
    slot: int = _FIRST_SLOT
    unusable: str = ""  # why it can't be used, and what to do about it
    kinds: dict[str, str] = field(default_factory=dict)  # of the backends it is to get, if it has stand-ins
    timeout: timedelta | None = None  # of these


class Collectives:
    """All process groups of this rank.

    Args:
        incarnation: Number of the set of ranks.
        store: Where the session's rendezvous store listens.

    Attributes:
        record: Which collectives have been started, and which have ended.
        timeouts: Those of the groups.
        stranded: What the main thread waits in and for whom, where that can't happen any more; "" for nothing.
    """

    def __init__(self, incarnation: int, store: StoreAddress) -> None:
        self.record = Record()
        self.timeouts = Timeouts()
        self._incarnation = incarnation
        self._address = store
        self._store: Any = None
        self._clients: set[str] = set()  # inodes of the connections to stores that rendezvous of ours have opened
        self._groups: dict[str, _Group] = {}
        self._creating: list[Creation] = []
        self._connecting: list[tuple[int, set[str]]] = []  # port, sockets that there were before
        self._cut: set[str] = set()  # groups whose connections were cut
        self._copies: list[int] = []  # descriptors that keep cut connections open towards the peers
        self._gone: dict[str, str] = {}  # why groups were dropped, by their names
        self._store_cut = False
        self._aborts: dict[int, threading.Thread] = {}  # by the backend's id; each thread keeps its backend alive
        self._unclaimed: dict[str, GroupRecipe] | None = None  # groups of a newcomer, until it has joined them
        self.stranded = ""

    # --- making groups

    def watch(self) -> None:
        """See every group that is made from now on, by whomever."""
        import torch.distributed.distributed_c10d as c10d

        original = getattr(c10d, "_new_process_group_helper", None)
        if original is None:
            return

        signature = inspect.signature(original)

        def helper(*args: object, **kwargs: object) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            name, members = str(given.get("group_name", "")), list(given.get("global_ranks_in_group", []))
            if self._unclaimed is not None and torch_groups.rank() in members:
                if len(members) > 1:
                    return torch_groups.with_store(self._claim(name, members))
                given["group_name"] = name = f"{_OWN}{name}"  # the others don't have it, and may have used the name
            self._groups.pop(name, None)  # an earlier group of this name has been destroyed
            self._cut.discard(name)
            with self._created(name, int(given.get("group_size", 0))):
                return original(**given)

        c10d._new_process_group_helper = helper

    def store(self) -> Any:
        """Return this rank's client of the session's store, which only its main thread may use."""
        import torch.distributed as dist

        if self._store is None or self._store_cut:
            limit = _STORE_LIMIT if self._store is None else RENEWAL_LIMIT
            host, port = self._address.host, self._address.port
            with self.connecting(port):
                self._store = dist.TCPStore(host, port, is_master=False, timeout=limit)
            self._store.set_timeout(_STORE_LIMIT)
            self._store_cut = False
        return self._store

    @contextlib.contextmanager
    def connecting(self, port: int) -> Iterator[None]:
        """Treat connections to this port in the body as those of a store that serves a rendezvous."""
        entry = (port, {inode for _, inode in descriptors.sockets()})
        self._connecting.append(entry)
        try:
            yield
        finally:
            self._connecting.remove(entry)
            new = {
                fd: inode
                for fd, inode in descriptors.sockets()
                if inode not in entry[1] and descriptors.peer_port(fd) == port
            }
            self._clients |= set(new.values())
            descriptors.keep_from_children(new)

    @contextlib.contextmanager
    def _created(self, name: str, size: int) -> Iterator[None]:
        """Assign epoll sets that appear in the body to the gloo devices of the group being made."""
        before = dict(descriptors.links())
        creation = Creation(size, descriptors.epolls(before))
        self._creating.append(creation)
        try:
            yield
        finally:
            self._creating.remove(creation)
            after = dict(descriptors.links())
            new = {fd: inode for fd, inode in creation.new_epolls(after).items() if inode}
            if new:
                connected = {fd: _Epoll(inode, _size_with(size - 1, fd)) for fd, inode in new.items()}
                self._groups.setdefault(name, _Group()).epolls.update(connected)
            descriptors.keep_from_children(fd for fd, link in after.items() if before.get(fd) != link)

    def name_of(self, group: object) -> str:
        """Return the name that torch has given a group (None: the default one); "" for none that it knows."""
        world = torch_groups.world()
        if group is None:
            group = getattr(world, "default_pg", None)
        return str(getattr(world, "pg_names", {}).get(group, ""))

    @property
    def creating(self) -> bool:
        """Whether the main thread is making a group, or on its way to a rendezvous."""
        return bool(self._creating or self._connecting)

    # --- where groups stand

    def begin(self) -> None:
        """Begin a cell: what is entered from now on counts as its own."""
        self.stranded = ""
        living = torch_groups.living()
        while self._copies and not self._cut & living.keys():  # peers must notice nothing until all are renewed
            with contextlib.suppress(OSError):  # a cell has closed it
                os.close(self._copies.pop())
        for name, group in living.items():
            self._groups.setdefault(name, _Group()).entered = torch_groups.entered(group)

    def groups(self, *, current: bool) -> dict[str, GroupState]:
        """Return where this rank stands in every group, by name. From any thread.

        Args:
            current: Whether the cell in question is the one that began last; else nothing was entered in it.
        """
        groups = {}
        for name, group in torch_groups.living().items():
            known = self._groups.get(name) or _Group()
            now = torch_groups.entered(group)
            before = known.entered if len(known.entered) == len(now) else (0,) * len(now)
            delta = [late - early for late, early in zip(now, before, strict=True)] if current else [0] * len(now)
            cut = name in self._cut or _is_broken(known)
            groups[name] = GroupState(RankSpans.of(torch_groups.members(group)), delta, cut)
        return groups

    def broken(self) -> dict[str, Any]:
        """Return groups that have lost a connection, as each does in which a collective times out, by name."""
        return {
            name: group
            for name, group in torch_groups.living().items()
            if (known := self._groups.get(name)) and not known.unusable and name not in self._cut and _is_broken(known)
        }

    def place_in(self, name: str, device: str) -> tuple[str, int]:
        """Return a group in words, and how many collectives of a device's tensors it has seen here. From any thread."""
        group = torch_groups.living().get(name)
        if group is None:
            return "", 0
        return group_label(name, str(getattr(group, "group_desc", ""))), torch_groups.sequence_of(group, device)

    @property
    def numbered(self) -> int:
        """How many groups torch has numbered."""
        return int(getattr(torch_groups.world(), "group_count", 0))

    # --- freeing a stuck rank

    def cut(self) -> None:
        """Free the main thread from whatever collective, or making of a group, it waits in. From any thread.

        Groups that it has used can't be used any more until they are renewed.
        """
        names = [name for name, group in torch_groups.living().items() if self._abort(name, group)]
        for creation in list(self._creating):
            for fd in creation.new_epolls(dict(descriptors.links())):
                self._silence(fd)
                creation.call_as_peers(*descriptors.listening(fd))
        if self.creating:
            self._cut_store()
        self._cut |= set(names)

    def _abort(self, name: str, group: ProcessGroup, *, limit: timedelta = timedelta(0)) -> bool:
        """Abort a group. Returns whether there was something to abort; it may be under way after the limit still."""
        if group.size() < 2:
            return False
        aborted = False
        for backend in torch_groups.backends(group).values():
            if "gloo" not in torch_groups.kind_of(backend) and hasattr(backend, "abort"):
                self._abort_apart(backend).join(limit.total_seconds())
                aborted = True
        known = self._groups.get(name)
        for fd, epoll in known.epolls.items() if known is not None else ():
            if descriptors.listening(fd)[1] == epoll.listener:  # else the descriptor has become somebody else's
                self._silence(fd)
                aborted = True
        return aborted

    def _abort_apart(self, backend: Backend) -> threading.Thread:
        """Abort in a thread: NCCL's can wait as long as the group's own time-out, and the control thread never may."""
        thread = self._aborts.get(id(backend))
        if thread is None:

            def abort() -> None:
                with contextlib.suppress(Exception):  # what can't be aborted is freed by its own time-out
                    backend.abort()
                del self._aborts[id(backend)]

            thread = self._aborts[id(backend)] = threading.Thread(target=abort, name="nbdist-abort", daemon=True)
            thread.start()
        return thread

    def _silence(self, epoll: int) -> None:
        """Let gloo see the end of the connections in an epoll set; not of the listener, or gloo ends the process."""
        self._copies += descriptors.stop_reading(descriptors.targets(epoll))

    def _cut_store(self) -> None:
        waiting = [fd for fd, inode in descriptors.sockets() if inode in self._clients]
        for port, before in list(self._connecting):
            waiting += [
                fd for fd, inode in descriptors.sockets() if inode not in before and descriptors.peer_port(fd) == port
            ]
        descriptors.shut_down(waiting)
        self._store_cut = True

    # --- renewing

    def recipes(self) -> dict[str, GroupRecipe]:
        """Return how the groups of this rank are made, by name. From any thread."""
        return {name: torch_groups.recipe(name, group) for name, group in torch_groups.living().items()}

    def adopt(self, recipes: Mapping[str, GroupRecipe], rank: int) -> None:
        """Take a dead rank's place in its groups: make them with stand-ins for backends, which `renew` replaces.

        No other rank takes part, and none notices. Until `renew`, collectives do nothing, and who makes a group gets
        the one that has these members already. On the main thread of a rank that has no group yet.

        Raises:
            RuntimeError: torch lacks what this takes.
        """
        own = {name: recipe for name, recipe in recipes.items() if rank in recipe.members}
        for name in sorted(own, key=_order):
            self.stand_in(name, own[name], rank)
        self._unclaimed = {name: recipe for name, recipe in own.items() if not recipe.default}

    def stand_in(self, name: str, recipe: GroupRecipe, rank: int) -> None:
        """Make a group with stand-ins for backends, which `renew` replaces; until then it counts as cut."""
        torch_groups.stand_in(name, recipe, rank)
        known = self._groups.setdefault(name, _Group())
        known.kinds, known.timeout = dict(recipe.kinds), timedelta(seconds=recipe.timeout)
        self._cut.add(name)

    @property
    def stand_ins(self) -> bool:
        """Whether this rank has adopted groups and not joined them yet."""
        return self._unclaimed is not None

    def _claim(self, name: str, members: Sequence[int]) -> Any:
        """Return the adopted group that code on this rank makes again: of this name, else the first of these members.

        Raises:
            UsageError: There is none.
        """
        unclaimed = self._unclaimed or {}
        fitting = [known for known in sorted(unclaimed, key=_order) if unclaimed[known].members == members]
        if not fitting:
            raise UsageError(
                f"the other ranks have no more process groups of {describe_ranks(members)} for this rank to join: "
                "create the group in a cell on all ranks, not in a setup cell"
            )
        chosen = name if name in fitting else fitting[0]
        del unclaimed[chosen]
        return torch_groups.living()[chosen]

    def renew(self, generation: int, groups: Sequence[str], stale: Sequence[str], count: int) -> None:
        """Give groups new backends, in place. All their members do so at the same time. On the main thread.

        Args:
            generation: A number that no renewal has had before.
            groups: Names of the groups, as `state` gives them; those that this rank is not in are passed over.
            stale: Names of groups that only some of their members have: they are dropped.
            count: How many groups have been numbered on the rank that has numbered most.

        Raises:
            RuntimeError: A member did not come, or torch lacks what this takes.
        """
        import torch.distributed as dist

        for name in stale:
            self.drop(name, _STALE)
        world = torch_groups.world()
        if world is not None and (self.stand_ins or getattr(world, "group_count", count) < count):
            world.group_count = count
        self._unclaimed = None
        living = torch_groups.living()
        chosen = [name for name in sorted(groups, key=_order) if name in living]
        if not chosen:
            return
        descriptors.make_room()  # backends of before keep theirs for as long as the group lives
        self._cut |= set(chosen)  # until they are renewed, should that fail
        base = self.store()
        for name in chosen:
            # What still waits for a collective of before must not wait forever.
            self._abort(name, living[name], limit=RENEWAL_LIMIT)
            self._groups.setdefault(name, _Group()).epolls.clear()
            store = dist.PrefixStore(f"nbdist/{self._incarnation}/generation/{generation}/{name}", base)
            known = self._groups[name]
            try:
                with self._created(name, living[name].size()):
                    self._renew(living[name], store, known)
            except Exception as error:  # of any backend; until a restart, who uses the group must be told
                known.unusable = f"this process group could not be renewed ({error}): use `%distributed restart`"
                raise
            self._cut.discard(name)
            known.unusable = ""
        self.record.give_up()

    def _renew(self, group: ProcessGroup, store: Store, known: _Group) -> None:
        import torch
        import torch.distributed as dist

        if not torch_groups.can_be_renewed(group):
            raise RuntimeError("this version of torch can't give an existing group a new backend")
        name, description = group.group_name, group.group_desc
        made: dict[str, tuple[Any, Any]] = {}
        for device, old in torch_groups.backends(group).items():
            kind = known.kinds.get(device) or torch_groups.kind_of(old)
            timeout = known.timeout or torch_groups.timeout_of(old)
            if kind not in made:
                meeting = dist.PrefixStore(kind, store)
                made[kind] = (
                    torch_groups.make_backend(kind, old, meeting, group, RENEWAL_LIMIT, timeout),
                    _next_slot(group, known),
                )
            new, slot = made[kind]
            group._register_backend(torch.device(device), slot, new)
        group._set_group_name(name)  # the backends keep it, and functional collectives (DTensor's) go by it
        group._set_group_desc(description)
        known.entered = torch_groups.entered(group)
        known.kinds, known.timeout = {}, None
        world = torch_groups.world()
        if world is not None and group in world.pg_map:
            world.pg_map[group] = (world.pg_map[group][0], store)  # what further groups meet through

    def drop(self, name: str, why: str) -> None:
        """Forget a group that is not whole, or no longer wanted; using it raises from now on, with this text."""
        import torch.distributed as dist

        group = torch_groups.living().get(name)
        if group is None:
            return
        self._gone[name] = why
        self._cut.discard(name)
        self._groups.setdefault(name, _Group()).unusable = ""
        self._abort(name, group, limit=RENEWAL_LIMIT)
        with contextlib.suppress(Exception):
            if group is dist.group.WORLD:  # else all groups would go
                torch_groups.unset_default()
            dist.destroy_process_group(group)

    def drop_stand_ins(self, why: str) -> None:
        """Forget groups that could not be connected: their collectives would do nothing, and nobody would notice."""
        for name in torch_groups.living():
            if name in self._groups and self._groups[name].kinds:
                self.drop(name, f"this process group could not be connected ({why}): use `%distributed restart`")

    def agree(self, topic: str, yes: bool, ranks: Sequence[int], rank: int) -> bool:
        """Return whether all of these ranks say yes; each of them asks. On the main thread, through the store.

        Raises:
            RuntimeError: A rank did not say anything in time.
        """
        import torch.distributed as dist

        votes = dist.PrefixStore(f"nbdist/{self._incarnation}/{topic}", self.store())
        votes.set(str(rank), "yes" if yes else "no")
        names = [str(other) for other in ranks]
        votes.wait(names, RENEWAL_LIMIT)
        return all(vote == b"yes" for vote in votes.multi_get(names))

    def lose(self, groups: Sequence[str], dead: Sequence[int]) -> None:
        """Make using groups whose members have died raise from now on, instead of hanging."""
        why = (
            f"this process group has lost a rank: {describe_ranks(dead)} died. `%distributed heal` replaces dead "
            "ranks; for a group of the surviving ranks, call `dist.new_group([...], use_local_synchronization=True)`"
        )
        for name, group in torch_groups.living().items():
            if name in groups:
                self._groups.setdefault(name, _Group()).unusable = why
                self._abort(name, group, limit=RENEWAL_LIMIT)

    def forbid(self, groups: Sequence[str] | None) -> dict[str, list[int]]:
        """Make using groups that may be out of step (None for all) raise until they are renewed. From any thread.

        Returns:
            Their members (global ranks), by name.
        """
        found = {}
        for name, group in torch_groups.living().items():
            if group.size() > 1 and (groups is None or name in groups):
                found[name] = torch_groups.members(group)
                self._cut.add(name)
                known = self._groups.setdefault(name, _Group())
                known.unusable = known.unusable or (
                    "this process group may be out of step: a cell failed while some of "
                    f"{describe_ranks(found[name])} were busy or did not answer. nbdist rebuilds it before the next "
                    "cell that starts while all of them are idle; `%distributed status` shows what they run"
                )
                self._abort(name, group)
        return found

    @property
    def is_cut(self) -> bool:
        """Whether a group of this rank's has been cut, and is yet to be renewed."""
        return bool(self._cut)

    def explain(self, error: BaseException) -> StaleGroupError | UsageError | None:
        """Return the error to show instead, where a group was used that is gone, or waited in, for a reason we know."""
        if self.stranded and (isinstance(error, KeyboardInterrupt) or failures.from_communication(error)):
            return (UsageError if stacks.in_meeting(error) else StaleGroupError)(self.stranded)
        reasons = {known.unusable for known in self._groups.values() if known.unusable}
        if reasons and failures.from_communication(error):
            return StaleGroupError("; or ".join(sorted(reasons)))
        if self._gone and failures.from_torch(error) and _UNKNOWN_GROUP.search(str(error)):
            return StaleGroupError("; or ".join(sorted(set(self._gone.values()))))
        return None


def _order(name: str) -> tuple[bool, int, str]:
    """Return the same order of groups on all ranks: else two ranks wait for each other in different ones."""
    return (not name.isdigit(), int(name) if name.isdigit() else 0, name)


def _size_with(peers: int, epoll: int) -> int:
    """Return how many descriptors an epoll set has with one connection for each peer.

    Another one is left where a peer's first attempt to connect took too long; the peer gives it up at some time.
    """
    found = descriptors.targets(epoll)
    connections = sum(descriptors.peer_port(fd) > 0 for fd in found)
    return len(found) - max(0, connections - peers)


def _is_broken(known: _Group) -> bool:
    """Return whether a connection of a gloo group is gone: gloo closes those of a collective that fails, for good."""
    return any(
        descriptors.count(fd) < epoll.size and descriptors.listening(fd)[1] == epoll.listener  # else somebody else's
        for fd, epoll in known.epolls.items()
    )


def _next_slot(group: ProcessGroup, known: _Group) -> Any:
    if known.slot > _LAST_SLOT:
        raise RuntimeError("this group has been renewed as often as torch allows")
    known.slot += 1
    return type(group).BackendType(known.slot - 1)
