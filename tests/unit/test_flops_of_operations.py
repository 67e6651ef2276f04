"""FLOPs of single operations are those of the textbook, and what cannot be counted is named."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbdist.metrics.compute.counting import Counting, FlopCount

pytestmark = [pytest.mark.torch_private, pytest.mark.filterwarnings("ignore")]


def counted(work: Callable[[], object], *, eagerly: bool = True) -> FlopCount:
    with Counting(eagerly=eagerly) as counting:
        work()
    return counting.result("")


def scaled_mm() -> Tensor:
    from torch.nn.functional import ScalingType

    one, left = torch.tensor(1.0), torch.randn(64, 32).to(torch.float8_e4m3fn)
    right = torch.randn(48, 32).to(torch.float8_e4m3fn).t()
    kind = ScalingType.TensorWise
    return F.scaled_mm(left, right, one, kind, one, kind, output_dtype=torch.bfloat16)


def grouped_mm() -> Tensor:
    """Four groups that use 32 of 96 rows."""
    rows, weights = torch.randn(96, 64, dtype=torch.bfloat16), torch.randn(4, 64, 32, dtype=torch.bfloat16)
    return torch._grouped_mm(rows, weights, offs=torch.tensor([8, 16, 24, 32], dtype=torch.int32))


def packed_fp4() -> Tensor:
    kind: Any = torch.float4_e2m1fn_x2
    left, right = torch.empty(128, 64, dtype=kind, device="meta"), torch.empty(64, 64, dtype=kind, device="meta").t()
    scales = [torch.empty(size, dtype=torch.float8_e4m3fn, device="meta") for size in (128 * 8, 128 * 8)]
    return torch._scaled_mm(left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)


VALUES = 200
SPARSE = torch.eye(100).repeat(1, 2).to_sparse()

WORK: dict[str, tuple[Callable[[], object], int]] = {
    "Bilinear": (lambda: nn.Bilinear(3, 4, 5)(torch.randn(7, 3), torch.randn(7, 4)), 2 * 7 * 3 * 4 * 5),
    "addmm_": (lambda: torch.randn(6, 8).addmm_(torch.randn(6, 7), torch.randn(7, 8)), 2 * 6 * 7 * 8),
    "baddbmm_": (lambda: torch.randn(2, 6, 8).baddbmm_(torch.randn(2, 6, 7), torch.randn(2, 7, 8)), 4 * 6 * 7 * 8),
    "addbmm_": (lambda: torch.randn(6, 8).addbmm_(torch.randn(2, 6, 7), torch.randn(2, 7, 8)), 4 * 6 * 7 * 8),
    "cdist": (lambda: torch.cdist(torch.randn(50, 8), torch.randn(60, 8)), 2 * 50 * 60 * 8),
    "complex": (lambda: torch.randn(6, 7, dtype=torch.complex64) @ torch.randn(7, 8, dtype=torch.complex64), 8 * 336),
    "COO @ dense": (lambda: SPARSE @ torch.randn(200, 8), 2 * VALUES * 8),
    "sparse.mm": (lambda: torch.sparse.mm(SPARSE, torch.randn(200, 8)), 2 * VALUES * 8),
    "CSR @ dense": (lambda: SPARSE.to_sparse_csr() @ torch.randn(200, 8), 2 * VALUES * 8),
    "COO, uncoalesced": (lambda: torch.cat([SPARSE, SPARSE]) @ torch.randn(200, 8), 2 * 2 * VALUES * 8),
    "BSR @ dense": (lambda: SPARSE.to_sparse_bsr((2, 2)) @ torch.randn(200, 8), 2 * 2 * VALUES * 8),
    "dense @ CSR": (lambda: torch.randn(4, 100) @ SPARSE.to_sparse_csr(), 2 * VALUES * 4),
    "linear, CSR": (lambda: F.linear(torch.randn(8, 200), SPARSE.to_sparse_csr()), 2 * VALUES * 8),
    "linear, BSR": (lambda: F.linear(torch.randn(8, 200), SPARSE.to_sparse_bsr((2, 2))), 2 * 2 * VALUES * 8),
    "scaled_mm": (scaled_mm, 2 * 64 * 32 * 48),
    "_grouped_mm": (grouped_mm, 2 * 32 * 64 * 32),
    "fp4": (packed_fp4, 2 * 128 * 128 * 64),
}


WITHOUT_FORMULA: dict[str, Callable[[], object]] = {
    "geqrf": lambda: torch.geqrf(torch.randn(8, 4)),
    "ormqr": lambda: torch.ormqr(torch.randn(8, 4), torch.randn(4), torch.randn(8, 2)),
    "_pdist_forward": lambda: torch.pdist(torch.randn(8, 4)),
    "hspmm": lambda: torch.hspmm(SPARSE, torch.randn(200, 8)),
}


@pytest.mark.parametrize("name", WORK)
def test_an_operation_takes_what_the_textbook_says(name: str) -> None:
    work, truth = WORK[name]
    if name == "scaled_mm" and not hasattr(F, "scaled_mm"):
        pytest.skip("this torch lacks it")
    found = counted(work)
    assert (found.model_flops, dict(found.uncounted)) == (truth, {})


@pytest.mark.parametrize("name", WITHOUT_FORMULA)
def test_an_operation_that_computes_and_has_no_formula_is_named(name: str) -> None:
    assert name in str(counted(WITHOUT_FORMULA[name]).uncounted)


def test_sparse_backward_passes_count_values_as_well() -> None:
    dense = torch.randn(200, 8, requires_grad=True)
    matrix = SPARSE.to_sparse_csr()
    assert counted(lambda: (matrix @ dense).sum().backward()).model_flops == 2 * 2 * VALUES * 8


def test_most_of_the_work_decides_about_the_device() -> None:
    with Counting() as counting:
        large = torch.randn(64, 64, device="meta")
        large @ large
        torch.randn(4, 4) @ torch.randn(4, 4)
    assert counting.whole().device == torch.device("meta")


# --- other libraries: operations with their names and arguments


@pytest.fixture(scope="module")
def flash_attn() -> Iterator[Any]:
    """Operations as flash_attn registers them; their kernels only make results of the right shape."""
    library = torch.library.Library("flash_attn", "DEF")
    tail = "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right"
    library.define(f"_flash_attn_forward(Tensor q, Tensor k, Tensor v, {tail}) -> (Tensor, Tensor)")
    library.define(
        "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        f"Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, {tail}) -> Tensor"
    )
    library.define(
        "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        f"SymInt max_seqlen_q, SymInt max_seqlen_k, {tail}) -> (Tensor, Tensor)"
    )
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward"):
        library.impl(name, lambda q, *args: (q.clone(), q.sum(-1)), "CPU")
    library.impl("_flash_attn_backward", lambda dout, q, *args: q.sum(-1), "CPU")
    yield torch.ops.flash_attn
    library._destroy()


TAIL = (0.0, 1.0, True)


def test_flash_attns_operations_are_known(flash_attn: Any) -> None:
    query = torch.randn(2, 64, 4, 16)  # batch, length, heads, width
    whole = 2 * 2 * 2 * 4 * 64 * 64 * 16
    assert counted(lambda: flash_attn._flash_attn_forward(query, query, query, *TAIL, -1, -1)).model_flops == whole
    back = counted(
        lambda: flash_attn._flash_attn_backward(
            query, query, query, query, query, query[..., 0], None, None, None, *TAIL, -1, -1
        )
    )
    assert (back.model_flops, back.hardware_flops) == (2 * whole, 2 * whole + whole // 2)


def test_a_sliding_window_of_flash_attn_counts_what_it_keeps(flash_attn: Any) -> None:
    query = torch.randn(1, 64, 4, 16)
    kept = sum(min(at, 7) + 1 for at in range(64))
    found = counted(lambda: flash_attn._flash_attn_forward(query, query, query, *TAIL, 7, 0))
    assert found.model_flops == pytest.approx(2 * 2 * 4 * kept * 16, abs=2)


def test_packed_sequences_of_flash_attn_do_not_see_each_other(flash_attn: Any) -> None:
    query, ends = torch.randn(14, 4, 16), torch.tensor([0, 5, 14], dtype=torch.int32)
    found = counted(lambda: flash_attn._flash_attn_varlen_forward(query, query, query, ends, ends, 9, 9, *TAIL, -1, -1))
    assert found.model_flops == 2 * 2 * 4 * 16 * (5 * 5 + 9 * 9)


# --- what torch does not see


def test_kernels_past_torch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the place and with the functions of transformer_engine's extension."""
    library: Any = types.ModuleType("transformer_engine_torch")
    library.generic_gemm = lambda left, right: left @ right
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", library)
    original = library.generic_gemm
    found = counted(lambda: library.generic_gemm(torch.ones(2, 3), torch.ones(3, 2)))
    assert list(found.uncounted) == ["transformer_engine's products"]
    assert library.generic_gemm is original


class Float8Tensor:
    """As transformer_engine's: no tensor, but it has a shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = torch.Size(shape)

    def size(self) -> torch.Size:
        return self.shape


def test_products_of_transformer_engine_take_what_their_layouts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of 32 inputs and 48 outputs on 2 x 8 rows: forward "TN", gradients "NN" and "NT"."""
    library: Any = types.ModuleType("transformer_engine_torch")
    library.generic_gemm = library.te_general_grouped_gemm = lambda *args, **kwargs: None
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", library)
    weight, inputs, outputs = torch.empty(48, 32), torch.empty(2, 8, 32), torch.empty(2, 8, 48)
    for args in ((weight, True, inputs, False), (weight, False, outputs, False), (inputs, False, outputs, True)):
        found = counted(lambda args=args: library.generic_gemm(*args, None))  # type: ignore[misc]
        assert (found.model_flops, dict(found.uncounted)) == (2 * 16 * 32 * 48, {})
    low = counted(lambda: library.generic_gemm(Float8Tensor(48, 32), True, Float8Tensor(16, 32), False, weight))
    assert dict(low.per_dtype) == {"fp8": 2 * 16 * 32 * 48}
    experts = counted(lambda: library.te_general_grouped_gemm([weight] * 2, True, [inputs, inputs[:1]], False, []))
    assert experts.model_flops == 2 * (16 + 8) * 32 * 48
    overlapped = counted(lambda: library.generic_gemm(weight, True, inputs, False, comm_overlap=object()))
    assert overlapped.model_flops == 0 and list(overlapped.uncounted) == ["transformer_engine's products"]


def test_the_scan_of_mamba_takes_nine_flops_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = types.ModuleType("selective_scan_cuda")
    library.fwd = library.bwd = lambda *args: None
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", library)
    values, states = torch.empty(2, 64, 128), torch.empty(64, 16)
    args = (values, values, states, None, None, torch.empty(64), None, None)  # u, delta, A, B, C, D, z, delta_bias
    scan = 2 * 64 * 128 * (9 * 16 + 1)
    assert counted(lambda: library.fwd(*args, True)).model_flops == scan
    back = counted(lambda: library.bwd(*args, values, None, None, None, True, False))
    assert (back.model_flops, back.hardware_flops, dict(back.uncounted)) == (2 * scan, 3 * scan, {})


def test_weights_that_are_stored_in_int8_are_multiplied_in_the_dtype_of_the_input() -> None:
    weight, scales = torch.ones(48, 32, dtype=torch.int8), torch.ones(48, dtype=torch.bfloat16)
    found = counted(lambda: torch._weight_int8pack_mm(torch.ones(16, 32, dtype=torch.bfloat16), weight, scales))
    assert dict(found.per_dtype) == {"bfloat16": 2 * 16 * 32 * 48}


def test_a_triton_kernel_that_is_launched_directly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with the class of triton.runtime.jit that launches kernels: without a GPU there is none to launch."""

    class JITFunction:
        __name__ = "my_kernel"

        def run(self, *args: Any, **kwargs: Any) -> None:
            del args, kwargs

    module: Any = types.ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    assert list(counted(lambda: JITFunction().run()).uncounted) == ["the Triton kernel my_kernel"]


def test_what_an_operation_with_a_formula_launches_is_not_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbdist.metrics.flops import register_flops

    library: Any = types.ModuleType("transformer_engine_torch")
    library.generic_gemm = lambda left, right: left @ right
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", library)

    @torch.library.custom_op("nbdist_tests::whole", mutates_args=())
    def whole(left: Tensor, right: Tensor) -> Tensor:
        return library.generic_gemm(left, right)

    register_flops("nbdist_tests::whole", lambda left, right, out_shape: 2 * left[0] * left[1] * right[1])
    found = counted(lambda: whole(torch.ones(2, 3), torch.ones(3, 2)))
    assert (found.model_flops, dict(found.uncounted)) == (24, {})


def test_threads_of_data_parallel_are_named_and_functions_wrapped_for_a_count_only() -> None:
    module = sys.modules["torch.nn.parallel.data_parallel"]
    before = module.parallel_apply
    with Counting() as counting:
        assert module.parallel_apply is not before
        with contextlib.suppress(RuntimeError):  # without a GPU it runs no threads
            module.parallel_apply([nn.Linear(2, 2)], [(torch.ones(2, 2),)])
    assert module.parallel_apply is before
    assert "the threads of DataParallel" in counting.result("").uncounted
