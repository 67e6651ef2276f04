"""The handle of a cell that runs while the notebook goes on: `%%distributed --background`."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from nbdist.client.session.results import CellResult
from nbdist.client.session.task import Task
from nbdist.errors import RankTimeout
from nbdist.ranks import describe_ranks


class BackgroundCell:
    """A cell that runs while the notebook goes on: `%%distributed --background`.

    Its output appears below the cell that started it.
    """

    def __init__(self, task: Task, work: Callable[[], None]) -> None:
        self._task = task
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(work,), name=f"nbdist-cell-{task.number}", daemon=True
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether every rank has ended its part."""
        return not self._thread.is_alive()

    @property
    def output(self) -> CellResult:
        """What the ranks have printed and shown so far, by rank."""
        return self._task.result

    def wait(self, timeout: float | None = None) -> CellResult:
        """Wait for the end.

        Args:
            timeout: Seconds to wait at most; the cell goes on after that.

        Returns:
            The results by rank.

        Raises:
            RankError: A rank failed.
            RankTimeout: It is not done after `timeout` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise RankTimeout(
                f"{self._task.describe()} is not done after {timeout:g} s and still runs. `.interrupt()` stops it."
            )
        if self._task.error is not None:
            raise self._task.error
        return self._task.result

    def interrupt(self, *, now: bool = False) -> None:
        """Stop its ranks: after the step they are in, if they train. Asked once more, or with `now`: at once."""
        self._task.interrupt(now=now)

    def __repr__(self) -> str:
        state = "done" if self.done else "running"
        if self.done and self._task.error is not None:
            state = f"failed: {self._task.error}"
        where = describe_ranks(self._task.ranks)
        return f"<cell {self._task.number} in the background on {where}: {state}>"
