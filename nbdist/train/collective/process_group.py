"""The process group of a script under torchrun that makes none: made when first needed, ended with the script."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from nbdist.train.state import default_device, has_group


def ensure_group() -> None:
    """Make the process group that a launcher such as torchrun has set the variables for, if nobody has made it.

    Without it each process of a `torchrun` script would silently train alone.
    """
    needed = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    if has_group() or not dist.is_available() or not needed <= os.environ.keys():
        return
    is_helper = multiprocessing.parent_process() is not None or get_worker_info() is not None
    if os.environ["WORLD_SIZE"] == "1" or is_helper:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(default_device())
    dist.init_process_group()
    atexit.register(_end_group)


def _end_group() -> None:
    """End gloo's threads before Python ends.

    One that frees a tensor while Python ends would abort the process ("terminate called without an active exception"),
    and torchrun would report a failure of a script that has done all it should.
    """
    failed = hasattr(sys, "last_type")  # the others may never join what this rank has begun
    if failed or not has_group() or torch.cuda.is_available():
        return
    gc.collect()  # models that are still there would hold the group
    dist.destroy_process_group()
