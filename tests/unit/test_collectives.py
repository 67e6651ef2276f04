"""How groups are aborted and renewed, on a stand-in for NCCL's process group: its interface, without a GPU."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbdist.errors import StaleGroupError
from nbdist.worker.collectives import Collectives
from tests.native_errors import from_native_code

pytestmark = pytest.mark.torch_private


class NcclBackend:
    """What ProcessGroupNCCL offers, as far as it is used."""

    class Options:
        _timeout = timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        self.store, self.options = store, options or self.Options()
        self.number, self.aborted, self.counts = 0, False, False

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborted = True

    def _set_sequence_number_for_group(self) -> None:
        self.counts = True

    def _get_sequence_number_for_group(self) -> int:
        return self.number


class Group:
    """What ProcessGroup offers, as far as it is used: a slot is taken once and for all."""

    class BackendType(int): ...

    group_name, group_desc = "0", "default_pg"

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def __init__(self, backend: NcclBackend) -> None:
        self._slots: dict[int, Any] = {6: backend}
        self._backend = backend
        self._device_types = [torch.device("cuda")]

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _get_backend(self, device: Any) -> NcclBackend:
        assert device.type == "cuda"
        return self._backend

    def _register_backend(self, device: Any, slot: int, backend: NcclBackend) -> None:
        self._backend = self._slots.setdefault(slot, backend)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """The one group of this process, of a world of two ranks."""
    found = Group(NcclBackend(None, 0, 2))
    world = SimpleNamespace(
        pg_names={found: "0"}, pg_group_ranks={found: {0: 0, 1: 1}}, pg_map={found: ("nccl", None)}, group_count=1
    )
    monkeypatch.setattr(c10d, "_world", world)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclBackend, raising=False)
    return found


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Collectives:
    found = Collectives(1, 0)
    monkeypatch.setattr(found, "store", dist.HashStore)
    return found


def test_an_nccl_group_is_aborted_and_gets_a_new_backend_in_the_same_object(
    group: Group, collectives: Collectives
) -> None:
    old = group._backend
    old.options._timeout = timedelta(seconds=42)
    assert collectives.cut() == ["0"]
    assert collectives.state(current=True)["groups"]["0"][2]
    collectives.renew(2, ["0"], [], 1)
    new = group._backend
    assert old.aborted and new is not old and new.counts and new.options._timeout == timedelta(seconds=42)
    assert not collectives.state(current=True)["groups"]["0"][2]


def test_an_abort_that_takes_its_time_does_not_hold_up_the_thread_that_asks_for_it(
    group: Group, collectives: Collectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    finish = threading.Event()
    monkeypatch.setattr(group._backend, "abort", lambda: begun.append(threading.get_ident()) or finish.wait())
    assert collectives.cut() == ["0"]
    assert collectives.cut() == ["0"]
    finish.set()
    collectives.renew(2, ["0"], [], 1)
    assert threading.get_ident() not in begun and len(begun) <= 2


def test_each_renewal_takes_a_slot_of_its_own(group: Group, collectives: Collectives) -> None:
    backends = {id(group._backend): group._backend}
    for generation in range(2, 202):
        collectives.renew(generation, ["0"], [], 1)
        backends[id(group._backend)] = group._backend
    assert len(backends) == 201


def test_collectives_are_counted_from_the_beginning_of_the_cell(group: Group, collectives: Collectives) -> None:
    group._backend.number = 10
    collectives.begin()
    group._backend.number = 13
    assert collectives.state(current=True)["groups"]["0"] == [[0, 1], [3], False]
    assert collectives.state(current=False)["groups"]["0"] == [[0, 1], [0], False]


def test_the_number_of_the_next_group_is_that_of_the_rank_which_has_made_most(
    group: Group, collectives: Collectives
) -> None:
    collectives.renew(2, [], [], 7)
    assert c10d._world.group_count == 7


def test_a_lost_group_is_explained_when_it_is_used(group: Group, collectives: Collectives) -> None:
    error = from_native_code("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:123")
    assert collectives.explain(error) is None
    collectives.lose(["0"], [1])
    explained = collectives.explain(error)
    assert isinstance(explained, StaleGroupError) and "rank 1" in str(explained)
    assert collectives.explain(from_native_code("mat1 and mat2 shapes cannot be multiplied")) is None
    assert collectives.explain(RuntimeError("Connection closed by peer")) is None


def test_a_group_that_may_be_out_of_step_can_t_be_used_until_it_is_renewed(
    group: Group, collectives: Collectives
) -> None:
    error = from_native_code("NCCL communicator was aborted on rank 0")
    assert collectives.forbid(["1"]) == {"groups": {}} and collectives.explain(error) is None
    assert collectives.forbid(None) == {"groups": {"0": [0, 1]}} and group._backend.aborted
    explained = collectives.explain(error)
    assert isinstance(explained, StaleGroupError) and "some of ranks 0-1 were busy" in str(explained)
    collectives.renew(2, ["0"], [], 1)
    assert collectives.explain(error) is None


def test_a_group_that_could_not_be_renewed_says_why(
    group: Group, collectives: Collectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_register_backend", None)
    with pytest.raises(RuntimeError, match="can't give a living group a new backend"):
        collectives.renew(2, ["0"], [], 1)
    collectives.forbid(["0"])
    explained = collectives.explain(from_native_code("NCCL communicator was aborted on rank 0"))
    assert "this torch can't give a living group a new backend" in str(explained)
    assert "%distributed restart" in str(explained)


def test_a_connection_of_the_user_s_is_never_cut(collectives: Collectives) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
        collectives.cut()
        client.sendall(b"x")
        assert server.recv(1) == b"x"
