"""Addresses and interfaces of this machine, as others see them. Independent of ranks."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil

from nbdist.errors import UsageError


def endpoint(host: str, port: int) -> str:
    """Return an address as text: `10.0.0.1:29500`, `[fd00::1]:29500`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read `10.0.0.1:29500` or `[fd00::1]:29500`.

    Raises:
        UsageError: It is neither.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{text!r} is not an address with a port: write, for example, 10.0.0.1:29500")
    return host.strip("[]"), int(port)


def is_literal(host: str) -> bool:
    """Return whether this is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        (
            *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),  # RFC 1918, RFC 4193
            *("169.254.0.0/16", "fe80::/10", "127.0.0.0/8", "::1/128", "100.64.0.0/10"),  # link, loopback, RFC 6598
        ),
    )
)


def is_private(address: str) -> bool:
    """Return whether packets to an address never cross the Internet."""
    meant = ipaddress.ip_address(address.partition("%")[0])
    meant = getattr(meant, "ipv4_mapped", None) or meant
    return any(meant in network for network in _PRIVATE)


def addresses_of(interface: str) -> list[str]:
    """Return the addresses that an interface of this machine has."""
    found = psutil.net_if_addrs().get(interface, ())
    return [own.address for own in found if own.family in (socket.AF_INET, socket.AF_INET6)]


def is_local(host: str) -> bool:
    """Return whether an address belongs to this machine."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, (address, *_rest) in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address, 0))
                return True
    return False


def address_towards(host: str, port: int = 1) -> str:
    """Return the address of this machine that is used to reach another; "" if there is no route.

    Raises:
        OSError: The name is not known.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """Return the network interface that has an address; "" if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address.partition("%")[0] == address for own in addresses):
            return name
    return ""
