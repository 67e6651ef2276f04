"""Several hosts on one machine: network namespaces with an address each, joined by a cable."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multinode.cable import Cable


@dataclass
class Host:
    """A namespace with a network of its own.

    Attributes:
        command: What runs a program on it.
        interface: Its end of the cable.
    """

    name: str
    address: str
    interface: str

    @property
    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def run(self, *command: str) -> str:
        """Run a program on it, and return what that prints."""
        return subprocess.run([*self.command, *command], check=True, capture_output=True, text=True).stdout

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Its end of the cable is out."""
        self.run("ip", "link", "set", self.interface, "down")
        try:
            yield
        finally:
            self.run("ip", "link", "set", self.interface, "up")


@dataclass
class OtherMachine:
    """This machine, but for one thing.

    Attributes:
        command: What runs a program on it.
    """

    command: list[str]

    def __post_init__(self) -> None:
        try:
            subprocess.run([*self.command, "true"], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no `unshare` here (Debian's package util-linux has it)")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no namespaces here: {error.stderr.strip()}")


def with_clock_ahead(seconds: int) -> OtherMachine:
    """A machine that has been up for longer, so that its monotonic clock is ahead."""
    ahead = ["--monotonic", str(seconds), "--boottime", str(seconds)]
    return OtherMachine(["unshare", "--time", *ahead, "--fork", "--kill-child"])


def with_name_and_without(name: str, folder: Path) -> OtherMachine:
    """A machine with a name of its own that has nothing in a folder."""
    setup = f'hostname {name} && mount -t tmpfs none {folder} && exec "$@"'
    return OtherMachine(["unshare", "--uts", "--mount", "sh", "-c", setup, "sh"])


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other, and nobody else. Skips the test where the system does not allow it."""
    with _two_namespaces() as (one, two):
        ends = ("link", "add", one.interface, "netns", one.name, "type", "veth")
        _ip(*ends, "peer", two.interface, "netns", two.name)
        _connect(one, two)
        yield one, two


@contextlib.contextmanager
def two_hosts_by_cable() -> Iterator[tuple[Host, Host, Cable]]:
    """Two hosts as of `two_hosts`, and the cable between them, which can be disturbed."""
    with _two_namespaces() as (one, two):
        cable = Cable(((one.name, one.interface), (two.name, two.interface)))
        with contextlib.closing(cable):
            _connect(one, two)
            yield one, two, cable


@contextlib.contextmanager
def _two_namespaces() -> Iterator[tuple[Host, Host]]:
    one, two = (Host(f"nbdist-{os.getpid()}-{end}", f"10.77.0.{end}", f"cable{end}") for end in (1, 2))
    with contextlib.ExitStack() as ends:
        for host in (one, two):
            _ip("netns", "add", host.name)
            ends.callback(_ip, "netns", "delete", host.name)
        yield one, two


def _connect(*hosts: Host) -> None:
    for host in hosts:
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
        for interface in (host.interface, "lo"):
            _ip("-n", host.name, "link", "set", interface, "up")


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no `ip` here (Debian calls its package iproute2)")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
