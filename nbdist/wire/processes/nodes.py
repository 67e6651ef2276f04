"""How other nodes come to a session, and the signs of life between them and the controller."""

from __future__ import annotations

import base64
import binascii
import functools
import importlib.metadata
import sys
from collections.abc import Sequence

import msgspec
from zmq.utils import z85

from nbdist.base import limits
from nbdist.wire.base.keys import Keys
from nbdist.wire.base.message import Count, Message, Seconds

TOKEN_VARIABLE = "NBDIST_TOKEN"  # holds what a node joins with
SILENT = 75  # EX_TEMPFAIL; exit code of an agent that has given the controller up because nothing came from it
_KEY = 32  # bytes


class NodesWanted(msgspec.Struct, frozen=True):
    """Which nodes a session is to have.

    count: of nodes, this one too. ranks: on each; None: one for each GPU. address, port: where this node listens for
    the others (0: at any port). interface: the network between them; "": the one that leads to `address`.
    patience: seconds that a node may take to come after another has. shares: of each node, this one first, its number
    of ranks if it is not `ranks` (0: no ranks). engine: what starts the others; "": the user does. engine_title: what
    that calls itself. engine_options: its options, as JSON. token_file: where the notebook writes their tokens; "": it
    prints them. timeout: seconds without a sign of life until a node is given up. listen: where this node listens for
    the others; "": at `address`.
    """

    count: Count
    address: str
    port: int = 0
    ranks: int | None = None
    interface: str = ""
    patience: Seconds = 600.0
    shares: list[int | None] = []
    engine: str = ""
    engine_title: str = ""
    engine_options: str = ""
    token_file: str = ""
    timeout: Seconds = limits.NODE_TIMEOUT
    listen: str = ""

    def ranks_of(self, seat: int) -> int | None:
        """Number of ranks of a node, by its place among them; None: one for each GPU."""
        share = self.shares[seat] if seat < len(self.shares) else None
        return self.ranks if share is None else share

    def world_size(self, own: int) -> int:
        """Number of ranks of all nodes, as far as it is known before they come.

        Args:
            own: On this node; nodes with a rank for each GPU are taken to have as many.
        """
        counts = (self.ranks_of(seat) for seat in range(self.count))
        return sum(own if count is None else count for count in counts)

    def with_ranks(self, counts: Sequence[int]) -> NodesWanted:
        """Return the same nodes, or more, with other numbers of ranks.

        Args:
            counts: Of the nodes that have ranks, in their order. If some that are wanted have none, nothing changes.
        """
        seats = [seat for seat in range(self.count) if self.ranks_of(seat) != 0]
        more = len(counts) - len(seats)
        if more < 0:
            return self
        seats += range(self.count, self.count + more)
        shares = dict(zip(seats, counts, strict=True))
        every = [shares.get(seat, 0) for seat in range(self.count + more)]
        return msgspec.structs.replace(self, count=len(every), shares=every)

    def same_nodes(self, other: NodesWanted) -> bool:
        """Return whether the same nodes are meant, whatever they have to run."""
        return msgspec.structs.replace(self, ranks=None, shares=[], interface="") == msgspec.structs.replace(
            other, ranks=None, shares=[], interface=""
        )


class Invited(Message, frozen=True):
    """Nodes are waited for at this address; each joins with one of these tokens.

    instead_of: the names of those that were lost, if they come in place of these.
    """

    address: str
    tokens: list[str]
    instead_of: list[str] = []


class Versions(msgspec.Struct, frozen=True):
    """What all nodes must have alike."""

    Python: str
    torch: str
    nbdist: str

    @classmethod
    def here(cls) -> Versions:
        """Return those of this Python, without importing the packages."""
        version = ".".join(map(str, sys.version_info[:2]))  # code travels as bytecode, which goes by these two
        return cls(version, *(_installed(name) for name in ("torch", "nbdist")))


class Join(Message, frozen=True):
    """A guest wants to be a node. host: its name. gpus: that it could use. ends_at: when its job ends, by its clock."""

    version: int
    host: str
    versions: Versions
    gpus: int
    ends_at: float | None = None


class Welcome(Message, frozen=True):
    """It is node `node` of `host`'s session, with keys of its own. timeout: as in NodesWanted."""

    node: int
    host: str
    keys: Keys
    timeout: Seconds = limits.NODE_TIMEOUT


class Refused(Message, frozen=True):
    """It can't be a node, and why. used: because another node has joined with its token."""

    text: str
    used: bool = False


class Ping(Message, frozen=True):
    """Are you there? The controller asks a node. sent: on its clock."""

    sent: float


class Pong(Message, frozen=True):
    """The node is there. at: on the node's clock when `sent` had come."""

    sent: float
    at: float


class NodeLeft(Message, frozen=True):
    """A node goes, and why. To be sent by its agent, or by whoever has started that."""

    why: str


class Token(msgspec.Struct, frozen=True):
    """What one node joins with, once: the controller's public key, and the secret key of a guest."""

    server_key: bytes
    secret_key: bytes

    def __str__(self) -> str:
        raw = z85.decode(self.server_key) + z85.decode(self.secret_key)
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read a token from a text.

        Raises:
            ValueError: It is none.
        """
        try:
            raw = base64.urlsafe_b64decode(text.strip() + "==")
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != 2 * _KEY:
            raise ValueError("not a token of nbdist")
        return cls(z85.encode(raw[:_KEY]), z85.encode(raw[_KEY:]))


@functools.cache  # it reads files, and the controller asks once for each node that comes
def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
