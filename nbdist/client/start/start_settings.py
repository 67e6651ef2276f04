"""The settings of a session: each declared once, with its values, its default, its flag, its words and its place.

`Session`'s keywords, the flags of `%distributed start`, and what a cluster's profile may set are read here. What
depends on this machine, or on how settings go together, is checked where they take effect.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from nbdist.base import limits
from nbdist.base.checks import check_seconds, check_whole
from nbdist.base.text import did_you_mean, parse_clock
from nbdist.errors import UsageError
from nbdist.planning.kinds import Choice, Kind, Switch

OnDeath = Literal["ask", "heal", "stop"]
ON_DEATH: tuple[OnDeath, ...] = ("ask", "heal", "stop")
NODES_EXAMPLE = "%distributed start --num-nodes 2 --master-addr 10.0.0.1"
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "cpu:gloo,cuda:nccl")
_LARGEST_PORT = (1 << 16) - 1


# --- the values of settings, by kind


class WholeNumber(Kind):
    """A whole number.

    Args:
        least: The smallest allowed.
        most: The largest; None: any.
    """

    def __init__(self, least: int = 1, most: int | None = None) -> None:
        self.least, self.most = least, most

    def refined(self, name: str, value: Any) -> int:
        if self.most is not None and check_whole(name, value, self.least) > self.most:
            raise UsageError(f"{name} must be at most {self.most}, not {value}")
        return check_whole(name, value, self.least)


class RankCount(WholeNumber):
    """A number of ranks."""


class NonEmptyText(Kind):
    """Any text but none."""

    def refined(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise UsageError(f"{name} must be a non-empty str, not {value!r}")
        return value


class FilePath(Kind):
    """A file, or a folder."""

    def refined(self, name: str, value: Any) -> Any:
        if not isinstance(value, str | os.PathLike) or not str(value):
            raise UsageError(f"{name} must be a path, not {value!r}")
        return value


class Duration(Kind):
    """Seconds.

    Args:
        zero: Whether it may be 0.
        least: The smallest allowed.
        default: What to use instead of less.
    """

    def __init__(self, *, zero: bool = False, least: float = 0.0, default: float = 60.0) -> None:
        self.zero, self.least, self.default = zero, least, default

    def refined(self, name: str, value: Any) -> float:
        check_seconds(name, value, zero=self.zero, optional=False)
        if value < self.least:
            raise UsageError(
                f"{name} must be at least {self.least:g} seconds, got {value:g}: "
                f"`{_flag(name)} {self.default:g}` is the default"
            )
        return float(value)


class EndTime(Kind):
    """A moment to come."""

    def refined(self, name: str, value: Any) -> str:
        at = parse_clock(value, time.time()) if isinstance(value, str) else None
        if at is None:
            raise UsageError(f"{name} must be a time, for example 18:00 or 2030-01-31T06:00, not {value!r}")
        if at < time.time():
            raise UsageError(f"{name} must be a time to come, and {value} is over")
        return str(value)


class ShellCommand(NonEmptyText):
    """A command for the shell."""


class IdleTime(Duration):
    """Seconds above 0, typed with or without a unit."""


class Gpus(Kind):
    """GPUs; whether this machine has them is known where they are used."""

    def refined(self, name: str, value: Any) -> Any:
        if not isinstance(value, int | str | Iterable):
            raise UsageError(f"{name} must name GPUs, for example [0, 2] or '0,2', not {value!r}")
        return value


class Backend(Kind):
    """A backend of torch's process groups."""

    def refined(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise UsageError(f"{name} must be a str, not {value!r}: `{name}='gloo'`")
        if value not in _BACKENDS:
            hint = did_you_mean(value, _BACKENDS, f"`{_flag(name)} {{}}`")
            raise UsageError(f"{name} {value!r} is unknown{hint} Allowed values: {', '.join(_BACKENDS)}")
        return value


class ClusterProfile(Kind):
    """A profile of a cluster, or what one would hold."""

    def refined(self, name: str, value: Any) -> Any:
        if not isinstance(value, str | Mapping):
            raise UsageError(
                f'{name} must be the name of a profile, or a dict like {{"engine": "ssh", "hosts": ["node-a"]}}, not '
                f"{value!r}"
            )
        return value


# --- what is known of a setting


@dataclass(frozen=True)
class FormField:
    """The field of a setting in JupyterLab's form, a line of text. The page has them as `start_fields.json`.

    Attributes:
        label: Its name.
        caption: What to enter.
        empty: What an empty field means, in a word or two.
        pattern: A regular expression for what may be entered.
        problem: What is shown for anything else.
    """

    label: str
    caption: str
    empty: str
    pattern: str
    problem: str


@dataclass(frozen=True, eq=False, repr=False)
class StartSetting:
    """All that is known of a setting besides its name and its type.

    Attributes:
        kind: The values that it may have.
        default: What it is if nobody sets it; None is allowed only then.
        help: What its flag is for, in a few words.
        metavar: What follows its flag.
        short: A second, shorter flag.
        label: What messages call it; "": by its name.
        example: What to type instead of a wrong value.
        profile: Its name in a cluster's profile; "": profiles can't set it.
        several_nodes: Whether it is only for sessions on several machines.
        form: Its field in JupyterLab's form; None: the form leaves it out.
    """

    kind: Kind
    default: Any
    help: str
    metavar: str = ""
    short: str = ""
    label: str = ""
    example: str = ""
    profile: str = ""
    several_nodes: bool = False
    form: FormField | None = None

    def check(self, name: str, value: object) -> None:
        """Refuse what it can't be.

        Raises:
            UsageError: With what it can be.
        """
        if value is None and self.default is None:
            return
        try:
            self.kind.refined(self.label or name, value)
        except UsageError as error:
            raise UsageError(f"{error}: `{self.example}`" if self.example else str(error)) from None

    def flags(self, name: str) -> list[str]:
        """Return its flags. That of a switch which is on by default turns it off."""
        flag = _flag(f"no_{name}" if self.default is True else name)
        return [self.short, flag] if self.short else [flag]

    def is_default(self, value: object) -> bool:
        """Return whether a value is the default; one that is compared by elements, such as an array, is not."""
        return value is None if self.default is None else value == self.default


def _setting(default: Any, kind: Kind, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"setting": StartSetting(kind, default, help, **more)})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# --- the settings


@dataclass(frozen=True, kw_only=True)
class StartSettings:
    """The values of all settings, checked. What they mean is in the docstring of `Session`, whose keywords they are.

    Raises:
        UsageError: One of them is invalid.
    """

    num_processes: int | None = _setting(
        None,
        RankCount(),
        "number of ranks (default: one per GPU)",
        metavar="N",
        short="-n",
        label="the number of ranks",
        example="%distributed start -n 2",
        profile="n",
        form=FormField(
            "Number of ranks",
            "How many ranks to start; empty: one for each GPU",
            "1 per GPU",
            "^0*([1-9][0-9]{0,2}|10[01][0-9]|102[0-4])$",
            "Number of ranks: a whole number from 1 to 1024, or empty.",
        ),
    )
    num_nodes: int = _setting(
        1,
        WholeNumber(),
        "number of machines, including this one; -n is then the number of ranks on each",
        metavar="N",
        example=NODES_EXAMPLE,
    )
    master_addr: str | None = _setting(
        None,
        NonEmptyText(),
        "address at which the others reach this machine",
        metavar="ADDRESS",
        profile="master_addr",
        several_nodes=True,
    )
    master_port: int | None = _setting(
        None,
        WholeNumber(1, _LARGEST_PORT),
        "port on which this machine waits for them (default: any free port)",
        metavar="PORT",
        example="--master-port 29500",
        profile="master_port",
        several_nodes=True,
    )
    interface: str | None = _setting(
        None,
        NonEmptyText(),
        "network interface between them (default: the one that leads to ADDRESS)",
        metavar="NAME",
        profile="interface",
        several_nodes=True,
    )
    token_file: str | os.PathLike[str] | None = _setting(
        None,
        FilePath(),
        "write the tokens to join with to FILE instead of printing them",
        metavar="FILE",
        several_nodes=True,
    )
    node_timeout: float | None = _setting(
        None,
        Duration(least=limits.SHORTEST_NODE_TIMEOUT, default=limits.NODE_TIMEOUT),
        "seconds without an answer until another machine's ranks count as lost (default: 60)",
        metavar="S",
        profile="node_timeout",
        several_nodes=True,
    )
    private_network: bool = _setting(
        False, Switch(), "refuse addresses outside private networks", profile="private_network", several_nodes=True
    )
    on: str | Mapping[str, Any] | None = _setting(
        None, ClusterProfile(), "use the machines of a profile in ~/.config/nbdist/clusters.toml", metavar="NAME"
    )
    gpus: Sequence[int | str] | int | str | None = _setting(
        None,
        Gpus(),
        "which GPUs, for example 0,2 (default: one per rank)",
        metavar="LIST",
        form=FormField(
            "GPUs",
            "Which GPUs ranks may use, for example 0,2; empty: all",
            "all",
            "^[0-9]+(,[0-9]+)*$",
            "GPUs: indices such as 0,2, or empty.",
        ),
    )
    backend: str | None = _setting(
        None,
        Backend(),
        "backend of the process group (default: nccl and gloo with GPUs, else gloo)",
        metavar="NAME",
    )
    init: bool = _setting(True, Switch(), "don't call init_process_group; your cells call it")
    timeout: float | None = _setting(
        None, Duration(), "seconds until a collective times out (default: 1800)", metavar="S"
    )
    linger: float | None = _setting(
        None,
        Duration(zero=True),
        "how long ranks outlive a crash of the kernel, for `attach`: 90, 15m, 12h (default: 15m; 0: not at all)",
        metavar="TIME",
    )
    keep: bool = _setting(False, Switch(), "keep the ranks when the kernel shuts down normally, too")
    exact: bool = _setting(
        False, Switch(), "restore what an interrupted step changed: buffers (BatchNorm) and random numbers"
    )
    on_death: OnDeath = _setting(
        "ask",
        Choice(*ON_DEATH),
        "when ranks die in a cell: only report it, replace them and run the cell again, or end the session (default: "
        "ask, which only reports it)",
    )

    until: str | None = _setting(
        None,
        EndTime(),
        "when the allocation ends: 18:00, or an ISO date (default: the end of the Slurm job)",
        metavar="TIME",
    )
    time_left: str | None = _setting(
        None,
        ShellCommand(),
        "command that prints how long the allocation lasts: seconds, or [D-]HH:MM:SS",
        metavar="COMMAND",
    )
    warn: float = _setting(
        600.0,
        Duration(zero=True),
        "how long before its end the notebook is told: 90, 10m, 1h (default: 10m)",
        metavar="TIME",
    )
    idle: float | None = _setting(
        None,
        IdleTime(),
        "end the ranks, and keep the notebook, when no cell has run on them for this long: 90s, 30m, 2h",
        metavar="TIME",
    )
    save: str | os.PathLike[str] | None = _setting(
        None,
        FilePath(),
        "when the end is announced, stop the ranks after the same step and save the session to this folder, for "
        "`start --from`",
        metavar="DIR",
    )
    every: float | None = _setting(
        None,
        IdleTime(),
        "also save the session to the folder of --save this often, between two steps of a cell that trains: 10m, 1h",
        metavar="TIME",
    )
    end_grace: float = _setting(
        0.0,
        Duration(zero=True),
        "how long SIGTERM, by which schedulers end jobs, leaves for a save: 25, 2m (default: 0, not at all)",
        metavar="TIME",
    )

    def __post_init__(self) -> None:
        for name, setting in START_SETTINGS.items():
            setting.check(name, getattr(self, name))

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> StartSettings:
        """Return the settings that are among named values, such as the locals of a function with their names."""
        return cls(**{name: value for name, value in values.items() if name in START_SETTINGS})

    def given(self) -> dict[str, Any]:
        """Return those that are not at their defaults."""
        named = ((name, getattr(self, name)) for name in START_SETTINGS)
        return {name: value for name, value in named if not START_SETTINGS[name].is_default(value)}

    def completed(self, others: Mapping[str, Any]) -> StartSettings:
        """Return these settings, with the values of others for those that are at their defaults."""
        return replace(self, **{**others, **self.given()})


START_SETTINGS: Mapping[str, StartSetting] = {each.name: each.metadata["setting"] for each in fields(StartSettings)}


def check_value(name: str, value: object) -> None:
    """Refuse what a setting can't be, for another function that has an argument of the same name and meaning.

    Args:
        name: Of both.
        value: What was given there; None is none of its values.

    Raises:
        UsageError: With what it can be, but no example, which would be of a session.
    """
    START_SETTINGS[name].kind.refined(name, value)
