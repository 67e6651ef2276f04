"""Variables on their way between the notebook and ranks: `push` and `pull`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from typing import Any

from nbdist import transfer
from nbdist.base.ranks import describe_ranks, format_ranks
from nbdist.base.text import nearest
from nbdist.client.ranks.task import Task
from nbdist.errors import NbdistError, RankError, TransferError, UsageError


def check_named(values: object) -> None:
    """Check what `push` was given.

    Raises:
        UsageError: It is not a dict, or a name is not a variable name.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"push takes a dict, not {type(values).__name__}: `session.push({{'x': x}})`")
    for name in values:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"{name!r} is not a variable name: `session.push({{'x': x}})`")


def pack_named(values: Mapping[str, Any]) -> transfer.Packed:
    """Pack all values in one parcel, so that tensors that share memory still do; an error names the variable."""
    try:
        return transfer.pack(dict(values), name=next(iter(values)) if len(values) == 1 else "values")
    except TransferError:
        for name, value in values.items():
            transfer.check(value, name=name)
        raise


def explain_missing(name: str, task: Task, error: RankError, names: Mapping[int, Sequence[str]]) -> NbdistError:
    """Return the error for a `pull` that failed: which ranks lack the name, and which have it or a similar one."""
    missing = [
        rank
        for rank, failure in task.failures.items()
        if failure.name == "NameError" and _lacks(names.get(rank, ()), name)
    ]
    if len(missing) != len(task.failures):
        return error
    have = [rank for rank in task.ranks if rank not in missing]
    text = f"{describe_ranks(sorted(missing))} {'has' if len(missing) == 1 else 'have'} no {name!r}"
    if have:
        verb = "has" if len(have) == 1 else "have"
        text += f" ({describe_ranks(have)} {verb}: `%distributed pull {name} -r {format_ranks(have)}`)"
    if close := nearest(name, {known for rank in missing for known in names.get(rank, [])}, 3):
        text += f"; similar names: {', '.join(sorted(close))}"
    elif not have:
        text += "; define it in a `%%distributed` cell first"
    return UsageError(text)


def _lacks(known: Sequence[str], expression: str) -> bool:
    """Return whether an expression uses an unknown name; otherwise what it calls has raised."""
    used = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
    return not used <= {*known, *vars(builtins)}
