"""Which machines a session is to have: the user's arguments, checked."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from nbdist.base import limits, network
from nbdist.base.checks import check_whole
from nbdist.client.start.start_settings import NODES_EXAMPLE, START_SETTINGS, StartSettings
from nbdist.errors import UsageError
from nbdist.wire.processes.nodes import NodesWanted


def check_more_nodes(nodes: NodesWanted | None, count: int, ranks: object) -> None:
    """Check that a session can call for more machines.

    Args:
        nodes: Which it has; None: this machine only.
        count: How many more.
        ranks: What else was named for ranks to be added to.

    Raises:
        UsageError: It can't.
    """
    check_whole("num_nodes", count, 1, "%distributed grow --num-nodes 1 -n 2")
    if ranks is not None:
        raise UsageError("-r adds ranks on machines of this session, --num-nodes on new machines: use only one of them")
    if nodes is None:
        raise UsageError(
            f"this session has one machine, which others can't join: start it with, for example, `{NODES_EXAMPLE}`"
        )


def nodes_wanted(settings: StartSettings) -> tuple[StartSettings, NodesWanted | None]:
    """Check which nodes a session is to have.

    Returns:
        The settings, with those of the cluster's profile where the user has left them at their defaults; and the nodes,
        None: this machine only.

    Raises:
        UsageError: They can't be had like that.
    """
    if settings.on is not None:
        if settings.token_file is not None:
            raise UsageError("token_file is for nodes that you start yourself, but nbdist starts these: leave it out")
        return _started(settings, settings.on)
    if settings.num_nodes == 1:
        if useless := [name for name in settings.given() if START_SETTINGS[name].several_nodes]:
            raise UsageError(f"{useless[0]} is for sessions on several machines: add `--num-nodes 2`, or leave it out")
        return settings, None
    if settings.master_addr is None:
        raise UsageError(f"the other machines need an address of this one: `{NODES_EXAMPLE}` ({_own_addresses()})")
    file = _new_file(settings.token_file) if settings.token_file is not None else ""
    return settings, _wanted(settings, settings.num_nodes, settings.master_addr, token_file=file)


def _started(given: StartSettings, on: str | Mapping[str, Any]) -> tuple[StartSettings, NodesWanted]:
    """Return nodes that an engine starts. What the user has set wins over the profile."""
    from nbdist.client.start.cluster_arguments import cluster_of, own_address  # others need not wait for it

    cluster = cluster_of(on, given.num_nodes if given.num_nodes > 1 else None)
    settings, layout = given.completed(cluster.session), cluster.layout
    return settings, _wanted(
        settings,
        1 + len(layout.ranks),
        settings.master_addr or own_address(cluster),
        patience=layout.patience,
        shares=[layout.here, *layout.ranks],
        engine=cluster.engine,
        engine_title=cluster.title,
        engine_options=cluster.options,
        listen=layout.listen,
    )


def _wanted(settings: StartSettings, count: int, address: str, **others: Any) -> NodesWanted:
    interface, timeout = settings.interface, settings.node_timeout
    if interface is not None and interface not in psutil.net_if_addrs():
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise UsageError(f"this machine has no network interface {interface!r}: it has {known}")
    return NodesWanted(
        count,
        _checked(address, settings),
        settings.master_port or 0,
        settings.num_processes,
        interface or "",
        timeout=limits.NODE_TIMEOUT if timeout is None else timeout,
        **others,
    )


def _new_file(given: str | os.PathLike[str]) -> str:
    """Return the path of a file that does not exist yet.

    Raises:
        UsageError: It does, or it can't be written.
    """
    file = Path(given).expanduser().absolute()
    if file.exists():
        raise UsageError(f"{file} already exists: remove it, or name another file with --token-file")
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"can't write to {file.parent}: choose another path for --token-file")
    return str(file)


def _checked(given: str, settings: StartSettings) -> str:
    """Return the address of this machine that is meant.

    Raises:
        UsageError: It is none of this machine's, or nobody else can reach it.
    """
    try:
        address = str(socket.getaddrinfo(given, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(f"master_addr {given!r} is not a known address ({error}): {_own_addresses()}") from None
    meant = ipaddress.ip_address(address.partition("%")[0])
    if meant.is_unspecified:
        raise UsageError(f"master_addr {given} would listen on every network: choose one address ({_own_addresses()})")
    if meant.is_loopback and not network.is_literal(given):
        raise UsageError(
            f"master_addr {given!r} means {address} on this machine (see /etc/hosts), which other machines can't "
            f"reach: give its network address ({_own_addresses()})"
        )
    if not network.is_local(address):
        raise UsageError(
            f"master_addr {given} is not an address of this machine, where the notebook runs: {_own_addresses()}"
        )
    if settings.private_network:
        _check_private(address, settings.interface)
    return address


def _check_private(address: str, interface: str | None) -> None:
    """Refuse what is reached through the Internet, where anybody could talk to torch's store, gloo and NCCL."""
    for each in [address, *(network.addresses_of(interface) if interface is not None else ())]:
        if not network.is_private(each):
            raise UsageError(
                f"{each} is not the address of a private network (10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, "
                "100.64.0.0/10, fc00::/7, link-local or loopback), and torch's store, gloo and NCCL have no password: "
                f"use another address, or leave out --private-network if you trust that network ({_own_addresses()})"
            )


def _own_addresses() -> str:
    """Name the addresses of this machine."""
    known = [
        own.address
        for addresses in psutil.net_if_addrs().values()
        for own in addresses
        if own.family in (socket.AF_INET, socket.AF_INET6)
        and not ipaddress.ip_address(own.address.partition("%")[0]).is_loopback
    ]
    return f"this machine has {', '.join(known[:6])}" if known else "this machine has no network except loopback"
