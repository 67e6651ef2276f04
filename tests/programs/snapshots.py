"""A trainer that saves snapshots and goes on from them, as the DDP tutorial series has it: argparse, a sampler, DDP."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer, path):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.data, self.optimizer, self.path = data, optimizer, path
        self.epochs_run = 0
        if os.path.exists(path):
            snapshot = torch.load(path)
            model.load_state_dict(snapshot["model"])
            self.epochs_run = snapshot["epochs"]
            print(f"resuming after epoch {self.epochs_run}")
        self.model = DDP(model)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.data.sampler.set_epoch(epoch)
            for source, target in self.data:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(source), target).backward()
                self.optimizer.step()
            if self.rank == 0:
                torch.save({"model": self.model.module.state_dict(), "epochs": epoch + 1}, self.path)
            print(f"epoch {epoch}, {len(self.data)} batches")


def main(epochs, batch_size, path):
    init_process_group(backend="gloo")
    dataset = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, data, optimizer, path).train(epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="distributed training with snapshots")
    parser.add_argument("epochs", type=int)
    parser.add_argument("path")
    parser.add_argument("--batch-size", default=8, type=int)
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.batch_size, arguments.path)
