"""Answers looks in a process of a job, in a thread of its own: what it does, where it is, what it holds.

Counts optimizer steps by torch's own hook, once torch is there. Imports neither torch nor IPython before a look.
"""

from __future__ import annotations

import atexit
import contextlib
import linecache
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from nbdist.base import limits
from nbdist.cluster.launchers import RankOfJob, rank_of_job
from nbdist.errors import UsageError
from nbdist.serving.look_messages import (
    FOLDER_VARIABLE,
    LookFailed,
    LookRequest,
    RankLook,
    folder,
    name_of_job,
    receive,
    send,
    short_path,
)
from nbdist.wire.questions.stopping import Flight

_LOOK_FOR_TORCH = 0.2  # seconds
_ANSWER_LIMIT = 5.0  # seconds for the other side to ask and to take the answer
_STEPS = 20  # whose mean time is told
_WIDEST = 60  # characters of a line of code that are shown
_served: ServedRank | None = None


def serve() -> str:
    """Let this user look into this process: `nbdist ls` shows its job, `nbdist look JOB` what its ranks do.

    To be called once in each process of a job, anywhere in a script. It starts a thread that sleeps until somebody
    looks, and counts optimizer steps. Only the user who runs the job reaches it. Calling it again changes nothing.

    Returns:
        The job's name.

    Raises:
        UsageError: The place for its socket can't be used, as when another user owns it.
    """
    global _served
    if _served is None or _served.pid != os.getpid():
        _served = ServedRank()
        _served.start()
    return _served.job


class ServedRank:
    """This process, for those who look at it.

    Attributes:
        job: The name of its job.
        pid: As it was made.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._place = rank_of_job(os.environ) or RankOfJob((), 0, 1)
        self.job = name_of_job(self._place.job, self.pid)
        self._since = time.time()
        self._steps = 0
        self._times: deque[float] = deque(maxlen=_STEPS + 1)
        self._hooked = False
        self._gpu: Any = None
        self._path = _own_folder() / f"{self.job}-{self._place.rank}-{self.pid}"
        self._listener = socket.socket(socket.AF_UNIX)

    def start(self) -> None:
        """Begin to answer.

        Raises:
            UsageError: The socket can't be made.
        """
        try:
            self._path.unlink(missing_ok=True)
            with short_path(self._path) as path:
                self._listener.bind(path)
        except OSError as error:
            raise UsageError(f"nbdist can't serve this process at {self._path}: {error.strerror}") from None
        self._listener.listen()
        self._listener.settimeout(_LOOK_FOR_TORCH)
        os.register_at_fork(after_in_child=self._listener.close)
        atexit.register(self._end)
        threading.Thread(target=self._run, name="nbdist-serve", daemon=True).start()

    def _end(self) -> None:
        if os.getpid() == self.pid:
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            if not self._hooked:
                self._hook_steps()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # the process ends
                return
            with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
                connection.settimeout(_ANSWER_LIMIT)
                send(connection, self._answer(receive(connection, LookRequest)))

    def _answer(self, request: LookRequest) -> RankLook | LookFailed:
        try:
            return self._look(request)
        except Exception as error:  # of whatever is looked at: the thread must outlive it
            return LookFailed(f"{type(error).__name__}: {error}")

    def _hook_steps(self) -> None:
        """Count steps from now on, if torch has been imported; then there is nothing more to wait for."""
        optimizers: Any = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self.step_made)
            self._hooked = True
            self._listener.settimeout(None)

    def step_made(self, *_: object) -> None:
        """Note that an optimizer has made a step: torch's hook."""
        self._steps += 1
        self._times.append(time.monotonic())

    def _look(self, request: LookRequest) -> RankLook:
        from nbdist.metrics.node import host
        from nbdist.worker.cell import stacks

        frame = sys._current_frames()[threading.main_thread().ident or 0]
        times = list(self._times)
        mean = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return RankLook(
            self._place.rank,
            self._place.world_size,
            socket.gethostname(),
            self.pid,
            str(getattr(sys.modules["__main__"], "__file__", None) or ""),
            self._since,
            self._steps,
            mean,
            time.monotonic() - times[-1] if times else -1.0,
            _line(frame),
            stacks.render_script(frame),
            stacks.torch_call(frame).name,
            host.private_memory(),
            self._gpu_memory(),
            self._flight(request.collectives) if request.collectives else None,
        )

    def _flight(self, count: int) -> Flight:
        from nbdist.worker.groups.flight_record import last_collectives

        return last_collectives(count) if self._hooked else Flight([], [], False)

    def _gpu_memory(self) -> int:
        from nbdist.metrics.node import device
        from nbdist.worker.control.main_thread import MainThreadLook

        if not self._hooked or not device.uses_gpu():  # before, torch may be half imported
            return -1
        if self._gpu is None:
            self._gpu = MainThreadLook(_allocated, lambda: False)
        try:
            return int(self._gpu.newest(limits.STATUS_LOOK)["allocated"])
        except TimeoutError:
            return -1


def _allocated() -> dict[str, Any]:
    """Return the bytes of tensors on all GPUs: which one a process uses is known to its main thread only."""
    cuda = sys.modules["torch"].cuda
    return {"allocated": sum(cuda.memory_allocated(index) for index in range(cuda.device_count()))}


def _own_folder() -> Path:
    """Return the folder of sockets, made if need be.

    Raises:
        UsageError: Another user owns it, or others may write to it.
    """
    path = folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UsageError(
            f"{path} must belong to you and to nobody else: remove it, or name another with {FOLDER_VARIABLE}"
        )
    return path


def _line(frame: FrameType) -> str:
    """Return the innermost line of the user's own code, "" for none."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    ours = str(Path(__file__).parents[1])
    current: FrameType | None = frame
    while current is not None:
        file = current.f_code.co_filename
        if not file.startswith((*libraries, ours, "<")):
            code = linecache.getline(file, current.f_lineno).strip()
            shown = code if len(code) <= _WIDEST else f"{code[: _WIDEST - 1]}…"
            return f"{os.path.basename(file)}:{current.f_lineno}: {shown}"
        current = current.f_back
    return ""
