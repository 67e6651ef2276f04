"""Whether a kernel that tests have used is as it was before them. Imported and called inside the kernel.

Tests whose sessions end as they should hand their kernel on, with its warm template: a new one imports torch, which
takes longer than most tests. What a test has changed in it, and has not put back, may reach none that follows.
"""

from __future__ import annotations

import builtins
import logging
import os
import signal
import sys
import threading
import warnings
from typing import Any

from IPython.core.getipython import get_ipython
from zmq.utils.garbage import GarbageCollectorThread

from nbdist.client.costs import history
from nbdist.client.ranks import observers
from nbdist.client.reports import death_report
from nbdist.client.start import session_plan

_PATIENCE = 5.0  # seconds; the client waits for longer

_before: dict[str, Any] = {}


def remember() -> None:
    """Note how the kernel is. A session is running, for the first time."""
    _forget()
    _before.update(_facts())


def await_reports() -> None:
    """Until the reports of ranks' deaths are written: they ask the session for what it knows."""
    death_report.finish(_PATIENCE)


def changes() -> list[str]:
    """Forget what the user has: names, outputs, plan, what history has recorded. Then: what is not as it was, by name.

    The session has ended, and what works for it with it.
    """
    _forget()
    if not _before:
        return ["everything: this is another process"]  # the kernel was restarted
    now = _facts()
    known = _before["attributes of nbdist"]  # a module that was imported since then has been changed by nobody
    now["attributes of nbdist"] = {name: now["attributes of nbdist"].get(name) for name in known}
    return [name for name, fact in _before.items() if now[name] != fact]


def _forget() -> None:
    _shell().reset(new_session=True)
    history.history().clear()
    session_plan.chosen_plan = None


def _facts() -> dict[str, Any]:
    shell = _shell()
    magics = shell.magics_manager.registry["DistributedMagics"]
    costs = magics._costs
    return {
        "names": sorted(shell.user_ns),
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "path": list(sys.path),
        "packages": _packages(),
        "attributes of nbdist": _attributes(),
        "builtins": set(dir(builtins)) - {"_"},
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "hooks": [sys.excepthook, threading.excepthook, shell.showtraceback],
        "streams": [sys.stdout, sys.stderr, sys.stdin],
        "threads": sorted(
            # pyzmq starts its own with the first long message
            thread.name
            for thread in threading.enumerate()
            if not isinstance(thread, GarbageCollectorThread)
        ),
        "warnings": list(warnings.filters),
        "loggers": [list(logging.root.handlers), logging.root.level],
        "callbacks": {name: list(functions) for name, functions in shell.events.callbacks.items()},
        "transformers": [shell.input_transformers_cleanup, shell.input_transformers_post, shell.ast_transformers],
        "magics": {kind: sorted(names) for kind, names in shell.magics_manager.magics.items()},
        "comms": len(shell.kernel.comm_manager.comms),
        "switches": [magics.auto, costs.memory.mode, costs.steps.on, costs._panel],
        "observers": len(observers._observers),
    }


def _shell() -> Any:
    return get_ipython()


def _packages() -> list[str]:
    """Those that are loaded of the packages that nbdist uses only where they are."""
    return [
        name for name in ("accelerate", "ipywidgets", "matplotlib", "numpy", "pandas", "torch") if name in sys.modules
    ]


def _attributes() -> dict[str, int]:
    """What functions and classes of nbdist are, by name: a test may have replaced some."""
    found = {}
    for name, module in sys.modules.copy().items():
        if name.startswith("nbdist"):
            for attribute, value in vars(module).items():
                if callable(value):
                    found[f"{name}.{attribute}"] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found |= {
                        f"{name}.{attribute}.{each}": id(part) for each, part in vars(value).items() if callable(part)
                    }
    return found
