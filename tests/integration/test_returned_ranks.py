"""Ranks of a launch that wait for one that has returned: an error that names both, long before torch's time-out."""

from __future__ import annotations

from testbed.kernel import Kernel

TRAIN = """
from nbdist import notebook_launcher

def train():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        return
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        print("cleaned up")

def train_alone():
    import os
    import torch.distributed as dist
    if os.environ["RANK"] != "1":
        dist.init_process_group("gloo")
"""


def test_a_collective_without_a_rank_that_has_returned_is_an_error(notebook: Kernel) -> None:
    outcome = notebook.fails(f"{TRAIN}\nnotebook_launcher(train, (), 3)", "LaunchError")
    first, *_, others, last = outcome.traceback.splitlines()
    assert "raised StaleGroupError: waits in all_reduce, cell " in first
    assert " line 10, for rank 1, which has returned: make the same calls on all ranks" in first
    assert others in ("rank 0: same", "rank 2: same") and last == "rank 1: finished"
    assert "dist.all_reduce(torch.ones(1))" in outcome.traceback
    assert "cleaned up" in outcome.stdout


def test_so_is_the_making_of_a_process_group_also_on_forked_ranks(notebook: Kernel) -> None:
    outcome = notebook.fails(f"{TRAIN}\nnotebook_launcher(train_alone, (), 2, start_method='fork')", "LaunchError")
    assert outcome.evalue.startswith("rank 0 raised StaleGroupError: waits in init_process_group, cell ")
    assert "for rank 1, which has returned" in outcome.evalue
