"""FSDP2 from the meta device, with a checkpoint that the next run goes on from."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def main(folder):
    device = torch.device("cpu")
    dist.init_process_group(backend=dist.get_default_backend_for_device(device), device_id=device)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    for layer in model:
        layer[0].reset_parameters()
    if os.path.exists(os.path.join(folder, ".metadata")):
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state)
        print("loaded")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.rand(4, 16)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    dist.destroy_process_group()
    print("saved")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    main(parser.parse_args().folder)
