"""Work that no dispatch mode sees: kernels that are launched past torch's operations.

What has a formula is counted, the rest is named.

Only what is loaded already is looked at. Independent of how it is shown.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nbdist.metrics.compute import library_kernels
from nbdist.metrics.compute.library_kernels import KernelFormula, KernelWork
from nbdist.metrics.events.listening import WrappedFunction

Heard = Callable[[str, "KernelWork | None"], None]

# Module, class in it (or none), function, and what it is called; {} is the name of what is launched.
_PLACES = (
    ("triton.runtime.jit", "JITFunction", "run", "the Triton kernel {}"),
    ("torch.cuda", "CUDAGraph", "replay", "CUDA graphs"),
    ("torch.nn.parallel.data_parallel", "", "parallel_apply", "the threads of DataParallel"),
    ("transformer_engine_torch", "", "generic_gemm", "transformer_engine's products"),
    ("transformer_engine_torch", "", "te_general_grouped_gemm", "transformer_engine's grouped products"),
    ("transformer_engine_torch", "", "fused_attn_fwd", "transformer_engine's attention"),
    ("transformer_engine_torch", "", "fused_attn_bwd", "transformer_engine's attention"),
    ("selective_scan_cuda", "", "fwd", "mamba_ssm's selective scan"),
    ("selective_scan_cuda", "", "bwd", "mamba_ssm's selective scan"),
    ("flash_attn_2_cuda", "", "fwd", "flash_attn's kernels"),
    ("flash_attn_2_cuda", "", "bwd", "flash_attn's kernels"),
)
_FORMULAS: dict[tuple[str, str], KernelFormula] = {
    ("transformer_engine_torch", "generic_gemm"): library_kernels.gemm,
    ("transformer_engine_torch", "te_general_grouped_gemm"): library_kernels.grouped_gemm,
    ("selective_scan_cuda", "fwd"): library_kernels.selective_scan,
    ("selective_scan_cuda", "bwd"): library_kernels.selective_scan_backward,
}


def listen(heard: Heard) -> Callable[[], None]:
    """Call this with the name of each such piece of work and what it takes, None if that is not known, before it runs.

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
    module, kind, function, words = place
    formula = _FORMULAS.get((module, function))

    def wrap(original: Callable[..., Any], listeners: Callable[[], Sequence[Heard]]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = None
            if formula is not None:
                with contextlib.suppress(Exception):  # of a version with other arguments: it is named then
                    work = formula(args, kwargs)
            for heard in listeners():
                heard(words.format(getattr(args[0], "__name__", "?") if kind and args else ""), work)
            return original(*args, **kwargs)

        return call

    return WrappedFunction(owner, function, wrap)
