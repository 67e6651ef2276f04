"""Measuring steps changes nothing: losses are equal to the last bit, and what a step cannot bear is not done to it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nbdist.metrics.compute.counting import bears_compiled_code
from nbdist.metrics.memory import MemoryMeter
from nbdist.metrics.steps import StepMeter
from tests.support.group_of_one import group_of_one

pytestmark = [pytest.mark.torch_private, pytest.mark.filterwarnings("ignore")]

beside_compiled = pytest.mark.skipif(
    not bears_compiled_code(), reason="modes of this torch switch compiled code off, so it is not counted"
)

STEPS, WIDTH = 6, 64


@pytest.fixture(scope="module", autouse=True)
def group() -> Any:
    with group_of_one():
        yield


class Net(nn.Module):
    """With what dispatch modes and compilers like to do in their own way: SiLU, Mish, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.mish(self.second(F.silu(self.first(x)))), 0.1)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Whatever tests before these have compiled in this process is gone."""
    torch._dynamo.reset()
    gc.collect()


def plain() -> nn.Module:
    return nn.Sequential(Net(), Net())


def compiled(backend: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch._dynamo.reset()
        model = plain()
        model.compile(backend=backend)
        return model

    return make


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Ragged(nn.Module):
    """Attention over a nested tensor, below more layers than are looked at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tail = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(24)])

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[:3], x[3:8]], layout=torch.jagged)
        query = self.first(rows).unflatten(-1, (4, 16)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(-2)
        out: Tensor = self.tail(mixed.to_padded_tensor(0.0))
        return out


class Flexible(nn.Module):
    """FlexAttention below the layers that train: on CPUs it has no backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        heads = x.view(1, 16, 4, WIDTH // 4).transpose(1, 2)
        attended: Any = flex_attention(heads, heads, heads)
        out: Tensor = self.net(attended.transpose(1, 2).reshape(16, WIDTH))
        return out


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    layers: Any = {f"{at}.{name}": kind() for at in (0, 1) for name, kind in LAYERS.items()}
    model: nn.Module = parallelize_module(plain(), mesh, layers)
    return model


LAYERS: dict[str, Any] = {"first": ColwiseParallel, "second": RowwiseParallel}


def needed(meter: MemoryMeter) -> int:
    """The bytes that a piece of code has taken at its peak."""
    assert meter.usage is not None and meter.usage.cpu is not None and meter.usage.cpu.needed is not None
    return meter.usage.cpu.needed


def losses(make: Callable[[], Any], meter: StepMeter | None) -> list[float]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    inputs, found = torch.randn(16, WIDTH), []
    if meter is not None:
        meter.start()
    for _ in range(STEPS):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


WAYS: dict[str, Callable[[], Any]] = {
    "eager": plain,
    "checkpointed": lambda: nn.Sequential(Checkpointed(), Checkpointed()),
    "DDP": lambda: DistributedDataParallel(plain()),
    "FSDP2": lambda: fully_shard(plain()),
    "tensor parallel": tensor_parallel,
    "FlexAttention": Flexible,
    "nested": Ragged,
    "aot_eager": compiled("aot_eager"),
    "inductor": compiled("inductor"),
    "DDP, aot_eager": lambda: DistributedDataParallel(compiled("aot_eager")()),
}


COMPILED = ("aot_eager", "inductor", "DDP, aot_eager")


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_equal_to_the_last_bit_with_and_without(way: str) -> None:
    bare = losses(WAYS[way], None)
    with StepMeter() as meter:
        assert losses(WAYS[way], meter) == bare
        found = meter.sample()
    assert found.steps == STEPS
    if way not in ("nested", "FlexAttention") and (bears_compiled_code() or way not in COMPILED):
        products = 4 * 2 * 16 * WIDTH * WIDTH
        assert (found.flops, found.not_counted) == (3 * products - products // 4, [])  # none for the inputs


@beside_compiled
def test_flex_attention_is_counted_by_the_blocks_of_its_mask_without_its_scores_in_memory() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    attention, length, window = torch.compile(flex_attention), 2048, 128
    mask = create_block_mask(
        lambda batch, head, at, other: (at >= other) & (at - other < window), None, None, length, length, device="cpu"
    )
    linear = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(linear.parameters(), 0.01)

    def step() -> None:
        query = torch.randn(1, 4, length, 16)
        with torch.no_grad():  # there is no backward pass of it on CPUs
            inputs = attention(query, query, query, block_mask=mask)
        linear(inputs.transpose(1, 2).flatten(2)).sum().backward()
        optimizer.step()

    with StepMeter():  # from here on graphs are known
        step()
    with MemoryMeter() as without:
        step()
    with StepMeter() as meter:
        with MemoryMeter() as memory:
            for _ in range(STEPS):
                step()
        found = meter.sample()
    blocks = 2 * length // 128 - 1
    assert found.flops == 2 * 2 * 128 * 128 * blocks * WIDTH + 2 * 2 * length * WIDTH * WIDTH
    assert needed(memory) < needed(without) + 32 * 1024**2  # the scores take 64 MiB


@beside_compiled
def test_code_that_was_compiled_before_makes_least_figures() -> None:
    """In a process of its own, for graphs are known from the first meter on."""
    done = subprocess.run([sys.executable, "-c", COMPILED_BEFORE], check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["['kernels of code that was compiled before it was measured']", "[]"]


COMPILED_BEFORE = """
import torch
from nbdist.metrics.steps import StepMeter
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def train():
    call = torch.compile(model, backend="aot_eager")
    for _ in range(4):
        call(torch.randn(2, 4)).sum().backward()
        optimizer.step()
train()
with StepMeter() as meter:
    train()
    print(meter.lap().not_counted)
    torch._dynamo.reset()
    train()
    train()
    print(meter.lap().not_counted)
"""


@torch.library.custom_op("nbdist_tests::shy", mutates_args=())
def shy(x: Tensor) -> Tensor:
    """An operation that a dispatch mode breaks."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            raise RuntimeError("not below a mode")
        frame = frame.f_back
    return x.clone()


def test_an_operation_that_a_count_breaks_costs_one_step_and_then_nothing() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    raised = []
    with StepMeter():
        for _ in range(12):
            try:
                shy(model(torch.randn(2, 4)).detach())
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                raised.append(False)
            except RuntimeError:
                raised.append(True)
    assert raised.count(True) == 1


def test_twice_is_enough_and_the_reason_is_said() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    raised = 0
    with StepMeter() as meter:
        for _ in range(4):
            for _ in range(6):
                try:
                    shy(model(torch.randn(2, 4)).detach())
                    model(torch.randn(2, 4)).sum().backward()
                    optimizer.step()
                except RuntimeError:
                    raised += 1
            found = meter.lap()
    assert raised == 2 and found.flops is None
    assert "raised twice" in found.why and "not below a mode" in found.why
