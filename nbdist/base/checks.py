"""Whether values that users give are what they have to be. Unlike in Python, True and False are not numbers here."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TypeGuard

from nbdist.base.text import did_you_mean
from nbdist.errors import UsageError

LONGEST = 1e9  # seconds that anything may be told to wait
_TRUE = ("1", "true", "yes", "on", "y", "t")  # those of Accelerate
_FALSE = ("0", "false", "no", "off", "n", "f")


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether it is a whole number of `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether it is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(name: str, value: object, least: int = 0, example: str = "") -> int:
    """Return the same number.

    Args:
        name: What the user calls it.
        value: What was given.
        least: The smallest allowed.
        example: What to type instead, for the end of the error.

    Raises:
        UsageError: It is not a whole number, or less.
    """
    if not is_whole(value, least):
        hint = f": `{example}`" if example else ""
        raise UsageError(f"{name} must be a whole number of {least} or more, not {value!r}{hint}")
    return value


def check_seconds(name: str, value: object, *, zero: bool = False, optional: bool = True) -> None:
    """Refuse what is not a time span.

    Args:
        name: What the user calls it.
        value: Seconds.
        zero: Whether it may be 0.
        optional: Whether it may be None.

    Raises:
        UsageError: It is something else.
    """
    if value is None and optional:
        return
    if not is_number(value) or not 0 <= value <= LONGEST or (value == 0 and not zero):
        least = "of 0 or more" if zero else "above 0"
        raise UsageError(f"{name} must be a number of seconds {least}, not {value!r}: `{name}=60`")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse what is not among the allowed values.

    Raises:
        UsageError: With the nearest of them.
    """
    if value not in allowed:
        raise unknown_choice(name, value, allowed)


def unknown_choice(name: str, value: object, allowed: Sequence[object]) -> UsageError:
    """Return the error for a value that is not among the allowed ones, with the nearest of them."""
    hint = did_you_mean(str(value).lower(), [word for word in allowed if isinstance(word, str)])
    return UsageError(f"{name} {value!r} is unknown{hint} Allowed values: {', '.join(map(repr, allowed))}")


def is_true(text: str) -> bool:
    """Return whether a text says yes: "1", "true", "yes", "on", "y", "t", in any case."""
    return text.strip().lower() in _TRUE


def is_on(variable: str, default: bool = False) -> bool:
    """Return whether an environment variable switches something on; `default` where it is not set, or says neither."""
    text = os.environ.get(variable, "")
    return is_true(text) if text.strip().lower() in (*_TRUE, *_FALSE) else default
