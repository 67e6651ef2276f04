"""Which machines a session is to have: the user's arguments, checked."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from nbdist import network
from nbdist.checks import check_whole
from nbdist.errors import UsageError
from nbdist.wire.nodes import NodesWanted

_EXAMPLE = "%distributed start --num-nodes 2 --master-addr 10.0.0.1"
_LARGEST_PORT = (1 << 16) - 1


def nodes_wanted(
    count: int,
    ranks: int | None,
    address: str | None,
    port: int | None,
    interface: str | None,
    on: str | Mapping[str, Any] | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> NodesWanted | None:
    """Check which nodes a session is to have.

    Args:
        count: How many, this machine too.
        ranks: On each; None: one for each GPU.
        address: Of this machine, for the others.
        port: Where it listens; None: anywhere.
        interface: The network between them; None: the one that leads to `address`.
        on: The cluster whose nodes are to be started; None: they join by themselves.
        token_file: Where the tokens that they join with are written; None: they are printed.

    Returns:
        The nodes; None: this machine only.

    Raises:
        UsageError: They can't be had like that.
    """
    check_whole("num_nodes", count, 1, _EXAMPLE)
    if on is not None:
        if token_file is not None:
            raise UsageError("token_file is for nodes that join by themselves; nbdist starts these: leave it out")
        return _started(on, count if count > 1 else None, ranks, address, port, interface)
    if count == 1:
        given = {"master_addr": address, "master_port": port, "interface": interface, "token_file": token_file}
        if useless := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{useless[0]} is for sessions on several machines: add `--num-nodes 2`, or leave it out")
        return None
    if address is None:
        raise UsageError(f"the other machines need an address of this one: `{_EXAMPLE}` ({_own_addresses()})")
    _check(port, interface)
    file = _new_file(token_file) if token_file is not None else ""
    return NodesWanted(count, _checked(address), port or 0, ranks, interface or "", token_file=file)


def _started(
    on: str | Mapping[str, Any],
    count: int | None,
    ranks: int | None,
    address: str | None,
    port: int | None,
    interface: str | None,
) -> NodesWanted:
    """Return nodes that an engine starts. What is given here wins over the profile."""
    from nbdist.client.session.cluster_arguments import cluster_of, own_address  # others need not wait for it

    cluster = cluster_of(on, count)
    layout, profile = cluster.layout, cluster.session
    ranks = profile.n if ranks is None else ranks
    port = profile.master_port if port is None else port
    interface = interface or profile.interface
    if ranks is not None:
        check_whole("the number of ranks", ranks, 1, "-n 8")
    _check(port, interface)
    return NodesWanted(
        1 + len(layout.ranks),
        _checked(address or profile.master_addr or own_address(cluster)),
        port or 0,
        ranks,
        interface or "",
        layout.patience,
        [layout.here, *layout.ranks],
        cluster.engine,
        cluster.options,
    )


def _check(port: int | None, interface: str | None) -> None:
    if port is not None and check_whole("master_port", port, 1, "--master-port 29500") > _LARGEST_PORT:
        raise UsageError(f"master_port must be {_LARGEST_PORT} at most, not {port}: `--master-port 29500`")
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
        raise UsageError(f"no file can be written to {file.parent}: name another one with --token-file")
    return str(file)


def _checked(given: str) -> str:
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
        raise UsageError(f"master_addr {given} would listen on every network: name one address ({_own_addresses()})")
    if meant.is_loopback and not network.is_literal(given):
        raise UsageError(
            f"master_addr {given!r} means {address} on this machine (see /etc/hosts), which no other machine reaches: "
            f"give the address itself ({_own_addresses()})"
        )
    if not network.is_local(address):
        raise UsageError(
            f"master_addr {given} is not an address of this machine, where the notebook runs: {_own_addresses()}"
        )
    return address


def _own_addresses() -> str:
    """Name the addresses of this machine."""
    known = [
        own.address
        for addresses in psutil.net_if_addrs().values()
        for own in addresses
        if own.family in (socket.AF_INET, socket.AF_INET6)
        and not ipaddress.ip_address(own.address.partition("%")[0]).is_loopback
    ]
    return f"this machine has {', '.join(known[:6])}" if known else "this machine has no network but its own loopback"
