"""Ranks that divide layers or sequences have to be called with the same batch: the first one is compared.

Independent of how they divide them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from nbdist.base import trees
from nbdist.errors import UsageError


class SharedBatch:
    """Compares the first batch that a model is called with.

    Args:
        divided: What ranks divide, in words.
        sharing: Returns the ranks that get each batch.
        gather: Returns what each of all ranks says.
    """

    def __init__(
        self, divided: str, sharing: Callable[[], Sequence[Sequence[int]]], gather: Callable[[str], Sequence[str]]
    ) -> None:
        self._divided = divided
        self._sharing = sharing
        self._gather = gather
        self._is_compared = False

    def compare(self, batch: object) -> None:
        """Refuse ranks that share a batch and got others: from then on they would train on neither. On all ranks.

        Raises:
            UsageError: With two of these ranks.
        """
        if self._is_compared:
            return
        told = self._gather(_described(batch))
        for first, *others in self._sharing():
            other = next((rank for rank in others if told[rank] != told[first]), None)
            if other is not None:
                raise UsageError(
                    f"ranks {first} and {other} divide the {self._divided} of one batch, but got different ones "
                    f"({told[first]} and {told[other]}): use a loader that nbdist.prepare has made, or give both the "
                    "same batch"
                )
        self._is_compared = True

    def watch(self, model: nn.Module) -> None:
        """Compare what the model is called with, the next time that it is."""

        def before(module: nn.Module, inputs: object, named: object) -> None:
            self.compare((inputs, named))
            handle.remove()

        handle = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


def _described(batch: object) -> str:
    """Return the tensors of a batch in words that can be compared."""
    tensors = [leaf for leaf in trees.leaves(batch) if isinstance(leaf, torch.Tensor)]
    digest = hashlib.blake2b(digest_size=3)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    return f"{shapes or 'no tensors'} with contents {digest.hexdigest()}"
