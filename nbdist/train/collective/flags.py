"""Questions that are answered by yes or no, and asked as an attribute or as a call: `if flag:` and `if flag():`.

A function alone would be true wherever its parentheses are forgotten. Independent of what is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable


class Flag:
    """A function of no arguments, of a module, that also has the truth value of its answer.

    Args:
        ask: Gives the answer. Used as a decorator.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        functools.update_wrapper(self, ask)
        self._ask = ask

    def __call__(self) -> bool:
        """Return the answer."""
        return self._ask()

    def __bool__(self) -> bool:
        return self._ask()

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, Flag) else self._ask() == other

    def __hash__(self) -> int:
        return hash(self._ask)

    def __repr__(self) -> str:
        return repr(self._ask())

    def __reduce__(self) -> str:
        return self._ask.__qualname__  # it is the module's one: asked where it arrives
