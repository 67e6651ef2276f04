"""Which nodes an engine is to start for a session: the user's arguments, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from nbdist.base import network
from nbdist.client.start.start_settings import START_SETTINGS, StartSettings
from nbdist.cluster.cluster_profiles import profile, profiles_file
from nbdist.cluster.engines.engine import Layout, load, options_of
from nbdist.cluster.engines.own_engines import OWN_ENGINES
from nbdist.errors import UsageError

_PROFILED = {setting.profile: name for name, setting in START_SETTINGS.items() if setting.profile}
_TYPES = get_type_hints(StartSettings)
_OfSession = msgspec.defstruct(
    "_OfSession", [(key, _TYPES[name] | msgspec.UnsetType, msgspec.UNSET) for key, name in _PROFILED.items()]
)


@dataclass(frozen=True)
class Cluster:
    """What an engine brings.

    Attributes:
        engine: Its name.
        title: What it calls itself.
        options: Its own, as JSON.
        layout: Which nodes.
        session: Settings of the session that the profile sets, by name.
    """

    engine: str
    title: str
    options: str
    layout: Layout
    session: Mapping[str, Any]


def cluster_of(on: str | Mapping[str, Any], nodes: int | None) -> Cluster:
    """Check a cluster.

    Args:
        on: The name of a profile, or what a profile would set. "profile" in it names one that it changes.
        nodes: How many nodes the engine is to bring; None: it knows, or its options say.

    Raises:
        UsageError: There is no such profile or engine, or it can't be had like that.
    """
    given: dict[str, Any] = {"profile": on} if isinstance(on, str) else dict(on)
    where = "`%distributed start`"
    if (name := given.pop("profile", None)) is not None:
        given = {**profile(name), **given}
        where = f"profile {name!r} of {profiles_file()}"
    engine_name = given.pop("engine", None)
    if not isinstance(engine_name, str):
        raise UsageError(f'{where} has no engine: `engine = "ssh"`, for example')
    engine = load(engine_name)
    session = _session_settings({key: given.pop(key) for key in _PROFILED if key in given}, where)
    if nodes is not None:
        if "nodes" not in engine.Options.__struct_fields__:
            raise UsageError(
                f"leave out --num-nodes: with the engine {engine_name} the number of nodes follows from its options"
            )
        given["nodes"] = nodes
    options = options_of(engine, engine_name, given, where)
    title = OWN_ENGINES[engine_name].title if engine_name in OWN_ENGINES else engine_name
    return Cluster(engine_name, title, msgspec.json.encode(options).decode(), engine.check(options), session)


def _session_settings(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of the session that a profile sets, by their own names."""
    try:
        typed = msgspec.structs.asdict(msgspec.convert(given, _OfSession))
        found = {_PROFILED[key]: value for key, value in typed.items() if value is not msgspec.UNSET}
        StartSettings(**found)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from None
    return found


def manifest_of(on: str | Mapping[str, Any] | None, nodes: int | None) -> str:
    """Return what an engine would create, for people to read.

    Args:
        on: The cluster, as for `cluster_of`.
        nodes: How many nodes it is to bring; None: its options say.

    Raises:
        UsageError: It can't be had like that, or the engine creates nothing that could be shown.
    """
    cluster = cluster_of(on, nodes) if on is not None else None
    engine: Any = load(cluster.engine) if cluster is not None else None
    if cluster is None or not hasattr(engine, "manifest"):
        raise UsageError("--dry-run shows what --kubernetes would create: add `--kubernetes`, or leave it out")
    options = msgspec.json.decode(cluster.options, type=engine.Options)
    return str(engine.manifest(options, f"{cluster.session.get('master_addr') or own_address(cluster)}:PORT"))


def own_address(cluster: Cluster) -> str:
    """Return the address of this machine by which the others reach it.

    Raises:
        UsageError: It can't be found out.
    """
    host = cluster.layout.towards
    why = "the route to the other machines is unknown"
    if host:
        try:
            if address := network.address_towards(host):
                return address
            why = f"this machine has no route to {host}"
        except OSError as error:
            why = f"host {host!r} is not known ({error.strerror})"
    raise UsageError(f"{why}: add `--master-addr ADDRESS`, this machine's address for the others")
