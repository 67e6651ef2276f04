"""The handle of a cell that runs in the background: `%%distributed --background`."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence

from nbdist.base.ranks import describe_ranks
from nbdist.client.base import interruption
from nbdist.client.base.results import CellResult
from nbdist.client.ranks.task import Task
from nbdist.errors import NbdistError, RankTimeout


class BackgroundCell:
    """A cell that runs in the background: `%%distributed --background`.

    Its output appears below the cell that started it.

    Args:
        task: Its task.
        timeout: Seconds after which its ranks are interrupted.
        keeps: An object to keep alive while it runs.
    """

    def __init__(self, task: Task, timeout: float | None, keeps: object) -> None:
        self._task = task
        self._ended = threading.Event()  # a join that Ctrl-C interrupts takes the thread for ended (Python 3.11)
        context = contextvars.copy_context()
        arguments = (_await, task, timeout, keeps, self._ended)
        name = f"nbdist-cell-{task.number}"
        threading.Thread(target=context.run, args=arguments, name=name, daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether every rank has ended its part."""
        return self._ended.is_set()

    @property
    def output(self) -> CellResult:
        """What the ranks have printed and shown so far, by rank."""
        return self._task.result

    def wait(self, timeout: float | None = None) -> CellResult:
        """Wait for the end.

        Args:
            timeout: Maximum seconds to wait; the cell keeps running after that.

        Returns:
            The results by rank.

        Raises:
            RankError: A rank failed.
            RankTimeout: It is not done after `timeout` seconds.
        """
        if not interruption.wait_for(self._ended, timeout):
            raise RankTimeout(f"{self._task.describe()} is still running after {timeout:g} s. `.interrupt()` stops it.")
        if self._task.error is not None:
            raise self._task.error
        return self._task.result

    def interrupt(self, *, now: bool = False) -> None:
        """Stop its ranks, after the current step if they train. A second call, or `now`, stops them at once."""
        self._task.interrupt(now=now)

    def __repr__(self) -> str:
        state = "done" if self.done else "running"
        if self.done and self._task.error is not None:
            state = f"failed: {self._task.error}"
        where = describe_ranks(self._task.ranks)
        return f"<cell {self._task.number} in the background on {where}: {state}>"


def wait_all(cells: Sequence[BackgroundCell]) -> None:
    """Wait for cells in the foreground: Ctrl-C stops their ranks, and again at once.

    Raises:
        RankError: A rank failed.
        KeyboardInterrupt: The user interrupted, and the ranks stopped.
    """
    for cell in cells:
        with interruption.events(lambda event, cell=cell: cell.interrupt()):  # type: ignore[misc]
            cell.wait()


def _await(task: Task, timeout: float | None, keeps: object, ended: threading.Event) -> None:
    """Wait for the cell, in its background thread."""
    try:
        task.wait(timeout)
    except (NbdistError, KeyboardInterrupt) as error:
        task.error = error
        task.say(rendered(error))
    finally:
        ended.set()


def rendered(error: BaseException) -> str:
    """Return an error as the notebook shows it where it fails a cell."""
    render = getattr(error, "_render_traceback_", None)
    return "\n".join(render() if render is not None else [str(error)])
