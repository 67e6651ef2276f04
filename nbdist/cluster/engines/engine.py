"""What starts `nbdist join` on other machines: an engine, loaded by its name.

`own_engines` has those that come with nbdist. The entry point group `nbdist.clusters` has the classes of others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from nbdist.base.text import did_you_mean
from nbdist.cluster.engines.own_engines import OWN_ENGINES
from nbdist.errors import UsageError
from nbdist.wire.processes.starter_lines import Invitation, Report

GROUP = "nbdist.clusters"
JOIN_LIMIT = 120.0  # seconds; Python and nbdist may lie on a slow file system


@dataclass(frozen=True)
class Layout:
    """Which nodes an engine brings.

    Attributes:
        ranks: For each of them its number of ranks; None: as many as the session says, or one per GPU.
        here: Ranks on the notebook's own machine; 0: none; None: as on the others.
        towards: A host of theirs, to which the route leads from the address that they join at; "": not known.
        patience: Seconds that a node may take to come after another has.
        listen: The address of this machine where the session listens for them; "": the one that they reach it by.
    """

    ranks: list[int | None]
    here: int | None = None
    towards: str = ""
    patience: float = JOIN_LIMIT
    listen: str = ""


class Engine(Protocol):
    """Starts one `nbdist join` on each machine, and ends it. Blocking Python, in a process of its own.

    `Options` is what a user can set: a msgspec.Struct with `forbid_unknown_fields=True`.
    """

    Options: type[msgspec.Struct]

    def __init__(self, options: Any) -> None:
        """Take the options; nothing is started yet."""

    @classmethod
    def check(cls, options: Any) -> Layout:
        """Return the nodes. Called in the notebook, before anything starts.

        Raises:
            UsageError: They can't be had like that: why, and what to type.
        """

    def start(self, invitation: Invitation) -> None:
        """Start a node for each seat: it reads its token on standard input, and leaves when that ends.

        Raises:
            UsageError: They can't be started.
        """

    def watch(self) -> Iterator[Report]:
        """Yield what happens, until all that was started has ended."""

    def stop(self) -> None:
        """End all that was started; may be called at any time."""


def load(name: str) -> type[Engine]:
    """Return the engine of that name.

    Raises:
        UsageError: There is none; the text lists those that exist.
    """
    others = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name in OWN_ENGINES:
        module, _, attribute = OWN_ENGINES[name].target.partition(":")
        engine: type[Engine] = getattr(importlib.import_module(module), attribute)
        return engine
    if name not in others:
        known = sorted({*OWN_ENGINES, *others})
        raise UsageError(
            f"unknown cluster engine {name!r}{did_you_mean(name, known)} Available engines: {', '.join(known)}"
        )
    try:
        engine = others[name].load()
    except Exception as error:  # somebody else's code
        raise UsageError(f"the cluster engine {name!r} can't be loaded: {type(error).__name__}: {error}") from error
    return engine


def options_of(engine: type[Engine], name: str, given: Mapping[str, object], where: str) -> msgspec.Struct:
    """Return the options of an engine.

    Args:
        engine: The engine.
        name: Its name.
        given: By name, what the user has set.
        where: Where it was set, for errors: "`%distributed start`".

    Raises:
        UsageError: There is no such option, or its value is invalid.
    """
    known = engine.Options.__struct_fields__
    for option in given:
        if option not in known:
            hint = did_you_mean(option, known)
            raise UsageError(
                f"{where}: the engine {name} has no option {option!r}{hint} Available options: {', '.join(known)}"
            )
    try:
        return msgspec.convert(given, engine.Options)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: invalid option for the engine {name}: {error}") from None
