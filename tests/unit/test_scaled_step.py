"""What a step in fp16 asks of the device: each question waits for all that has been queued."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch, nbdist
from torch.utils._python_dispatch import TorchDispatchMode
from nbdist.train import state

class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))

def step(factor):
    nbdist.backward(model(torch.ones(2, 4)).sum() * 1e-3 * factor)
    with Reads() as reads:
        optimizer.step()
    optimizer.zero_grad()
    return reads.count

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=json.loads(sys.argv[1]))
model, optimizer = nbdist.prepare(model, optimizer, plan=nbdist.Plan(strategy="none", precision="fp16"))
print(json.dumps([step(1.0), step(float("inf")), step(1.0), state.current().skipped_steps, state.current().steps]))
"""


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_waits_for_the_device_once(fused: bool) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(fused)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, 1, 1, 1, 2]
