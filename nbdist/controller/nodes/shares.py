"""Which node is to start which ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from nbdist.controller.nodes.node_table import KnownNode, NoEntrance
from nbdist.wire.messages.life import Place, StartOptions
from nbdist.wire.processes.nodes import NodesWanted


def shared_out(
    options: StartOptions, wanted: NodesWanted | None, nodes: Iterable[KnownNode]
) -> dict[int, StartOptions]:
    """Return what each node has to start. Ranks are numbered node by node.

    Args:
        options: What the notebook asks for, on its own machine.
        wanted: Which nodes; None: only that machine.
        nodes: Those that have come.

    Raises:
        NoEntrance: A node has no GPU, and no number of ranks was given.
    """
    if wanted is None or wanted.count == 1:
        return {0: options}
    ordered = sorted(nodes, key=lambda node: node.seat)
    counts = {node.number: _count(options, wanted, node) for node in ordered}
    working = [number for number, count in counts.items() if count]
    world, gpus = sum(counts.values()), {node.number: node.gpus for node in nodes}
    gpus[0] = len(options.gpus or [])
    each_has_its_own = all(gpus[number] >= count for number, count in counts.items())
    shares, first = {}, 0
    for number, count in counts.items():
        shares[number] = msgspec.structs.replace(
            options if number == 0 else without_surroundings(options),
            count=count,
            backend=options.backend or ("cpu:gloo,cuda:nccl" if each_has_its_own else "gloo"),
            place=Place(first, world, working.index(number) if count else 0, len(working)),
        )
        first += count
    return shares


def _count(options: StartOptions, wanted: NodesWanted, node: KnownNode) -> int:
    count = wanted.ranks_of(node.seat)
    if node.number == 0:
        return 0 if count == 0 else options.count
    if not (count := count or node.gpus):
        raise NoEntrance(f"node {node.number} ({node.host}) has no GPU, so pass the number of ranks per node: `-n 8`")
    return count


def without_surroundings(options: StartOptions) -> StartOptions:
    """Remove what belongs to the notebook's machine; other nodes have their own."""
    return msgspec.structs.replace(options, environment={}, sys_path=[], gpus=None, open_files=0, umask=0)
