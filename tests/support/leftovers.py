"""The search for what a test has left behind: processes and files of its sessions."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

MARK = "NBDIST_TEST_RUN"


def processes_of_this_run() -> dict[int, str]:
    """All processes that carry this test run's mark but the run itself, with their command lines."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for folder in os.listdir("/proc"):  # after every test: psutil would read four files of every process
        if not folder.isdigit() or int(folder) == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            if mark not in Path(f"/proc/{folder}/environ").read_bytes().split(b"\0"):
                continue
            process = psutil.Process(int(folder))
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())[:200]
    return found


files_of_spares: dict[int, set[str]] = {}  # of each kernel that waits for its next test: tests/support/spare.py


def files_of_sessions() -> set[str]:
    """Key files and log folders of sessions that tests have."""
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    temporary = Path(os.environ["TMPDIR"])
    found = {str(path) for folder in (runtime, temporary) for path in folder.glob("nbdist-*")}
    return found.difference(*files_of_spares.values())
