"""Nodes by OpenSSH: one `ssh` for each host, which is its node's life."""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from nbdist.base.processes import describe_exit
from nbdist.base.text import counted, split_commas
from nbdist.cluster.engines.engine import Layout
from nbdist.cluster.engines.remote import CANNOT_JOIN, NO_NBDIST, Remote, ended, join_command
from nbdist.cluster.engines.sync import Copy, look_at
from nbdist.errors import UsageError
from nbdist.wire.processes.starter_lines import Invitation, NodeEnded, Report, StarterProgress

_SSH_FAILED = 255  # of ssh itself, not of what it has run
_NO_SUCH_COMMAND = (126, 127)  # of every shell
_OPTIONS = (
    "BatchMode=yes",  # nobody is there to answer
    "ConnectTimeout=10",
    "ForwardX11=no",
)
_NO_TUNNEL = ("ClearAllForwardings=yes",)  # those of the configuration are not for us; it would clear ours, too
_TUNNEL_PORTS = range(20_000, 30_000)  # below those that systems give to outgoing connections
_EXAMPLE = "`--hosts node-a,node-b:4`"
_HOST = re.compile(r"(?P<name>\[[^\]]+\]|[^:\s]+)(:(?P<ranks>\d+))?")


class _Host(NamedTuple):
    name: str
    ranks: int | None

    @property
    def here(self) -> bool:
        own = socket.gethostname()
        return self.name in ("localhost", own, own.partition(".")[0])


class SshOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can set.

    hosts: as for ssh, each with `:N` for its number of ranks. python: the Python there; "": at the path of this one.
    ssh_config: a file to use in place of ~/.ssh/config. tunnel: whether the session's own connections go through ssh.
    sync: folders to copy to each host before its node starts, as whole paths.
    """

    hosts: list[str] | str
    python: str = ""
    ssh_config: str = ""
    tunnel: bool = False
    sync: list[str] = []


class Ssh:
    """The engine."""

    Options = SshOptions

    def __init__(self, options: SshOptions) -> None:
        self._options = options
        self._hosts = [host for host in _hosts(options) if not host.here]
        self._python = options.python or sys.executable
        self._seats: dict[int, str] = {}
        self._remotes: dict[int, Remote] = {}
        self._invitation = Invitation("", [])

    @classmethod
    def check(cls, options: SshOptions) -> Layout:
        """Return the nodes; nothing is connected to yet."""
        if shutil.which("ssh") is None:
            raise UsageError("there is no `ssh` here: install it (Debian calls its package openssh-client)")
        hosts = _hosts(options)
        others = [host for host in hosts if not host.here]
        if not others:
            raise UsageError(f"--hosts names no other machine: {_EXAMPLE}, or `%distributed start -n 2` for this one")
        for host in others:
            if host.ranks == 0:
                raise UsageError(f"host {host.name!r} can't have 0 ranks: leave it out, or give `{host.name}:1`")
        look_at(options.sync)
        here = next((host.ranks for host in hosts if host.here), None)
        return Layout(
            [host.ranks for host in others],
            here,
            _host_name(options, others[0].name),
            listen="127.0.0.1" if options.tunnel else "",
        )

    def start(self, invitation: Invitation) -> None:
        """Start one ssh for each seat, unless something has to be copied first."""
        if max(seat.number for seat in invitation.seats) > len(self._hosts):
            raise UsageError(
                f"--hosts of this session names {counted(len(self._hosts), 'other host')}, and no host is left "
                "unused. To use more, start the session with all hosts; `%distributed grow -n 1` adds ranks on the "
                "present ones"
            )
        self._invitation = invitation
        self._seats = {seat.number: self._hosts[seat.number - 1].name for seat in invitation.seats}
        if not self._options.sync:
            self._start(invitation)

    def _start(self, invitation: Invitation) -> None:
        for seat in invitation.seats:
            host = self._seats[seat.number]
            settings, way, address = self._way(invitation)
            command = shlex.join(join_command(self._python, address))
            self._remotes[seat.number] = Remote(
                [*_ssh(self._options, settings), *way, "-T", host, "--", f"exec {command}"], [seat.token]
            )

    def _way(self, invitation: Invitation) -> tuple[tuple[str, ...], list[str], str]:
        """Return the settings and arguments of ssh, and the address at which the host joins."""
        settings = (*_OPTIONS, *_alive(invitation.timeout))
        if not self._options.tunnel:
            return (*settings, *_NO_TUNNEL), [], invitation.address
        address = f"127.0.0.1:{secrets.choice(_TUNNEL_PORTS)}"  # there; another program may have it, which ssh reports
        return (*settings, "ExitOnForwardFailure=yes"), ["-R", f"{address}:{invitation.address}"], address

    def watch(self) -> Iterator[Report]:
        """Yield what is copied, then the end of each."""
        if self._options.sync:
            yield from self._copy()
            self._start(self._invitation)
        for seat in ended(self._remotes):
            if seat is not None:
                yield NodeEnded(seat, self._explain(self._seats[seat], self._remotes[seat]))

    def _copy(self) -> Iterator[Report]:
        """Copy the user's folders to all hosts at once."""
        trees = look_at(self._options.sync)
        hosts = dict.fromkeys(self._seats.values())
        yield StarterProgress(f"copying {', '.join(map(str, trees))} to {', '.join(hosts)}")
        ssh = _ssh(self._options, (*_OPTIONS, *_NO_TUNNEL))
        copies = {host: Copy([tree.path for tree in trees], host, ssh) for host in hosts}
        for host, copy in copies.items():
            if why := copy.failure():
                raise UsageError(
                    f"--sync to host {host!r} failed: {why}. It needs rsync there, and a path that you may write to"
                )

    def stop(self) -> None:
        """End all."""
        for remote in self._remotes.values():
            remote.let_go()
        for remote in self._remotes.values():
            remote.end()

    def _explain(self, host: str, remote: Remote) -> str:
        code, said = remote.wait(), remote.last_line
        if code == _SSH_FAILED:
            what = f"ssh to host {host!r} failed: {said or 'no reason was given'}".rstrip(".")
            trial = shlex.join([*_ssh(self._options, ()), host, "true"])
            return f"{what}. `{trial}` must work in a terminal without asking anything"
        if code in _NO_SUCH_COMMAND:
            return f"host {host!r} has no Python at {self._python}: give one that has nbdist, `--python PATH`"
        if code == NO_NBDIST:
            return (
                f"{self._python} of host {host!r} has no nbdist ({said}): type `{self._python} -m pip install nbdist` "
                "there, or name a Python that has it with `--python PATH`"
            )
        if code == CANNOT_JOIN:
            return f"host {host!r}: {said.removeprefix('nbdist: ')}"
        return f"`nbdist join` on host {host!r} has ended: {describe_exit(code)}{': ' if said else ''}{said}"


def _ssh(options: SshOptions, settings: tuple[str, ...] = _OPTIONS) -> list[str]:
    config = ["-F", options.ssh_config] if options.ssh_config else []
    return ["ssh", *config, *(word for setting in settings for word in ("-o", setting))]


def _alive(timeout: float) -> tuple[str, ...]:
    """Return the settings by which a connection lasts as long as a node may be silent."""
    interval = max(1, int(timeout / 12))
    return f"ServerAliveInterval={interval}", f"ServerAliveCountMax={max(1, round(timeout / interval))}"


def _hosts(options: SshOptions) -> list[_Host]:
    """Return the hosts.

    Raises:
        UsageError: One can't be meant.
    """
    texts = split_commas(options.hosts) if isinstance(options.hosts, str) else options.hosts
    hosts = []
    for text in texts:
        found = _HOST.fullmatch(text)
        if found is None or text.startswith("-"):
            raise UsageError(f"invalid host {text!r}: give its name, and its number of ranks after a colon: {_EXAMPLE}")
        hosts.append(_Host(found["name"].strip("[]"), int(found["ranks"]) if found["ranks"] else None))
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"host {twice!r} is named twice: name it once, with all its ranks: `--hosts {twice}:8`")
    return hosts


def _host_name(options: SshOptions, host: str) -> str:
    """Return the name or address that ssh connects to for a host, which may be an alias.

    Raises:
        UsageError: ssh does not accept its configuration.
    """
    found = subprocess.run([*_ssh(options, ()), "-G", host], check=False, capture_output=True, text=True)
    if found.returncode:
        raise UsageError(f"ssh does not accept host {host!r}: {(found.stderr.strip().splitlines() or ['?'])[-1]}")
    settings = dict(line.partition(" ")[::2] for line in found.stdout.splitlines())
    return settings.get("hostname", host)
