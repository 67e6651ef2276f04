"""Experiments: a stretch of work whose names are deleted at its end, with what it consumed, gave back and leaked.

In the manner of IPyExperiments. Owns which names go and how the figures are defined; works on any namespace.
Independent of notebooks: what else keeps values alive there is let go of by a function that it is given.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar

import msgspec

from nbdist import shells
from nbdist.base.text import duration, size
from nbdist.errors import UsageError
from nbdist.metrics.allocation import tensors
from nbdist.metrics.memory import MemoryMeter, MemoryUsage, Usage
from nbdist.metrics.node.host import trim_malloc


class Balance(msgspec.Struct, frozen=True):
    """One kind of memory over an experiment. All in bytes.

    Attributes:
        consumed: In use at its end, before anything was deleted, and not at its begin.
        peaked: Needed on the way beyond that; None: not known.
        reclaimed: What deleting its names gave back.
        kept: In tensors and arrays of the names that were kept.
    """

    consumed: int
    peaked: int | None
    reclaimed: int
    kept: int

    @property
    def leaked(self) -> int:
        """What is in use still, although nothing that was kept accounts for it."""
        return max(0, self.consumed - self.reclaimed - self.kept)


def experiment(name: str = "", *, keep: Iterable[str] = ()) -> Experiment:
    """Return a stretch of work whose names are deleted at its end, with what it consumed, gave back and leaked.

    In a notebook and on ranks it looks after the names of cells, in a script after those of the calling module.

    >>> with nbdist.experiment("load", keep=["model"]):
    ...     model = make_model()
    ...     scratch = make_batch()

    or in cells of their own: `e = nbdist.experiment("load").begin()`, later `e.end(keep=["model"])`.

    Args:
        name: For the report that is printed at the end.
        keep: Names that stay.
    """
    shell = shells.current()
    if shell is None:
        return Experiment(name, namespace=sys._getframe(1).f_globals, keep=keep)
    first = shell.execution_count
    return Experiment(name, namespace=shell.user_ns, keep=keep, forget=lambda: shells.forget_outputs(shell, first))


class Experiment:
    """Names created while it runs are deleted at its end, but for those kept. Experiments may nest.

    >>> with Experiment("load", namespace=globals(), keep=["model"]):
    ...     model = make_model()
    ...     scratch = make_batch()

    Args:
        name: For the report.
        namespace: Where names are created.
        keep: Names that stay.
        forget: Called at the end with the names that go, to let go of what else holds their values.
        show: Takes the report; None: it is only in `report`.

    Attributes:
        balances: By kind of memory ("CPU", "cuda:0 allocated"), once it has ended.
        deleted: Names that went.
    """

    _open: ClassVar[list[Experiment]] = []

    def __init__(
        self,
        name: str = "",
        *,
        namespace: dict[str, Any],
        keep: Iterable[str] = (),
        forget: Callable[[], object] = lambda: None,
        show: Callable[[str], object] | None = print,
    ) -> None:
        self.name = name or f"experiment {len(self._open) + 1}"
        self.balances: dict[str, Balance] = {}
        self.deleted: list[str] = []
        self._namespace = namespace
        self._keep = _names(keep)
        self._forget = forget
        self._show = show
        self._state = "new"
        self._failed = False

    def begin(self) -> Experiment:
        """Start assigning new names to it. Returns itself.

        Raises:
            UsageError: It has begun before.
        """
        if self._state != "new":
            raise UsageError(f"{self.name} has begun before: make a new one with `nbdist.experiment(...)`")
        self._state = "open"
        self._before = set(self._namespace)
        self._open.append(self)
        self._meter = MemoryMeter().begin()
        return self

    def keep(self, *names: str) -> None:
        """Let these names stay at the end, too."""
        self._keep |= _names(names)

    def end(self, keep: Iterable[str] = ()) -> None:
        """Delete what it created and report. Experiments begun within it and not ended yet are ended first.

        Args:
            keep: Names that stay, besides those named before.

        Raises:
            UsageError: It is not running, or a name to keep is not there: then it goes on, and nothing is deleted.
        """
        if self._state != "open":
            state = "has ended already" if self._state == "ended" else "has not begun: `.begin()`, or a `with` block"
            raise UsageError(f"{self.name} {state}")
        self.keep(*_names(keep))
        self._check_kept()
        while self._open[-1] is not self:
            self._open[-1].end()
        self._state = "ended"
        self._open.pop()
        consumed = self._meter.end()
        self._delete()
        self._balance(consumed, self._after())
        if self._show is not None:
            self._show(self.report)

    def __enter__(self) -> Experiment:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._failed = error is not None
        if self._state != "open":
            return
        try:
            self.end()
        except UsageError:  # of a name to keep: it ends all the same, and everything stays
            self._keep |= set(self._namespace)
            self.end()
            raise

    def _check_kept(self) -> None:
        """Check the names to keep: a misspelled one must not delete what it was meant to keep."""
        missing = sorted(self._keep - set(self._namespace))
        self._keep -= set(missing)
        if missing and not self._failed:
            names = ", ".join(map(repr, missing))
            raise UsageError(
                f"{self.name} has no {names} to keep, so nothing was deleted: `keep` is for names that exist"
            )

    def _delete(self) -> None:
        names = [name for name, value in self._namespace.items() if self._goes(name, value)]
        for name in names:
            del self._namespace[name]
        self.deleted = sorted(name for name in names if not name.startswith("_"))
        self._forget()

    def _goes(self, name: str, value: Any) -> bool:
        """Return whether a variable is deleted. Modules and experiments stay."""
        return name not in self._before | self._keep and not isinstance(value, (types.ModuleType, Experiment))

    def _after(self) -> MemoryUsage:
        """Return memory once all is given back that can be."""
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        trim_malloc()
        return MemoryMeter().begin().end()

    def _balance(self, during: MemoryUsage, after: MemoryUsage) -> None:
        kept = {name: self._namespace[name] for name in self._keep - self._before if name in self._namespace}
        blocks = list(tensors.find(kept).values())
        left = after.kinds
        for kind, usage in during.kinds.items():
            now = left.get(kind, Usage(0, 0)).end
            where = kind.split()[0].lower()
            held = sum(block.size for block in blocks if block.device == where)
            self.balances[kind] = Balance(usage.consumed, usage.peaked, max(0, usage.end - now), held)
        self._seconds = during.seconds

    @property
    def data(self) -> dict[str, Any]:
        """The figures, in bytes and seconds; empty until the end."""
        if self._state != "ended":
            return {}
        kinds = {kind: msgspec.to_builtins(one) | {"leaked": one.leaked} for kind, one in self.balances.items()}
        return {"name": self.name, "seconds": self._seconds, "memory": kinds, "deleted": self.deleted}

    @property
    def report(self) -> str:
        """The figures, aligned; what it is doing until the end."""
        if self._state != "ended":
            return f"{self.name}: {'running' if self._state == 'open' else 'not begun'}"
        header = ["", "consumed", "peaked", "reclaimed", "kept", "leaked"]
        rows = [header, *([kind, *_figures(one)] for kind, one in self.balances.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        if self._failed:
            lines.append("an exception is on its way: what its frames hold counts as leaked")
        return "\n".join([f"{self.name}: {duration(self._seconds)}; {self._describe_deleted()}", *lines])

    def _describe_deleted(self) -> str:
        if not self.deleted:
            return "no names deleted"
        shown = ", ".join(self.deleted[:_SHOWN])
        return f"deleted {shown}{' ...' if len(self.deleted) > _SHOWN else ''}"

    def __repr__(self) -> str:
        return self.report


_SHOWN = 8  # names


def _figures(one: Balance) -> list[str]:
    signed = (size(value, signed=True) for value in (one.consumed, one.peaked))
    return [*signed, *(size(value) for value in (one.reclaimed, one.kept, one.leaked))]


def _names(names: Iterable[str]) -> set[str]:
    """Return the names, checked.

    Raises:
        UsageError: One of them is not a variable name.
    """
    if not isinstance(names, Iterable):
        raise UsageError(f"keep takes names of variables as text, not {names!r}: `keep=['model']`")
    given = [names] if isinstance(names, str) else list(names)
    for name in given:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"keep takes names of variables as text, and {name!r} is none: `keep=['model']`")
    return set(given)
