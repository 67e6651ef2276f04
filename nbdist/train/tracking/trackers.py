"""Where the numbers of a training go: CSV, TensorBoard, W&B, MLflow, Comet, through their own libraries.

Only rank 0 writes; the other ranks may call everything, and wait for nothing. A library is imported when it is used.
Independent of models or plans.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import numbers
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from nbdist.errors import UsageError
from nbdist.train.state import current, rank

_ALLOWED = "csv, tensorboard, wandb, mlflow, comet"


class Tracker(Protocol):
    """Somewhere that numbers go; `init_trackers` takes objects of one's own that have these methods."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep these numbers, by flat names."""

    def close(self) -> None:
        """Close the tracker: no more values follow."""


class _Csv:
    """`FOLDER/NAME.csv`: a column for each name, after the step. The configuration stands beside it as JSON."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        path = folder / f"{name}.csv"
        try:
            self._log = CsvLog(path, ["step"])
        except ValueError as error:
            raise UsageError(
                f"{path} is not a log that can be continued: {error}; give the run another name"
            ) from error
        self.tracker = self._log
        if config:
            text = json.dumps(dict(config), indent=1, default=str)
            (folder / f"{name}.config.json").write_text(text, encoding="utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._log.add({"step": step, **values})

    def close(self) -> None:
        pass


class _TensorBoard:
    """`FOLDER/NAME`: event files. `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.tracker = self._writer = SummaryWriter(str(folder / name))
        if config:
            self._writer.add_text("config", f"```json\n{json.dumps(dict(config), indent=1, default=str)}\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tracker = self._run = _library("wandb").init(name=name, config=dict(config), dir=str(folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        self.tracker = self._mlflow = _library("mlflow")
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(dict(flatten(config)))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Comet:
    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        self.tracker = self._experiment = _library("comet_ml").start()
        self._experiment.set_name(name)
        self._experiment.log_parameters(dict(flatten(config)))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._experiment.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._experiment.end()


_KINDS: dict[str, tuple[type, str, str]] = {  # class, module that it needs, what pip calls it
    "csv": (_Csv, "csv", ""),
    "tensorboard": (_TensorBoard, "tensorboard", "tensorboard"),
    "wandb": (_Wandb, "wandb", "wandb"),
    "mlflow": (_MLflow, "mlflow", "mlflow"),
    "comet": (_Comet, "comet_ml", "comet_ml"),
}
_trackers: list[Tracker] | None = None
_names: list[str] = []  # of the trackers of the run, on all ranks
_told: set[str] = set()  # names whose values are no numbers, as was said


def init_trackers(
    name: str,
    config: Mapping[str, Any] | None = None,
    to: str | Tracker | Iterable[str | Tracker] = "csv",
    folder: str | Path = "runs",
) -> None:
    """Begin a run: from now on `log` writes to these trackers. Those of an earlier run are closed.

    >>> nbdist.init_trackers("gpt", config={"lr": 3e-4}, to=["csv", "tensorboard"])
    >>> nbdist.log({"loss": loss, "lr": {"head": 1e-3, "body": 3e-4}}, step)

    Args:
        name: Of the run. CSV and TensorBoard go on with a run of this name; the others begin a new one.
        config: Settings to keep with the run.
        to: One or several of "csv", "tensorboard", "wandb", "mlflow", "comet", or objects with `log(values, step)` and
            `close()`.
        folder: Where trackers that write files put them.

    Raises:
        UsageError: A tracker is unknown, or its library is not installed. No run was begun.
    """
    global _trackers
    wanted = [to] if isinstance(to, str) or not isinstance(to, Iterable) else list(to)
    for kind in wanted:
        _refuse_unknown(kind)
    if not name or "/" in name:
        raise UsageError(f"{name!r} is not a name for a run: give one such as 'gpt-small'")
    _close()
    _told.clear()
    begun: list[Tracker] = []
    try:
        for kind in wanted if rank() == 0 else ():
            begun.append(_KINDS[kind][0](name, config or {}, Path(folder)) if isinstance(kind, str) else kind)
    except BaseException:  # Ctrl-C included: none is left half begun
        _close_all(begun)
        raise
    _trackers = begun
    _names[:] = [kind if isinstance(kind, str) else type(kind).__name__ for kind in wanted]


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Write numbers to all trackers. May be called on any rank; only rank 0 does something.

    Args:
        values: Numbers, and tensors of one element, by name; of nested dicts the names are joined by "/". What is not
            a number is left out, and that is said once.
        step: What they belong to; by default the optimizer steps made so far.

    Raises:
        UsageError: No run was begun.
    """
    if _trackers is None:
        raise UsageError('there is nothing to log to: call nbdist.init_trackers("name of the run") first')
    if rank() != 0:
        return
    numbers_only = dict(_numbers(values))
    at = current().steps if step is None else int(step)
    for tracker in _trackers if numbers_only else ():
        tracker.log(numbers_only, at)


def get_tracker(name: str, unwrap: bool = False) -> Any:
    """Return a tracker of the run, for what it can do beyond numbers: images, tables, files.

    >>> nbdist.get_tracker("tensorboard", unwrap=True).add_histogram("weights", weights, step)

    Args:
        name: "csv", "tensorboard", "wandb", "mlflow" or "comet"; of a tracker of your own its class's name.
        unwrap: Whether to give the library's own object: a SummaryWriter, a run of W&B, ...

    Returns:
        It on rank 0; on the other ranks something that takes any call and does nothing.

    Raises:
        UsageError: The run has no such tracker.
    """
    if name not in _names:
        known = ", ".join(_names) or "none"
        raise UsageError(f"no tracker named {name!r} in this run (there are: {known}): name it in init_trackers(to=)")
    if rank() != 0 or _trackers is None:
        return _Silent()
    tracker = _trackers[_names.index(name)]
    return getattr(tracker, "tracker", tracker) if unwrap else tracker


class _Silent:
    """Takes any call, as the trackers of ranks that write nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def end_training() -> None:
    """Close all trackers, and wait for a checkpoint that is still being written."""
    from nbdist.train.checkpoint.saving import wait_for_saves

    _close()
    wait_for_saves()


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts, with their keys joined by "/"."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in flatten(values):
        number, reason = _number(value)
        if number is not None:
            yield name, number
        elif name not in _told:
            _told.add(name)
            warnings.warn(f"{name} is not logged: {reason}", stacklevel=3)


def _number(value: Any) -> tuple[float | None, str]:
    """Return the number, or None and why it is none."""
    if isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements):
        return None, "it is spread over ranks, of which rank 0 has a part: log its full_tensor(), called on all ranks"
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):
        shape = list(getattr(value, "shape", ()))
        if getattr(value, "size", 1) != 1 and (not isinstance(value, torch.Tensor) or value.numel() != 1):
            return None, f"it has the shape {shape}, and must be a number: log its mean(), for example"
        value = value.item()
    if isinstance(value, numbers.Real):
        return (int(value) if isinstance(value, numbers.Integral) else float(value)), ""
    return None, f"it is {type(value).__name__}, not a number"


def _library(module: str) -> Any:
    return importlib.import_module(module)


def _refuse_unknown(kind: Any) -> None:
    if not isinstance(kind, str):
        if not (callable(getattr(kind, "log", None)) and callable(getattr(kind, "close", None))):
            raise UsageError(f"{kind!r} is not a tracker: give one of {_ALLOWED}, or an object with log() and close()")
        return
    if kind not in _KINDS:
        raise UsageError(f"{kind!r} is not a tracker: give one of {_ALLOWED}")
    _, module, package = _KINDS[kind]
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{kind} needs a library that is not installed: run `%pip install {package}`")


def _close() -> None:
    global _trackers
    begun, _trackers = _trackers or [], None
    _names.clear()
    _close_all(begun)


def _close_all(begun: Iterable[Tracker]) -> None:
    """Close each of them, also if one fails."""
    with ExitStack() as stack:
        for tracker in begun:
            stack.callback(tracker.close)


class CsvLog:
    """A CSV file with a row for each call of `add`, and more columns when new ones come; an existing one is continued.

    Args:
        path: The file.
        first: Names of the columns that come first.

    Raises:
        ValueError: The file is something else.
    """

    def __init__(self, path: Path, first: Sequence[str]) -> None:
        self._path = path
        self._columns = list(first)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._continue()
        else:
            self._replace([self._columns])

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row. It is in the file when this returns."""
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(_csv_line([str(row.get(name, "")) for name in self._columns]))

    def _continue(self) -> None:
        content = self._path.read_text(encoding="utf-8")
        rows = list(csv.reader(io.StringIO(content)))
        if rows[0][: len(self._columns)] != self._columns:
            raise ValueError(f"its first line is {rows[0]}, not that of a log")
        self._columns = rows[0]
        if not content.endswith("\n"):  # a process was killed while it wrote the last line
            self._replace(rows[:-1] or [self._columns])

    def _widen(self, new: Sequence[str]) -> None:
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        self._columns += new
        self._replace([self._columns, *(row + [""] * (len(self._columns) - len(row)) for row in rows[1:])])

    def _replace(self, rows: Sequence[Sequence[str]]) -> None:
        """Write the whole file again, all at once."""
        beside = self._path.with_name(f"{self._path.name}.partial")
        beside.write_text("".join(map(_csv_line, rows)), encoding="utf-8", newline="")
        os.replace(beside, self._path)


def _csv_line(values: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue()
