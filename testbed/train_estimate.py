"""Models to estimate, and what a real step of theirs takes, as ranks measure it of themselves."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.plan import Plan
from nbdist.train import state
from nbdist.train.loop import loop
from nbdist.train.prepare.prepare import prepare

_TOKENS = 4096
_MMAP_THRESHOLD = -3  # of mallopt


class Mlp(nn.Sequential):
    def __init__(self, width: int = 1024, layers: int = 8) -> None:
        super().__init__(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """With tied weights, and a loss of its own."""

    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"}

    def __init__(self, width: int = 384, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(_TOKENS, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, 6) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())}


class Untied(Gpt):
    """With a head of its own."""

    def __init__(self, width: int = 384, layers: int = 4, length: int = 128) -> None:
        super().__init__(width, layers, length)
        self.head.weight = nn.Parameter(torch.ones_like(self.embed.weight))


class Experts(nn.Module):
    """Each of which gets as many tokens as the others."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, width, 2 * width))
        self.down = nn.Parameter(torch.zeros(experts, 2 * width, width))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = numbers[:, 0].argsort()
        by_expert = x[order].unflatten(0, (len(self.up), -1))
        computed = (F.relu(by_expert @ self.up) @ self.down).flatten(0, 1)
        return torch.empty_like(computed).index_copy(0, order, computed) * weights


class Mixture(nn.Module):
    ep_plan: ClassVar = {
        "layers.*.1": "ep_dispatch_experts",
        "layers.*.1.up": "grouped_gemm",
        "layers.*.1.down": "grouped_gemm",
    }

    def __init__(self, width: int = 256, layers: int = 4, experts: int = 8) -> None:
        super().__init__()
        self.experts = experts
        self.layers = nn.ModuleList(MixtureLayer(width, experts) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MixtureLayer(nn.Sequential):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__(nn.Linear(width, width), Experts(width, experts))
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(len(x), device=x.device).remainder(self.experts)[:, None]
        return x + self[1](self[0](x), numbers, torch.ones_like(x[:, :1]))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(x + self.norms[1](self.convolutions[1](inner)))


class ConvNet(nn.Module):
    def __init__(self, channels: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, stride=2, padding=3)
        self.blocks = nn.Sequential(*[Residual(channels) for _ in range(layers)])
        self.head = nn.Linear(channels, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))


SHAPES = {Mlp: (512, 1024), Mixture: (1024, 256), Gpt: (4, 128), Untied: (4, 128), ConvNet: (12, 3, 96, 96)}
_ONE_BLOCK = ((384, 1, 128), (4, 128))  # as wide as it is measured: oneDNN keeps 15 MB for wide products in bf16
_SMALL = {
    Mlp: ((32, 2), (4, 32)),
    Mixture: ((32, 2, 2), (4, 32)),
    Gpt: _ONE_BLOCK,
    Untied: _ONE_BLOCK,
    ConvNet: ((16, 2), (2, 3, 32, 32)),
}


def batch_of(kind: type[nn.Module], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64) if issubclass(kind, Gpt) else torch.ones(shape)


class Trained:
    """A prepared model that makes steps."""

    def __init__(self, kind: type[nn.Module], sizes: tuple[int, ...], batch: torch.Tensor, plan: Plan) -> None:
        model = kind(*sizes)
        self.batch = batch
        self.accumulate = plan.accumulate
        self.model, self.optimizer = prepare(model, torch.optim.AdamW(model.parameters()), plan=plan)

    def step(self) -> None:
        for _ in range(self.accumulate):
            with loop.accumulate():
                output = self.model(self.batch)
                loop.backward(output["loss"] if isinstance(output, dict) else output.sum())
                self.optimizer.step()
                self.resident = self.bytes()
                self.optimizer.zero_grad()

    def bytes(self) -> dict[str, int]:
        """By category what lasts beyond backward."""
        parameters = list(self.model.parameters())
        states = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return {
            "parameters": _bytes([*parameters, *self.model.buffers()]),
            "gradients_whole": _bytes(one.grad for one in parameters if one.grad is not None),
            "averages": _bytes(state.current().averages.values()),
            "optimizer": _bytes(value for value in states if isinstance(value, torch.Tensor)),
        }


def _bytes(tensors: Any) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in local}
    return sum(storage.nbytes() for storage in storages.values())


def measured(kind: type[nn.Module], **settings: Any) -> dict[str, int]:
    """What the third step of a training takes at most, by the system's own peak of this process's resident memory.

    That is what a machine runs out of: scratch memory of oneDNN and gloo is in it. The C library is told to give freed
    memory back at once, as its reserves would be counted else. The third, because DDP makes new buckets in the second,
    which are not resident before something is written into them.
    """
    c = ctypes.CDLL(None)
    c.mallopt(_MMAP_THRESHOLD, 65536)
    sizes, shape = _SMALL[kind]
    state.forget()
    small = Trained(kind, sizes, batch_of(kind, shape), Plan(**settings))  # libraries load what they need
    small.step()
    small.step()
    del small
    before = _now(c)
    trained = Trained(kind, (), batch_of(kind, SHAPES[kind]), Plan(**settings))
    for _ in range(2):
        trained.step()
    _now(c)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    trained.step()
    peak = _status("VmHWM") - before
    found = trained.resident | {"total": peak}
    del trained
    state.forget()
    return found


def _now(c: Any) -> int:
    """Resident memory, after all that can be freed is."""
    gc.collect()
    c.malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)
