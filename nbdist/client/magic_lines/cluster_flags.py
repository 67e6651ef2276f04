"""The flags of `%distributed start` for machines that nbdist starts itself."""

from __future__ import annotations

import argparse
import os
from typing import Any

from nbdist.base.text import split_commas
from nbdist.client.magic_lines.magic_line import number
from nbdist.errors import UsageError

# By engine, its flag, and the option whose value that has.
_ENGINES = {
    "ssh": ("--hosts", "hosts"),
    "slurm": ("--slurm", ""),
    "ray": ("--ray", "address"),
    "kubernetes": ("--kubernetes", ""),
}
# By option, the flag of an engine that it goes with, for an example.
_OPTIONS = {
    **dict.fromkeys(("ssh_config", "tunnel", "sync"), "--hosts node-a"),
    **dict.fromkeys(("partition", "account", "time", "gres", "constraint"), "--slurm"),
    "gpus_per_node": "--ray",
    **dict.fromkeys(("image", "volumes", "namespace"), "--kubernetes"),
    "python": "--hosts node-a",
}


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, except for `--on`."""
    parser.add_argument(
        "--hosts",
        type=split_commas,
        metavar="LIST",
        help="use these machines, through ssh: node-a,node-b:4,user@node-c",
    )
    parser.add_argument("--ssh-config", metavar="FILE", help="with --hosts: file to use instead of ~/.ssh/config")
    parser.add_argument(
        "--tunnel",
        action="store_true",
        default=None,
        help="with --hosts: send the session's own connections through ssh",
    )
    parser.add_argument(
        "--sync", type=_folders, metavar="LIST", help="with --hosts: folders to copy there first, for example src,lib"
    )
    parser.add_argument("--slurm", action="store_true", help="use nodes of a Slurm cluster; --num-nodes says how many")
    parser.add_argument("--partition", metavar="NAME", help="with --slurm, as for sbatch")
    parser.add_argument("--account", metavar="NAME", help="with --slurm, as for sbatch")
    parser.add_argument("--time", metavar="LIMIT", help="with --slurm, as for sbatch, for example 2:00:00")
    parser.add_argument("--gres", metavar="LIST", help="with --slurm, as for sbatch, for example gpu:8")
    parser.add_argument("--constraint", metavar="LIST", help="with --slurm, as for sbatch")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="use nodes of a Ray cluster; --num-nodes says how many",
    )
    parser.add_argument(
        "--kubernetes", action="store_true", help="use pods of a Kubernetes cluster; --num-nodes says how many"
    )
    parser.add_argument(
        "--image", metavar="NAME", help="with --kubernetes: image for the pods, which must contain nbdist"
    )
    parser.add_argument(
        "--volumes",
        type=split_commas,
        metavar="LIST",
        help="with --kubernetes: volume claims and where to mount them: data:/data",
    )
    parser.add_argument("--namespace", metavar="NAME", help="with --kubernetes (default: kubectl's)")
    parser.add_argument("--dry-run", action="store_true", help="with --kubernetes: show what would be created")
    parser.add_argument(
        "--gpus-per-node",
        type=number,
        metavar="G",
        help="with --ray (default: all) and --kubernetes (none)",
    )
    parser.add_argument(
        "--python", metavar="PATH", help="path of Python on the other machines (default: the same as here)"
    )


def _folders(text: str) -> list[str]:
    """Return the whole paths of folders that may be given from the notebook's one on."""
    return [os.path.abspath(os.path.expanduser(name)) for name in split_commas(text)]


def cluster_flags(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return what the flags say, as a profile would; None: there are no machines to start.

    Raises:
        UsageError: They don't go together.
    """
    given = {name: value for name in _OPTIONS if (value := getattr(arguments, name)) is not None}
    chosen = [name for name, (flag, _) in _ENGINES.items() if getattr(arguments, flag[2:])]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(_ENGINES[name][0] for name in chosen)} exclude each other: leave one out")
    for name in chosen:
        flag, option = _ENGINES[name]
        if option:
            given[option] = getattr(arguments, flag[2:])
    if arguments.sync is not None and chosen not in ([], ["ssh"]):
        raise UsageError(
            f"--sync copies by ssh, so it is for --hosts: with {_ENGINES[chosen[0]][0]}, put the code on a shared file "
            "system, or install it there"
        )
    if arguments.on is not None:  # a profile may say the same of ssh with other hosts, but not of another engine
        other = {"engine": chosen[0]} if chosen and chosen[0] != "ssh" else {}
        return {"profile": arguments.on, **given, **other}
    if chosen:
        return {"engine": chosen[0], **given}
    if given:
        name = next(iter(given))
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(f"{flag} is for machines that nbdist starts: add `{_OPTIONS[name]}`, or leave it out")
    return None
