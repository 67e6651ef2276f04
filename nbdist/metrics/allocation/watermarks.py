"""High-water marks that several scopes read side by side.

A peak counter (the kernel's VmHWM, torch's of a device) is one for all and can only be reset as a whole. Here the peaks
up to a reset are noted for every scope that is open, so that scopes may nest or overlap and none loses anything; what
the user reads of torch's counters is one more such scope, which never ends.

Owns when counters are reset. Independent of what is measured with them.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

Peaks = dict[Hashable, int]
Stats = dict[str, Any]  # as torch nests them: {"allocated_bytes": {"all": {"current": 1, "peak": 2, ...}, ...}, ...}

_PAGE_FLAGS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): "reset the peak resident set size to the process's current resident set size value"


class Counter(Protocol):
    """What keeps peaks."""

    def peaks(self) -> Peaks:
        """Return the largest values since the last reset, or since ever."""

    def reset(self) -> bool:
        """Begin again from the current values. False: that is not possible here."""


class Scope:
    """What one reader sees of a counter.

    Attributes:
        peaks: The largest values so far, up to the last look.
        hidden: Peaks from before the scope that could not be reset; a lower one within it stays unseen.
    """

    __slots__ = ("hidden", "peaks")

    def __init__(self, hidden: Mapping[Hashable, int] | None = None) -> None:
        self.peaks: Peaks = {}
        self.hidden = dict(hidden or {})

    def note(self, peaks: Mapping[Hashable, int]) -> None:
        """Take in what the counter says."""
        for key, value in peaks.items():
            if value > self.peaks.get(key, -1):
                self.peaks[key] = value

    def peak(self, key: Hashable) -> int | None:
        """Return the largest value in the scope; None: not known."""
        value = self.peaks.get(key)
        return None if value is None or value <= self.hidden.get(key, -1) else value


class Watermark:
    """A counter and its open scopes. May be used from any thread."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._scopes: list[Scope] = []
        self._lock = threading.Lock()

    def begin(self) -> Scope:
        """Open a scope that sees what comes from now on."""
        with self._lock:
            self._look()
            scope = Scope() if self._counter.reset() else Scope(self._counter.peaks())
            self._scopes.append(scope)
        return scope

    def join(self) -> Scope:
        """Open a scope that also sees what the counter already holds."""
        scope = Scope()
        with self._lock:
            self._scopes.append(scope)
        return scope

    def restart(self, scope: Scope) -> None:
        """Let an open scope forget what it has seen."""
        with self._lock:
            self._look()
            scope.hidden = {} if self._counter.reset() else self._counter.peaks()
            scope.peaks = {}

    def look(self, scope: Scope) -> Scope:
        """Bring an open scope up to date."""
        with self._lock:
            self._look()
        return scope

    def end(self, scope: Scope) -> Scope:
        """Close a scope, up to date."""
        with self._lock:
            self._look()
            self._scopes = [each for each in self._scopes if each is not scope]
        return scope

    def _look(self) -> None:
        if not self._scopes:
            return
        peaks = self._counter.peaks()
        for scope in self._scopes:
            scope.note(peaks)


# --- this process


class ResidentPeak:
    """The kernel's largest resident size of this process (VmHWM), bytes, under the key "resident"."""

    def peaks(self) -> Peaks:
        """See Counter."""
        return {"resident": resident()[1]}

    def reset(self) -> bool:
        """See Counter. What `getrusage` gives as `ru_maxrss` begins again with it."""
        try:
            _PAGE_FLAGS.write_text(_RESET_PEAK)
        except OSError:
            return False
        return True


def resident() -> tuple[int, int]:
    """Return this process's resident size (VmRSS) and the largest one since the last reset (VmHWM). Bytes.

    Raises:
        OSError: There is no /proc here.
    """
    with open("/proc/self/status", "rb") as file:
        text = file.read()
    return _field(text, b"VmRSS:"), _field(text, b"VmHWM:")


def _field(text: bytes, name: bytes) -> int:
    begin = text.index(name) + len(name)
    return int(text[begin : text.index(b"kB", begin)]) * 1024


process = Watermark(ResidentPeak())


# --- devices


class SharedStats:
    """torch's statistics of one device, for scopes and for the user side by side.

    Args:
        stats: Gives them, nested.
        reset: Resets all their peaks.

    Attributes:
        watermark: For scopes; keys are the paths of the nested statistics, as ("allocated_bytes", "all").
    """

    def __init__(self, stats: Callable[[], Stats], reset: Callable[[], object]) -> None:
        self._stats = stats
        self._reset = reset
        self.watermark = Watermark(self)
        self._users = self.watermark.join()
        self._ever = self.watermark.join()

    def peaks(self) -> Peaks:
        """See Counter."""
        return {path: leaf["peak"] for path, leaf in _leaves(self._stats())}

    def reset(self) -> bool:
        """See Counter."""
        self._reset()
        return True

    def current(self, *paths: tuple[str, ...]) -> list[int]:
        """Return values now, 0 where torch has none."""
        leaves = dict(_leaves(self._stats()))
        return [int(leaves[path]["current"]) if path in leaves else 0 for path in paths]

    def ever(self) -> Scope:
        """Return the peaks since the process has used the device, whoever has reset what."""
        return self.watermark.look(self._ever)

    def for_user(self) -> Stats:
        """Return the statistics as they would be, had only the user reset anything."""
        found = self._stats()
        seen = self.watermark.look(self._users)
        for path, leaf in _leaves(found):
            leaf["peak"] = max(leaf["peak"], seen.peaks.get(path, 0))
        return found

    def reset_for_user(self) -> None:
        """Handle a reset of the peaks by the user."""
        self.watermark.restart(self._users)


def _leaves(stats: Stats, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Stats]]:
    for name, value in stats.items():
        if isinstance(value, dict):
            if "peak" in value:
                yield (*path, name), value
            else:
                yield from _leaves(value, (*path, name))


# What torch's Python functions for statistics and for resetting their peaks end in.
_FUNCTIONS = (
    ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats"),
    ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),  # torch.accelerator's
)


class SharedDevices:
    """The CUDA devices of this process, with their statistics shared with the user.

    From the first time on that they are asked for, torch's own functions answer through here.

    Args:
        core: torch's C module, `torch._C`.
    """

    def __init__(self, core: Any) -> None:
        self._devices: dict[int, SharedStats] = {}
        self._stats: Any
        self._reset: Any
        self._stats, self._reset = (getattr(core, name, None) for name in _FUNCTIONS[0])
        self.why = "" if self._stats and self._reset else "GPU memory n/a: this torch has no peak counters to share"
        if self.why:
            return
        for names in _FUNCTIONS:
            if all(hasattr(core, name) for name in names):
                setattr(core, names[0], lambda device: self.of(device).for_user())
                setattr(core, names[1], lambda device: self.of(device).reset_for_user())

    def of(self, device: int) -> SharedStats:
        """Return the statistics of a device, by its index."""
        if device not in self._devices:
            stats, reset = functools.partial(self._stats, device), functools.partial(self._reset, device)
            self._devices.setdefault(device, SharedStats(stats, reset))
        return self._devices[device]


shared_devices: SharedDevices | None = None


def devices() -> SharedDevices | None:
    """Return those of this process; None as long as torch is not there, or is built without CUDA."""
    global shared_devices
    torch = sys.modules.get("torch")
    core = getattr(torch, "_C", None)
    if shared_devices is None and getattr(core, "_cuda_getDeviceCount", None) is not None:
        shared_devices = SharedDevices(core)
    return shared_devices
