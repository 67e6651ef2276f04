"""From an exception on a rank to what is sent of it. Independent of the wire's other messages or the shell's work."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import os
import pickle
import re
import sys
import sysconfig
import time
import traceback as tracebacks
import types
from collections.abc import Iterator
from typing import Any

from nbdist.errors import NbdistError, TransferError
from nbdist.shells import chain
from nbdist.wire.messages.cells import Failure, FailureKind
from nbdist.worker.cell import lost_context
from nbdist.worker.cell.interrupts import StepStop

_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
# By name: `pip install --user` and the system's packages below a virtual environment have other prefixes than Python.
_PACKAGES = ("/site-packages/", "/dist-packages/")
_OURS = __file__.rsplit("/", 3)[0]
_CELL_FILE = "<ipython-input-"
_CELL = re.compile(rf'File "{_CELL_FILE}(\d+)-\w+>", line')
# Where torch's own frames are while a step is under way.
_STEP_FILES = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/graph.py",
    "/torch/optim/",
    "/torch/amp/grad_scaler.py",
)
# What torch's native code says of a peer that has failed or gone, or of a group or store that is closed.
_COMMUNICATION = re.compile(
    r"gloo|nccl|process group|store.*(closed|time)|connection (closed|reset|refused)|broken pipe|socket timeout|"
    r"timed out (waiting|after)|remote process exited",
    re.IGNORECASE,
)
_SHARD_ADVICE = (
    "a parameter of a sharded model was used where it is not gathered: outside the forward of the model or block that "
    "it belongs to. Name the method that uses it in the plan, for example `%distributed plan fsdp --methods encode` "
    "(before `prepare`), or use `parameter.full_tensor()` on all ranks"
)
_ENDS = 20  # frames that are shown of each end of a recursion
_PICKLE_LIMIT = 1 << 20  # bytes of an exception object that are worth sending


def describe(error: BaseException, traceback: str) -> Failure:
    """Return the failure to send for an exception, with its traceback as text."""
    return Failure(
        name="KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else type(error).__name__,
        text=_message(error),
        traceback=traceback + _advice(error),
        when=time.monotonic(),
        pickled=_pickle(error),
        kind=_kind(error),
    )


def answered_by_exit(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt after which a program called `sys.exit(1)`, as Lightning does: it was interrupted."""
    if not isinstance(error, SystemExit):
        return None
    return next((part for part in chain(error) if isinstance(part, KeyboardInterrupt)), None)


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, StepStop):
        return "stopped"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "lost" if any(from_communication(part) for part in chain(error)) else "raised"


def from_communication(error: BaseException) -> bool:
    """Return whether torch has raised it because communication between ranks has failed.

    What Python code raises counts for nothing, whatever its text: only torch's native code knows.
    """
    own_type = getattr(sys.modules.get("torch.distributed"), "DistError", RuntimeError)
    if type(error) is not RuntimeError and not isinstance(error, own_type):
        return False
    place = _innermost(error)
    return place is not None and not _raises(place) and _COMMUNICATION.search(_message(error)) is not None


def from_torch(error: BaseException) -> bool:
    """Return whether a RuntimeError or ValueError comes out of torch.distributed, or of native code."""
    place = _innermost(error)
    if place is None or not isinstance(error, RuntimeError | ValueError):
        return False
    return "/torch/distributed/" in place.tb_frame.f_code.co_filename or not _raises(place)


def _innermost(error: BaseException) -> types.TracebackType | None:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place


def _raises(place: types.TracebackType) -> bool:
    """Return whether it stands at a `raise` of Python's, not at a call of native code."""
    return dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def _advice(error: BaseException) -> str:
    """Return advice on a GPU that a forked process can't use, or that this one has lost, or on a shard that is used
    outside its model's forward; empty for other errors.
    """
    if lost := lost_context.advice(error):
        return f"\nnbdist: {lost}"
    if any(_uses_shard(part) for part in chain(error)):
        return f"\nnbdist: {_SHARD_ADVICE}"
    from nbdist import cuda_guard

    advice = cuda_guard.advice_for(error)
    return f"\nnbdist: {advice}" if advice else ""


def _uses_shard(error: BaseException) -> bool:
    """Return whether torch has refused to compute with a shard and a whole tensor: its native code says it by text."""
    return isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in _message(error)


def trim(traceback: types.TracebackType | None, *, innermost: bool = True) -> types.TracebackType | None:
    """Return the traceback with the user's own frames, and the innermost one whosever it is but ours.

    An interrupt comes up anywhere, so there the innermost frame says nothing: `innermost=False` leaves it out. What we
    have raised ourselves ends with the user's frames: libraries that stand between ours say nothing either.

    Of a deep recursion only both ends: rendering a thousand frames takes seconds.
    """
    frames: list[types.TracebackType] = []
    ours = False
    while traceback is not None:
        ours = traceback.tb_frame.f_code.co_filename.startswith(_OURS)
        if not ours:
            frames.append(traceback)
        traceback = traceback.tb_next
    kept = [entry for entry in frames if _is_users(entry.tb_frame.f_code.co_filename)]
    if frames and ((innermost and not ours) or not kept) and frames[-1] not in kept:
        kept.append(frames[-1])
    if len(kept) > 2 * _ENDS:
        kept = kept[:_ENDS] + kept[-_ENDS:]
    return _chained(kept)


def within_users_code(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback from the user's outermost frame inwards, to where it comes into nbdist."""
    entries = list(_entries(traceback))
    first = next((at for at, place in enumerate(entries) if is_users_code(place.tb_frame.f_code)), 0)
    kept = entries[first:]
    while len(kept) > 1 and kept[-1].tb_frame.f_code.co_filename.startswith(_OURS):
        kept.pop()
    return _chained(kept)


def _entries(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _chained(entries: list[types.TracebackType]) -> types.TracebackType | None:
    """Return a traceback of these entries."""
    made: types.TracebackType | None = None
    for entry in reversed(entries):
        line = max(0, entry.tb_lineno or 0)  # an interrupt may come where there is none: older Pythons have -1 there
        line = line or entry.tb_frame.f_code.co_firstlineno
        made = types.TracebackType(made, entry.tb_frame, entry.tb_lasti, line)
    return made


def passed_through_step(error: BaseException) -> bool:
    """Return whether it came from within a training step: a model's forward, backward, a collective, an optimizer."""
    return any(
        any(part in frame.f_code.co_filename for part in _STEP_FILES)
        for cause in chain(error)
        for frame, _ in tracebacks.walk_tb(cause.__traceback__)
    )


def _holds_group(error: BaseException) -> bool:
    """Return whether an exception group is part of it, which IPython does not render."""
    return any(_is_group(part) for part in chain(error))


def _is_group(error: BaseException) -> bool:
    return any(base.__name__ == "BaseExceptionGroup" for base in type(error).__mro__)


def render(
    kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None, renderer: Any
) -> str:
    """Return the traceback as IPython shows it, or as Python does where IPython can't.

    Args:
        renderer: The `InteractiveTB` of IPython's shell; None without one.
    """
    if isinstance(error, TransferError):
        return ""  # it says all there is to say, and its frames are ours
    try:
        with trimmed_causes(error):
            if isinstance(error, KeyboardInterrupt):
                # IPython takes 0.5 s for a first frame in a large file, and an interrupt is to be quick.
                return _render_frames(traceback)
            if renderer is None or _holds_group(error) or _kind(error) == "lost":  # what another rank has caused
                return _render_plainly(kind, error, traceback)
            own = getattr(error, "_render_traceback_", None)
            if own is not None and not isinstance(error, NbdistError):
                return "\n".join(own())
            with _placed_cells(error):
                return str(renderer.stb2text(renderer.structured_traceback(kind, error, traceback, tb_offset=0)))
    except Exception:  # the user's own __str__ or _render_traceback_ may raise anything
        return _render_plainly(kind, error, traceback)


@contextlib.contextmanager
def _placed_cells(error: BaseException) -> Iterator[None]:
    """Have `inspect` know where cells belong while the body runs.

    Else it goes through all loaded modules three times for each frame: there are thousands, and a recursion has forty.
    """
    frames = (place.tb_frame for part in chain(error) for place in _entries(part.__traceback__))
    cells = {frame.f_code.co_filename for frame in frames if frame.f_code.co_filename.startswith(_CELL_FILE)}
    places = list(cells)
    with contextlib.suppress(FileNotFoundError):  # the working directory is gone
        places += map(os.path.abspath, cells)
    inspect.modulesbyfile.update(dict.fromkeys(places, "__main__"))
    try:
        yield
    finally:
        for place in places:
            inspect.modulesbyfile.pop(place, None)


def _render_plainly(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> str:
    """Return the traceback as Python prints it, with cells named as the notebook names them."""
    text = "".join(tracebacks.format_exception(kind, error, traceback))
    return _CELL.sub(r"Cell In[\1], line", text)


def _render_frames(traceback: types.TracebackType | None) -> str:
    """Return where it was raised, as Python prints it, without the exception."""
    return _CELL.sub(r"Cell In[\1], line", "".join(tracebacks.format_tb(traceback)))


@functools.cache
def keep_last_comments() -> None:
    """Have tracebacks show the comment behind a function's last line.

    stack_data colors a function's text up to its last token, and takes that for all there is.
    """
    frames: Any = importlib.import_module("stack_data").FrameInfo
    colored: Any = getattr(frames, "_pygmented_scope_lines", None)
    color = getattr(colored, "func", None)
    if color is None:
        return

    @functools.wraps(color)
    def with_comment(info: Any) -> Any:
        first, lines = color(info)
        _, (line, column) = info.source.asttext().get_text_positions(info.scope, padded=False)
        if line == first + len(lines) - 1:
            lines[-1] += info.source.lines[line - 1][column:]
        return first, lines

    frames._pygmented_scope_lines = colored.__class__(with_comment)


@contextlib.contextmanager
def trimmed_causes(error: BaseException) -> Iterator[None]:
    """Trim the tracebacks of this exception's causes too, while the body runs."""
    causes = [(cause, cause.__traceback__) for cause in chain(error) if cause is not error]
    for cause, traceback in causes:
        cause.__traceback__ = trim(traceback)
    try:
        yield
    finally:
        for cause, traceback in causes:
            cause.__traceback__ = traceback


def is_users_code(code: types.CodeType) -> bool:
    """Return whether it is in a cell or file of the user's, not in a library, nor in nbdist."""
    return _is_users(code.co_filename) and not code.co_filename.startswith(_OURS)


def _is_users(filename: str) -> bool:
    if filename.startswith((*_STANDARD_LIBRARY, "<frozen")):
        return False
    return not any(folder in filename for folder in _PACKAGES)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # the user's own __str__ may raise anything
        return f"<its str() raised {type(broken).__name__}>"


def _pickle(error: BaseException) -> bytes | None:
    sink = _Sink()
    try:
        _Pickler(sink).dump(error)
    except Exception:  # so may what pickle calls; the error then arrives as text only
        return None
    return b"".join(sink.chunks)


class _Sink:
    """Takes a pickle of limited size."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self._left = _PICKLE_LIMIT

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise pickle.PicklingError("too large")
        self.chunks.append(bytes(data))
        return size


class _Pickler(pickle.Pickler):
    """Refuses tensors: an error report is not a way to copy them, and unpickling one may wake the notebook's CUDA."""

    def reducer_override(self, obj: object) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            raise pickle.PicklingError("a tensor")
        return NotImplemented
