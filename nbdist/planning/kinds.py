"""What a setting of a plan is: its values, by kind, and all else that rules, flags and tables ask of it.

Independent of which settings there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.base.checks import is_number, is_whole, unknown_choice
from nbdist.errors import UsageError

_LIMIT = 2**31
_FEW = 10


class Kind:
    """The values of a setting."""

    def refined(self, name: str, value: Any) -> Any:
        """Return the value in the one way that a plan keeps.

        Args:
            name: Of the setting.
            value: As the user has written it.

        Raises:
            UsageError: The setting can't have this value. The text says which it can.
        """
        raise NotImplementedError


class Choice(Kind):
    """One of a few words.

    Args:
        words: These.
        synonyms: Others that mean one of them.
    """

    def __init__(self, *words: str, **synonyms: str) -> None:
        self.words = words
        self.synonyms = synonyms

    def refined(self, name: str, value: Any) -> str:
        if isinstance(value, str):
            value = self.synonyms.get(value, value)
            if value in self.words:
                return str(value)
        raise unknown_choice(name, value, self.words)


class Switch(Kind):
    """True or False."""

    def refined(self, name: str, value: Any) -> bool:
        return bool(_expected(name, value, is_switch, "True or False"))


class OptionalSwitch(Kind):
    """True, False, or None for what is left open."""

    def refined(self, name: str, value: Any) -> bool | None:
        return None if value is None else bool(_expected(name, value, is_switch, "True, False or None"))


class Way(Kind):
    """On or off, or a word that says how it is on; "default" is plainly on."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def refined(self, name: str, value: Any) -> bool | str:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value in self.words:
            return value == "default" or value
        raise unknown_choice(name, value, (True, False, *self.words))


class Count(Kind):
    """A whole number.

    Args:
        least: The smallest allowed.
        below: The smallest that is too large.
        optional: Whether None is allowed.
    """

    def __init__(self, least: int = 0, below: int = _LIMIT, *, optional: bool = False) -> None:
        self.least, self.below, self.optional = least, below, optional

    def refined(self, name: str, value: Any) -> int | None:
        if value is None and self.optional:
            return None
        if not is_whole(value) or not self.least <= value < self.below:
            allowed = f"a whole number of {self.least} or more"
            if self.below <= _FEW:
                allowed = f"a whole number from {self.least} to {self.below - 1}"
            elif is_whole(value) and value >= self.below:
                allowed = f"a whole number less than {self.below}"
            raise UsageError(f"{name} must be {allowed}{_or_none(self.optional)}, not {value!r}")
        return int(value)


class Number(Kind):
    """A finite number.

    Args:
        allowed: Which, in words.
        fits: Whether one of 0 or more is allowed.
        optional: Whether None is allowed.
    """

    def __init__(self, allowed: str, fits: Callable[[float], bool], *, optional: bool = True) -> None:
        self.allowed, self.fits, self.optional = allowed, fits, optional

    def refined(self, name: str, value: Any) -> float | None:
        if value is None and self.optional:
            return None
        if not is_amount(value) or not self.fits(value):
            raise UsageError(f"{name} must be a number {self.allowed}{_or_none(self.optional)}, not {value!r}")
        return float(value)


class Blocks(Kind):
    """Names of modules' classes, or a function of a module."""

    def refined(self, name: str, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        if isinstance(names, (list, tuple)):
            if names and all(isinstance(each, str) and each.isidentifier() for each in names):
                return value if isinstance(value, str) else tuple(names)
        elif not isinstance(value, type) and (value is None or callable(value)):
            return value
        hint = f" (its name is {value.__name__!r})" if isinstance(value, type) else ""
        raise UsageError(
            f"{name} must be the name of a module's class like 'Block', several of them, a function that says of a "
            f"module whether it is a block, or None; not {value!r}{hint}"
        )


class Methods(Kind):
    """Names of methods, also of submodules."""

    def refined(self, name: str, value: Any) -> tuple[str, ...] | None:
        names = [value] if isinstance(value, str) else value
        if names is None:
            return None
        if isinstance(names, (list, tuple)) and all(_is_path(each) for each in names):
            return tuple(names) or None
        raise UsageError(
            f"{name} must be the name of a method like 'encode' or 'decoder.logits', several of them, or None; not "
            f"{value!r}"
        )


class Options(Kind):
    """Named values.

    Args:
        of: Of what they are options, in words.
        example: Of a dictionary.
        known: For each whether a value will do, and what will.
    """

    def __init__(self, of: str, example: str, known: Mapping[str, tuple[Callable[[object], bool], str]]) -> None:
        self.of, self.example, self.known = of, example, known

    def refined(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} must be a dictionary like {self.example}, not {value!r}")
        for option, entry in value.items():
            if option not in self.known:
                raise unknown_choice(f"the {self.of} option", option, list(self.known))
            _expected(f"the {self.of} option {option}", entry, *self.known[option])
        return dict(value)


STRATEGIES = ("none", "ddp", "fsdp", "hsdp", "deepspeed")
Teller = Callable[[Any, str], str]
Tell = str | Teller


@dataclass(eq=False, repr=False)
class Setting:
    """All that is known of a setting beside its name and its type.

    Attributes:
        kind: The values that it may have.
        group: Under which title its flag is shown.
        help: What its flag is for, in a few words.
        metavar: What follows its flag.
        owners: The strategies that it is for.
        why: Why the others have no use for it.
        part_of: The setting of which it only says more, if there is one.
        is_on: Whether that one is on, by its value.
        tell: What will be done, for a table; or a function of the plan and of the kind of device ("" if that is not
            known yet). None: the row of another setting tells of it.
    """

    kind: Kind
    group: str
    help: str
    metavar: str = ""
    owners: tuple[str, ...] = STRATEGIES
    why: str = ""
    part_of: str = ""
    is_on: Callable[[Any], bool] = bool
    tell: Tell | None = None


def _is_path(value: object) -> bool:
    """Return whether this names an attribute, or one of a submodule: "layers.0.project"."""
    return isinstance(value, str) and all(part.isidentifier() or part.isdecimal() for part in value.split("."))


def is_count(value: object) -> bool:
    """Return whether this is a whole number above 0."""
    return is_whole(value, 1) and value < _LIMIT


def is_amount(value: object) -> bool:
    """Return whether this is a finite number of 0 or more."""
    return is_number(value) and value >= 0


def is_switch(value: object) -> bool:
    """Return whether this is True or False."""
    return isinstance(value, bool)


def _expected(name: str, value: object, fits: Callable[[object], bool], allowed: str) -> object:
    if not fits(value):
        raise UsageError(f"{name} must be {allowed}, not {value!r}")
    return value


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""
