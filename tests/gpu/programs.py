"""What ranks run in checks on GPUs: small models and trainings, as cells import them. All are the same on the CPU."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import nbdist
from nbdist.plan import Plan
from nbdist.planning.settings import Precision, Strategy
from nbdist.train import state

Recomputation = Literal["none", "full", "selective", "selective-half"]

WIDTH = 256
MIB = 1 << 20


def here() -> torch.device:
    """This rank's device."""
    return state.default_device()


def net(width: int = WIDTH, depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)])


def prepared(plan: Plan, width: int = WIDTH, depth: int = 4, fused: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = net(width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused or None)
    return nbdist.prepare(model, optimizer, plan=plan)


def step(model: nn.Module, optimizer: Any, factor: float = 1.0, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + state.rank())
    x = torch.randn(32, width, generator=generator).to(here())
    with nbdist.accumulate(model), nbdist.autocast():
        loss = (model(x) - x).square().mean()
        nbdist.backward(loss * factor)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach().float()


def trains(steps: int = 4, **settings: Any) -> tuple[bool, bool]:
    """Whether the loss falls, and whether the ranks agree afterwards."""
    model, optimizer = prepared(Plan(**settings))
    losses = [step(model, optimizer).item() for _ in range(steps)]
    found = losses[-1] < losses[0], bool(nbdist.check(model))
    nbdist.free_memory()
    return found


def collectives(kind: str) -> list[Any]:
    """What gather, broadcast, reduce and padding give for a dtype."""
    tensor = torch.ones(3, device=here()).to(getattr(torch, kind))
    padded = nbdist.pad_across_processes(torch.ones(2 + state.rank(), device=here()))
    return [
        list(nbdist.gather(tensor).shape),
        list(nbdist.gather(torch.ones((), device=here())).shape),
        nbdist.broadcast(tensor.clone()).device.type,
        list(padded.shape),
        nbdist.reduce(torch.ones(2, device=here())).tolist(),
    ]


def all_reduce() -> float:
    """The sum of a one from each rank."""
    one = torch.ones(1, device=here())
    dist.all_reduce(one)
    return one.item()


def skips_infinite_steps(strategy: Strategy, fused: bool, clip: float | None = None) -> tuple[int, bool, bool]:
    """An infinite loss on rank 1 alone in step 3: steps skipped for it on this rank, whether values stayed, agreement.

    Steps that fp16 skips at first until its scale is found are not counted.
    """
    model, optimizer = prepared(Plan(strategy=strategy, precision="fp16", clip_grad_norm=clip), fused=fused)
    for _ in range(12):
        step(model, optimizer)
    before, skipped = whole_values(model), state.current().skipped_steps
    step(model, optimizer, math.inf if state.rank() == 1 else 1.0)
    stayed = torch.equal(before, whole_values(model))
    found = state.current().skipped_steps - skipped
    losses = [step(model, optimizer).item() for _ in range(8)]
    fell = losses[-1] < losses[0]
    nbdist.free_memory()
    return found, stayed, fell


def whole_values(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole(each).flatten() for each in model.parameters()])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def reserved_by_epoch(epochs: int = 8) -> tuple[list[int], bool]:
    """MiB that torch holds after each epoch of a prepared loader, and whether batches came whole and on the device."""
    data: Any = torch.randn(64, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    loader = nbdist.prepare(DataLoader(data, batch_size=16, num_workers=2))
    mine, right = [], True
    for _ in range(epochs):
        total = 0.0
        for batch in loader:
            right = right and batch.device.type == here().type
            total += batch.double().sum().item()
        everything = nbdist.reduce(torch.tensor([total], device=here(), dtype=torch.float64)).item()
        right = right and math.isclose(everything, data.double().sum().item(), rel_tol=1e-6, abs_tol=1e-3)
        mine.append(torch.cuda.memory_reserved() // MIB if here().type == "cuda" else 0)
    return mine, right


def allocated_by_cell(repeats: int, **settings: Any) -> list[int]:
    """MiB in tensors after each time that a cell makes, prepares and steps the same model again."""
    found = []
    for _ in range(repeats):
        model, optimizer = prepared(Plan(**settings), 2048, 8)
        step(model, optimizer, width=2048)
        found.append(torch.cuda.memory_allocated() // MIB if here().type == "cuda" else 0)
    return found


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3)))


def batchnorm_distance(strategy: Strategy, synchronized: bool) -> float:
    """How far two ranks with SyncBatchNorm are from one process on the joined batch, after some steps."""
    torch.manual_seed(1)
    alone = Images().to(here(), torch.float64)
    model = copy.deepcopy(alone)
    data = torch.randn(5, 16, 3, 12, 12, dtype=torch.float64).to(here())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = nbdist.prepare(model, optimizer, plan=Plan(strategy=strategy, sync_batchnorm=synchronized))
    lonely = torch.optim.SGD(alone.parameters(), 0.1)
    share = slice(state.rank() * 8, state.rank() * 8 + 8)
    for x in data:
        nbdist.backward(model(x[share]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        alone(x).square().mean().backward()
        lonely.step()
        lonely.zero_grad()
    ours = dict(nbdist.unwrap(model).named_parameters()) | dict(nbdist.unwrap(model).named_buffers())
    theirs = dict(alone.named_parameters()) | dict(alone.named_buffers())
    worst = max(float((whole(ours[name]) - theirs[name]).abs().max()) for name in theirs)
    nbdist.free_memory()
    return worst


def offloaded(folder: str, precision: Precision) -> tuple[bool, bool, bool]:
    """Train offloaded, save, load: whether parameters are in CPU memory, the loss falls, and what was saved returns."""
    model, optimizer = prepared(Plan(strategy="fsdp", precision=precision, offload=True, clip_grad_norm=1.0))
    losses = [step(model, optimizer).item() for _ in range(5)]
    on_cpu = all(each.device.type == "cpu" for each in model.parameters())
    path = Path(folder) / "state"
    nbdist.save_state(path)
    before = [local(each).clone() for each in model.parameters()]
    step(model, optimizer)
    nbdist.load_state(path)
    after = [local(each) for each in model.parameters()]
    same = all(map(torch.equal, before, after))
    nbdist.free_memory()
    return on_cpu, losses[-1] < losses[0], same


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    assert isinstance(parameter, DTensor)
    shard: torch.Tensor = parameter.to_local()
    return shard.detach()


class Tied(nn.Module):
    """Tokens in, logits out; the head is the embedding."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.emb = nn.Embedding(512, width)
        self.blocks = net(width)
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.emb(tokens)))


def fp8(strategy: Strategy, tied: bool) -> tuple[bool, bool]:
    """Whether the loss falls in fp8, and whether head and embedding are still one weight."""
    torch.manual_seed(0)
    model: nn.Module = Tied() if tied else net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = nbdist.prepare(model, optimizer, plan=Plan(strategy=strategy, precision="fp8"))
    x = torch.randint(512, (16, 32), device=here()) if tied else torch.randn(32, WIDTH, device=here())
    losses = []
    for _ in range(5):
        loss = model(x).float().square().mean()
        nbdist.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    inner: Any = nbdist.unwrap(model)
    same = not tied or inner.head.weight is inner.emb.weight
    nbdist.free_memory()
    return losses[-1] < losses[0], same


def compiled(strategy: Strategy) -> tuple[bool, int, float, float]:
    """Whether the loss falls, graphs broken, and seconds of the first and the tenth step."""
    from torch._dynamo.utils import counters

    counters.clear()
    model, optimizer = prepared(Plan(strategy=strategy, compile=True))
    losses, seconds = [], []
    for _ in range(10):
        began = time.perf_counter()
        losses.append(step(model, optimizer).item())
        seconds.append(time.perf_counter() - began)
    broken = sum(counters["graph_break"].values())
    nbdist.free_memory()
    return losses[-1] < losses[0], broken, seconds[0], seconds[-1]


def checkpointed(kind: Recomputation, offload: bool = False) -> tuple[float, int]:
    """The norm of all gradients of one step of a transformer, and its peak in MiB."""
    from tests.support.train_estimate import Gpt

    torch.manual_seed(0)
    plan = Plan(strategy="ddp", activation_checkpointing=kind, activation_offload=offload)
    model = nbdist.prepare(Gpt(384, 6), plan=plan)
    tokens = torch.randint(4096, (32, 128), generator=torch.Generator().manual_seed(1)).to(here())
    if here().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss = next(iter(model(tokens).values()))
    nbdist.backward(loss.float().square().mean())
    norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]).item()
    peak = torch.cuda.max_memory_allocated() // MIB if here().type == "cuda" else 0
    nbdist.free_memory()
    return norm, peak


def deterministic_after_a_product() -> float:
    """A deterministic plan, after cuBLAS has begun without one."""
    x = torch.ones(64, 64, device=here())
    (x @ x).sum().item()
    model, optimizer = prepared(Plan(strategy="none", deterministic=True))
    step(model, optimizer)
    found = (x @ x).sum().item()
    torch.use_deterministic_algorithms(False)
    nbdist.free_memory()
    return found


def tf32_after_the_new_setting() -> str:
    """A plan with TF32, after the session has used torch's new way to ask for it."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    model, optimizer = prepared(Plan(strategy="none", tf32=True))
    step(model, optimizer)
    found = str(torch.backends.cuda.matmul.fp32_precision)
    nbdist.free_memory()
    return found


def cores_before_during_and_after_numa() -> list[list[int]]:
    """The number of cores of each thread (fewest, most): before plans with `numa`, with them, and after."""
    return [_cores(), *(_cores_with(Plan(strategy="none", numa=numa)) for numa in (True, "exclusive", False))]


def _cores_with(plan: Plan) -> list[int]:
    step(*prepared(plan))
    found = _cores()
    nbdist.free_memory()
    return found


def _cores() -> list[int]:
    counts = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            counts.append(len(os.sched_getaffinity(int(thread))))
    return [min(counts), max(counts)]


def saved_twice(folder: str, width: int) -> tuple[float, float, float]:
    """Seconds that a save, two asynchronous saves and the step after them take."""
    model, optimizer = prepared(Plan(strategy="fsdp"), width, 8)
    step(model, optimizer, width=width)
    waiting = seconds_of(lambda: nbdist.save_state(Path(folder) / "waited"))
    behind = seconds_of(
        lambda: [nbdist.save_state(Path(folder) / f"{number}", asynchronous=True) for number in range(2)]
    )
    after = seconds_of(lambda: step(model, optimizer, width=width).item())
    nbdist.save_state(Path(folder) / "last")  # waits for those before
    nbdist.free_memory()
    return waiting, behind / 2, after


def peak_of_a_step(plan: Plan, width: int, depth: int) -> dict[str, int]:
    """Bytes in tensors at most in a second step, and what NVML counts beyond what torch holds; 0: n/a."""
    model, optimizer = prepared(plan, width, depth)
    step(model, optimizer, width=width)
    if here().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step(model, optimizer, width=width)
    found = {"peak": 0, "outside": 0}
    if here().type == "cuda":
        found = {"peak": torch.cuda.max_memory_allocated(), "outside": _outside_torch()}
    nbdist.free_memory()
    return found


def _outside_torch() -> int:
    """This process's share by NVML without what torch has reserved; 0 where NVML does not name processes."""
    from nbdist.metrics.node import device
    from nbdist.metrics.node.nvml import Nvml
    from nbdist.metrics.node.sample import gpu_among

    gpu = gpu_among(device.uuid(torch.cuda, here().index or 0), Nvml().read())
    share = gpu.by_pid.get(os.getpid()) if gpu is not None else None
    return share - torch.cuda.memory_reserved() if share else 0


def seconds_of(work: Any) -> float:
    if here().type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if here().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
