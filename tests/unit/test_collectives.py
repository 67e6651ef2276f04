"""How groups are aborted and renewed, on a stand-in for NCCL's process group: its interface, without a GPU."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbdist.errors import StaleGroupError
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.messages.rank_processes import StoreAddress
from nbdist.wire.questions.stopping import GroupState
from nbdist.worker.groups import process_groups as module
from nbdist.worker.groups.process_groups import Collectives
from tests.stand_ins.nccl import Group, NcclBackend
from tests.support.native_errors import from_native_code

pytestmark = pytest.mark.torch_private


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
    found = Collectives(1, StoreAddress())
    monkeypatch.setattr(found, "store", dist.HashStore)
    return found


def test_an_nccl_group_is_aborted_and_gets_a_new_backend_in_the_same_object(
    group: Group, collectives: Collectives
) -> None:
    old = group._backend
    old.options._timeout = timedelta(seconds=42)
    collectives.cut()
    assert collectives.groups(current=True)["0"].cut
    collectives.renew(2, ["0"], [], 1)
    new = group._backend
    assert old.aborted and new is not old and new.counts and new.options._timeout == timedelta(seconds=42)
    assert not collectives.groups(current=True)["0"].cut


def test_a_renewed_nccl_backend_has_the_options_of_the_old_one_but_for_the_group_it_was_split_from(
    group: Group, collectives: Collectives
) -> None:
    before = group._backend.options
    before.is_high_priority_stream, before.split_from, before.split_color = True, object(), 7
    collectives.renew(1, ["0"], [], 1)
    after = group._backend.options
    assert after.is_high_priority_stream and after._timeout == before._timeout
    assert after.split_from is None and after.split_color == -2


def test_an_abort_that_takes_its_time_does_not_hold_up_the_thread_that_asks_for_it(
    group: Group, collectives: Collectives
) -> None:
    old = group._backend
    old.abort_can_end.clear()
    collectives.cut()
    collectives.cut()
    old.abort_can_end.set()
    collectives.renew(2, ["0"], [], 1)
    assert threading.get_ident() not in old.aborting and len(old.aborting) <= 2


def test_a_group_is_renewed_although_its_abort_does_not_end(
    group: Group, collectives: Collectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEWAL_LIMIT", timedelta(seconds=0.1))
    old = group._backend
    old.abort_can_end.clear()
    collectives.renew(2, ["0"], [], 1)
    assert group._backend is not old and old.aborted
    old.abort_can_end.set()


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
    assert collectives.groups(current=True)["0"] == GroupState(RankSpans.of([0, 1]), [3], cut=False)
    assert collectives.groups(current=False)["0"] == GroupState(RankSpans.of([0, 1]), [0], cut=False)


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
    assert collectives.forbid(["1"]) == {} and collectives.explain(error) is None
    assert collectives.forbid(None) == {"0": [0, 1]} and group._backend.aborted
    explained = collectives.explain(error)
    assert isinstance(explained, StaleGroupError) and "some of ranks 0-1 were busy" in str(explained)
    collectives.renew(2, ["0"], [], 1)
    assert collectives.explain(error) is None


def test_a_group_that_could_not_be_renewed_says_why(
    group: Group, collectives: Collectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_register_backend", None)
    with pytest.raises(RuntimeError, match="can't give an existing group a new backend"):
        collectives.renew(2, ["0"], [], 1)
    collectives.forbid(["0"])
    explained = collectives.explain(from_native_code("NCCL communicator was aborted on rank 0"))
    assert "this version of torch can't give an existing group a new backend" in str(explained)
    assert "%distributed restart" in str(explained)


def test_a_connection_of_the_user_s_is_never_cut(collectives: Collectives) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
        collectives.cut()
        client.sendall(b"x")
        assert server.recv(1) == b"x"
