"""A process group of the test's own process alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def group_of_one(**keywords: Any) -> Iterator[None]:
    """A gloo group, which models in the body may use.

    It goes after them: DDP's reducer, as the last to hold a group, would end gloo's threads with Python's lock held,
    for which one of them may be waiting, and that whenever the garbage collector comes by in some later test.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **keywords)
    held = dist.group.WORLD
    try:
        yield
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        del held
