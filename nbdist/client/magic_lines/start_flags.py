"""The flags of `%distributed start`, from the table of a session's settings, and `Session`'s keywords from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from nbdist.base.text import split_commas
from nbdist.client.magic_lines.cluster_flags import add_cluster_flags, cluster_flags
from nbdist.client.magic_lines.magic_line import count, linger, number, seconds, span_above_zero
from nbdist.client.start.start_settings import (
    START_SETTINGS,
    ClusterProfile,
    Duration,
    Gpus,
    IdleTime,
    RankCount,
    WholeNumber,
)
from nbdist.planning.kinds import Choice, Kind, Switch


def add_start_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, and those that stand for a cluster's profile."""
    for name, setting in START_SETTINGS.items():
        add_start_flag(parser, name)
        if isinstance(setting.kind, ClusterProfile):
            add_cluster_flags(parser)


def add_start_flag(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flag of one setting."""
    setting = START_SETTINGS[name]
    how: dict[str, Any] = {"dest": name, "default": setting.default, "help": setting.help}
    if isinstance(setting.kind, Switch):
        how["action"] = "store_false" if setting.default else "store_true"
    elif isinstance(setting.kind, Choice):
        how["choices"] = setting.kind.words
    else:
        how |= {"type": _reader(setting.kind), "metavar": setting.metavar}
    parser.add_argument(*setting.flags(name), **how)


def start_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `Session` for the flags of a line.

    Raises:
        UsageError: Those of a cluster don't go together.
    """
    return {name: getattr(arguments, name) for name in START_SETTINGS} | {"on": cluster_flags(arguments)}


def _reader(kind: Kind) -> Callable[[str], Any]:
    """Return what makes a flag's text a value of this kind."""
    if isinstance(kind, RankCount):
        return count
    if isinstance(kind, WholeNumber):
        return number
    if isinstance(kind, IdleTime):
        return span_above_zero
    if isinstance(kind, Duration):
        return linger if kind.zero else seconds
    return split_commas if isinstance(kind, Gpus) else str
