"""What a new rank takes over from the notebook before it runs anything: environment, limits, paths."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.util
import os
import resource
import sys
import time

from nbdist.metrics.compute import graphs
from nbdist.metrics.events import waits
from nbdist.wire.messages.rank_processes import RankSetup
from nbdist.worker.groups import accelerate_state, join
from nbdist.worker.processes import forks

_LONGEST_FOLDER = 85  # characters; the path of a socket in it may have 107


def take_on(setup: RankSetup) -> None:
    """Take over the notebook's environment, as it was at `start`."""
    options = setup.options
    os.environ.clear()
    os.environ.update(options.environment)
    os.environ.update(join.environment(setup))
    os.umask(options.umask)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.open_files, hard))
    os.chdir(options.cwd)
    sys.path[:] = options.sys_path
    sys.argv[:] = options.argv
    importlib.invalidate_caches()
    time.tzset()
    # Python 3.14 has another default; workers of a DataLoader must find the classes of cells.
    multiprocessing.set_start_method("fork", force=True)
    forks.mend()
    _keep_sockets_in(setup.folder)
    join.prepare_torch(setup)
    graphs.watch()  # of what is made before its steps are measured, less would be known
    waits.watch()
    accelerate_state.install()


def _keep_sockets_in(folder: str) -> None:
    """Have multiprocessing put its sockets, which DataLoader workers share tensors by, where the agent removes them.

    Each worker would make a folder of its own, and leave it behind when it is killed.
    """
    if not folder or len(folder) > _LONGEST_FOLDER:
        return

    def get_temp_dir() -> str:
        for path in (os.path.dirname(folder), folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        return folder

    multiprocessing.util.get_temp_dir = get_temp_dir
