"""Work that no dispatch mode sees: kernels that are launched past torch's operations. It is named instead.

Only what is loaded already is looked at. Knows nothing of how it is shown.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from nbdist.metrics.compute.listening import WrappedFunction

Heard = Callable[[str], None]

# Module, class in it (or none), function, and what it is called; {} is the name of what is launched.
_PLACES = (
    ("triton.runtime.jit", "JITFunction", "run", "the Triton kernel {}"),
    ("torch.cuda", "CUDAGraph", "replay", "CUDA graphs"),
    ("torch.nn.parallel.data_parallel", "", "parallel_apply", "the threads of DataParallel"),
    ("transformer_engine_torch", "", "generic_gemm", "transformer_engine's products"),
    ("transformer_engine_torch", "", "fused_attn_fwd", "transformer_engine's attention"),
    ("transformer_engine_torch", "", "fused_attn_bwd", "transformer_engine's attention"),
    ("selective_scan_cuda", "", "fwd", "mamba_ssm's selective scan"),
    ("selective_scan_cuda", "", "bwd", "mamba_ssm's selective scan"),
    ("flash_attn_2_cuda", "", "fwd", "flash_attn's kernels"),
    ("flash_attn_2_cuda", "", "bwd", "flash_attn's kernels"),
)


def listen(heard: Heard) -> Callable[[], None]:
    """Call this with the name of each such piece of work, before it runs.

    Returns:
        What ends it.
    """
    ends = [wrapped.listen(heard) for place in _PLACES if (wrapped := _at(place)) is not None and wrapped.exists]

    def stop() -> None:
        for end in ends:
            end()

    return stop


def _at(place: tuple[str, str, str, str]) -> WrappedFunction[Heard] | None:
    module, owner, _, _ = place
    found = sys.modules.get(module)
    if found is None or (owner and not hasattr(found, owner)):
        return None
    return _wrapped(place, getattr(found, owner) if owner else found)


@functools.cache
def _wrapped(place: tuple[str, str, str, str], owner: Any) -> WrappedFunction[Heard]:
    _, kind, function, words = place

    def wrap(original: Callable[..., Any], listeners: Callable[[], list[Heard]]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for heard in listeners():
                heard(words.format(getattr(args[0], "__name__", "?") if kind and args else ""))
            return original(*args, **kwargs)

        return call

    return WrappedFunction(owner, function, wrap)
