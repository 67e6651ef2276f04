"""The processes of one set of ranks on this node: the ranks, and where it is here their rendezvous store.

Owns which of them are asked for, which are there, and what each is told. Independent of the controller and of the
template.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Collection

from nbdist.agent.forks.fork_channel import ForkChannel
from nbdist.agent.pipes import PipeReader
from nbdist.base import network
from nbdist.wire.base.keys import Keys
from nbdist.wire.frames import encode
from nbdist.wire.messages.healing import Respawn
from nbdist.wire.messages.output import STDERR, STDOUT
from nbdist.wire.messages.rank_processes import RankSetup, Spawn, StoreAddress, renumbered
from nbdist.wire.processes.setup import AgentSetup

STORE = -1  # the store among the ranks, inside of the agent
_FORKS_AT_ONCE = 64  # requests without an answer; the channel holds some 500


class ProcessSet:
    """The processes of one incarnation.

    Args:
        spawn: What the controller has asked for.
        source: Forks them: the template's channel, or one to the notebook.
        pipes: Reads what they print.
        keys: By which ranks reach the controller.
        setup: This agent's.

    Attributes:
        store: Where the store is.
        pids: Their slots, by process id; of ranks, the numbers that they had at the start.
        expected: Processes requested that have not ended.
        forked: Whether the store and ranks have been requested.
        unasked: Ranks that have not been requested.
        unwanted: Ranks to end as soon as they are there.
        complete: Whether all have started.
        ending: Whether they are to end.
        kill_at: When to end them by force.
    """

    def __init__(self, spawn: Spawn, source: ForkChannel, pipes: PipeReader, keys: Keys, setup: AgentSetup) -> None:
        self.spawn = spawn
        self.source = source
        self.store = StoreAddress()
        self.pids: dict[int, int] = {}
        self.expected = 0
        self.forked = False
        self.unasked: deque[int] = deque()
        self.unwanted: set[int] = set()
        self.complete = False
        self.ending = False
        self.kill_at: float | None = None
        self._pipes = pipes
        self._keys = keys
        self._setup = setup
        self._listener: socket.socket | None = None
        self._interface = ""  # the network to other nodes
        self._again: dict[int, Respawn] = {}  # what slots were asked for after the start

    @property
    def has_store(self) -> bool:
        """Whether the incarnation's store is among them, and not on another node."""
        return not self.spawn.store.port

    @property
    def all_forked(self) -> bool:
        """Whether as many processes are there as were asked for at the start."""
        ranks = 0 if self.spawn.later else self.spawn.options.count
        return len(self.pids) == ranks + self.has_store

    def fork_all(self) -> None:
        """Request the store and the ranks.

        Raises:
            OSError: The system denies what they need.
        """
        self.forked = True
        if not self.spawn.later:
            self.unasked.extend(self.spawn.options.ranks)
        if self.has_store:
            self._fork_store()
        else:
            self.store = self.spawn.store
        self._choose_interface()
        self.fork_more()

    def fork_more(self) -> None:
        """Request ranks, not all at once: a process that forks stops reading requests if nobody reads its answers."""
        while self.unasked and self.expected - len(self.pids) < _FORKS_AT_ONCE:
            self._fork_rank(self.unasked.popleft())

    def fork_again(self, message: Respawn) -> None:
        """Request a rank after the start, in a slot of its own or that of a dead one."""
        self.unwanted.discard(message.slot)
        self._again[message.slot] = message
        self.unasked.append(message.slot)
        if self.forked:  # else what they are forked from is still importing torch
            self.fork_more()

    def end_ranks(self, ranks: Collection[int]) -> None:
        """End some ranks by force, also those that are about to come."""
        self.unwanted.update(ranks)
        self.unasked = deque(rank for rank in self.unasked if rank not in ranks)
        self.source.kill([pid for pid, rank in self.pids.items() if rank in ranks])

    def folder(self, rank: int) -> str:
        """Return the folder for a rank's temporary files, which is removed when the rank ends."""
        return f"{self._setup.folder}/rank-{self.spawn.incarnation}-{rank}" if self._setup.folder else ""

    def close_listener(self) -> None:
        """Leave the store's socket to the store."""
        if self._listener is not None:
            self._listener.close()

    @property
    def _spared(self) -> bool:
        return self.spawn.options.end_grace > 0

    def _fork_store(self) -> None:
        # Listening before anybody forks: ranks may connect before the store has come up.
        host, port = self.spawn.store.host, self.spawn.options.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=4096)
        self._listener, self.store = listener, StoreAddress(host, listener.getsockname()[1])
        read, write = os.pipe2(os.O_CLOEXEC)
        self._pipes.add(STORE, STDERR, read)
        self.source.fork(None, [listener.fileno(), write], spared=self._spared)
        os.close(write)
        self.expected += 1

    def _choose_interface(self) -> None:
        """Choose the network that leads to the other nodes, if there are any."""
        place = self.spawn.options.place
        if place is not None and place.num_nodes > 1 and not place.master_addr:
            address = self.store.host if self.has_store else network.address_towards(self.store.host)
            self._interface = self.spawn.interface or network.interface_of(address)

    def _fork_rank(self, rank: int) -> None:
        setup = self._rank_setup(rank)
        writers = []
        for stream in (STDOUT, STDERR):
            read, write = os.pipe2(os.O_CLOEXEC)
            self._pipes.add(rank, stream, read)
            writers.append(write)
        memory = os.memfd_create("nbdist-setup", os.MFD_CLOEXEC)
        try:
            os.write(memory, encode(setup))
            os.lseek(memory, 0, os.SEEK_SET)
            self.source.fork(rank, [*writers, memory], fresh=setup.options.fresh, spared=self._spared)
            self.expected += 1
        finally:
            for descriptor in (*writers, memory):
                os.close(descriptor)

    def _rank_setup(self, slot: int) -> RankSetup:
        keys, options = self._keys, self.spawn.options
        again = self._again.get(slot)
        setup = RankSetup(
            incarnation=self.spawn.incarnation,
            rank=slot,
            url=keys.url,
            server_key=keys.server_key,
            public_key=keys.public_key,
            secret_key=keys.secret_key,
            token=self._setup.token,
            store=self.store,
            interface=self._interface,
            life=again.life if again is not None else 0,
            slot=slot,
            gpu=again.post.gpu if again is not None else slot - options.ranks.start,
            newcomer=again is not None,
            threads=max(1, len(os.sched_getaffinity(0)) // (options.count if again is None else again.post.count)),
            options=options,
            folder=self.folder(slot),
        )
        return setup if again is None else renumbered(setup, again.post)
