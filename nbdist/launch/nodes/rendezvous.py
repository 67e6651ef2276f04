"""Torch's rendezvous for the nodes of a launch: "static" and "c10d", whose waiting can be observed and given up.

Knows the nodes by their store and their messages; independent of ranks. Private parts of torch's dynamic rendezvous are
probed when they are used.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from nbdist.errors import NodesMissing
from nbdist.launch.nodes.node_agents import Left, Nodes, Waiting

_WITHDRAW_LIMIT = 1.0  # seconds for the store to take a node off the list


def rendezvous(nodes: Nodes) -> RendezvousHandler:
    """Return the rendezvous handler for torch's agent. The nodes are connected."""
    request, store = nodes.request, nodes.store
    if not nodes.several or request.rdzv_backend == "static":
        return StaticRendezvous(nodes, store)
    parameters = RendezvousParameters(
        "c10d",
        nodes.address,
        request.rdzv_id,
        min_nodes=request.num_nodes,
        max_nodes=request.num_nodes,
        local_addr=nodes.own_address(),
        **{**nodes.conf, "join_timeout": math.ceil(nodes.limit)},
    )
    backend = _Backend(nodes, store)
    return DynamicRendezvous(nodes, backend, create_handler(store, backend, parameters))


class StaticRendezvous(RendezvousHandler):
    """Nodes with given numbers: torch's "static", except that its waiting can be observed and given up."""

    def __init__(self, nodes: Nodes, store: Store) -> None:
        self._nodes = nodes
        self._store: Store | None = PrefixStore(nodes.request.rdzv_id, store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the others."""
        assert self._store is not None
        request = self._nodes.request
        store = self._nodes.meet(self._store)
        where = RendezvousStoreInfo(self._nodes.host, self._nodes.port)
        return RendezvousInfo(store, request.node_rank, request.num_nodes, where)

    def get_backend(self) -> str:
        """Return its name."""
        return "static"

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._nodes.request.rdzv_id

    def is_closed(self) -> bool:
        """Return False: latecomers wait."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: a number can't be given twice."""
        return 0

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the agents' store."""
        return True

    def shutdown(self) -> bool:
        """Release the store."""
        self._store = None
        return True


class _Backend(C10dRendezvousBackend):
    """Torch's backend, except that a node can leave while it waits.

    Attributes:
        look: Called each time torch checks the state of the rendezvous.
        withdrawn: Whether this node has left; its remaining calls are then let through.
    """

    def __init__(self, nodes: Nodes, store: Store) -> None:
        self.look: Callable[[], None] = lambda: None
        self.withdrawn = False
        self._nodes = nodes
        super().__init__(store, nodes.request.rdzv_id)

    def get_state(self) -> Any:
        """Return the state of the rendezvous."""
        self._check()
        return super().get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Change the state of the rendezvous."""
        self._check()
        return super().set_state(state, token)

    def _check(self) -> None:
        self.look()
        if self._nodes.left.is_set() and not self.withdrawn:
            raise Left
        if not self._nodes.alive:
            raise RendezvousConnectionError


class DynamicRendezvous(RendezvousHandler):
    """Nodes that torch numbers: its "c10d", with our messages."""

    def __init__(self, nodes: Nodes, backend: _Backend, inner: DynamicRendezvousHandler) -> None:
        self._nodes = nodes
        self._backend = backend
        self._inner = inner

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the others."""
        nodes, since = self._nodes, time.monotonic()
        most = 0

        def look() -> None:
            nonlocal most
            here = self._participants()
            most = max(most, here)
            all_nodes = nodes.request.num_nodes
            which = f"{all_nodes - here} of {all_nodes} nodes" if 0 < here < all_nodes else "the other nodes"
            nodes.waiting = Waiting(f"{which} at {nodes.address}", since, nodes.limit)

        if hasattr(self._inner, "_bootstrap_store_info"):
            # Torch reports it only in a node's first round; a node that is new in a later round waits for it in vain.
            self._inner._bootstrap_store_info = None
        self._backend.look = look
        try:
            return self._inner.next_rendezvous()
        except Left:
            self._withdraw()
            raise
        except RendezvousTimeoutError:
            raise nodes.too_few(max(1, most)) from None
        except RendezvousClosedError:
            raise NodesMissing(
                f"another node ended the launch {nodes.request.rdzv_id!r} at {nodes.address}: "
                "run this cell again on all nodes"
            ) from None
        except RendezvousConnectionError:
            raise nodes.gone() from None
        finally:
            self._backend.look = lambda: None
            nodes.waiting = None

    def _participants(self) -> int:
        """Return how many nodes have arrived, if this torch shows it."""
        state = getattr(getattr(self._inner, "_state_holder", None), "state", None)
        return len(getattr(state, "participants", ()))

    def _withdraw(self) -> None:
        """Take this node off the list, so that the others don't count it; otherwise they need 15 s to notice."""
        self._backend.withdrawn = True
        leave = getattr(dynamic_rendezvous, "_RendezvousExitOp", None)
        executor = getattr(self._inner, "_op_executor", None)
        if leave is not None and executor is not None:
            with contextlib.suppress(RendezvousError):
                executor.run(leave(), time.monotonic() + _WITHDRAW_LIMIT)

    def get_backend(self) -> str:
        """Return its name."""
        return self._inner.get_backend()

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._inner.get_run_id()

    def is_closed(self) -> bool:
        """Return whether it is over for all nodes."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """End it for all nodes."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that want to replace others."""
        try:
            return self._inner.num_nodes_waiting()
        except RendezvousError:  # the store is gone, which the next check will find
            return 0

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the agents' store."""
        return True

    def shutdown(self) -> bool:
        """End it for all nodes, and release the store."""
        done = not self._backend.withdrawn and self._inner.shutdown()
        if hasattr(self._inner, "_shared_tcp_store_server"):
            self._inner._shared_tcp_store_server = None
        return done
