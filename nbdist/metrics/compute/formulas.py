"""FLOPs of single operations: those that torch's own registry lacks or counts by another convention.

A multiply-add is 2 FLOPs; what is elementwise (activations, norms, softmax, optimizers) is not counted. Attention is
counted without a discount for causal masks, as torch, Megatron and torchtitan do, unless the half is asked for.
Knows torch's operations and their schemas; independent of models or steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.utils.flop_counter

from nbdist.base import trees
from nbdist.errors import UsageError
from nbdist.metrics.compute import attention, graphs
from nbdist.metrics.compute.operations import Formula, OperationCall, Work
from nbdist.metrics.rates import peaks

# --- matrix products


def _mv(call: OperationCall) -> int:
    return 2 * prod(call.shape("self"))


def _addmv(call: OperationCall) -> int:
    return 2 * prod(call.shape("mat"))


def _dot(call: OperationCall) -> int:
    return 2 * prod(call.shape("self"))


def _mm(call: OperationCall) -> int:
    rows, inner = call.shape("self")
    return 2 * rows * inner * int(call.out.shape[-1])


def _addmm_activation(call: OperationCall) -> int:
    return 2 * prod(call.shape("mat1")) * int(call.out.shape[-1])


def _addbmm(call: OperationCall) -> int:
    batches, rows, inner = call.shape("batch1")
    return 2 * batches * rows * inner * int(call.shape("batch2")[-1])


def _foreach_mm(call: OperationCall) -> int:
    return sum(
        2 * prod(one.shape) * int(other.shape[-1]) for one, other in zip(call["self"], call["mat2"], strict=True)
    )


def _semi_structured(call: OperationCall) -> int:
    """Count the dense product: what is left out is the hardware's shortcut, which peaks with sparsity are for."""
    inner = call.shape("input")[-1] if call.name.endswith("linear") else call.shape("mat2")[0]
    return int(2 * inner * prod(call.out.shape))


def _linear_backward(call: OperationCall) -> int:
    product = 2 * prod(call.shape("grad_output")) * int(call.shape("weight")[-1])
    return product * sum(map(bool, call["output_mask"][:2]))


def _distance(call: OperationCall) -> int:
    return int(2 * prod(call.out.shape) * call.shape("x1")[-1])


def _trilinear(call: OperationCall) -> int:
    """Count what `nn.Bilinear` multiplies: its three tensors, expanded to one shape."""
    shapes = []
    for tensor, expanded in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        shape = list(call.shape(tensor))
        for dimension in call[expanded]:
            shape.insert(dimension, 1)
        shapes.append(shape)
    return int(2 * prod(max(sizes) for sizes in zip(*shapes, strict=True)))


def _grouped_mm(call: OperationCall) -> int:
    """Count groups that are a batch of `mat_a` or `mat_b`, or split their common dimension, without unused rows."""
    left, right = list(call.shape("self")), list(call.shape("mat2"))
    split = right if len(left) == 3 else left  # its last dimension, unless its rows belong to a batch of matrices
    if call["offs"] is not None:
        with contextlib.suppress(ValueError):  # no values here: all rows count
            split[0 if len(right) == 3 else -1] = graphs.numbers_in(call["offs"])[-1]
    if len(left) == 3 and len(right) == 2:  # a batch of matrices, each with its part of the other's columns
        return 2 * int(left[1]) * prod(right)
    return 2 * prod(left) * int(right[-1])


def _packed_linear(call: OperationCall) -> int:
    """Return products with weights that are packed in int8 or int4, so that only the result tells their width."""
    return 2 * prod(call.shape("self")) * int(call.out.shape[-1])


# --- convolutions


def _convolution_backward(call: OperationCall) -> int:
    """Count as much as the forward pass for each of the two gradients requested; groups count, unlike in torch's."""
    spatial = call.shape("input" if call["transposed"] else "grad_output")[2:]
    forward = 2 * int(call.shape("input")[0]) * prod(spatial) * prod(call.shape("weight"))
    return forward * sum(map(bool, call["output_mask"][:2]))


# --- recurrent layers


def _mkldnn_rnn(call: OperationCall) -> int:
    rows = prod(call.shape("input")[:-1])
    return 2 * rows * (prod(call.shape("weight0")) + prod(call.shape("weight1")))


def _mkldnn_rnn_backward(call: OperationCall) -> int:
    rows = prod(call.shape("input")[:-1])
    return int(4 * rows * (prod(call.shape("weight1")) + prod(call.shape("weight2"))))


def _fused_rnn(call: OperationCall) -> int:
    """Return each weight matrix of each layer meets each row of the input once."""
    rows = prod(call.shape("input")[:-1])
    return int(2 * rows * sum(weight.numel() for weight in call["weight"] if weight.dim() == 2))


def _fused_rnn_backward(call: OperationCall) -> int:
    return 2 * _fused_rnn(call)


# --- linear algebra: Golub and Van Loan, Matrix Computations, chapters 3 and 4


def _square(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many matrices, and of which order."""
    return prod(shape[:-2]), int(shape[-1])


def _lu(call: OperationCall) -> int:
    batch, order = _square(call.shape("A"))
    return int(batch * 2 * order**3 // 3)


def _cholesky(call: OperationCall) -> int:
    batch, order = _square(call.shape("self"))
    return int(batch * order**3 // 3)


def _inverse(call: OperationCall) -> int:
    batch, order = _square(call.shape("A"))
    return int(batch * 2 * order**3)


def _solve(call: OperationCall) -> int:
    batch, order = _square(call.shape("A"))
    return int(batch * 2 * order**3 // 3 + 2 * order * prod(call.out[0].shape))


def _lu_solve(call: OperationCall) -> int:
    return int(2 * call.shape("LU")[-1] * prod(call.out.shape))


def _triangular(call: OperationCall) -> int:
    return int(call.shape("self")[-1] * prod(call.out.shape))


_OURS: dict[str, Formula] = {
    "_foreach_mm": _foreach_mm,
    "addbmm_": _addbmm,
    "baddbmm_": _addbmm,
    "addmm_": _addmm_activation,
    "_scaled_mm_v2": _mm,
    "_scaled_grouped_mm_v2": _grouped_mm,
    "_sparse_semi_structured_mm": _semi_structured,
    "_sparse_semi_structured_addmm": _semi_structured,
    "_sparse_semi_structured_linear": _semi_structured,
    "linear_backward": _linear_backward,
    "mkldnn_linear_backward": _linear_backward,
    "_euclidean_dist": _distance,
    "_cdist_forward": _distance,
    "_trilinear": _trilinear,
    "_cudnn_attention_forward": attention.cudnn_attention,
    "_cudnn_attention_backward": attention.cudnn_attention_backward,
    "mv": _mv,
    "addmv": _addmv,
    "addmv_": _addmv,
    "dot": _dot,
    "vdot": _dot,
    "_int_mm": _mm,
    "_addmm_activation": _addmm_activation,
    "addbmm": _addbmm,
    "_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm": _grouped_mm,
    "_weight_int4pack_mm": _packed_linear,
    "_weight_int8pack_mm": _packed_linear,
    "mkldnn_linear": _packed_linear,
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _mkldnn_rnn,
    "mkldnn_rnn_layer_backward": _mkldnn_rnn_backward,
    "_cudnn_rnn": _fused_rnn,
    "_cudnn_rnn_backward": _fused_rnn_backward,
    "miopen_rnn": _fused_rnn,
    "miopen_rnn_backward": _fused_rnn_backward,
    "_native_multi_head_attention": attention.multi_head,
    "_transformer_encoder_layer_fwd": attention.encoder_layer,
    "linalg_lu_factor_ex": _lu,
    "linalg_cholesky_ex": _cholesky,
    "linalg_inv_ex": _inverse,
    "_linalg_solve_ex": _solve,
    "linalg_lu_solve": _lu_solve,
    "linalg_solve_triangular": _triangular,
    "_scaled_dot_product_attention_math_for_mps": attention.attention,
}
for _kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"):
    _OURS[f"_scaled_dot_product_{_kernel}"] = attention.attention
    _OURS[f"_scaled_dot_product_{_kernel}_backward"] = attention.attention_backward
_OURS["_scaled_dot_product_flash_attention_for_cpu"] = attention.attention
_OURS["_scaled_dot_product_flash_attention_for_cpu_backward"] = attention.attention_backward
for _kernel in ("flash", "efficient"):
    _OURS[f"_{_kernel}_attention_forward"] = attention.kernel_attention
    _OURS[f"_{_kernel}_attention_backward"] = attention.kernel_attention_backward

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_registered: dict[Any, Callable[..., int]] = {}

# Parts of the names of operations that do more than elementwise work, so that one without a formula is worth a word.
_HEAVY = {
    *("addmm", "addmv", "attention", "baddbmm", "bmm", "cdist", "cholesky", "conv", "convolution", "einsum", "fft"),
    *("geqrf", "gru", "hspmm", "linalg", "linear", "lstm", "matmul", "mm", "mv", "ormqr", "pdist", "rnn", "smm"),
    *("spsolve", "sspaddmm", "trilinear", "triangular"),
}
_LIGHT = {"linalg_vector_norm", "_linalg_check_errors", "linalg_cross", "linalg_diagonal"}
# What is in these namespaces is communication or bookkeeping; in others, somebody's own work.
_NO_WORK = {
    *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "device_mesh", "fsdp"),
    *("debugprims", "inductor", "prim", "prims", "profiler", "rngprims", "streams", "symm_mem"),
}


def register_flops(operation: Any, formula: Callable[..., int]) -> None:
    """Tell what an operation takes that nobody knows: a custom operation, or a fused kernel of a library.

    >>> nbdist.metrics.flops.register_flops("mylib::gemm", lambda a, b, out_shape: 2 * a[0] * a[1] * b[1])

    Formulas given to torch's own `register_flop_formula` are known without this.

    Args:
        operation: Its name, `torch.ops.mylib.gemm`, or what `torch.library.custom_op` returned.
        formula: Called with the operation's arguments, shapes in place of tensors, and the result's shape as
            `out_shape`; gives FLOPs, with a multiply-add as 2. A formula given before is replaced.

    Raises:
        UsageError: There is no such operation, or the formula is not a function.
    """
    if not callable(formula):
        raise UsageError(f"a formula is a function, not {formula!r}: `lambda a, b, out_shape: 2 * a[0] * a[1] * b[1]`")
    _registered[_packet(operation)] = formula
    is_light.cache_clear()


def _packet(operation: Any) -> Any:
    found = getattr(operation, "_opoverload", operation)  # of a CustomOpDef
    if isinstance(operation, str):
        namespace, _, name = operation.replace(".", "::").partition("::")
        found = getattr(getattr(torch.ops, namespace), name.partition("::")[0], None) if name else None
    found = getattr(found, "overloadpacket", found)  # of an overload
    if not isinstance(found, (torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        raise UsageError(
            f"{operation!r} is not an operation: give its name, such as 'mylib::gemm', torch.ops.mylib.gemm, "
            "or what torch.library.custom_op returned"
        )
    return found


def work_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work | None:
    """Return what one call of an operation takes.

    Args:
        function: The overload, or the higher-order operation.
        args: As it was called.
        kwargs: As it was called.
        out: What it returned.

    Returns:
        Its FLOPs; None if there is no formula.
    """
    packet = getattr(function, "overloadpacket", function)
    if packet in _registered:
        shapes = trees.mapped(_shape, (args, kwargs, out))
        return Work(int(_registered[packet](*shapes[0], **shapes[1], out_shape=shapes[2])))
    sparse = _sparse_product(args, out)
    if sparse is not None:
        return sparse
    formula = _table().get(packet) or attention.of_library(packet)
    if formula is not None:
        found = formula(OperationCall(function, args, kwargs, out))
        work = found if isinstance(found, Work) else Work(found)
    else:
        torchs = torch.utils.flop_counter.flop_registry.get(packet)
        if torchs is None:
            return None
        whole = int(torchs(*args, **kwargs, out_val=out) * attention.share_of_blocks(packet, args))
        again = 0
        if str(packet).endswith(("attention_backward", "attn_backward")):  # torch counts the scores again: 5 products
            again = whole - whole * 4 // 5
        work = Work(whole - again, again)
    times = _products_of_one(args)
    return work if times == 1 else Work(times * work.model, times * work.repeated)


def _products_of_one(args: tuple[Any, ...]) -> int:
    """Return how many real products one of an operation's is: 4 of complex numbers, 2 of those packed in a byte."""
    kind = next((arg.dtype for arg in args if isinstance(arg, torch.Tensor)), None)
    if kind is None:
        return 1
    return 4 if kind.is_complex else 2 if kind == getattr(torch, "float4_e2m1fn_x2", None) else 1


def _sparse_product(args: tuple[Any, ...], out: Any) -> Work | None:
    """Return the work of a product with a sparse matrix: each of its values meets a row or column of the other.

    Blocks are stored whole, and `_nnz` is the number of blocks.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    sparse = next((tensor for tensor in tensors if tensor.layout in _SPARSE), None)
    if sparse is None or not isinstance(out, torch.Tensor):
        return None
    others = [tensor for tensor in tensors if tensor is not sparse and tensor.layout not in _SPARSE]
    if not others or out.layout in _SPARSE:
        raise NotImplementedError("the product of sparse matrices")
    values = sparse._values() if sparse.layout == torch.sparse_coo else sparse.values()
    is_right = tensors[-1] is sparse
    size = 1 if out.dim() < 2 else out.shape[-2] if is_right else out.shape[-1]
    return Work(2 * values.numel() * int(size))


def arithmetic(name: str, dtype: str, device: torch.device) -> str:
    """Return in what an operation multiplies: its dtype, or "tf32" for fp32 in tensor cores.

    Args:
        name: Of the operation, such as "aten.convolution".
        dtype: Of what is multiplied, as torch names it.
        device: Where.
    """
    if dtype != "float32" or device.type != "cuda":
        return dtype
    kind = "conv" if "conv" in name else "rnn" if "rnn" in name else "matmul"
    return "tf32" if peaks.in_tensor_cores(kind) else dtype


@functools.cache
def is_heavy(function: Any) -> bool:
    """Return whether an operation without a formula probably does work that counts: products, or a custom kernel."""
    namespace, _, name = function.name().partition("::")
    if namespace != "aten":
        return namespace not in _NO_WORK
    words = name.partition(".")[0]
    return words not in _LIGHT and not words.startswith("_thnn") and not _HEAVY.isdisjoint(words.split("_"))


@functools.cache
def is_light(function: Any) -> bool:
    """Return whether an operation is one of torch's that never counts; most are, so this is asked first."""
    packet = getattr(function, "overloadpacket", function)
    tables: tuple[Mapping[Any, Any], ...] = (_table(), torch.utils.flop_counter.flop_registry, _registered)
    counts = any(packet in table for table in tables) or attention.of_library(packet) is not None
    return not counts and not is_heavy(function)


@functools.cache
def _table() -> dict[Any, Formula]:
    """Return our formulas for the operations that this torch has."""
    aten = torch.ops.aten
    return {getattr(aten, name): formula for name, formula in _OURS.items() if hasattr(aten, name)}


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value
