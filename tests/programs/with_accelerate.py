"""Accelerate's own way: accumulation, a scheduler, metrics over all ranks, a checkpoint."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main(arguments):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    set_seed(42)
    inputs = torch.randn(50, 4)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    train = DataLoader(data, batch_size=4, shuffle=True)
    test = DataLoader(data, batch_size=8)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    for _ in range(arguments.epochs):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    model.eval()
    right = seen = 0
    for x, y in test:
        with torch.no_grad():
            found, wanted = accelerator.gather_for_metrics((model(x).argmax(1), y))
        right += (found == wanted).sum().item()
        seen += len(wanted)
    accelerator.save_state(arguments.folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(arguments.folder)
    accelerator.print(f"{right} of {seen} right on {accelerator.num_processes} processes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", required=True)
    main(parser.parse_args())
