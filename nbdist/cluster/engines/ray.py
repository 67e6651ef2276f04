"""Nodes by Ray: a placement group with a bundle on each of them, whose actor runs `nbdist join` there.

Ray accounts the GPUs. All of it ends with our connection to Ray: the actors, and with them the nodes.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from nbdist.base import network
from nbdist.base.checks import LONGEST, check_seconds, check_whole
from nbdist.base.processes import describe_exit
from nbdist.base.text import counted
from nbdist.cluster.engines.engine import JOIN_LIMIT, Layout
from nbdist.cluster.engines.remote import CANNOT_JOIN, NO_NBDIST, join_command
from nbdist.errors import UsageError
from nbdist.wire.processes.starter_lines import Invitation, NodeEnded, Report, StarterFailed, StarterProgress

_TICK = 1.0  # seconds
_CONNECT_LIMIT = 5.0  # seconds to find out that nothing listens there, which Ray tries for a minute
_AUTO = "auto"
_CURRENT = "/tmp/ray/ray_current_cluster"  # where Ray keeps the address of the cluster that this machine is part of
_CLIENT = "ray://"
_EXAMPLE = "`%distributed start --ray 10.0.0.1:6379 --num-nodes 2`"


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can set.

    address: as for `ray.init`; "auto": of the cluster that this machine is part of. nodes: how many. gpus_per_node:
    None: as many as all of them have free. cpus_per_node: that Ray sets aside. python: the Python there; "": that of
    Ray. wait: seconds for Ray to give the nodes; None: as long as it takes.
    """

    address: str = _AUTO
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_node: int = 1
    python: str = ""
    wait: float | None = None


class Ray:
    """The engine."""

    Options = RayOptions

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._invitation = Invitation("", [])
        self._bundle: dict[str, float] = {}
        self._group: Any = None
        self._seats: dict[Any, int] = {}  # by the reference to the end of its actor's work
        self._actors: list[Any] = []

    @classmethod
    def check(cls, options: RayOptions) -> Layout:
        """Return the nodes; nothing is asked for yet."""
        if importlib.util.find_spec("ray") is None:
            raise UsageError("Ray is not installed here: type `pip install 'nbdist[ray]'`")
        count = check_whole("the number of nodes", options.nodes, 1, _EXAMPLE)
        for name in ("gpus_per_node", "cpus_per_node"):
            if (value := getattr(options, name)) is not None:
                check_whole(name, value, 1, f"--{name.replace('_', '-')} 1")
        check_seconds("wait", options.wait)
        return Layout([None] * count, 0, _host_and_port(_address(options))[0], LONGEST)

    def start(self, invitation: Invitation) -> None:
        """Ask Ray for a bundle for each seat."""
        import ray
        from ray.util.placement_group import placement_group

        address = _address(self._options)
        _await_listener(address)
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR", namespace=f"nbdist-{os.getpid()}")
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or ["it gave no reason"])[0]
            raise UsageError(f"Ray at {address} can't be used: {reason}") from None
        self._invitation = invitation
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._bundle = _bundle(nodes, len(invitation.seats), self._options)
        self._group = placement_group([self._bundle] * len(invitation.seats), strategy="STRICT_SPREAD")

    def watch(self) -> Iterator[Report]:
        """Yield that Ray lets us wait, then the end of each node."""
        import ray

        gave_up_at, said = time.monotonic() + (self._options.wait or LONGEST), False
        while not self._group.wait(_TICK):
            if time.monotonic() > gave_up_at:
                yield StarterFailed(
                    f"Ray did not provide the nodes within {self._options.wait:g} s: {_listed(self._bundle)} on each "
                    "are in use. `ray status` shows what uses them; ask for fewer nodes, or wait longer"
                )
                return
            if not said:
                said = True
                yield StarterProgress(f"waiting for Ray: {_listed(self._bundle)} on each node; Ctrl-C cancels")
        yield StarterProgress("Ray has provided the nodes" if said else "", JOIN_LIMIT)
        self._run_actors()
        while self._seats:
            for ended in ray.wait(list(self._seats), timeout=_TICK)[0]:
                yield NodeEnded(self._seats.pop(ended), self._explain(ended))

    def stop(self) -> None:
        """End the actors, and give the bundles back."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def _run_actors(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = _actor_class()
        command = join_command(self._options.python, self._invitation.address)
        for number, seat in enumerate(self._invitation.seats):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            actor = kind.options(
                num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), scheduling_strategy=where
            ).remote()
            self._actors.append(actor)
            self._seats[actor.join.remote(command, seat.token)] = seat.number

    def _explain(self, ended: Any) -> str:
        import ray

        try:
            host, python, code, said = ray.get(ended)
        except ray.exceptions.RayError as error:
            return f"the Ray actor of a node has ended: {str(error).strip().splitlines()[0]}"
        if code is None:
            return f"node {host} of Ray has no Python at {python}: give one that has nbdist, `--python PATH`"
        if code == NO_NBDIST:
            return f"{python} of node {host} of Ray has no nbdist ({said}): type `{python} -m pip install nbdist` there"
        if code == CANNOT_JOIN:
            return f"node {host} of Ray: {said.removeprefix('nbdist: ')}"
        return f"`nbdist join` on node {host} of Ray has ended: {describe_exit(code)}{': ' if said else ''}{said}"


def _actor_class() -> Any:
    """Return the actor. It travels by value, so nothing but Ray is needed for it to report that nbdist is missing."""
    import ray

    class Node:
        def join(self, command: list[str], token: str) -> tuple[str, str, int | None, str]:
            """Return the host, its Python, and how `nbdist join` ended: exit code (None: no Python), last line."""
            import socket
            import subprocess
            import sys

            host, python = socket.gethostname(), command[0] or sys.executable
            pipe = subprocess.PIPE
            try:
                process = subprocess.Popen(
                    [python, *command[1:]], stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True, cwd="/"
                )
            except OSError:
                return host, python, None, ""
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(f"{token}\n")
            process.stdin.flush()  # it stays open: its end, also with this actor, makes the node leave
            lines = [line.strip() for line in process.stderr if line.strip()]
            return host, python, process.wait(), lines[-1] if lines else ""

    return ray.remote(max_restarts=0)(Node)


def _bundle(nodes: Sequence[dict[str, float]], count: int, options: RayOptions) -> dict[str, float]:
    """Return what to ask for on each node.

    Args:
        nodes: What those of the cluster have, in all.
        count: How many are wanted.
        options: What the user wants on each.

    Raises:
        UsageError: The cluster does not have that.
    """
    gpus = options.gpus_per_node
    if gpus is None:
        most = sorted((int(node.get("GPU", 0)) for node in nodes), reverse=True)
        gpus = most[count - 1] if len(most) >= count else 0
    bundle = {"CPU": float(options.cpus_per_node), **({"GPU": float(gpus)} if gpus else {})}
    enough = [node for node in nodes if all(node.get(name, 0) >= value for name, value in bundle.items())]
    if len(enough) < count:
        there = f"{counted(len(enough), 'node')} with {_listed(bundle)}" if nodes else "no nodes"
        have = "; ".join(_listed({name: node.get(name, 0) for name in ("CPU", "GPU")}) for node in nodes)
        raise UsageError(
            f"the Ray cluster has {there}, but {count} were requested (its nodes have {have}): ask for fewer with "
            "--num-nodes, or for less with --gpus-per-node; `ray status` shows what is available"
        )
    return bundle


def _listed(resources: dict[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in resources.items())


def _address(options: RayOptions) -> str:
    """Return the address of the cluster.

    Raises:
        UsageError: This machine is part of none.
    """
    if options.address != _AUTO:
        return options.address
    if given := os.environ.get("RAY_ADDRESS", ""):
        return given
    try:
        with open(_CURRENT) as file:
            return file.read().strip()
    except OSError:
        raise UsageError(
            f"this machine is not part of a Ray cluster: give the address of one ({_EXAMPLE}), or type "
            "`ray start --head` in a terminal"
        ) from None


def _host_and_port(address: str) -> tuple[str, int]:
    return network.parse_endpoint(address.removeprefix(_CLIENT))


def _await_listener(address: str) -> None:
    """Raise a UsageError if nothing listens there."""
    try:
        socket.create_connection(_host_and_port(address), timeout=_CONNECT_LIMIT).close()
    except OSError as error:
        raise UsageError(
            f"Ray at {address} can't be reached: {error}. Is it still running, and does a firewall let this machine "
            "through? `ray status` shows it"
        ) from None
