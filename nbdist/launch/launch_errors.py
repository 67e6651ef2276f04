"""The error of a launch, which `except` clauses written for torchrun and Accelerate also catch.

Torch is not loaded for it: without torch, no clause can name its class.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from nbdist.base.processes import describe_exit
from nbdist.errors import LaunchError, RankError, RankFailure

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def launch_error(error: RankError, name: str, local_ranks: Mapping[int, int]) -> LaunchError:
    """Return the LaunchError for a failure on ranks.

    Args:
        error: The failure.
        name: The launched function.
        local_ranks: By rank, its number on its node; a failure that lacks here carries its own.
    """
    now = int(time.time())
    failures = {
        rank: LaunchFailure(**{"local_rank": local_ranks.get(rank, 0)} | asdict(failure) | {"timestamp": now + place})
        for place, (rank, failure) in enumerate(error.failures.items())
    }
    made = _make(error.report, failures)
    made.name = name
    return made


def _make(report: str, failures: Mapping[int, RankFailure]) -> LaunchError:
    return _class()(report, failures)


@dataclass(frozen=True)
class LaunchFailure(RankFailure):
    """A failure of one rank, with the fields of torch's `ProcessFailure`.

    Attributes:
        local_rank: The rank on its node.
        timestamp: Seconds since 1970, in causal order, so that `get_first_failure` finds the first.
    """

    local_rank: int = 0
    timestamp: int = 0
    error_file: str = "<N/A>"

    @property
    def exitcode(self) -> int:
        """Of the process; if it raised, what Python would exit with: 1, or the argument of `sys.exit`."""
        if self.exit_code is not None:
            return self.exit_code
        code = self.exception.code if isinstance(self.exception, SystemExit) else None
        return code if isinstance(code, int) else 1

    @property
    def pid(self) -> int:
        """No longer known."""
        return 0

    @property
    def message(self) -> str:
        """The traceback, or how the process ended."""
        return _COLOURS.sub("", self.traceback) or self.text

    def signal_name(self) -> str:
        """Return the signal that ended the process."""
        return describe_exit(self.exitcode).split(" ")[0] if self.exitcode < 0 else "<N/A>"

    def timestamp_isoformat(self) -> str:
        """Return the time as text, in torch's format."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


def _class() -> type[LaunchError]:
    return _class_with_torch() if "torch" in sys.modules else LaunchError


@functools.cache
def _class_with_torch() -> type[LaunchError]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    class TorchLaunchError(LaunchError, ChildFailedError):  # type: ignore[misc]  # theirs holds ProcessFailures
        __doc__ = LaunchError.__doc__

        def __init__(self, report: str, failures: Mapping[int, RankFailure] | None = None) -> None:
            RankError.__init__(self, report, failures)  # ChildFailedError's looks up this host's name for each failure

        def __reduce__(self) -> tuple[Any, ...]:
            return _make, (self.report, self.failures), self.__dict__

    TorchLaunchError.__name__ = TorchLaunchError.__qualname__ = LaunchError.__name__
    return TorchLaunchError
