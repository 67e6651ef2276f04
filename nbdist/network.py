"""Addresses and interfaces of this machine, as others see them. Knows nothing of ranks."""

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
