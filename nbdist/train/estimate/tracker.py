"""Torch's memory tracker, for steps on tensors without values."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


class CountedFakeTensorMode(FakeTensorMode):
    """A mode that knows how many times it has been entered.

    DTensor enters it once more to find the whole shape of what an operation on shards returns.
    """

    entered = 0

    def __enter__(self) -> Any:
        self.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered -= 1
        super().__exit__(*error)


def tracker_of(mode: CountedFakeTensorMode) -> Any:
    """Return a tracker of what is held under this mode, which has been entered already.

    With some versions of torch (seen: 2.11), an operation on shards also counted with its whole shape: the temporary
    memory of AdamW's multi-tensor step was 7 shards instead of one.

    Raises:
        ImportError: This version of torch has no such tracker.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    entered = mode.entered

    class ShardTracker(MemTracker):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if mode.entered > entered:
                return func(*args, **kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    return ShardTracker()
