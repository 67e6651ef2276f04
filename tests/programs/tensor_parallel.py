"""Tensor parallelism on a mesh that makes the process group itself; all at the top level of the file."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = nn.ModuleDict({"into": nn.Linear(10, 32), "out": nn.Linear(32, 5)})
whole = [parameter.clone() for parameter in model.parameters()]
model = parallelize_module(model, mesh, {"into": ColwiseParallel(), "out": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
for step in range(3):
    torch.manual_seed(step)
    output = model["out"](torch.relu(model["into"](torch.rand(20, 10))))
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained, output {output.sum().item():.4f}")
if dist.is_initialized():
    dist.destroy_process_group()
