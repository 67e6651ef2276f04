"""The errors that nbdist raises. Independent of torch, the wire or Jupyter.

NbdistError
├── UsageError            what was typed can't be done; nothing has changed
├── NodesMissing          other nodes of a launch did not come, or have gone
├── SessionError
│   ├── SessionClosed     you closed it (or never opened it)
│   ├── SessionBroken     it broke: its controller, its agent or its start-up failed
│   └── SessionBusy       its ranks are running something else
├── RankError             ranks raised; the first cause stands first
│   ├── RankDied          a rank's process has ended
│   ├── RankTimeout       ranks were still running when the time was over
│   └── LaunchError       a launched function failed on a rank; torch's ChildFailedError too
├── StaleGroupError       a process group was used that is gone, or may be out of step
├── CheckpointError       a checkpoint could not be written or read
├── PackageError          a package that nbdist needs is missing or too old
├── TransferError         a value can't travel between processes
└── InteractionError      code on a rank reads a line, and nobody can enter one
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class NbdistError(Exception):
    """Root of all errors of nbdist.

    >>> try:
    ...     session.run("1/0")
    ... except nbdist.NbdistError as error:
    ...     print(error)

    In a notebook only its text is shown, without frames of nbdist's own.
    """

    def _render_traceback_(self) -> list[str]:
        return f"{type(self).__name__}: {self}".splitlines()


class UsageError(NbdistError, ValueError):
    """What was typed can't be done. Nothing has changed; the text says what is allowed and what to type."""


class PackageError(NbdistError, ImportError):
    """A package that nbdist needs is missing or too old. The text names it, and what to type."""


class NodesMissing(NbdistError, TimeoutError):
    """Nodes of a launch did not come in time, or the one where all meet has gone. No rank of this node is left.

    The text says how many came, at which address, and what to check there.
    """


class SessionError(NbdistError):
    """A session can't do what was asked of it."""


class SessionClosed(SessionError):
    """There is no session, or you closed it. Type `%distributed start -n 2` (or `nbdist.Session(2)`) to have one."""


class SessionBroken(SessionError):
    """A process that the session can't do without has ended, or its ranks could not be brought up.

    Every rank is gone, and their variables with them. `%distributed start` starts a new one, without a kernel restart.
    """


class SessionBusy(SessionError):
    """Ranks that were asked for are still running another cell. Nothing has been sent to any rank.

    Wait for that cell, or `%distributed interrupt`, or as the last resort `%distributed restart`.
    """


class StaleGroupError(NbdistError, RuntimeError):
    """Code on a rank used a process group that is gone, or may be out of step.

    A member has died or returned, it was never whole, or a cell failed while not all of its ranks could be compared.

    The text says which way there is to go on. Raised on the rank, so the notebook sees it inside a RankError.
    """


class CheckpointError(NbdistError):
    """A checkpoint could not be written or read, as when the disk is full.

    Raised on all ranks; the text names those that failed. The checkpoints that were there before are whole. After a
    failed save training goes on as if it had not been tried; after a failed load the text says what may have changed.
    """


class TransferError(NbdistError):
    """A value can't be sent to another process. Nothing was sent; the text names the part that can't travel.

    Attributes:
        part: That part and the way to it, as "args[0]['lock'] is a _thread.lock"; empty where it is not known.
        on_gpu: Whether it is a tensor on a GPU, where none may travel.
    """

    part = ""
    on_gpu = False


class InteractionError(NbdistError):
    """Code on a rank reads a line where nobody can enter one: no input field, no terminal. The rank lives on."""


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank.

    Attributes:
        rank: The rank.
        kind: "raised", "died", "interrupted", "running" (did not end in time) or "ended" (with a launch that failed).
        name: Name of the exception's class, or of the signal that ended the process.
        text: The exception's message.
        traceback: The rank's traceback as the notebook would show it (may hold ANSI colors).
        when: Seconds on the machine's monotonic clock.
        pickled: The pickled exception, if it could be pickled.
        exit_code: Of a process that has ended; negative: the signal that ended it.
        lost_peer: Whether it is what torch raises where another rank has failed or gone.
    """

    rank: int
    kind: str
    name: str
    text: str
    traceback: str
    when: float
    pickled: bytes | None = None
    exit_code: int | None = None
    lost_peer: bool = False

    @property
    def exception(self) -> BaseException | None:
        """The exception object, or None when it does not unpickle in this process."""
        if self.pickled is None:
            return None
        try:
            value = pickle.loads(self.pickled)
        except Exception:  # what a user's class raises there
            return None
        return value if isinstance(value, BaseException) else None


class RankError(NbdistError):
    """One or more ranks raised. The ranks live on, and their variables with them; the next cell works.

    Attributes:
        report: The whole text: the first failure with its traceback, then one line for each other group of ranks.
        failures: What went wrong, by rank, the first cause first.
        interrupted: Whether the user had asked the cell to stop by then.
    """

    interrupted = False

    def __init__(self, report: str, failures: Mapping[int, RankFailure] | None = None) -> None:
        Exception.__init__(self, report)  # not super's: a LaunchError may also be torch's, whose arguments are others
        self.report = report
        self.failures: dict[int, RankFailure] = dict(failures or {})
        # What Python shows below the message where no notebook renders the report: in scripts, in logs (Python 3.11).
        self.__notes__ = [_COLORS.sub("", line) for line in report.split("\n")[1:]]

    @property
    def first(self) -> RankFailure | None:
        """The failure that came first: the root cause."""
        return next(iter(self.failures.values()), None)

    @property
    def exceptions(self) -> dict[int, BaseException | None]:
        """The ranks' exception objects (None where one does not unpickle here)."""
        return {rank: failure.exception for rank, failure in self.failures.items()}

    def __str__(self) -> str:
        return self.report.split("\n", 1)[0]

    def _render_traceback_(self) -> list[str]:
        return self.report.splitlines()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report, self.failures), self.__dict__


class RankDied(RankError):
    """The process of a rank has ended; its variables are lost. The other ranks keep theirs.

    Go on with the living (`%%distributed -r 0,2-3`), or bring up a fresh set with `%distributed restart`.
    """


class RankTimeout(RankError, TimeoutError):
    """Ranks were still running when the time given was over. They were interrupted and keep their variables."""


class LaunchError(RankError):
    """A function that was launched has failed on at least one rank, and all ranks of that launch have ended.

    Where torch is loaded it is a `torch.distributed.elastic.multiprocessing.errors.ChildFailedError` too, so that
    `except` clauses written for torchrun or Accelerate go on working.

    Attributes:
        name: The function that was launched.
    """

    name = ""
