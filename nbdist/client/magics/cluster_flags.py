"""The flags of `%distributed start` for machines that nbdist starts itself."""

from __future__ import annotations

import argparse
from typing import Any

from nbdist.errors import UsageError
from nbdist.text import split_commas

_SSH = {"ssh_config": "--ssh-config", "tunnel": "--tunnel"}
_SLURM = {name: f"--{name}" for name in ("partition", "account", "time", "gres", "constraint")}
_BOTH = {"python": "--python"}


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--on", metavar="NAME", help="a profile of ~/.config/nbdist/clusters.toml")
    parser.add_argument(
        "--hosts", type=split_commas, metavar="LIST", help="other machines, by ssh: node-a,node-b:4,user@node-c"
    )
    parser.add_argument("--ssh-config", metavar="FILE", help="with --hosts: in place of ~/.ssh/config")
    parser.add_argument(
        "--tunnel", action="store_true", default=None, help="with --hosts: the session's own connections through ssh"
    )
    parser.add_argument("--slurm", action="store_true", help="nodes of a Slurm cluster; --num-nodes of them")
    parser.add_argument("--partition", metavar="NAME", help="with --slurm, as for sbatch")
    parser.add_argument("--account", metavar="NAME", help="likewise")
    parser.add_argument("--time", metavar="LIMIT", help="likewise, for example 2:00:00")
    parser.add_argument("--gres", metavar="LIST", help="likewise, for example gpu:8")
    parser.add_argument("--constraint", metavar="LIST", help="likewise")
    parser.add_argument(
        "--python", metavar="PATH", help="the Python of the other machines (default: at this one's path)"
    )


def cluster_flags(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return what the flags say, as a profile would; None: there are no machines to start.

    Raises:
        UsageError: They don't go together.
    """
    names = {**_SSH, **_SLURM, **_BOTH}
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    chosen = [flag for flag, value in (("--hosts", arguments.hosts), ("--slurm", arguments.slurm)) if value]
    if len(chosen) > 1:
        raise UsageError("--hosts and --slurm exclude each other: hosts are started by ssh; leave one out")
    if arguments.hosts:
        given["hosts"] = arguments.hosts
    if arguments.on is not None:
        return {"profile": arguments.on, **given, **({"engine": "slurm"} if arguments.slurm else {})}
    if chosen:
        return {"engine": "ssh" if arguments.hosts else "slurm", **given}
    if given:
        name = next(iter(given))
        needed = "--slurm" if name in _SLURM else "--hosts node-a"
        raise UsageError(f"{names[name]} is for machines that nbdist starts: add `{needed}`, or leave it out")
    return None
