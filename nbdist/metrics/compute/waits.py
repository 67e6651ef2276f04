"""How long a rank waits in collectives, so that the one for which all others wait can be found: it waits least.

Two sources: torch's own log of DDP's backward passes, and on the CPU the time in `Work.wait`, which FSDP2 and plain
collectives go through. Knows nothing of what other ranks do. On GPUs the latter only queues, so it says nothing there.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nbdist.metrics.compute.listening import WrappedFunction

_EVERY = 0.25  # seconds between two looks at DDP's log: each takes 50 µs
_ON_GPU = 20  # steps, of which torch logs one: it waits for the GPU then
_KEPT = 16  # looks

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


class CollectiveWaits:
    """What the steps of one thread wait for other ranks. All calls in that thread.

    Attributes:
        waited: Seconds in `Work.wait`, since whoever reads this has set it to 0.
    """

    def __init__(self) -> None:
        self._logged: deque[float] = deque(maxlen=_KEPT)  # seconds of a step, by DDP's log
        self._by_log: float | None = None  # their mean
        self._sampled: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose log is on
        self._looked_at = 0.0
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
        self._by_log = None
        self.waited, self._has_waited = 0.0, False

    def of_step(self, waited: float, *, on_gpu: bool) -> float | None:
        """Return the seconds that a step waited in collectives, not hidden behind its own work; None: not known.

        Args:
            waited: Seconds of it in `Work.wait`.
            on_gpu: Whether it ran on a GPU.
        """
        if on_gpu or not self._has_waited:
            return self._by_log
        return waited + (self._by_log or 0.0)

    def look(self, now: float, *, on_gpu: bool) -> None:
        """Look at DDP's log now and then; `now` is by `time.monotonic`."""
        if now - self._looked_at >= _EVERY:
            self._looked_at = now
            self._look_at_ddp(on_gpu)

    def _hear(self, seconds: float) -> None:
        self.waited += seconds
        self._has_waited = True

    def _look_at_ddp(self, on_gpu: bool) -> None:
        found = [self._last_pass(model, on_gpu) for model in ddp_models()]
        known = [seconds for seconds in found if seconds is not None]
        if known:
            self._logged.append(sum(known))
        self._by_log = sum(self._logged) / len(self._logged) if self._logged and found else None

    def _last_pass(self, model: Any, on_gpu: bool) -> float | None:
        """Return the seconds of a model's last backward pass that only collectives took; None: not known yet."""
        if model not in self._sampled:
            self._sampled.add(model)
            model._set_ddp_runtime_logging_sample_rate(_ON_GPU if on_gpu else 1)
            return None
        log = model._get_ddp_logging_data()
        took, hidden = log.get("backward_comm_time"), log.get("backward_compute_comm_overlap_time")
        return None if not took or hidden is None else max(0.0, (took - hidden) / 1e9)
