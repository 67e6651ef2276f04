"""The server by which VS Code debugs this rank. debugpy, which comes with ipykernel, is imported only here."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from nbdist.errors import UsageError


@functools.cache
def listen() -> int:
    """Listen on loopback, from now on until the rank ends.

    Returns:
        The port, the same each time.

    Raises:
        UsageError: debugpy is not installed.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about Python's own frozen modules
    try:
        debugpy: Any = importlib.import_module("debugpy")
    except ImportError:
        raise UsageError("--debugpy needs debugpy on the ranks: `%pip install debugpy`, then run this again") from None
    debugpy.configure(subProcess=False)  # a worker of a DataLoader would wait for a client of its own
    _, port = debugpy.listen(("127.0.0.1", 0))
    return int(port)
