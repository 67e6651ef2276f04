"""One call of an operation, as formulas of FLOPs want it: arguments by the names of its schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What one call of an operation takes.

    Attributes:
        model: FLOPs that the model's mathematics needs.
        repeated: FLOPs on top that the kernel spends on computing something again, as fused attention does backward.
    """

    model: int
    repeated: int = 0


class OperationCall:
    """One call of an operation: its arguments by the names of its schema.

    Args:
        function: An overload, such as `torch.ops.aten.mm.default`.
        args: As it was called.
        kwargs: As it was called.
        out: What it returned.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self.out = out

    def __getitem__(self, name: str) -> Any:
        """Return the argument of this name."""
        if name in self._kwargs:
            return self._kwargs[name]
        for number, argument in enumerate(self._function._schema.arguments):
            if argument.name == name:
                return self._args[number] if number < len(self._args) else argument.default_value
        raise KeyError(name)

    @property
    def name(self) -> str:
        """The operation's, such as "aten::mm"."""
        return str(self._function._schema.name)

    def get(self, name: str, otherwise: Any) -> Any:
        """Return the argument of this name, or something else if the operation has none."""
        try:
            return self[name]
        except KeyError:
            return otherwise

    def first(self, *names: str) -> Any:
        """Return the first of these arguments that the operation has: kernels name the same thing differently."""
        known = {argument.name for argument in self._function._schema.arguments}
        return self[next(name for name in names if name in known)]

    def first_or_none(self, *names: str) -> Any:
        """Return the first of these arguments that the operation has; None if it has none of them."""
        return next((found for name in names if (found := self.get(name, None)) is not None), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor among the arguments."""
        return tuple(self[name].shape)


Formula = Callable[[OperationCall], "int | Work"]
