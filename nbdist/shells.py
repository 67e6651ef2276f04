"""What the notebook's IPython shell and the ranks' have in common: what they keep alive, and letting go of it.

Independent of sessions or the wire.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from nbdist.metrics.node.host import trim_malloc

_LAST = ("last_exc", "last_value", "last_traceback", "last_type")
_OUTPUTS = ("_", "__", "___")

_on_rank = False


def current() -> Any:
    """Return the IPython shell of this process, None if there is none."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def in_kernel() -> bool:
    """Return whether this process is a notebook's kernel, and not a script or a terminal."""
    return hasattr(current(), "kernel")


def in_cell() -> bool:
    """Return whether what runs in this kernel is the user's, and not code that a front end runs for itself.

    VS Code reads variables so, for example, and takes all output for its answer. Such a request leaves no history.
    """
    content = _request().get("content", {})
    return not content.get("silent") and content.get("store_history") is not False


def cell_id() -> str:
    """Return the front end's name for the cell that is running, the same in each run; empty: it gives none."""
    return str(_request().get("metadata", {}).get("cellId") or "")


def _request() -> dict[str, Any]:
    """Return the message that the kernel works on, empty outside of kernels."""
    kernel: Any = getattr(current(), "kernel", None)
    return (kernel.get_parent() or {}) if hasattr(kernel, "get_parent") else {}


def cell_number() -> int:
    """Return the number of the notebook's cell that is running, 0 outside of notebooks."""
    shell = current()
    # `execution_count` is ahead of the running cell in some versions of IPython, and not in others.
    return int(shell.displayhook.prompt_count) if shell is not None else 0


def code_of_cell(number: int) -> str:
    """Return what has run under a number in this kernel; empty: nothing has."""
    cells: list[str] = current().history_manager.input_hist_raw
    return cells[number] if 0 < number < len(cells) else ""


def newest_cell(code: str) -> int:
    """Return the number under which this code has run last in this kernel, or runs; 0: it has not."""
    cells: list[str] = current().history_manager.input_hist_raw
    wanted = code.rstrip()
    return next((number for number in range(len(cells) - 1, 0, -1) if cells[number].rstrip() == wanted), 0)


def from_first_line(cell: str, above: int = 0) -> tuple[str, int]:
    """Return a cell without leading blank lines, which IPython would not count, and the number of lines above it.

    Args:
        cell: The cell.
        above: Lines that stand above it.
    """
    lines = cell.split("\n")
    blank = 0
    while blank < len(lines) - 1 and not lines[blank].strip():
        blank += 1
    return "\n".join(lines[blank:]), above + blank


def cell_files() -> Mapping[str, int]:
    """Return the numbers of the cells that have run here, by the names that their code has for a file."""
    numbers: Mapping[str, int] = getattr(getattr(current(), "compile", None), "_filename_map", {})
    return numbers


def become_rank() -> None:
    """Mark this process, and all forked from it, as a rank from now on."""
    global _on_rank
    _on_rank = True


def on_rank() -> bool:
    """Return whether this process is a rank, or was forked from one. Ranks that torchrun has started are not meant."""
    return _on_rank


def forget_outputs(shell: Any, first: int) -> None:
    """Let go of what `Out` and its short names have since this cell."""
    outputs = shell.user_ns.get("_oh", {})
    for number in [number for number in outputs if number >= first]:
        del outputs[number]
        shell.user_ns.pop(f"_{number}", None)
        shell.user_ns_hidden.pop(f"_{number}", None)
    for name in _OUTPUTS:
        if shell.user_ns.get(name) is getattr(shell.displayhook, name, None):  # else the user has taken the name
            setattr(shell.displayhook, name, "")
            shell.push({name: ""}, interactive=False)


def forget_failure(shell: Any) -> None:
    """Let go of the frames of the last failure: they may hold tensors and DataLoader workers."""
    for name in _LAST:
        value = vars(sys).pop(name, None)
        if isinstance(value, BaseException):
            clear_frames(value)
    shell.last_execution_result = None
    for renderer in (shell.InteractiveTB, shell.SyntaxTB):
        renderer.tb = None
        renderer.etype = renderer.evalue = None
    shell.SyntaxTB.last_syntax_error = None


def free(shell: Any) -> None:
    """Let go of everything that only the shell keeps alive: last failure, `Out`, `_`."""
    forget_failure(shell)
    shell.displayhook.flush()
    shell.user_ns["Out"] = shell.user_ns["_oh"]
    # `flush` forgets the copies that say whether the user has taken these names.
    shell.push(dict.fromkeys(_OUTPUTS, ""), interactive=False)


def free_memory(shell: Any) -> int:
    """Give back everything that only the shell, reference cycles and caches keep alive.

    Returns:
        Bytes of GPU memory that torch has given back.
    """
    free(shell)
    gc.collect()
    freed = _empty_device_cache()
    trim_malloc()
    return freed


def _empty_device_cache() -> int:
    before = device_memory()
    if before:
        sys.modules["torch"].cuda.empty_cache()
    return before - device_memory()


def device_memory() -> int:
    """Return the bytes of GPU memory that torch holds, on all devices of this process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(int(torch.cuda.memory_reserved(index)) for index in range(torch.cuda.device_count()))


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception and all that it came from, also what its groups hold."""
    found: list[BaseException] = []
    todo = [error]
    while todo:
        now = todo.pop()
        if now is None or any(now is known for known in found):
            continue
        found.append(now)
        members = getattr(now, "exceptions", ())  # of a group: a tuple. Others may mean what they like by the name
        todo += [now.__cause__, now.__context__, *(members if isinstance(members, tuple) else ())]
    return found


def clear_frames(error: BaseException) -> None:
    """Let go of what the frames of an exception hold, and of the frames."""
    for cause in chain(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
                _ = frame.f_locals  # refreshes the copy that a traceback's rendering left in the frame (Python < 3.13)
        cause.__traceback__ = None
