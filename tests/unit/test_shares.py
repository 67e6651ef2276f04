"""Which node starts which ranks."""

from __future__ import annotations

import msgspec
import pytest

from nbdist.controller.nodes.node_table import KnownNode, NoEntrance
from nbdist.controller.nodes.placement import shared_out
from nbdist.wire.messages.life import StartOptions
from nbdist.wire.processes.nodes import NodesWanted


def options(count: int, gpus: int = 0) -> StartOptions:
    return StartOptions(
        count=count,
        environment={"SECRET": "of the notebook's machine"},
        cwd="/work",
        sys_path=["/only/there"],
        argv=[],
        umask=0o022,
        open_files=1024,
        gpus=[str(number) for number in range(gpus)] or None,
    )


def share(count: int, gpus: list[int], ranks: int | None) -> dict[int, StartOptions]:
    nodes = [KnownNode(number, f"host-{number}", found) for number, found in enumerate(gpus)]
    return shared_out(options(count, gpus[0]), NodesWanted(len(gpus), "10.0.0.1", ranks=ranks), nodes)


def test_without_other_nodes_nothing_is_changed() -> None:
    alone = options(2)
    assert shared_out(alone, None, [KnownNode(0, "here")]) == {0: alone}


def test_ranks_are_numbered_node_by_node() -> None:
    shares = share(2, [0, 0, 0], 2)
    assert {node: list(found.ranks) for node, found in shares.items()} == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    places = [found.place for found in shares.values()]
    assert [(place.node_rank, place.world_size, place.num_nodes) for place in places if place] == [
        (0, 6, 3),
        (1, 6, 3),
        (2, 6, 3),
    ]


def test_without_a_number_each_node_has_a_rank_for_each_gpu() -> None:
    shares = share(4, [4, 2], None)
    assert {node: list(found.ranks) for node, found in shares.items()} == {0: [0, 1, 2, 3], 1: [4, 5]}


def test_a_node_without_gpus_wants_a_number() -> None:
    with pytest.raises(NoEntrance, match=r"node 1 \(host-1\) has no GPU"):
        share(4, [4, 0], None)


@pytest.mark.parametrize(("gpus", "backend"), [([2, 2], "cpu:gloo,cuda:nccl"), ([2, 1], "gloo"), ([0, 0], "gloo")])
def test_all_nodes_use_one_backend(gpus: list[int], backend: str) -> None:
    assert {found.backend for found in share(2, gpus, 2).values()} == {backend}


def test_other_nodes_do_not_get_the_environment_of_the_notebook_s_machine() -> None:
    shares = share(2, [0, 0], 2)
    assert shares[0].environment and shares[0].sys_path
    assert not shares[1].environment and not shares[1].sys_path
    assert b"SECRET" not in msgspec.msgpack.encode(shares[1])
