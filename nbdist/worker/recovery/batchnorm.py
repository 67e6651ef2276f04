"""Whether BatchNorm has counted another batch since the last optimizer step: only then has a lost step moved something.

Costs a look at a counter of each layer, and at no value. Independent of cells or of what a step is.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

_COUNTER = "num_batches_tracked"


class Statistics:
    """The layers that this process has built. Of others, such as copies, nothing is known. All on the main thread."""

    def __init__(self) -> None:
        self._seen: MutableMapping[Any, tuple[int, int] | None] = WeakKeyDictionary()

    def install(self) -> None:
        """Know of the layers that are built from now on. InstanceNorm is none of them: it does not count."""
        from torch.nn.modules.module import register_module_buffer_registration_hook

        from nbdist.train.structure.blocks import is_batch_norm

        def note(module: Any, name: str, buffer: Any) -> None:
            if name == _COUNTER and is_batch_norm(module):
                self._seen[module] = None

        register_module_buffer_registration_hook(note)

    def mark(self, *_: object) -> None:
        """Treat what has been counted until now as part of whole steps."""
        for module in list(self._seen):
            self._seen[module] = _stamp(module)

    def moved(self, module: Any) -> bool:
        """Return whether a layer has counted a batch since the last mark; True where that is not known."""
        seen = self._seen.get(module)
        return seen is None or seen != _stamp(module)


def _stamp(module: Any) -> tuple[int, int] | None:
    """Return a stamp that changes when a batch is counted."""
    counter = module._buffers.get(_COUNTER)
    return None if counter is None or counter.is_inference() else (id(counter), counter._version)
