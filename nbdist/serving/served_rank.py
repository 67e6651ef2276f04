"""Answers looks in a process of a job, in a thread of its own: what it does, where it is, what it holds.

Counts optimizer steps by torch's own hook, once torch is there, and stands still after one if that is allowed.
Imports neither torch nor IPython before a look.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from nbdist.base import limits
from nbdist.cluster.launchers import RankOfJob, rank_of_job
from nbdist.errors import UsageError
from nbdist.serving.collective_counts import entered_collectives
from nbdist.serving.control_messages import TakeControl
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
from nbdist.serving.optimizer_watch import HookTaker, once_optimizers_are_there
from nbdist.serving.script_frame import script_line
from nbdist.serving.short_values import described_names
from nbdist.serving.step_pause import StepPause
from nbdist.wire.questions.stopping import Flight

_ANSWER_LIMIT = 5.0  # seconds for the other side to ask and to take the answer
_STEPS = 20  # whose mean time is told
_served: ServedRank | None = None


def serve(*, control: bool = False) -> str:
    """Let this user look into this process: `nbdist ls` shows its job, `nbdist look JOB` what its ranks do.

    To be called once in each process of a job, anywhere in a script. It starts a thread that sleeps until somebody
    looks, and counts optimizer steps. Only the user who runs the job reaches it. Calling it again changes nothing,
    except that it may allow control.

    Args:
        control: Whether `nbdist look JOB --run CODE` may pause this process after a step and run code in it.

    Returns:
        The job's name.

    Raises:
        UsageError: The place for its socket can't be used, as when another user owns it.
    """
    global _served
    if _served is None or _served.pid != os.getpid():
        _served = ServedRank()
        _served.start()
    if control:
        _served.pause.allowed = True
    return _served.job


class ServedRank:
    """This process, for those who look at it.

    Attributes:
        job: The name of its job.
        pid: As it was made.
        pause: Where it stands still if somebody wants that.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._place = rank_of_job(os.environ) or RankOfJob((), 0, 1)
        self.job = name_of_job(self._place.job, self.pid)
        self._since = time.time()
        self._steps = 0
        self._times: deque[float] = deque(maxlen=_STEPS + 1)
        self._hooked = False
        self.pause = StepPause(self._pace)
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
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)
        once_optimizers_are_there(self._hook_steps)
        threading.Thread(target=self._run, name="nbdist-serve", daemon=True).start()

    def _end(self) -> None:
        if os.getpid() == self.pid:
            self._path.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Leave those who look to the process that a child was forked from."""
        self._listener.close()
        self.pause.forget()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the process ends
                return
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as unless_attended:
            unless_attended.callback(connection.close)
            connection.settimeout(_ANSWER_LIMIT)
            request: LookRequest | TakeControl = receive(connection, LookRequest | TakeControl)
            if isinstance(request, LookRequest):
                send(connection, self._answer(request))
                return
            connection.settimeout(None)
            unless_attended.pop_all()
        attend = threading.Thread(
            target=self.pause.attend, args=(connection, request), name="nbdist-serve-control", daemon=True
        )
        attend.start()

    def _answer(self, request: LookRequest) -> RankLook | LookFailed:
        try:
            return self._look(request)
        except Exception as error:  # of whatever is looked at: the thread must outlive it
            return LookFailed(f"{type(error).__name__}: {error}")

    def _hook_steps(self, register: HookTaker) -> None:
        register(self.step_made)
        self._hooked = True

    def step_made(self, *_: object) -> None:
        """Note that an optimizer has made a step: torch's hook."""
        self._steps += 1
        self._times.append(time.monotonic())
        if self._steps >= self.pause.target and self.pause.reached(self._steps, sys._getframe(1)):
            self._times = deque([time.monotonic()], maxlen=_STEPS + 1)  # none is to have that pause in it

    step_made._torchdynamo_disable = True  # type: ignore[attr-defined]  # else a compiled step would be traced into it

    def _pace(self) -> tuple[int, float]:
        """Return the steps so far, and the seconds of one of the last."""
        times = list(self._times)
        return self._steps, (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    def _look(self, request: LookRequest) -> RankLook:
        from nbdist.metrics.node import host
        from nbdist.worker.cell import stacks

        frame = sys._current_frames()[threading.main_thread().ident or 0]
        steps, mean = self._pace()
        last = self._times[-1] if steps else None
        return RankLook(
            self._place.rank,
            self._place.world_size,
            socket.gethostname(),
            self.pid,
            str(getattr(sys.modules["__main__"], "__file__", None) or ""),
            self._since,
            steps,
            mean,
            time.monotonic() - last if last is not None else -1.0,
            script_line(frame),
            stacks.render_script(frame),
            stacks.torch_call(frame).name,
            host.private_memory(),
            self._gpu_memory(),
            self.pause.standing,
            entered_collectives() if self._hooked else {},
            self._flight(request.collectives) if request.collectives else None,
            described_names(frame) if request.names else [],
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
