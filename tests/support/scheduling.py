"""Which worker runs which file of tests, when a worker has ended in the middle of one.

xdist's own scheduler hands out the files that such a worker has done once more, with no test left in them: who gets one
waits for tests that never come, and the run does not end. The test that ended the worker would be run again, too.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FilesOfTests(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    """Files, of which the rest is run by others where a worker has ended."""

    def remove_node(self, node: WorkerController) -> str | None:
        left = [(file, tests) for file, tests in self.assigned_work.pop(node).items() if not all(tests.values())]
        if not left:
            return None
        tests: dict[str, bool] = left[0][1]
        ended_by = next(test for test, is_done in tests.items() if not is_done)
        tests[ended_by] = True  # it is reported as failed
        self.workqueue.update((file, tests) for file, tests in left if not all(tests.values()))
        for other in self.assigned_work:
            self._reschedule(other)
        return ended_by


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Any:
    """Return it, where files are handed out."""
    return FilesOfTests(config, log) if config.getvalue("dist") == "loadfile" else None
