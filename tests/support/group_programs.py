"""What tests of process groups define on ranks."""

WAIT_AND_TOTAL = """
import os, time, torch, torch.distributed as dist

def wait_for(path):
    while not os.path.exists(path): time.sleep(0.01)

def total(group=None):
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return int(x)
"""
