"""The flags of `%distributed start` for machines that nbdist starts itself."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from nbdist.base.text import split_commas
from nbdist.client.magic_lines.magic_line import number
from nbdist.cluster.engines.own_engines import OWN_ENGINES, ClusterFlag, FlagKind
from nbdist.errors import UsageError

# By option, how to choose an engine that has it, for an example.
_OPTIONS = {flag.option: engine.example for engine in OWN_ENGINES.values() for flag in engine.flags}


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, except for `--on`."""
    for engine in OWN_ENGINES.values():
        for flag in (engine.flag, *engine.flags):
            _add(parser, flag)
    parser.add_argument("--dry-run", action="store_true", help="with --kubernetes: show what would be created")


def _add(parser: argparse.ArgumentParser, flag: ClusterFlag) -> None:
    if flag.kind == "switch":
        parser.add_argument(flag.name, action="store_true", default=None, help=flag.help)
    elif flag.otherwise:
        parser.add_argument(flag.name, nargs="?", const=flag.otherwise, metavar=flag.metavar, help=flag.help)
    else:
        parser.add_argument(flag.name, type=_PARSED[flag.kind], metavar=flag.metavar, help=flag.help)


def _folders(text: str) -> list[str]:
    """Return the whole paths of folders that may be given from the notebook's one on."""
    return [os.path.abspath(os.path.expanduser(name)) for name in split_commas(text)]


_PARSED: Mapping[FlagKind, Callable[[str], object]] = {
    "text": str,
    "names": split_commas,
    "folders": _folders,
    "number": number,
}


def cluster_flags(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return what the flags say, as a profile would; None: there are no machines to start.

    Raises:
        UsageError: They don't go together.
    """
    given = {name: value for name in _OPTIONS if (value := getattr(arguments, name)) is not None}
    chosen = {name: engine for name, engine in OWN_ENGINES.items() if getattr(arguments, engine.flag.option)}
    if len(chosen) > 1:
        flags = " and ".join(engine.flag.name for engine in chosen.values())
        raise UsageError(f"{flags} exclude each other: leave one out")
    for name, engine in chosen.items():
        if engine.option:
            given[engine.option] = getattr(arguments, engine.flag.option)
        if arguments.sync is not None and name != "ssh":
            raise UsageError(
                f"--sync copies by ssh, so it is for --hosts: with {engine.flag.name}, put the code on a shared file "
                "system, or install it there"
            )
    if arguments.on is not None:  # a profile may say the same of ssh with other hosts, but not of another engine
        other = {} if chosen.keys() <= {"ssh"} else {"engine": next(iter(chosen))}
        return {"profile": arguments.on, **given, **other}
    if chosen:
        return {"engine": next(iter(chosen)), **given}
    if given:
        option = next(iter(given))
        flag = f"--{option.replace('_', '-')}"
        raise UsageError(f"{flag} is for machines that nbdist starts: add `{_OPTIONS[option]}`, or leave it out")
    return None
