"""Trains a tiny language model, under torchrun with DDP: settings as globals, overridden by `--name=value`."""

import os
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

steps = 4
accumulate = 4
backend = "gloo"
for argument in sys.argv[1:]:
    name, value = argument.removeprefix("--").split("=")
    globals()[name] = type(globals()[name])(value)

ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    init_process_group(backend=backend)
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    assert accumulate % world_size == 0
    accumulate //= world_size
else:
    rank, world_size = 0, 1

torch.manual_seed(1337)
model = nn.Sequential(nn.Embedding(17, 8), nn.Flatten(), nn.Linear(32, 17))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = DDP(model) if ddp else model


def get_batch(step, micro_step):
    generator = torch.Generator().manual_seed(1000 * step + micro_step * world_size + rank)
    x = torch.randint(17, (8, 4), generator=generator)
    return x, x.sum(1) % 17


total = 0.0
for step in range(steps):
    for micro_step in range(accumulate):
        x, y = get_batch(step, micro_step)
        last = micro_step == accumulate - 1
        with nullcontext() if last or not ddp else model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y) / accumulate
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    total += loss.item()

weight = sum(parameter.double().sum().item() for parameter in model.parameters())
print(f"done after {steps} steps, weight {weight:.6f}")
if ddp:
    destroy_process_group()
