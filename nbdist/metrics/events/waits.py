"""How long a rank waits in collectives, so that the one for which all others wait can be found: it waits least.

Two sources: torch's own log of DDP's backward passes, and on the CPU the time in `Work.wait`, which FSDP2 and plain
collectives go through. Independent of what other ranks do. On GPUs the latter only queues, so it says nothing there.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nbdist.metrics.events.listening import WrappedFunction

_EVERY = 0.01  # seconds between two looks at DDP's log: each takes 10 to 50 µs
_EVERY_ON_GPU = 0.25
_ON_GPU = 20  # steps, of which torch logs one: it waits for the GPU then
_KEPT = 16  # looks, on a GPU

_LOG = ("logger", "_get_ddp_logging_data", "_set_ddp_runtime_logging_sample_rate")  # private parts of a DDP model

_models: weakref.WeakSet[Any] = weakref.WeakSet()


def watch() -> None:
    """Have all models known that DDP wraps in this process from now on. Again: nothing happens."""
    found = sys.modules.get("torch.nn.parallel.distributed")
    kind: Any = getattr(found, "DistributedDataParallel", None)
    if kind is None or hasattr(kind.__init__, "_nbdist_watches"):
        return
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _models.add(self)

    __init__._nbdist_watches = True  # type: ignore[attr-defined]
    kind.__init__ = __init__


def ddp_models() -> list[Any]:
    """Return the models that DDP has wrapped in this process, and that still exist."""
    return list(_models)


def _wrap_wait(original: Callable[..., Any], listeners: Callable[[], Sequence[Callable[[float], None]]]) -> Any:
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            seconds = time.perf_counter() - began
            for listener in listeners():
                listener(seconds)

    return wait


@functools.cache
def _work() -> WrappedFunction[Callable[[float], None]] | None:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    return None if c10d is None else WrappedFunction(getattr(c10d, "Work", None), "wait", _wrap_wait)


class _Pass(NamedTuple):
    """A backward pass of DDP.

    Attributes:
        began: In nanoseconds, on the CPU by `time.time_ns`.
        seconds: That only collectives took.
    """

    began: int
    seconds: float


class StepWait(NamedTuple):
    """What is known of the collectives of one step.

    Attributes:
        seconds: That only collectives took, not hidden behind the step's own work; None: not known.
        stands_for: Steps that this one represents, as those before it were not looked at.
    """

    seconds: float | None
    stands_for: float = 1.0


_UNKNOWN = StepWait(None)


class CollectiveWaits:
    """What the steps of one thread wait for other ranks. All calls in that thread.

    Attributes:
        waited: Seconds in `Work.wait`, since whoever reads this has set it to 0.
    """

    def __init__(self) -> None:
        self._logged: deque[float] = deque(maxlen=_KEPT)  # seconds of a step on a GPU, by DDP's log
        self._sampled: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose log is on
        self._looked_at = self._ended_at = 0.0
        self._began = 0  # the step that is under way, in nanoseconds of torch's clock
        self._ddp_trains = False  # in the step that was looked at last
        self.waited = 0.0
        self._has_waited = False
        self._end: Callable[[], None] | None = None

    def start(self) -> None:
        """Listen from now on, if ranks communicate here."""
        watch()
        work = _work()
        if work is not None and work.exists and self._end is None:
            self._end = work.listen(self._hear)

    def stop(self) -> None:
        """Listen no longer."""
        if self._end is not None:
            self._end()
            self._end = None

    def restart(self) -> None:
        """Forget the steps so far, but not whose log is on."""
        self._logged.clear()
        self._looked_at = self._ended_at = 0.0
        self._ddp_trains = False
        self.waited, self._has_waited = 0.0, False

    def of_step(self, waited: float, now: float, *, counted: bool) -> StepWait:
        """Return what the step that has just ended on the CPU waited in collectives.

        A step of `_EVERY` or longer is always looked at, and so are some of the shorter ones. Long ones are therefore
        among them more often than they come: each stands for as many of its length as the time since the look before
        would hold.

        Args:
            waited: Seconds of it in `Work.wait`.
            now: By `time.monotonic`.
            counted: Whether its FLOPs were counted, which makes other ranks wait.
        """
        began, self._began = self._began, time.time_ns()
        lasted, self._ended_at = now - self._ended_at, now
        if counted:
            self._looked_at = now
            return _UNKNOWN
        elapsed = now - self._looked_at
        if elapsed < _EVERY:
            return _UNKNOWN if self._ddp_trains else self._heard(waited)
        self._looked_at = now
        passes = [self._last_pass(model, 1) for model in ddp_models()]
        known = [each.seconds for each in passes if each is not None and each.began >= began]
        self._ddp_trains = bool(known)
        if not known:
            return self._heard(waited)
        is_first = elapsed == now  # after a restart
        return StepWait(sum(known) + waited, 1.0 if is_first or lasted <= 0.0 else elapsed / lasted)

    def on_gpu(self, now: float) -> float | None:
        """Return the seconds of a step on a GPU, by DDP's log, at which this looks now and then; None: not known."""
        if now - self._looked_at >= _EVERY_ON_GPU:
            self._looked_at = now
            known = [each.seconds for model in ddp_models() if (each := self._last_pass(model, _ON_GPU)) is not None]
            if known:
                self._logged.append(sum(known))
        return sum(self._logged) / len(self._logged) if self._logged else None

    def _heard(self, waited: float) -> StepWait:
        return StepWait(waited) if self._has_waited else _UNKNOWN

    def _hear(self, seconds: float) -> None:
        self.waited += seconds
        self._has_waited = True

    def _last_pass(self, model: Any, rate: int) -> _Pass | None:
        """Return a model's last backward pass, of those that are logged: one in `rate`; None: not known yet."""
        if not all(hasattr(model, name) for name in _LOG):
            return None
        if model not in self._sampled:
            self._sampled.add(model)
            model._set_ddp_runtime_logging_sample_rate(rate)
            return None
        if rate == 1:  # else the log has a pass when the next forward pass begins
            model.logger.set_runtime_stats_and_log()
        log = model._get_ddp_logging_data()
        took, hidden = log.get("backward_comm_time"), log.get("backward_compute_comm_overlap_time")
        if not took or hidden is None:
            return None
        return _Pass(log.get("backward_compute_time_start", 0), max(0.0, (took - hidden) / 1e9))
