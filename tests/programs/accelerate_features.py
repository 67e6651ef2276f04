"""More of Accelerate: a smaller batch when memory is short, a compressed exchange, local SGD, an early stop."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    find_executable_batch_size,
    set_seed,
)
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
    )

    @find_executable_batch_size(starting_batch_size=32)
    def train(batch_size):
        accelerator.free_memory()
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory.")
        set_seed(42)
        inputs = torch.randn(128, 4)
        loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=batch_size, shuffle=True)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        epochs = 0
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
            while not accelerator.check_trigger():
                epochs += 1
                for x, y in loader:
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
                if accelerator.is_last_process and epochs == 3:
                    accelerator.set_trigger()
        weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
        return f"batches of {batch_size}, {epochs} epochs, weights {weights:.6f}"

    accelerator.print(train())


if __name__ == "__main__":
    main()
