"""How the nodes of a launch find each other, and what they exchange while it runs.

Owns the one store where all nodes meet, which torch's rendezvous, its elastic agents and the ranks also use. Every wait
here can be observed (`waiting`) and given up at once (`left`), unlike torch's own. Independent of processes.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from nbdist.base import network
from nbdist.base.checks import is_true
from nbdist.base.processes import describe_owner
from nbdist.base.text import counted
from nbdist.errors import NodesMissing, UsageError
from nbdist.launch.nodes import store_probe
from nbdist.launch.nodes.news import Facts, News, Pulse
from nbdist.launch.request import Request

_DEFAULT_LIMITS = {"static": 900.0, "c10d": 600.0}  # seconds, as in torchrun
_READ_LIMIT = 60.0
_LOOK = 0.1  # seconds between checks of whether what is waited for has arrived
_STRANGE_LIMIT = 3.0  # seconds until a listener that is not a store counts as another program
_FACTS_LIMIT = 5.0  # seconds for the node that hosts the rendezvous to report what it launches
_NEWS_LIMIT = 3.0  # ... for the others to receive a failure before it leaves
_FACTS = "nbdist/facts"

STORE_ERRORS = (RuntimeError, RendezvousError)  # raised by torch when a store does not answer


class Left(RendezvousError):
    """This node has left the launch."""


@dataclass(frozen=True)
class Waiting:
    """What is being waited for.

    Attributes:
        text: In words, to follow "waiting for".
        since: On the monotonic clock.
        limit: Seconds after which it is an error; None: never.
    """

    text: str
    since: float
    limit: float | None = None


class Nodes:
    """The nodes of one launch, as seen by this one. One thread works with it; `waiting` and `left` are for others.

    Args:
        request: The launch request.

    Attributes:
        waiting: What is being waited for at the moment.
        left: Set it when this node wants to leave: all waiting then ends, and raises `Left`.
        request: The launch request.
        host, port: The rendezvous address.
        conf: Settings of the rendezvous.

    Raises:
        UsageError: The address or a setting is invalid.
    """

    def __init__(self, request: Request) -> None:
        self.waiting: Waiting | None = None
        self.request = request
        self.conf = dict(request.rdzv_conf or {})
        if str(self.conf.get("store_type", "tcp")) != "tcp":
            raise UsageError("rdzv_conf: nodes only support a store of type 'tcp'; leave store_type out")
        try:
            self.host, self.port = parse_rendezvous_endpoint(
                request.rdzv_endpoint or network.endpoint(request.master_addr, request.port), request.port
            )
        except ValueError as error:
            raise UsageError(f"{error} For example rdzv_endpoint='10.0.0.1:29500'") from None
        if self.several and not self.port:
            raise UsageError("several nodes need the same port on all of them: `use_port='29501'`")
        limit = self._seconds("timeout", _DEFAULT_LIMITS[request.rdzv_backend])
        self.limit = self._seconds("join_timeout", limit) if request.rdzv_backend == "c10d" else limit
        self._read_limit = timedelta(seconds=self._seconds("read_timeout", _READ_LIMIT))
        if self.host == "localhost":
            self.host = "127.0.0.1"  # ranks must be given the address at which this node listens
        self.left = threading.Event()
        self._lifeline: socket.socket | None = None  # ends with the process that opened the store
        self._strange_since: float | None = None
        self._returned = 0  # how many times nodes have reported returned ranks
        self._seen = 0  # the latest round in which this node took part
        self._server: TCPStore | None = None
        self._store: Store | None = None
        self._round: PrefixStore | None = None
        self._pulse: Pulse | None = None

    @property
    def several(self) -> bool:
        """Whether there are other nodes."""
        return self.request.num_nodes > 1

    @property
    def store(self) -> Store:
        """The store where all nodes meet, once this node is connected."""
        assert self._store is not None
        return self._store

    @property
    def address(self) -> str:
        """Where all meet, in words."""
        return network.endpoint(self.host, self.port)

    def _seconds(self, name: str, default: float) -> float:
        given = self.conf.get(name, default)
        try:
            seconds = float(given)
        except (TypeError, ValueError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"rdzv_conf: {name} must be a number of seconds above 0, not {given!r}")
        return seconds

    # --- the store

    def connect(self) -> None:
        """Connect to the store where all nodes meet; open it, if this node should.

        Raises:
            UsageError: The port is taken, or the other nodes launch something else.
            NodesMissing: The node that should open it did not do so in time.
        """
        if not self.several:
            self._store = HashStore()
            return
        deadline = time.monotonic() + self.limit
        if not (self._serves() and self._serve()):
            who = "node 0" if self.request.rdzv_backend == "static" else "the first node"
            self._await(self._answers, lambda: f"{who} at {self.address}", deadline, self._nobody)
            self._store = self._client(self.host)
            self._bound_silence()
        self._compare_facts()

    def close(self) -> None:
        """Release the store. If this node opened it, its port is free afterwards."""
        self._store = self._round = self._server = self._pulse = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    @property
    def alive(self) -> bool:
        """Return whether the process that opened the store still runs. Torch would report it in pages of warnings."""
        if self._lifeline is None:
            return True
        try:
            return bool(self._lifeline.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _serves(self) -> bool:
        if self.request.rdzv_backend == "static":
            return self.request.node_rank == 0
        if "is_host" in self.conf:
            return is_true(str(self.conf["is_host"]))
        return network.is_local(self.host) and not self._taken()

    def _taken(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self.host, self.port), timeout=store_probe.CONNECT_LIMIT).close()
            return True
        return False

    def _serve(self) -> bool:
        """Open the store. False: another node of this machine was faster."""
        literal = network.is_literal(self.host) and network.is_local(self.host)
        address = self.host if literal else ""  # a name may mean an address that only this machine knows
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, self.port), family=family, backlog=1024)
        except OSError as error:
            if self.request.rdzv_backend == "c10d" and self._taken():
                return False
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"{self.address} can't be opened: {error}") from None
            taken = f"port {self.port} is taken{describe_owner(self.port)}"
            raise UsageError(f"{taken}: choose another port on all nodes, `use_port='29501'`") from None
        own = address or "127.0.0.1"
        self._server = TCPStore(
            own,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._read_limit,
            master_listen_fd=listener.detach(),
        )
        self._store = self._client(own)
        self._store.set(_FACTS, msgspec.json.encode(self._facts).decode())
        return True

    def _client(self, host: str) -> Store:
        return TCPStore(host, self.port, is_master=False, timeout=self._read_limit, wait_for_workers=False)

    def _bound_silence(self) -> None:
        """Make an unreachable store an error after a while: torch would wait for a quarter of an hour.

        A process that is merely slow is not affected, because its system acknowledges what it is sent.
        """
        if self._lifeline is None or not hasattr(socket, "TCP_USER_TIMEOUT"):
            return
        peer, limit = store_probe.peer(self._lifeline), self._read_limit // timedelta(milliseconds=1)
        for connection in store_probe.own_connections():
            with connection, contextlib.suppress(OSError):
                if connection.family in (socket.AF_INET, socket.AF_INET6) and store_probe.peer(connection) == peer:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)

    def _stranger(self) -> UsageError:
        owner = describe_owner(self.port) if network.is_local(self.host) else ""
        return UsageError(
            f"what listens at {self.address} is not an nbdist launch{owner and f', but opened{owner}'}: start "
            "`notebook_launcher` on the node with that address first, or choose another port on all nodes "
            "(`use_port='29501'`)"
        )

    def _answers(self) -> bool:
        """Return whether a store listens there.

        Raises:
            UsageError: Something else has been listening there for seconds.
        """
        try:
            connection = socket.create_connection((self.host, self.port), timeout=store_probe.CONNECT_LIMIT)
        except OSError:
            self._strange_since = None
            return False
        if store_probe.is_store(connection):
            connection.setblocking(False)
            self._lifeline = connection
            return True
        connection.close()
        if not store_probe.can_tell_stores():
            return True
        # It may be about to end, if it belongs to an earlier launch.
        self._strange_since = self._strange_since or time.monotonic()
        if time.monotonic() > self._strange_since + _STRANGE_LIMIT:
            raise self._stranger()
        return False

    @property
    def _facts(self) -> Facts:
        return Facts(*(getattr(self.request, name) for name in Facts.__struct_fields__))

    def _compare_facts(self) -> None:
        assert self._store is not None
        store, began = self._store, time.monotonic()
        while not store.check([_FACTS]):
            if time.monotonic() > began + _FACTS_LIMIT:
                raise self._stranger()
            self._pause()
        theirs = msgspec.json.decode(store.get(_FACTS), type=Facts)
        for name in Facts.__struct_fields__:
            there, here = getattr(theirs, name), getattr(self._facts, name)
            if there != here:
                raise UsageError(
                    f"{name} is {there!r} on the node at {self.address}, and {here!r} here: "
                    "it must be the same on all nodes"
                )

    # --- waiting

    def _await(
        self, reached: Callable[[], bool], what: Callable[[], str], deadline: float, error: Callable[[], Exception]
    ) -> None:
        since = time.monotonic()
        try:
            while True:
                self._check_alive()
                if reached():
                    return
                if time.monotonic() > deadline:
                    raise error()
                self.waiting = Waiting(what(), since, self.limit)
                self._pause()
        finally:
            self.waiting = None

    def _check_alive(self) -> None:
        if not self.alive:
            raise self.gone()

    def _pause(self) -> None:
        if self.left.wait(_LOOK):
            raise Left

    def _nobody(self) -> NodesMissing:
        who = "node 0" if self.request.rdzv_backend == "static" else "the node that hosts the rendezvous"
        return NodesMissing(
            f"1 of {self.request.num_nodes} nodes arrived, this one: {who} did not answer at {self.address} within "
            f"{self.limit:g} s. {self._advice()}"
        )

    def too_few(self, came: int, missing: str = "") -> NodesMissing:
        """Return the error for nodes that have not arrived in time."""
        return NodesMissing(
            f"{came} of {self.request.num_nodes} nodes arrived at {self.address} within {self.limit:g} s{missing}. "
            f"{self._advice()}"
        )

    def _advice(self) -> str:
        ranks = f", and node_rank 0 to {self.request.num_nodes - 1}, each once"
        return (
            "Run this cell on all nodes, with the same num_nodes, rdzv_id, address and port"
            f"{ranks if self.request.rdzv_backend == 'static' else ''}. Check the address, and that the node's "
            f"firewall lets the others through. On one of them: `!nc -vz {self.host} {self.port}`. "
            f"To wait longer: rdzv_conf={{'timeout': {2 * self.limit:g}}}"
        )

    def gone(self) -> NodesMissing:
        """Return the error for a store that no longer answers."""
        return NodesMissing(
            f"the node at {self.address}, which hosts the rendezvous, is gone: its launch or its notebook has ended, "
            "or the network in between has failed. Run this cell again on all nodes"
        )

    # --- torch's rendezvous

    def meet(self, store: Store) -> Store:
        """Wait for all nodes, each with its given number.

        Returns:
            The store of this round.
        """
        request, deadline = self.request, time.monotonic() + self.limit
        met = self._next_round(store, deadline)
        mine = f"node/{request.node_rank}"
        if met.add(mine, 1) > 1:
            met.add(mine, -1)
            raise UsageError(
                f"another node has joined with node_rank={request.node_rank}: "
                f"give each its own, 0 to {request.num_nodes - 1}, and run this cell again on all of them"
            )
        met.add("came", 1)
        try:
            self._await(
                lambda: met.add("came", 0) >= request.num_nodes,
                lambda: f"{request.num_nodes - met.add('came', 0)} of {request.num_nodes} nodes at {self.address}",
                deadline,
                lambda: self.too_few(met.add("came", 0), self._missing(met)),
            )
        except Exception:  # whatever it is, this node is no longer among those that have come
            if self.alive:
                with contextlib.suppress(RuntimeError):
                    met.add(mine, -1)
                    met.add("came", -1)
            raise
        return met

    def _next_round(self, store: Store, deadline: float) -> PrefixStore:
        """Open a round on node 0; on other nodes, wait for one that they have not seen."""
        seen = self._seen
        if self.request.node_rank == 0:
            store.add("round", 1)
        self._await(lambda: store.add("round", 0) > seen, lambda: "node 0 to start again", deadline, self._nobody)
        self._seen = store.add("round", 0)
        return PrefixStore(str(self._seen), store)

    def _missing(self, met: Store) -> str:
        missing = [str(node) for node in range(self.request.num_nodes) if not met.add(f"node/{node}", 0)]
        return f" ({'node' if len(missing) == 1 else 'nodes'} {', '.join(missing)} did not)" if missing else ""

    def own_address(self) -> str:
        """Return this node's address, as the node where all meet sees it."""
        if self._server is not None and network.is_literal(self.host):
            return self.host
        with contextlib.suppress(OSError):
            here = socket.gethostname() if self._server is not None else self.host
            if address := network.address_towards(here, self.port):
                return address
        return socket.getfqdn()

    def interface(self) -> str:
        """Return the network interface that leads to the other nodes; "" if unknown."""
        own, literal = self.own_address(), network.is_literal
        if not literal(own) or (ipaddress.ip_address(own).is_loopback and not literal(self.host)):
            return ""
        return network.interface_of(own)

    # --- while it runs

    def begin_round(self, store: Any, node: int, restart: int) -> int:
        """Begin a round after all nodes have met; they exchange data in this store from now on.

        Args:
            store: The store of this round.
            node: This node's number in it.
            restart: How often this node's ranks have restarted.

        Returns:
            How often the ranks of the whole job have restarted.
        """
        self._round, self._returned = PrefixStore("nbdist", store), 0
        self._round.set(f"restart/{node}", str(restart))
        self._pulse = Pulse(self._round, node, range(self.request.num_nodes) if self._server is not None else ())
        return max(int(self._round.get(f"restart/{other}")) for other in range(self.request.num_nodes))

    def tell(self, news: News) -> News:
        """Report a failure here to the other nodes.

        Returns:
            What all nodes take as the cause: the first failure that any of them reported.
        """
        found = self._told().compare_set("failed", "", msgspec.json.encode(news).decode())
        return msgspec.json.decode(found, type=News)

    def hear(self) -> News | None:
        """Return a reported failure, if there is one."""
        store = self._told()
        if not store.check(["failed"]):
            return None
        self.waiting = None
        return msgspec.json.decode(store.get("failed"), type=News)

    def silences(self) -> list[str]:
        """Send a sign of life, and on the hosting node, check those of the others.

        Returns:
            A line for each node that has fallen silent since the last call, or is heard from again.
        """
        assert self._pulse is not None
        self._check_alive()
        return self._pulse.beat()

    def exchange_returned(self, ranks: Sequence[int]) -> list[int]:
        """Report to the other nodes that these ranks have returned.

        Returns:
            The ranks that any node has reported since the last call.
        """
        store = self._told()
        if ranks:
            store.set(f"returned/{store.add('returned', 1)}", msgspec.json.encode(ranks).decode())
        told: list[int] = []
        while store.check([f"returned/{self._returned + 1}"]):
            self._returned += 1
            told += msgspec.json.decode(store.get(f"returned/{self._returned}"), type=list[int])
        return told

    def finish(self) -> None:
        """Note that this node's ranks have finished."""
        self._told().add("finished", 1)

    def others_at_work(self) -> int:
        """Return on how many other nodes ranks still run, once this node's have finished."""
        count = int(self.request.num_nodes - self._told().add("finished", 0))
        since = self.waiting.since if self.waiting is not None else time.monotonic()
        others = f"the ranks of {counted(count, 'other node')}"
        self.waiting = Waiting(others, since) if count else None
        return count

    def part(self) -> None:
        """Leave after a failure: the node that opened the store keeps it until the others know."""
        with contextlib.suppress(RuntimeError, NodesMissing):
            store = self._told()
            store.add("parted", 1)
            deadline = time.monotonic() + _NEWS_LIMIT
            while self._server is not None and store.add("parted", 0) < self.request.num_nodes:
                if time.monotonic() > deadline:
                    return
                time.sleep(_LOOK)

    def _told(self) -> Store:
        self._check_alive()
        assert self._round is not None
        return self._round
