"""FLOPs of other libraries' kernels that are not operations of torch: functions of their extension modules.

Arguments are those of transformer_engine 1.11 to 2.x (`generic_gemm` and `te_general_grouped_gemm`, see
transformer_engine/pytorch/cpp_extensions/gemm.py and csrc/extensions/gemm.cpp) and of mamba_ssm 1.x and 2.x
(`selective_scan_cuda`, see mamba_ssm/ops/selective_scan_interface.py). Other arguments raise; the work is named then.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from nbdist.metrics.compute.operations import Work

_SCAN = 9  # FLOPs for each step, channel and state, by the authors' count: state-spaces/mamba issue 110


class KernelWork(NamedTuple):
    """What one call takes.

    Attributes:
        work: FLOPs.
        dtype: Of what is multiplied, as torch names it, or "fp8", "fp4".
        device: Where.
    """

    work: Work
    dtype: str
    device: torch.device


KernelFormula: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any]], KernelWork]"


def gemm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelWork:
    """Count transformer_engine's product of two matrices, whose leading dimensions are flattened."""
    left, turned, right, right_turned = args[:4]
    if kwargs.get("comm_overlap") is not None:
        raise NotImplementedError("a product that gathers its factors as it runs")
    return _kernel(Work(_product(left, turned, right, right_turned)), left, args)


def grouped_gemm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelWork:
    """Count its products of several pairs."""
    lefts, turned, rights, right_turned = args[:4]
    pairs = zip(lefts, rights, strict=True)
    return _kernel(Work(sum(_product(one, turned, other, right_turned) for one, other in pairs)), lefts[0], lefts)


def selective_scan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelWork:
    """Count mamba_ssm's scan: 9 FLOPs a state, and one a value for each of D and z where they are given."""
    return _kernel(Work(_scan(args)), args[0], args)


def selective_scan_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelWork:
    """Count its gradients as twice the scan; the kernel keeps no states, so it scans once more."""
    return _kernel(Work(2 * _scan(args), _scan(args)), args[0], args)


def _product(left: Any, turned: bool, right: Any, right_turned: bool) -> int:
    (rows, columns), (other_rows, other_columns) = _matrix(left), _matrix(right)
    inner, outer = (columns, rows) if turned else (rows, columns)
    other_inner, other_outer = (other_rows, other_columns) if right_turned else (other_columns, other_rows)
    if inner != other_inner:
        raise ValueError(f"factors of {inner} and {other_inner}")
    return 2 * outer * inner * other_outer


def _matrix(tensor: Any) -> tuple[int, int]:
    shape = tuple(tensor.size())  # quantized ones need not be tensors, but have this
    return prod(shape[:-1]), int(shape[-1])


def _scan(args: tuple[Any, ...]) -> int:
    values, states = args[0], args[2]
    if states.is_complex():
        raise NotImplementedError("a scan of complex numbers")
    extras = sum(each is not None for each in args[5:7])
    return int(values.numel() * (_SCAN * states.shape[1] + extras))


def _kernel(work: Work, factor: Any, args: Any) -> KernelWork:
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    device = tensor.device if tensor is not None else torch.device("cuda", torch.cuda.current_device())
    return KernelWork(work, _dtype(factor), device)


def _dtype(factor: Any) -> str:
    """Return in what it is multiplied: quantized tensors have the dtype of what they stand for."""
    name = type(factor).__name__.lower()
    for kind in ("fp4", "fp8", "float8"):
        if kind in name:
            return kind.replace("float", "fp")
    return str(factor.dtype).removeprefix("torch.")
