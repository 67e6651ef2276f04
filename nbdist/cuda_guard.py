"""Who initialized CUDA in this process: file, line, cell and import chain. Importing this module arms it.

Once CUDA is initialized, processes that are forked from this one can't use it. This module owns the callback in torch's
lazy initialization that notes the culprit, and the questions asked before a fork. It never imports torch or initializes
CUDA itself, and is independent of sessions, ranks or launchers.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from nbdist import shells
from nbdist.base.checks import is_on
from nbdist.base.imports import after_import
from nbdist.base.text import size
from nbdist.devices import visible_gpus
from nbdist.errors import UsageError

_SYMPTOM = "Cannot re-initialize CUDA in forked subprocess"
_AT_IMPORT = ("bitsandbytes", "cudf", "pycuda.autoinit")  # libraries that initialize CUDA when they are imported
_DRIVER = "libcuda.so.1"
_PROBE_LIMIT = 5.0  # seconds; it takes milliseconds


@dataclass(frozen=True)
class Initialization:
    """The moment at which CUDA was initialized in a process. As text: one sentence that names the culprit.

    Attributes:
        file: The file of the innermost code outside torch, None when nobody saw it.
        line: Its line.
        function: The function it is in, "<module>" outside of functions.
        cell: Number of the notebook's cell that was running, None outside of cells.
        chain: The cell, the modules that imported each other below it, and the culprit, as `peft/__init__.py:22`,
            outermost first.
        imported: Whether it happened while a module was being imported.
        time: When, in seconds since the epoch.
        seconds: The same in seconds since the process began.
        before_guard: It had happened when the guard was armed, so that nothing else is known.
    """

    file: str | None = None
    line: int | None = None
    function: str | None = None
    cell: int | None = None
    chain: tuple[str, ...] = ()
    imported: bool = False
    time: float | None = None
    seconds: float | None = None
    before_guard: bool = False

    def __str__(self) -> str:
        return f"CUDA was initialized {self._by()}"

    def _by(self) -> str:
        if self.before_guard:
            return f"before nbdist watched, so the caller is unknown{_suspects()}"
        if not self.chain:
            return f"by a caller that could not be found{_suspects()}"
        parts = [f"by {self.chain[-1]}", *self._way(), *self._when()]
        if self.function is not None and not self.function.startswith("<"):
            parts[0] += f" ({self.function})"
        return ", ".join(parts)

    def _way(self) -> Iterator[str]:
        """Yield how it came to run: "imported by peft in cell 3"."""
        where = f" in cell {self.cell}" if self.cell is not None else ""
        if self.imported:
            importers = _importers(self.chain)
            yield (", ".join(f"imported by {name}" for name in importers) or "imported") + where
        elif where and not self.chain[-1].startswith(f"cell {self.cell},"):
            yield f"called{where}"

    def _when(self) -> Iterator[str]:
        if self.seconds is not None:
            amount = f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:.0f} min"
            yield f"{amount} after the {_kind_of_process()}'s start"


_seen: Initialization | None = None


def arm() -> None:
    """Watch for the first initialization of CUDA by torch, which may be imported already or later. Idempotent.

    Takes microseconds. What was initialized before is known as such, but not by whom.
    """
    after_import("torch.cuda", _watch)


def first() -> Initialization | None:
    """Return what initialized CUDA through torch in this process, or in the process that it was forked from.

    Returns:
        None if nobody did, as far as torch knows: `safe_to_fork` asks the driver, too.
    """
    arm()
    if _seen is None and _torch_is_initialized():
        return Initialization(before_guard=True)
    return _seen


def describe() -> str:
    """Return what initialized CUDA, in one sentence. Asks the driver and NVML if torch doesn't know; forks nothing."""
    initialization = first()
    if initialization is not None:
        return f"{initialization}."
    devices = context_outside_torch()
    if devices or _driver_is_initialized():
        where = f" on GPU {', '.join(map(str, devices))}" if devices else ""
        return (
            f"CUDA was initialized{where} bypassing torch's own initialization, so the caller is unknown: "
            "`torch.cuda.is_available()` and `device_count()` do that, and so does code that calls CUDA "
            f"directly{_suspects()}."
        )
    if not _can_watch():
        return (
            "It is not known whether CUDA was initialized in this process: this version of torch has no "
            "`torch.cuda._queued_calls`, which nbdist needs to see it. `nbdist.cuda_guard.safe_to_fork()` can tell."
        )
    return "CUDA is not initialized in this process."


def report() -> None:
    """Print who initialized CUDA in this process, and the import chain that led there."""
    print(describe())
    chain = _seen.chain if _seen is not None else ()
    if len(chain) > 1:
        print("\n".join(f"  {'  ' * depth}{place}" for depth, place in enumerate(chain)))


def context_outside_torch() -> list[int]:
    """Return the GPUs, as nvidia-smi numbers them, on which this process has a context that torch did not make.

    Returns:
        Empty without NVML, when torch itself has initialized CUDA (its contexts look the same), and in containers
        with process numbers of their own, in which NVML can't recognize a process.
    """
    if first() is not None:
        return []
    return [index for index, (_, held) in enumerate(_nvml_devices()) if held is not None]


def safe_to_fork() -> bool:
    """Return whether processes forked from this one could use CUDA. Never initializes it; costs a fork (milliseconds).

    True on machines without GPUs, whatever has asked for them.
    """
    if first() is not None or _driver_is_initialized():
        return False
    return not _torch_refuses_in_child() or not visible_gpus({})


def check_fork() -> None:
    """Refuse a fork whose child could not use CUDA.

    Raises:
        UsageError: Names who initialized CUDA, and the way out.
    """
    if not safe_to_fork():
        raise UsageError(f"{_culprit()}, and processes forked from here can't use it: {_way_out()}")


def held_memory() -> dict[int, int]:
    """Return the memory that this process holds on GPUs, which ranks there will miss.

    Returns:
        Bytes by GPU as nvidia-smi numbers it (as torch does, if NVML does not know it): what torch has reserved, or
        NVML's figure, which counts the context, where that is larger. GPUs of which nothing is held are left out.
    """
    devices = _nvml_devices()
    held = {index: share or 0 for index, (_, share) in enumerate(devices)}
    uuids = [uuid for uuid, _ in devices]
    for number, (uuid, reserved) in enumerate(_reserved_by_torch()):
        index = uuids.index(uuid) if uuid in uuids else number
        held[index] = max(held.get(index, 0), reserved)
    return {index: amount for index, amount in sorted(held.items()) if amount > 0}


def memory_warning() -> str | None:
    """Return what to say when this process holds GPU memory that ranks will miss, None if it holds none."""
    held = held_memory()
    if not held:
        return None
    amounts = " and ".join(f"{size(amount)} on GPU {index}" for index, amount in held.items())
    return (
        f"the {_kind_of_process()} holds {amounts} that the ranks will miss: delete what you don't need and call "
        f"`torch.cuda.empty_cache()`, or restart the {_kind_of_process()} before the launch"
    )


def preflight_asked() -> bool:
    """Return whether ACCELERATE_DEBUG_MODE asks for a check before a launch, in any true spelling."""
    return is_on("ACCELERATE_DEBUG_MODE")


def preflight() -> None:
    """Print what stands in the way of a fork, and what was checked to find it."""
    print(f"who initialized CUDA: {describe()}")
    print(f"a forked process {'could' if safe_to_fork() else 'could not'} use CUDA")
    print(f"GPU memory: {memory_warning() or f'the {_kind_of_process()} holds none'}")


def advice_for(error: BaseException | str) -> str | None:
    """Return what to do about "Cannot re-initialize CUDA in forked subprocess", wherever that was raised.

    Args:
        error: An exception (what caused it, and a RankError's report, are looked at, too), or the text of one.

    Returns:
        The culprit and the way out; None if the error is another one.
    """
    chain = [] if isinstance(error, str) else list(_chain(error))
    text = error if isinstance(error, str) else "\n".join(map(_text, chain))
    if _SYMPTOM not in text and not any(map(_is_refusal, chain)):
        return None
    if "DataLoader worker" in text:
        return (
            "workers of a DataLoader are forked from a process that uses CUDA, so they can't use it: let the dataset "
            "return CPU tensors and move each batch in the loop, or pass `multiprocessing_context='spawn'`"
        )
    if "LOCAL_RANK" in os.environ and not _is_bad_fork():  # torchrun's: a rank, whose own CUDA works
        return (
            "this rank uses CUDA, so processes that it forks can't: start them by "
            "`torch.multiprocessing.get_context('spawn')`, or let them work on the CPU"
        )
    return f"{_culprit()}, and the process that failed was forked after that: {_way_out()}"


def _is_refusal(error: BaseException) -> bool:
    """Return whether torch has raised an error to refuse CUDA to this process, because it was forked: by its frames."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    frame = None if place is None else place.tb_frame
    in_torch = frame is not None and frame.f_globals.get("__name__") == "torch.cuda"
    return in_torch and isinstance(error, RuntimeError) and _is_bad_fork()


# --- being told


def _watch(cuda: ModuleType) -> None:
    queued = getattr(cuda, "_queued_calls", None)
    call: tuple[Callable[[], None], list[str]] = (_note, [])
    # In front: the calls of others may raise, when the driver has been initialized already.
    if isinstance(queued, list) and call not in queued:
        queued.insert(0, call)


def _can_watch() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is None or isinstance(getattr(cuda, "_queued_calls", None), list)


def _note() -> None:
    """Called by torch while it initializes CUDA, which would fail if this raised."""
    global _seen
    if _seen is not None:
        return
    try:
        _seen = _look(list(_outwards(sys._getframe(1))))
    except Exception:  # whatever it was, torch goes on
        _seen = Initialization(time=time.time())


def _look(frames: list[FrameType]) -> Initialization:
    """Read the culprit and the way to it from the stack, innermost frame first."""
    cells = [at for at, frame in enumerate(frames) if _cell(frame)]
    if cells:
        frames = frames[: cells[-1] + 1]  # what is further out belongs to the kernel
    innermost = next((at for at, frame in enumerate(frames) if not _is_torch(frame) and not _is_import(frame)), -1)
    culprit = frames[innermost]
    below = frames[innermost:]
    chain = [frame for frame, importing in _with_imports(below) if importing or frame.f_code.co_name == "<module>"]
    if culprit not in chain:
        chain.insert(0, culprit)
    if cells and frames[-1] not in chain:
        chain.append(frames[-1])
    now = time.time()
    return Initialization(
        file=culprit.f_code.co_filename,
        line=culprit.f_lineno,
        function=getattr(culprit.f_code, "co_qualname", culprit.f_code.co_name),  # from Python 3.11 on
        cell=_cell(frames[-1]) or None,
        chain=tuple(map(_place, reversed(chain))),
        imported=any(map(_is_import, below)),
        time=now,
        seconds=_seconds_since_start(now),
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _with_imports(frames: Sequence[FrameType]) -> Iterator[tuple[FrameType, bool]]:
    """Yield each frame that is not machinery of imports, and whether it is importing."""
    importing = False
    for frame in frames:
        if _is_import(frame):
            importing = True
        else:
            yield frame, importing
            importing = False


def _is_torch(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] == "torch" or frame.f_globals is globals()


def _is_import(frame: FrameType) -> bool:
    # `exec_module` is what import hooks of others call theirs.
    root = _module(frame).partition(".")[0]
    return root in ("importlib", "_frozen_importlib", "_frozen_importlib_external") or (
        frame.f_code.co_name == "exec_module"
    )


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def _cell(frame: FrameType) -> int:
    """Return the number of the notebook's cell that a frame is in, 0 for none."""
    numbers = shells.cell_files()
    return int(numbers.get(frame.f_code.co_filename, 0))


def _place(frame: FrameType) -> str:
    """Return `cell 3, line 2`, or a file relative to its package: `bitsandbytes/cextension.py:97`."""
    cell = _cell(frame)
    if cell:
        return f"cell {cell}, line {frame.f_lineno}"
    file = frame.f_code.co_filename
    depth = _module(frame).count(".") + (2 if os.path.basename(file) == "__init__.py" else 1)
    return f"{'/'.join(file.split(os.sep)[-depth:])}:{frame.f_lineno}"


def _importers(chain: Sequence[str]) -> list[str]:
    """Return the packages that led to the culprit's import, innermost first, each once."""
    packages = [place.partition("/")[0] for place in reversed(chain) if not place.startswith("cell ")]
    return [name for name in dict.fromkeys(packages) if name != chain[-1].partition("/")[0]]


def _seconds_since_start(now: float) -> float | None:
    try:
        import psutil

        return max(0.0, now - psutil.Process().create_time())
    except Exception:  # a figure for the reader, no more
        return None


# --- asking


def _torch_is_initialized() -> bool:
    return bool(getattr(sys.modules.get("torch.cuda"), "is_initialized", lambda: False)())


def _is_bad_fork() -> bool:
    """Return whether this process was forked from one that had initialized CUDA, as torch has seen it."""
    return bool(getattr(sys.modules.get("torch.cuda"), "_is_in_bad_fork", lambda: False)())


def _driver_is_initialized() -> bool:
    """Ask the driver, if it is loaded: until somebody has called `cuInit`, counting devices fails."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0
    except (OSError, AttributeError):  # not loaded, or not NVIDIA's
        return False


def _torch_refuses_in_child() -> bool:
    """Ask torch in a forked child: in this process it does not tell."""
    refuses: Callable[[], bool] | None = getattr(sys.modules.get("torch._C"), "_cuda_isInBadFork", None)
    if refuses is None:  # a build without CUDA, or torch is not imported
        return False
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child calls nothing that has locks
            child = os.fork()
        if child == 0:
            os._exit(int(refuses()))
    finally:
        if os.getpid() != parent:  # an interrupt in the child, which must not go on as a second notebook
            os._exit(1)
    return _exit_code(child) != 0


def _exit_code(child: int) -> int:
    """Wait for a child, not forever: one that hangs is killed."""
    ended: list[tuple[int, int]] = []
    process = os.pidfd_open(child)
    try:
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        ended = waiting.poll(_PROBE_LIMIT * 1000)
    finally:
        os.close(process)
        if not ended:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _nvml_devices() -> list[tuple[str, int | None]]:
    """Return UUID of each GPU, and the bytes that this process has on it: None where NVML does not know the process.

    Empty without a driver that works and answers within a moment.
    """
    from nbdist.metrics.node.driver import ask_once

    return ask_once(_shares_by_uuid, [])


def _shares_by_uuid(nvml: Any) -> list[tuple[str, int | None]]:
    return [_share_at(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _share_at(nvml: Any, index: int) -> tuple[str, int | None]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return str(nvml.nvmlDeviceGetUUID(handle)), _own_share(nvml, handle)
    except Exception:  # it has fallen off the bus, which says nothing of the others
        return "", None


def _own_share(nvml: Any, handle: Any) -> int | None:
    shares = [
        each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if each.pid == os.getpid()
    ]
    return sum(share or 0 for share in shares) if shares else None  # a share is None where NVML may not tell


def _reserved_by_torch() -> list[tuple[str, int]]:
    """Return UUID as NVML has it, and reserved bytes, of each GPU that torch sees."""
    if not _torch_is_initialized():
        return []
    cuda: Any = sys.modules["torch.cuda"]
    try:
        return [
            (f"GPU-{cuda.get_device_properties(index).uuid}", int(cuda.memory_reserved(index)))
            for index in range(cuda.device_count())
        ]
    except Exception:  # torch raises many kinds, such as after an error of the driver
        return []


# --- words


def _culprit() -> str:
    initialization = first()
    if initialization is not None:
        return str(initialization)
    return f"CUDA was initialized by a call that was not seen, in torch or in a library{_suspects()}"


def _way_out() -> str:
    """Return what to do so that forked processes can use CUDA."""
    seen = first() or Initialization()
    what = "the import" if seen.imported else "that call" if seen.chain else "what does it"
    hint = "" if seen.chain else ". `%load_ext nbdist` in the first cell watches who does it"
    return (
        f"restart the {_kind_of_process()}, and move {what} into the function, or use the default start_method, "
        f"which works anyway{hint}"
    )


def _suspects() -> str:
    imported = [name for name in _AT_IMPORT if name in sys.modules]
    return f" ({' and '.join(imported)}, imported here, would do it at its import)" if imported else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    known: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in known:
            continue
        known.add(id(each))
        yield each
        todo += [each.__cause__, each.__context__]


def _text(error: BaseException) -> str:
    try:
        return f"{error}\n{getattr(error, 'report', '')}"
    except Exception:  # a class of the user's, whose words can't be had
        return ""


def _kind_of_process() -> str:
    return "kernel" if shells.in_kernel() else "process"


arm()
