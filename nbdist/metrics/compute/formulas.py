"""FLOPs of single operations: those that torch's own registry lacks or counts by another convention.

A multiply-add is 2 FLOPs; what is elementwise (activations, norms, softmax, optimizers) is not counted. Attention is
counted without a discount for causal masks, as torch, Megatron and torchtitan do, unless the half is asked for.
Knows torch's operations and their schemas; knows nothing of models or steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.utils._pytree
import torch.utils.flop_counter

from nbdist.errors import UsageError
from nbdist.metrics.compute import graphs, peaks


class Work(NamedTuple):
    """What one call of an operation takes.

    Attributes:
        model: FLOPs that the model's mathematics needs.
        repeated: FLOPs on top that the kernel spends on computing something again, as fused attention does backward.
    """

    model: int
    repeated: int = 0


class OperationCall:
    """One call of an operation: its arguments by the names of its schema.

    Args:
        function: An overload, such as `torch.ops.aten.mm.default`.
        args: As it was called.
        kwargs: As it was called.
        out: What it returned.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self.out = out

    def __getitem__(self, name: str) -> Any:
        """Return the argument of this name."""
        if name in self._kwargs:
            return self._kwargs[name]
        for number, argument in enumerate(self._function._schema.arguments):
            if argument.name == name:
                return self._args[number] if number < len(self._args) else argument.default_value
        raise KeyError(name)

    def first(self, *names: str) -> Any:
        """Return the first of these arguments that the operation has: kernels name the same thing differently."""
        known = {argument.name for argument in self._function._schema.arguments}
        return self[next(name for name in names if name in known)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor among the arguments."""
        return tuple(self[name].shape)


Formula = Callable[[OperationCall], "int | Work"]


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


def _grouped_mm(call: OperationCall) -> int:
    """Count groups that are a batch of `mat_a` or `mat_b`, or split their common dimension, including empty rows."""
    left, right = call.shape("self"), call.shape("mat2")
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


# --- attention


def _scores(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> tuple[int, int]:
    """Return FLOPs of query x key, and of scores x value, for (batch, heads, length, width)."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * int(key[-2]) * width, 2 * batch * heads * length * int(key[-2]) * int(value[-1])


def _attention(call: OperationCall) -> int:
    return sum(_scores(call.shape("query"), call.shape("key"), call.shape("value")))


def _attention_backward(call: OperationCall) -> Work:
    """Return four products for the gradients; the kernel has kept no scores, so it computes them once more."""
    first, second = _scores(call.shape("query"), call.shape("key"), call.shape("value"))
    return Work(2 * (first + second), first)


def _kernel_attention(call: OperationCall) -> int:
    return sum(first + second for first, second in _parts(call))


def _kernel_attention_backward(call: OperationCall) -> Work:
    parts = _parts(call)
    return Work(2 * sum(first + second for first, second in parts), sum(first for first, _ in parts))


def _parts(call: OperationCall) -> list[tuple[int, int]]:
    """Return the parts of the kernels below SDPA: (batch, length, heads, width), or packed sequences of any lengths."""
    query, key, value = call.shape("query"), call.shape("key"), call.shape("value")
    ends = call.first("cum_seq_q", "cu_seqlens_q")
    if ends is None:
        return [_scores(*((batch, heads, length, width) for batch, length, heads, width in (query, key, value)))]
    other_ends = call.first("cum_seq_k", "cu_seqlens_k")
    lengths = _lengths(ends, call.first("max_q", "max_seqlen_q"))
    others = _lengths(ends if other_ends is None else other_ends, call.first("max_k", "max_seqlen_k"))
    heads, width, value_width = int(query[-2]), int(query[-1]), int(value[-1])
    return [
        _scores((1, heads, length, width), (1, heads, other, width), (1, heads, other, value_width))
        for length, other in zip(lengths, others, strict=True)
    ]


def _lengths(ends: torch.Tensor, longest: int) -> list[int]:
    """Return the lengths of packed sequences; if no values can be read, the longest for each."""
    try:
        numbers = graphs.numbers_in(ends)
    except ValueError:
        return [int(longest)] * (ends.numel() - 1)
    return [end - start for start, end in itertools.pairwise(numbers)]


def _share_of_blocks(packet: Any, args: tuple[Any, ...]) -> float:
    """Return the share of all scores that FlexAttention computes: those of blocks that its mask does not leave out."""
    if not str(packet).startswith("flex_attention"):
        return 1.0
    mask = next((arg for arg in args if isinstance(arg, tuple) and len(arg) > 8 and isinstance(arg[0], int)), None)
    if mask is None:
        return 1.0
    length, other_length, partial, _, full = mask[:5]
    rows, columns = mask[-3], mask[-2]
    blocks = sum(sum(graphs.numbers_in(each)) for each in (partial, full) if each is not None)
    heads = prod(partial.shape[:-1])  # of the mask, which batches and heads may share
    return min(1.0, float(blocks * rows * columns / (heads * length * other_length)))


def _multi_head(call: OperationCall) -> int:
    """Count `nn.MultiheadAttention` in one kernel, as in evaluation."""
    batch, length, width = call.shape("query")
    others = int(call.shape("key")[1])
    projections = 2 * batch * width * width * (length + 2 * others + length)
    return projections + 4 * batch * length * others * width


def _encoder_layer(call: OperationCall) -> int:
    """Count `nn.TransformerEncoderLayer` in one kernel, as in evaluation."""
    batch, length, width = call.shape("src")
    feed_forward = prod(call.shape("ffn_weight_1")) + prod(call.shape("ffn_weight_2"))
    return 2 * batch * length * (4 * width * width + feed_forward) + 4 * batch * length * length * width


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
    "_native_multi_head_attention": _multi_head,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "linalg_lu_factor_ex": _lu,
    "linalg_cholesky_ex": _cholesky,
    "linalg_inv_ex": _inverse,
    "_linalg_solve_ex": _solve,
    "linalg_lu_solve": _lu_solve,
    "linalg_solve_triangular": _triangular,
    "_scaled_dot_product_attention_math_for_mps": _attention,
}
for _kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"):
    _OURS[f"_scaled_dot_product_{_kernel}"] = _attention
    _OURS[f"_scaled_dot_product_{_kernel}_backward"] = _attention_backward
_OURS["_scaled_dot_product_flash_attention_for_cpu"] = _attention
_OURS["_scaled_dot_product_flash_attention_for_cpu_backward"] = _attention_backward
for _kernel in ("flash", "efficient"):
    _OURS[f"_{_kernel}_attention_forward"] = _kernel_attention
    _OURS[f"_{_kernel}_attention_backward"] = _kernel_attention_backward

_registered: dict[Any, Callable[..., int]] = {}

# Parts of the names of operations that do more than elementwise work, so that one without a formula is worth a word.
_HEAVY = {
    *("addmm", "addmv", "attention", "baddbmm", "bmm", "cdist", "cholesky", "conv", "convolution", "einsum", "fft"),
    *("gru", "linalg", "linear", "lstm", "matmul", "mm", "mv", "rnn", "trilinear", "triangular"),
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
        UsageError: There is no such operation, or the formula is no function.
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
        shapes = torch.utils._pytree.tree_map(_shape, (args, kwargs, out))
        return Work(int(_registered[packet](*shapes[0], **shapes[1], out_shape=shapes[2])))
    if packet in _table():
        found = _table()[packet](OperationCall(function, args, kwargs, out))
        return found if isinstance(found, Work) else Work(found)
    formula = torch.utils.flop_counter.flop_registry.get(packet)
    if formula is None:
        return None
    whole = int(formula(*args, **kwargs, out_val=out) * _share_of_blocks(packet, args))
    if str(packet).endswith(("attention_backward", "attn_backward")):  # torch counts the scores once more: 5 products
        return Work(whole * 4 // 5, whole - whole * 4 // 5)
    return Work(whole)


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
    counts = packet in _table() or packet in torch.utils.flop_counter.flop_registry or packet in _registered
    return not counts and not is_heavy(function)


@functools.cache
def _table() -> dict[Any, Formula]:
    """Return our formulas for the operations that this torch has."""
    aten = torch.ops.aten
    return {getattr(aten, name): formula for name, formula in _OURS.items() if hasattr(aten, name)}


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value
