"""Which rank is where, and what it is told, when there are fewer or more."""

from __future__ import annotations

import msgspec

from nbdist.controller.nodes.node_table import KnownNode
from nbdist.controller.nodes.placement import Placement
from nbdist.wire.messages.life import Place, StartOptions


def options(count: int, gpus: int = 0, place: Place | None = None) -> StartOptions:
    names = [str(number) for number in range(gpus)] or None
    return StartOptions(count, {}, "/", [], [], 0o022, 1024, gpus=names, place=place)


def two_nodes() -> tuple[Placement, dict[int, KnownNode]]:
    """Ranks 0 and 1 on node 0, 2 and 3 on node 1."""
    nodes = {0: KnownNode(0, "a"), 1: KnownNode(1, "b")}
    shares = {node: options(2, 2, Place(2 * node, 4, node, 2)) for node in nodes}
    return Placement(shares, nodes), nodes


def test_ranks_that_stay_keep_slot_and_gpu_under_new_numbers() -> None:
    where, _ = two_nodes()
    where.renumber({1: 0, 2: 1, 3: 2})
    assert [where.slot_of(rank) for rank in range(3)] == [1, 2, 3]
    assert [where.rank_in(slot) for slot in range(4)] == [None, 0, 1, 2]
    assert [where.post(rank).gpu for rank in range(3)] == [1, 0, 1]
    post = where.post(1)
    assert (post.rank, post.count, post.place.first_rank, post.place.world_size) == (1, 2, 1, 3)
    assert where.names.nodes == {"a": range(1), "b": range(1, 3)}


def test_without_its_lost_node_a_session_has_one_machine() -> None:
    where, nodes = two_nodes()
    del nodes[1]
    where.renumber({0: 0, 1: 1})
    assert where.names.nodes == {} and where.shares.keys() == {0}
    assert msgspec.structs.asdict(where.post(1).place)["num_nodes"] == 1


def test_newcomers_get_slots_of_their_own_on_gpus_that_are_free() -> None:
    where = Placement({0: options(4, 4)}, {0: KnownNode(0, "a")})
    where.renumber({0: 0, 2: 1, 3: 2})
    assert where.expect({0: 2}, [str(number) for number in range(5)]) == [3, 4]
    where.take_in()
    assert [(where.slot_of(rank), where.post(rank).gpu) for rank in range(5)] == [
        (0, 0),
        (2, 2),
        (3, 3),
        (4, 1),
        (5, 4),
    ]


def test_newcomers_are_last_until_they_are_taken_in_and_then_numbered_machine_by_machine() -> None:
    where, _ = two_nodes()
    assert where.expect({0: 1, 1: 1}, None) == [4, 5]
    assert where.numbers == {0: 0, 1: 1, 4: 2, 2: 3, 3: 4, 5: 5}
    assert [where.post(rank).rank for rank in range(6)] == [0, 1, 2, 3, 2, 5]
    assert where.names.nodes == {"a": range(2), "b": range(2, 4)} and where.post(0).place.world_size == 4
    where.take_in()
    assert where.names.nodes == {"a": range(3), "b": range(3, 6)} and where.post(0).place.world_size == 6
    assert [where.slot_of(rank) for rank in range(6)] == [0, 1, 4, 2, 3, 5]


def test_newcomers_that_are_given_up_leave_no_trace_but_their_slots() -> None:
    where = Placement({0: options(3, 3)}, {0: KnownNode(0, "a")})
    where.expect({0: 2}, None)
    where.renumber({0: 0, 1: 1, 2: 2})
    assert len(where.ranks) == 3 and where.post(0).place.world_size == 3
    assert where.slot_of(where.expect({0: 1}, None)[0]) == 5
