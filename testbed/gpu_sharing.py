"""A process group with NCCL for ranks that share a GPU. Imports no torch."""

from __future__ import annotations

from nbdist import Session

# NCCL refuses a GPU twice on a host. From 2.30 on a variable allows it; before, each rank has a host of its own.
_GROUP = """
import datetime, os, torch, torch.distributed as dist
if device.type == "cuda" and torch.cuda.nccl.version() < (2, 30):
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=SECONDS))
first = torch.ones(1, device=device)
dist.all_reduce(first)
assert first.item() == world_size
"""
ENVIRONMENT = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # before the ranks start


def make_group(session: Session, seconds: float = 600) -> None:
    """Make the default group of ranks that were started without one.

    Args:
        session: The ranks.
        seconds: Time-out of the group's collectives.

    Raises:
        RankError: This NCCL does not take several ranks on one GPU.
    """
    session.run(_GROUP.replace("SECONDS", str(seconds)), timeout=20)


def stuck_cell(stuck: str, away: str) -> str:
    """A cell in which rank 0 waits in an all_reduce, and what rank 1 does meanwhile."""
    imports = "import os, time, torch, torch.distributed as dist"
    inside = stuck.replace("\n", "\n    ")
    return f"{imports}\nif rank == 1:\n    {away}\nelse:\n    {inside}"


def is_stuck(session: Session) -> bool:
    """Whether rank 0 is in such a cell's all_reduce: gloo waits in the call itself, NCCL where the result is read."""
    return any(waits in session.stacks(0)[0] for waits in ("dist.all_reduce(big)", "big.sum().item()"))
