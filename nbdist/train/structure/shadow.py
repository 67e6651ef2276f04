"""A method of one object replaced, while its class stays: `isinstance`, pickling and copies work as before.

Independent of models or optimizers.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

Replacement = Callable[..., Any]


class Shadow:
    """Stands in an object's `__dict__` for a method of its class.

    Refers to its owner weakly, so that the owner is freed as soon as nobody holds it. Pickled it becomes the method of
    the class again; a deep copy of the owner has a shadow of its own.

    Args:
        owner: The object.
        name: Name of the method.
        replacement: Called as `replacement(original, owner, *args)`, where `original(owner, *args)` is what would
            have been called without the shadow. It must not refer to the owner.
    """

    def __init__(self, owner: Any, name: str, replacement: Replacement) -> None:
        earlier = owner.__dict__.get(name)
        method = getattr(type(owner), name)
        functools.update_wrapper(self, method if earlier is None else earlier)
        self._owner = weakref.ref(owner)
        self._name = name
        self._earlier = earlier
        self._replacement = replacement
        self._original = method if earlier is None else _without_owner(earlier)

    @property
    def __func__(self) -> Callable[..., Any]:
        """What a bound method has: torch's schedulers wrap it."""
        replacement, original = self._replacement, self._original

        def function(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, owner, *args, **kwargs)

        return functools.update_wrapper(function, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement."""
        return self._replacement(self._original, self._owner(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner(), self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shadow:
        twin = object.__new__(Shadow)
        twin.__dict__.update(self.__dict__)
        twin._owner = weakref.ref(copy.deepcopy(self._owner(), memo))
        return twin


def shadow(owner: Any, name: str, replacement: Replacement) -> None:
    """Put a shadow over a method, in place of an earlier one."""
    restore(owner, name)
    setattr(owner, name, Shadow(owner, name, replacement))


def restore(owner: Any, name: str) -> None:
    """Take a shadow off, if there is one."""
    found = owner.__dict__.get(name)
    if not isinstance(found, Shadow):
        return
    if found._earlier is None:
        delattr(owner, name)
    else:
        setattr(owner, name, found._earlier)


def _without_owner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an instance's own function, callable with its owner in front as the class's methods are."""

    def call(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
