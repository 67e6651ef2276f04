"""One notebook, every GPU: cells that run on all ranks of a distributed PyTorch job."""

# General layout
#   client/       inside the notebook kernel: sessions, magics, what is shown
#   controller/   one process per session: routes, knows who lives, keeps the output log
#   agent/        one process per node: the warm template, the ranks' processes and pipes
#   worker/       inside a rank: shell, control thread, process group
#   train/        what training code on a rank calls; works under torchrun, too
#   protocol.py   the only module that knows the wire; transfer.py: how values travel
#   errors.py     the error tree; cuda_guard.py: who initialised CUDA in the notebook
# The roles share only the modules at the top. Importing nbdist loads neither torch nor ipywidgets.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbdist.errors import (
    InteractionError,
    NbdistError,
    RankDied,
    RankError,
    RankFailure,
    RankTimeout,
    SessionBroken,
    SessionBusy,
    SessionClosed,
    SessionError,
    StaleGroupError,
    TransferError,
    UsageError,
)

if TYPE_CHECKING:
    from nbdist.client.magics import load_ipython_extension as load_ipython_extension
    from nbdist.client.session import Session, get_session
    from nbdist.train.replicas import check, sync

__version__ = "0.1.0"
__all__ = [
    "InteractionError",
    "NbdistError",
    "RankDied",
    "RankError",
    "RankFailure",
    "RankTimeout",
    "Session",
    "SessionBroken",
    "SessionBusy",
    "SessionClosed",
    "SessionError",
    "StaleGroupError",
    "TransferError",
    "UsageError",
    "check",
    "get_session",
    "sync",
]

_LAZY = {
    "Session": "nbdist.client.session",
    "check": "nbdist.train.replicas",
    "get_session": "nbdist.client.session",
    "load_ipython_extension": "nbdist.client.magics",
    "sync": "nbdist.train.replicas",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
