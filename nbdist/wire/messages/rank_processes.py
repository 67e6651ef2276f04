"""The processes of a set of ranks, between the controller, its agent and the ranks."""

from __future__ import annotations

import msgspec

from nbdist.wire.base.message import Message
from nbdist.wire.messages.healing import Post
from nbdist.wire.messages.life import Obstacle, StartOptions


class StoreAddress(msgspec.Struct, frozen=True):
    """Where the rendezvous store of an incarnation is. port: 0 while it is not open."""

    host: str = "127.0.0.1"
    port: int = 0


class RankSetup(msgspec.Struct, frozen=True):
    """A rank's settings, passed to it through a file descriptor.

    interface: the network to the ranks of other nodes; "": not known, or there are none.
    folder: for temporary files, which the agent removes when the rank has ended; empty: there is none.
    newcomer: whether other ranks were there before: it waits for their groups.
    slot: the number by which its agent and its lanes know it: its rank at the start, and the same as long as it lives.
    life: how many processes have had this slot before. gpu: which of its node's GPUs it has, counted on from the first
    if there are fewer.
    """

    incarnation: int
    rank: int
    url: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes
    token: bytes
    store: StoreAddress
    threads: int
    options: StartOptions
    interface: str = ""
    folder: str = ""
    life: int = 0
    slot: int = 0
    gpu: int = 0
    newcomer: bool = False

    @property
    def local_rank(self) -> int:
        """The rank's number on this node; `rank` is its number in the whole job."""
        return self.rank - self.options.ranks.start

    @property
    def gpu_count(self) -> int:
        """GPUs that this node's ranks may use."""
        return len(self.options.gpus or [])

    @property
    def gpus_shown(self) -> list[str]:
        """The GPUs that CUDA is to show this rank, by name."""
        gpus = self.options.gpus or []
        return [gpus[self.gpu % len(gpus)]] if self.options.gpus_are_parts else gpus

    @property
    def world_size(self) -> int:
        """The number of ranks in the whole job."""
        return self.options.place.world_size if self.options.place is not None else self.options.count


def renumbered(setup: RankSetup, post: Post) -> RankSetup:
    """Return the setup of a rank that has another post now."""
    gpus = setup.options.gpus if post.gpus is None else post.gpus
    options = msgspec.structs.replace(setup.options, count=post.count, place=post.place, gpus=gpus)
    return msgspec.structs.replace(setup, rank=post.rank, options=options)


class Ready(Message, frozen=True):
    """A rank is up. failure: why it is not."""

    rank: int
    device: str
    backend: str
    failure: str = ""


class Quit(Message, frozen=True):
    """Exit in an orderly way: run atexit handlers first."""


class Spawn(Message, frozen=True):
    """Fork ranks, and their store unless it is open.

    store: where it is, or, without a port, where to open it. interface: the network to other nodes; "": the one that
    leads to the store. later: none is forked before a Respawn asks for it: the others are there already.
    """

    incarnation: int
    options: StartOptions
    store: StoreAddress = StoreAddress()
    interface: str = ""
    later: bool = False


class StoreOpened(Message, frozen=True):
    """The incarnation's store listens: ranks of other nodes may be forked."""

    incarnation: int
    store: StoreAddress


class Spawned(Message, frozen=True):
    """A rank's process exists."""

    incarnation: int
    rank: int
    pid: int


class Spawning(Message, frozen=True):
    """All ranks of the incarnation are forked. notes: lines for the user."""

    incarnation: int
    notes: list[str]


class SpawnFailed(Message, frozen=True):
    """The agent could not start the incarnation; it has cleaned up."""

    incarnation: int
    text: str
    obstacle: Obstacle = "other"


class Kill(Message, frozen=True):
    """End the ranks of an incarnation, by force after `grace` seconds."""

    incarnation: int
    grace: float


class Exited(Message, frozen=True):
    """A process of the incarnation has ended, all its output is read and its process group is gone.

    rank: None for the store. code: as in subprocess, -9 for SIGKILL. cause: the end it follows from, if it is not its
    own.
    """

    incarnation: int
    rank: int | None
    pid: int
    code: int
    stderr: str
    when: float
    cause: str = ""


class Gone(Message, frozen=True):
    """No process of the incarnation is left."""

    incarnation: int
