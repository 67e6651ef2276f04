"""Which machines a session is to have: the user's arguments, checked."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from nbdist.base import limits, network
from nbdist.base.checks import check_seconds, check_whole
from nbdist.errors import UsageError
from nbdist.wire.processes.nodes import NodesWanted

_EXAMPLE = "%distributed start --num-nodes 2 --master-addr 10.0.0.1"
_LARGEST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class WayIn:
    """How other nodes come in, as the user says.

    Attributes:
        address: Of this machine, for the others.
        port: Where it listens; None: anywhere.
        interface: The network between them; None: the one that leads to `address`.
        timeout: Seconds that a node may be silent until it is given up; None: as usual.
        token_file: Where the tokens that they join with are written; None: they are printed.
        private: Whether to refuse a network that is not private.
    """

    address: str | None = None
    port: int | None = None
    interface: str | None = None
    timeout: float | None = None
    token_file: str | os.PathLike[str] | None = None
    private: bool = False


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
            f"this session has one machine, which others can't join: start it with, for example, `{_EXAMPLE}`"
        )


def nodes_wanted(
    count: int, ranks: int | None, way: WayIn, on: str | Mapping[str, Any] | None = None
) -> NodesWanted | None:
    """Check which nodes a session is to have.

    Args:
        count: How many, this machine too.
        ranks: On each; None: one for each GPU.
        way: How they come in.
        on: The cluster whose nodes are to be started; None: they join by themselves.

    Returns:
        The nodes; None: this machine only.

    Raises:
        UsageError: They can't be had like that.
    """
    check_whole("num_nodes", count, 1, _EXAMPLE)
    if on is not None:
        if way.token_file is not None:
            raise UsageError("token_file is for nodes that you start yourself, but nbdist starts these: leave it out")
        return _started(on, count if count > 1 else None, ranks, way)
    if count == 1:
        given = {
            "master_addr": way.address,
            "master_port": way.port,
            "interface": way.interface,
            "node_timeout": way.timeout,
            "token_file": way.token_file,
            "private_network": way.private or None,
        }
        if useless := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{useless[0]} is for sessions on several machines: add `--num-nodes 2`, or leave it out")
        return None
    if way.address is None:
        raise UsageError(f"the other machines need an address of this one: `{_EXAMPLE}` ({_own_addresses()})")
    _check(way)
    file = _new_file(way.token_file) if way.token_file is not None else ""
    wanted = NodesWanted(count, _checked(way.address, way), way.port or 0, ranks, way.interface or "", token_file=file)
    return _with_timeout(wanted, way.timeout)


def _started(on: str | Mapping[str, Any], count: int | None, ranks: int | None, way: WayIn) -> NodesWanted:
    """Return nodes that an engine starts. What is given here wins over the profile."""
    from nbdist.client.start.cluster_arguments import cluster_of, own_address  # others need not wait for it

    cluster = cluster_of(on, count)
    layout, profile = cluster.layout, cluster.session
    ranks = profile.n if ranks is None else ranks
    way = WayIn(
        way.address or profile.master_addr,
        profile.master_port if way.port is None else way.port,
        way.interface or profile.interface,
        profile.node_timeout if way.timeout is None else way.timeout,
        private=way.private or profile.private_network,
    )
    if ranks is not None:
        check_whole("the number of ranks", ranks, 1, "-n 8")
    _check(way)
    wanted = NodesWanted(
        1 + len(layout.ranks),
        _checked(way.address or own_address(cluster), way),
        way.port or 0,
        ranks,
        way.interface or "",
        layout.patience,
        [layout.here, *layout.ranks],
        cluster.engine,
        cluster.options,
        listen=layout.listen,
    )
    return _with_timeout(wanted, way.timeout)


def _with_timeout(wanted: NodesWanted, timeout: float | None) -> NodesWanted:
    return wanted if timeout is None else msgspec.structs.replace(wanted, timeout=timeout)


def _check(way: WayIn) -> None:
    port, interface = way.port, way.interface
    check_seconds("node_timeout", way.timeout)
    if way.timeout is not None and way.timeout < limits.SHORTEST_NODE_TIMEOUT:
        raise UsageError(
            f"node_timeout must be at least {limits.SHORTEST_NODE_TIMEOUT:g} seconds, got {way.timeout:g}: "
            "`--node-timeout 60` is the default"
        )
    if port is not None and check_whole("master_port", port, 1, "--master-port 29500") > _LARGEST_PORT:
        raise UsageError(f"master_port must be at most {_LARGEST_PORT}, not {port}: `--master-port 29500`")
    if interface is not None and interface not in psutil.net_if_addrs():
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise UsageError(f"this machine has no network interface {interface!r}: it has {known}")


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


def _checked(given: str, way: WayIn) -> str:
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
    if way.private:
        _check_private(address, way.interface)
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
