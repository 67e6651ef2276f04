"""Small models, and what a forward and backward pass of each takes by the textbook. A multiply-add is 2 FLOPs.

A linear layer of `k` inputs and `n` outputs takes 2·k·n a row, and twice that backward; attention over `t` positions of
width `d` takes 4·t·t·d a sequence, without a discount for its causal mask, and twice that backward.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 3
LINEAR = LAYERS * 12 * WIDTH * WIDTH  # weights of the blocks


class Block(nn.Module):
    """Of a transformer; `attention` is "fused" or "manual", `recompute` None, "reentrant" or "not reentrant"."""

    def __init__(self, attention: str, recompute: str | None) -> None:
        super().__init__()
        self.attention, self.recompute = attention, recompute
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")

    def body(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.attention == "fused":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-1, -2)
            mixed = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -1e9).softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    """Takes indices; with labels gives its loss, as models of Hugging Face do."""

    def __init__(self, attention: str = "fused", recompute: str | None = None, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, recompute) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def gpt_blocks(batch: int, length: int) -> int:
    """One forward pass of all blocks."""
    return 2 * batch * length * LINEAR + LAYERS * gpt_attention(batch, length)


def gpt_attention(batch: int, length: int) -> int:
    """One forward pass of the attention of one block."""
    return 4 * batch * length * length * WIDTH


def gpt(batch: int, length: int) -> int:
    """A forward and a backward pass."""
    return 3 * (gpt_blocks(batch, length) + 2 * batch * length * WIDTH * VOCABULARY)


def gpt_scores_again(batch: int, length: int) -> int:
    """What fused attention computes once more backward: query x key, in each block."""
    return LAYERS * gpt_attention(batch, length) // 2


def indices(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


class Graphs:
    """A backend of torch.compile that knows how often its graphs have run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run
