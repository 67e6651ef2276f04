"""The same small training made by `nbdist.prepare`, by one process, and by PyTorch's own parts by hand."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import nbdist
from nbdist.plan import Plan
from nbdist.planning.settings import Precision, Strategy
from nbdist.train import state

STEPS, BATCH, WIDTH = 5, 2, 6
RATE = 1e-3
CLIP = 0.05  # below all norms that occur, so that every step is clipped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """Repeated blocks, with parameters beside layers, and a weight that is tied."""

    tp_plan: ClassVar = dict.fromkeys(["blocks.*.linear", "inner", "outer"], "colwise_gather_output")

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


def make(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = Net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def micro_batches(accumulate: int) -> int:
    """For five steps, the last window one short of whole."""
    return STEPS * accumulate - (accumulate > 1)


def data(accumulate: int, dtype: torch.dtype, ranks: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    count = micro_batches(accumulate) * BATCH * ranks
    return TensorDataset(*(torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in "xy"))


def train(plan: Plan, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As a user of nbdist writes it."""
    model, optimizer, scheduler = make(dtype)
    loader = DataLoader(data(plan.accumulate, dtype, shares(plan)), BATCH)
    scheduler, model, loader, optimizer = nbdist.prepare(scheduler, model, loader, optimizer, plan=plan)
    for x, y in loader:
        with nbdist.accumulate(model):
            nbdist.backward(F.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, optimizer


def graph_breaks() -> int:
    """How often code that was to be compiled has been run as it is."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def shares(plan: Plan) -> int:
    """Ranks without a strategy train by themselves, and those that divide layers share a batch."""
    return 1 if plan.strategy == "none" else dist.get_world_size() // plan.tp


def train_alone(plan: Plan, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One process, without nbdist, each step on all that the ranks see in a window."""
    model, optimizer, scheduler = make(dtype)
    for _ in steps_alone(plan, dtype, model, optimizer, scheduler):
        pass
    return model, optimizer


def steps_alone(plan: Plan, dtype: torch.dtype, model: nn.Module, optimizer: Any, scheduler: Any) -> Iterator[None]:
    """The steps of one process, one after the other."""
    size = plan.accumulate * BATCH * shares(plan)
    for x, y in DataLoader(data(plan.accumulate, dtype, shares(plan)), size):
        F.mse_loss(model(x), y).backward()
        if plan.clip_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


def averages_apart(plan: Plan, dtype: str) -> float:
    """How far averaged weights are from those that torch's AveragedModel keeps in one process."""
    kind = getattr(torch, dtype)
    model, _ = train(plan, kind)
    alone, optimizer, scheduler = make(kind)
    reference = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(plan.ema))
    for _ in steps_alone(plan, kind, alone, optimizer, scheduler):
        reference.update_parameters(alone)
    theirs = {name: whole(tensor) for name, tensor in reference.module.named_parameters()}
    with nbdist.averaged(model):
        mine = {name: whole(tensor) for name, tensor in nbdist.unwrap(model).named_parameters()}
    return distance(mine, theirs)


def train_by_hand(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With bf16 as PyTorch's tutorials do it: autocast around DDP, a policy under FSDP."""
    model: Any = make(torch.float32)[0].to(place())
    if plan.strategy == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif plan.strategy != "none":
        mesh = mesh_of(plan)
        policy = functools.partial(MixedPrecisionPolicy, torch.bfloat16, torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy())
        fully_shard(model, mesh=mesh, mp_policy=policy(torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = list(DataLoader(data(plan.accumulate, torch.float32, shares(plan)), BATCH))[own(plan)]
    for window in windows(batches, plan.accumulate):
        for number, (x, y) in enumerate(window, 1):
            with exchange(model, number == len(window)):
                with autocast(plan):
                    result = model(x.to(place()))
                loss = F.mse_loss(result.float(), y.to(place()))
                (loss / len(window) if len(window) > 1 else loss).backward()
        if plan.clip_grad_norm:
            clip_by_hand(model, plan.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer


def place() -> torch.device:
    """Where this rank computes."""
    return state.default_device()


def autocast(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    by_policy = plan.strategy in ("fsdp", "hsdp")
    return contextlib.nullcontext() if by_policy else torch.autocast(place().type, torch.bfloat16)


def clip_by_hand(model: nn.Module, limit: float) -> None:
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def own(plan: Plan) -> slice:
    return slice(None) if plan.strategy == "none" else slice(dist.get_rank(), None, dist.get_world_size())


def windows(batches: list[Any], length: int) -> Iterator[list[Any]]:
    return (batches[start : start + length] for start in range(0, len(batches), length))


def mesh_of(plan: Plan) -> Any:
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if plan.strategy == "hsdp" else (ranks,)
    return dist.init_device_mesh(place().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


@contextlib.contextmanager
def exchange(model: Any, wanted: bool) -> Iterator[None]:
    if isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(wanted)
    yield


def plan_of(strategy: Strategy, accumulate: int, clip: bool, precision: Precision = "fp32", **more: Any) -> Plan:
    replicas = 2 if strategy == "hsdp" else None
    limit = CLIP if clip else None
    return Plan(
        strategy=strategy,
        precision=precision,
        accumulate=accumulate,
        clip_grad_norm=limit,
        replicas=replicas,
        **more,
    )


def distance_from_one_process(plan: Plan, dtype: str) -> float:
    """How far parameters and optimizer state are from those of one process: relative, the worst tensor."""
    kind = getattr(torch, dtype)
    return distance(tensors(*train(plan, kind)), tensors(*train_alone(plan, kind)))


def differing_from_recipe(plan: Plan) -> list[str]:
    """The tensors that are not bit for bit those of PyTorch's own recipe."""
    mine, theirs = tensors(*train(plan, torch.float32)), tensors(*train_by_hand(plan))
    return [name for name in {**mine, **theirs} if not torch.equal(mine[name], theirs[name])]


def distance(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12)) for name in mine)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole parameters, and the optimizer's state of each."""
    found = {}
    for name, parameter in nbdist.unwrap(model).named_parameters():
        found[name] = whole(parameter)
        found |= {f"{name}.{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()
