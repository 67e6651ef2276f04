"""Cloudpickle, but that functions which travel by value still say where they were written."""

from __future__ import annotations

import types
from typing import Any

import cloudpickle


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Keeps the file of each code object: cloudpickle 3.1.3 writes `<dynamic-code>` in its place.

    Without it, tracebacks and stacks of a function from a cell have neither the cell's number nor lines of source.
    """

    def reducer_override(self, value: Any) -> Any:
        """Return what an object is made from again; see `pickle.Pickler`."""
        reduce = self.dispatch_table.get(types.CodeType) if isinstance(value, types.CodeType) else None
        if reduce is None:
            return super().reducer_override(value)
        make, arguments = reduce(value)
        return _make_code, (make, arguments, value.co_filename)


def _make_code(make: Any, arguments: tuple[Any, ...], file: str) -> types.CodeType:
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=file)
