"""One notebook, every GPU: cells that run on all ranks of a distributed PyTorch job."""

# General layout
#   client/       inside the notebook kernel: sessions, magics, what is shown
#   controller/   one process per session: routes, knows who lives, keeps the output log
#   agent/        one process per node: the warm template, the ranks' processes and pipes
#   worker/       inside a rank: shell, control thread, process group
#   launch/       a function on ranks of its own, behind launcher.py: notebook_launcher, debug_launcher
#   panel/        what ranks cost, live in the notebook; its page side is in labextension/
#   plan.py       how models are made distributed; planning/: its rules, words and variables
#   train/        what training code on a rank calls; works under torchrun, too
#   metrics/      what cells, steps and machines cost; works in any process
#   wire/         every message between these processes; transfer/: how values travel
#   shells.py     what IPython shells keep alive, in the notebook and on ranks
#   errors.py     the error tree; cuda_guard.py: who initialized CUDA in the notebook
# The roles share only the modules at the top. Importing nbdist loads neither torch nor ipywidgets.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbdist.errors import (
    CheckpointError,
    InteractionError,
    LaunchError,
    NbdistError,
    NodesMissing,
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
    from nbdist import cuda_guard as cuda_guard
    from nbdist import metrics as metrics
    from nbdist.client.costs.history import history
    from nbdist.client.magics.distributed import load_ipython_extension as load_ipython_extension
    from nbdist.client.session.session import Session, get_session
    from nbdist.launcher import debug_launcher, notebook_launcher
    from nbdist.panel import Panel
    from nbdist.plan import Plan
    from nbdist.shells import experiment
    from nbdist.train.checkpoint.checkpoint import latest_state, load_state, register_for_checkpointing, save_state
    from nbdist.train.checkpoint.model_files import load_model, save_model
    from nbdist.train.collective.collectives import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_for_metrics,
        gather_object,
        pad_across_processes,
        reduce,
    )
    from nbdist.train.collective.place import device as device
    from nbdist.train.collective.place import local_process_index as local_process_index
    from nbdist.train.collective.place import num_processes as num_processes
    from nbdist.train.collective.place import process_index as process_index
    from nbdist.train.collective.place import split_batches as split_batches
    from nbdist.train.collective.turns import (
        check_trigger,
        is_last_process,
        is_local_main_process,
        is_main_process,
        local_main_process_first,
        main_process_first,
        on_local_main_process,
        on_main_process,
        on_process,
        save,
        set_trigger,
        split_between_processes,
        wait_for_everyone,
    )
    from nbdist.train.collective.turns import print as print
    from nbdist.train.compare.replicas import check, sync
    from nbdist.train.data.loaders import prepare_loader, skip_first_batches
    from nbdist.train.estimate.estimate import estimate
    from nbdist.train.loop.averages import averaged
    from nbdist.train.loop.batch_size import find_executable_batch_size, free_memory
    from nbdist.train.loop.gradients import clip_grad_norm_, clip_grad_value_, unscale_gradients
    from nbdist.train.loop.local_sgd import LocalSGD
    from nbdist.train.loop.loop import (
        accumulate,
        backward,
        join_uneven_inputs,
        no_sync,
        optimizer_step_was_skipped,
        sync_gradients,
        unwrap,
    )
    from nbdist.train.loop.precision import autocast
    from nbdist.train.prepare.environment import set_seed
    from nbdist.train.prepare.prepare import prepare
    from nbdist.train.tracking.rank_logger import get_logger
    from nbdist.train.tracking.trackers import end_training, get_tracker, init_trackers, log

__version__ = "0.1.0"
__all__ = [  # not `print`: a star import would take Python's away; nor what is looked up when it is read, as `device`
    "CheckpointError",
    "InteractionError",
    "LaunchError",
    "LocalSGD",
    "NbdistError",
    "NodesMissing",
    "Panel",
    "Plan",
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
    "accumulate",
    "autocast",
    "averaged",
    "backward",
    "broadcast",
    "broadcast_object_list",
    "check",
    "check_trigger",
    "clip_grad_norm_",
    "clip_grad_value_",
    "debug_launcher",
    "end_training",
    "estimate",
    "experiment",
    "find_executable_batch_size",
    "free_memory",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "get_logger",
    "get_session",
    "get_tracker",
    "history",
    "init_trackers",
    "is_last_process",
    "is_local_main_process",
    "is_main_process",
    "join_uneven_inputs",
    "latest_state",
    "load_model",
    "load_state",
    "local_main_process_first",
    "log",
    "main_process_first",
    "no_sync",
    "notebook_launcher",
    "on_local_main_process",
    "on_main_process",
    "on_process",
    "optimizer_step_was_skipped",
    "pad_across_processes",
    "prepare",
    "prepare_loader",
    "reduce",
    "register_for_checkpointing",
    "save",
    "save_model",
    "save_state",
    "set_seed",
    "set_trigger",
    "skip_first_batches",
    "split_between_processes",
    "sync",
    "sync_gradients",
    "unscale_gradients",
    "unwrap",
    "wait_for_everyone",
]

_MODULES = {
    "nbdist.client.costs.history": ("history",),
    "nbdist.client.magics.distributed": ("load_ipython_extension",),
    "nbdist.client.session.session": (
        "Session",
        "get_session",
    ),
    "nbdist.launcher": (
        "debug_launcher",
        "notebook_launcher",
    ),
    "nbdist.panel": ("Panel",),
    "nbdist.plan": ("Plan",),
    "nbdist.shells": ("experiment",),
    "nbdist.train.loop.averages": ("averaged",),
    "nbdist.train.checkpoint.checkpoint": (
        "latest_state",
        "load_state",
        "register_for_checkpointing",
        "save_state",
    ),
    "nbdist.train.collective.collectives": (
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_for_metrics",
        "gather_object",
        "pad_across_processes",
        "reduce",
    ),
    "nbdist.train.data.loaders": (
        "prepare_loader",
        "skip_first_batches",
    ),
    "nbdist.train.prepare.environment": ("set_seed",),
    "nbdist.train.estimate.estimate": ("estimate",),
    "nbdist.train.loop.gradients": (
        "clip_grad_norm_",
        "clip_grad_value_",
        "unscale_gradients",
    ),
    "nbdist.train.loop.local_sgd": ("LocalSGD",),
    "nbdist.train.loop.loop": (
        "accumulate",
        "backward",
        "join_uneven_inputs",
        "no_sync",
        "optimizer_step_was_skipped",
        "sync_gradients",
        "unwrap",
    ),
    "nbdist.train.loop.batch_size": (
        "find_executable_batch_size",
        "free_memory",
    ),
    "nbdist.train.checkpoint.model_files": (
        "load_model",
        "save_model",
    ),
    "nbdist.train.collective.place": (
        "device",
        "local_process_index",
        "num_processes",
        "process_index",
        "split_batches",
    ),
    "nbdist.train.loop.precision": ("autocast",),
    "nbdist.train.prepare.prepare": ("prepare",),
    "nbdist.train.tracking.rank_logger": ("get_logger",),
    "nbdist.train.compare.replicas": (
        "check",
        "sync",
    ),
    "nbdist.train.tracking.trackers": (
        "end_training",
        "get_tracker",
        "init_trackers",
        "log",
    ),
    "nbdist.train.collective.turns": (
        "check_trigger",
        "is_last_process",
        "is_local_main_process",
        "is_main_process",
        "local_main_process_first",
        "main_process_first",
        "on_local_main_process",
        "on_main_process",
        "on_process",
        "print",
        "save",
        "set_trigger",
        "split_between_processes",
        "wait_for_everyone",
    ),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}
_MODULES_FOR_USERS = ("cuda_guard", "metrics")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES_FOR_USERS})


def __getattr__(name: str) -> Any:
    if name in _MODULES_FOR_USERS:
        return importlib.import_module(f"nbdist.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
