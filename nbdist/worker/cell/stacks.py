"""A thread's stack as people read it: from the user's cell inwards. Independent of ranks or the wire."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from types import FrameType
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython

_OURS = __file__.rsplit("/", 3)[0] + "/"
_LAUNCHED = _OURS + "worker/cell/launched.py"  # calls a launched function
_C10D = "/torch/distributed/distributed_c10d.py"
_MEETING = _OURS + "train/collective/meeting.py"
_LOGGER = "/torch/distributed/c10d_logger.py"  # wraps every function of c10d
_CHECKPOINT = "/torch/distributed/checkpoint/"  # what it does itself is reading and writing
_AUTOGRAD = "/torch/autograd/graph.py"
_WAITS = re.compile(r"\.(wait|item|tolist|cpu|synchronize|result)\(")  # for what was started before
_ALIKE = {  # by collective, the argument that has the same shape and type on all ranks
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
}
_WIDEST = 80  # characters of a line of code that are shown


class Call(NamedTuple):
    """What a thread does of torch.distributed.

    Attributes:
        name: The function that was called, or "backward"; "" for neither.
        frame: That function's, if it is one that other ranks have to call too.
        meeting: Whether it is one of nbdist's own, for which ranks meet by the store.
    """

    name: str
    frame: FrameType | None = None
    meeting: bool = False


def describe(frame: FrameType) -> str:
    """Return where a thread is, in one line: "cell 7 line 4: train(model) (in all_reduce)".

    Returns:
        "" when the thread is nowhere in code of the user's.
    """
    frames = _frames(frame)
    if not frames:
        return ""
    anchor, inner = _anchor(frames), frames[-1]
    line = f"{_place(anchor)}: {_code(anchor)}"
    if inner is anchor:
        return line
    call = torch_call(frame).name if "/torch/" in inner.f_code.co_filename else ""
    return f"{line} (in {call or f'{inner.f_code.co_name}, {_place(inner)}'})"


def place(frame: FrameType) -> str:
    """Return the user's line that a thread is in: "cell 7 line 4", or "train.py:12"; "" for none."""
    frames = _frames(frame)
    return _place(_anchor(frames)) if frames else ""


def render(frame: FrameType) -> str:
    """Return the whole stack, a line for each call, from the user's cell inwards."""
    return "\n".join(_entry(each) for each in _frames(frame))


def render_script(frame: FrameType) -> str:
    """Return the whole stack, a line for each call, from the main program inwards."""
    frames: list[FrameType] = []
    current: FrameType | None = frame
    while current is not None:
        if not current.f_code.co_filename.endswith(_LOGGER):
            frames.append(current)
        is_main = current.f_code.co_name == "<module>" and current.f_globals.get("__name__") == "__main__"
        current = None if is_main else current.f_back
    return "\n".join(_entry(each) for each in reversed(frames))


def torch_call(frame: FrameType) -> Call:
    """Return the user's outermost call of torch.distributed. A collective takes precedence."""
    found = autograd = ""
    collective = Call("")
    current: FrameType | None = frame
    while current is not None:
        name, filename = current.f_code.co_name, current.f_code.co_filename
        if filename.endswith(_C10D):
            if not name.startswith("_") or not collective.name:
                collective = Call(name, current)
        elif filename == _MEETING and name == "meet":
            return Call(str(current.f_locals["function"]), current, meeting=True)
        elif filename.endswith(_AUTOGRAD):
            autograd = "backward"
        elif "/torch/distributed/" in filename and _CHECKPOINT not in filename and "wrapper" not in name:
            found = found or name if name.startswith("_") else name
        current = current.f_back
    return collective if collective.name else Call(autograd or found)


def tensors_of(call: Call) -> tuple[str, str]:
    """Return what a collective was called with, if all ranks must call it alike, and on which type of device.

    Returns:
        For example "float32[16, 8]" and "cuda"; empty where there is nothing to compare.
    """
    if call.frame is None or call.meeting:
        return "", ""
    torch: Any = sys.modules["torch"]
    given: Any = call.frame.f_locals.get(_ALIKE.get(call.name, ""))
    if type(given) not in (torch.Tensor, torch.nn.Parameter):  # looking at a subclass may run the user's code
        return "", ""
    return f"{str(given.dtype).removeprefix('torch.')}{[int(size) for size in given.shape]}", given.device.type


def in_meeting(error: BaseException) -> bool:
    """Return whether it comes out of a function of nbdist's own for which ranks meet by the store."""
    return any(frame.f_code.co_filename == _MEETING for frame, _ in traceback.walk_tb(error.__traceback__))


def awaits_work(frame: FrameType) -> bool:
    """Return whether a thread seems to wait for a collective that was started before, so far as its code tells."""
    frames = _frames(frame)
    if not frames:
        return False
    return "/torch/nn/parallel/" in frames[-1].f_code.co_filename or bool(_WAITS.search(_code(frames[-1])))


def _frames(frame: FrameType) -> list[FrameType]:
    """Return the frames that are shown, the outermost first: what IPython does before the cell is nobody's concern."""
    frames: list[FrameType] = []
    in_ours = False
    called_by_us = 0  # how many frames there are from the innermost one to what our outermost frames have called
    current: FrameType | None = frame
    while current is not None:
        filename = current.f_code.co_filename
        if filename.startswith(_OURS):
            called_by_us = called_by_us if in_ours else len(frames)
            in_ours = True
        elif not filename.endswith(_LOGGER):
            in_ours = False
            frames.append(current)
        current = current.f_back if filename != _LAUNCHED else None
    outermost = next((at for at in reversed(range(len(frames))) if _cell(frames[at])), None)
    if outermost is None:  # a function that has come from the notebook without a cell, or nothing of the user's
        outermost = called_by_us - 1
    return frames[outermost::-1] if outermost >= 0 else []


def _anchor(frames: list[FrameType]) -> FrameType:
    """Return the innermost frame that is in a cell."""
    return next((frame for frame in reversed(frames) if _cell(frame)), frames[0])


def _cell(frame: FrameType) -> int:
    """Return the number of the notebook's cell that a frame is in, 0 for none."""
    compiler = getattr(get_ipython(), "compile", None)
    return int(getattr(compiler, "_filename_map", {}).get(frame.f_code.co_filename, 0))


def _place(frame: FrameType) -> str:
    number = _cell(frame)
    return f"cell {number} line {frame.f_lineno}" if number else _file(frame)


def _file(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _code(frame: FrameType) -> str:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"


def _entry(frame: FrameType) -> str:
    name = frame.f_code.co_name
    function = "" if name.startswith("<") else f", in {name}"
    code = _code(frame)
    return f"{_place(frame)}{function}{': ' if code else ''}{code}"
