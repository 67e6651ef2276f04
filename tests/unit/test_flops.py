"""FLOP counts equal the textbook's, to the last one, and counting leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbdist.errors import UsageError
from nbdist.metrics import flops
from nbdist.metrics.compute.counting import Counting, FlopCount
from nbdist.metrics.flops import count
from testbed import closed_forms
from testbed.closed_forms import Gpt, Graphs, gpt, gpt_blocks, gpt_scores_again, indices, loss_of

pytestmark = pytest.mark.torch_private

B, T = 2, 16


def live(work: Callable[[], object]) -> FlopCount:
    with Counting() as counting:
        work()
    return counting.result("")


# --- models


def test_a_linear_layer_takes_two_flops_a_weight_and_row_forward_and_twice_that_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs = torch.randn(5, 8, requires_grad=True)
    assert count(model, inputs, backward=False).model_flops == 2 * 5 * (8 * 16 + 16 * 4)
    assert count(model, inputs).model_flops == 3 * 2 * 5 * (8 * 16 + 16 * 4)


def test_the_gradient_of_an_input_that_nobody_wants_is_not_counted() -> None:
    assert count(nn.Linear(8, 16), torch.randn(5, 8)).model_flops == 2 * 2 * 5 * 8 * 16


@pytest.mark.parametrize("attention", ["manual", "fused"])
def test_a_gpt_is_counted_exactly_on_meta_and_live(attention: str) -> None:
    model, ids = Gpt(attention), indices(B, T)
    assert count(model, {"input_ids": ids, "labels": ids}).model_flops == gpt(B, T)
    found = live(lambda: loss_of(model, ids).backward())
    assert found.model_flops == gpt(B, T)
    assert found.hardware_flops - found.model_flops == (gpt_scores_again(B, T) if attention == "fused" else 0)
    assert not found.uncounted


def test_embedded_tokens_are_counted_once() -> None:
    model, ids = Gpt(), indices(B, T)
    assert live(lambda: loss_of(model, ids).backward()).tokens == B * T


@pytest.mark.parametrize("reentrant", [True, False])
def test_nor_are_they_counted_again_where_they_are_recomputed(reentrant: bool) -> None:
    layer, ids = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8)), indices(B, T)
    start = torch.ones((), requires_grad=True)  # without which a reentrant checkpoint has nothing to differentiate

    def scaled(ids: Tensor, factor: Tensor) -> Tensor:
        return layer(ids) * factor

    def step() -> None:
        torch.utils.checkpoint.checkpoint(scaled, ids, start, use_reentrant=reentrant).sum().backward()

    assert live(step).tokens == B * T


def test_embedded_positions_and_types_are_no_tokens() -> None:
    words, positions, types = nn.Embedding(50, 8), nn.Embedding(T, 8), nn.Embedding(2, 8)
    ids = torch.randint(50, (B, T))

    def forward() -> Tensor:
        return words(ids) + positions(torch.arange(T)[None]) + types(torch.zeros_like(ids))

    assert live(forward).tokens == B * T


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut, as in ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


def test_a_resnet_is_counted_exactly() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    first, blocks, head = 8 * 8 * 7 * 7 * 3 * 8, 2 * 8 * 8 * 3 * 3 * 8 * 8, 8 * 10
    truth = 2 * B * (2 * first + 3 * blocks + 3 * head)  # nobody wants the gradient of the image
    assert count(model, torch.randn(B, 3, 16, 16)).model_flops == truth


@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_and_depthwise_convolutions_take_their_share(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(32, 32, 3, padding=1, groups=groups, bias=False)
    inputs = torch.randn(B, 32, 8, 8, requires_grad=True)
    assert count(layer, inputs).model_flops == 3 * 2 * B * 8 * 8 * 3 * 3 * 32 * 32 // groups


@pytest.mark.parametrize("where", ["meta", "live"])
def test_an_lstm_is_counted_whatever_kernel_runs_it(where: str) -> None:
    model = nn.LSTM(8, 16, num_layers=2, bidirectional=True)
    inputs = torch.randn(5, B, 8, requires_grad=True)
    truth = 3 * 2 * 5 * B * 2 * 4 * 16 * ((8 + 16) + (32 + 16))
    if where == "live":
        assert live(lambda: model(inputs)[0].sum().backward()).model_flops == truth
    else:
        assert count(model, inputs, backward=False).model_flops == truth // 3


def test_multi_head_attention_counts_the_same_in_one_kernel() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    inputs = torch.randn(B, T, 32)
    truth = 2 * B * T * (4 * 32 * 32 + 2 * 32 * 64) + 4 * B * T * T * 32
    with torch.no_grad():
        assert live(lambda: model.train()(inputs)).model_flops == truth
        fast = live(lambda: model.eval()(inputs))
        assert fast.model_flops == truth and list(fast.per_op) == ["aten._transformer_encoder_layer_fwd"]
        one = nn.MultiheadAttention(32, 4, batch_first=True).eval()
        assert live(lambda: one(inputs, inputs, inputs)).model_flops == 8 * B * T * 32 * 32 + 4 * B * T * T * 32


has_grouped_products = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "CPU")
    and not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "CompositeExplicitAutograd"),
    reason="this torch has the products of experts for GPUs alone",
)


@has_grouped_products
def test_experts_are_counted() -> None:
    rows, experts = torch.randn(32, 16, dtype=torch.bfloat16), torch.randn(2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([8, 32], dtype=torch.int32)
    assert live(lambda: torch._grouped_mm(rows, experts, offs=ends)).model_flops == 2 * 32 * 16 * 8


@has_grouped_products
@pytest.mark.parametrize("padded", ["rows", "columns"])
def test_padded_rows_of_experts_count_neither_forward_nor_backward(padded: str) -> None:
    """56 rows of 160 belong to an expert."""
    rows = torch.randn(160, 64, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randn(4, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([8, 24, 40, 56], dtype=torch.int32)

    def work() -> None:
        if padded == "rows":
            torch._grouped_mm(rows, experts, offs=ends).square().sum().backward()
        else:
            torch._grouped_mm(experts.transpose(1, 2), rows.T, offs=ends).square().sum().backward()

    assert live(work).model_flops == 3 * 2 * 56 * 64 * 32


def test_products_with_vectors_and_of_integers_are_counted() -> None:
    matrix, vector = torch.randn(6, 8), torch.randn(8)
    assert live(lambda: matrix @ vector).model_flops == 2 * 6 * 8
    assert live(lambda: vector @ vector).model_flops == 2 * 8
    bytes_ = torch.ones(32, 16, dtype=torch.int8)
    assert live(lambda: torch._int_mm(bytes_, bytes_.T.contiguous())).model_flops == 2 * 32 * 16 * 32


def test_solving_equations_is_counted() -> None:
    matrix, right = torch.eye(9), torch.randn(9, 4)
    assert live(lambda: torch.linalg.solve(matrix, right)).model_flops == 2 * 9**3 // 3 + 2 * 9 * 9 * 4


def test_inference_mode_hides_nothing() -> None:
    with torch.inference_mode():
        assert live(lambda: nn.Linear(8, 16)(torch.randn(B, T, 8))).model_flops == 2 * B * T * 8 * 16


def test_what_is_multiplied_in_which_dtype_is_told() -> None:
    model = nn.Linear(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert live(lambda: model(torch.randn(5, 8))).per_dtype == {"bfloat16": 2 * 5 * 8 * 16}


# --- recomputation


@pytest.mark.parametrize("where", ["meta", "live"])
def test_reentrant_checkpoints_run_each_block_once_more(where: str) -> None:
    model, ids = Gpt("manual", "reentrant"), indices(B, T)
    found = count(model, ids) if where == "meta" else live(lambda: loss_of(model, ids).backward())
    assert found.model_flops == gpt(B, T)
    assert found.hardware_flops - found.model_flops == gpt_blocks(B, T)


@pytest.mark.parametrize("early_stop", [True, False])
def test_other_checkpoints_leave_out_what_nothing_needs(early_stop: bool) -> None:
    model, ids = Gpt("manual", "not reentrant"), indices(B, T)
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        found = live(lambda: loss_of(model, ids).backward())
    last = 2 * B * T * closed_forms.LAYERS * 4 * closed_forms.WIDTH**2  # `down`, whose result is only added
    assert found.model_flops == gpt(B, T)
    assert found.hardware_flops - found.model_flops == gpt_blocks(B, T) - (last if early_stop else 0)


def test_a_pass_that_is_differentiated_again_is_no_recomputation() -> None:
    layer, inputs = nn.Linear(8, 16, bias=False), torch.randn(5, 8, requires_grad=True)

    def penalty() -> None:
        (gradient,) = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
        gradient.square().sum().backward()

    found = live(penalty)
    assert found.model_flops == found.hardware_flops > 0


def test_products_in_an_optimizer_are_hardware_flops_only() -> None:
    with Counting() as counting, torch.no_grad():
        counting.in_optimizer = True
        torch.ones(4, 4) @ torch.ones(4, 4)
    found = counting.result("")
    assert (found.model_flops, found.hardware_flops) == (0, 2 * 4**3)


# --- what nobody knows


@torch.library.custom_op("nbdist_tests::gemm", mutates_args=())
def gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def test_an_operation_without_a_formula_is_named_until_it_has_one() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    before = live(lambda: gemm(a, b))
    assert (before.model_flops, before.uncounted) == (0, {"nbdist_tests.gemm": 1})
    assert "register_flops" in str(before)
    flops.register_flops("nbdist_tests::gemm", lambda a, b, out_shape: 2 * a[0] * a[1] * b[1])
    assert live(lambda: gemm(a, b)).model_flops == 2 * 3 * 4 * 5


def test_a_formula_that_raises_costs_the_count_and_not_the_step() -> None:
    def wrong(*_: Any, **__: Any) -> int:
        raise ValueError("no idea")

    flops.register_flops(gemm, wrong)
    results = []
    found = live(lambda: results.append(gemm(torch.ones(2, 2), torch.ones(2, 2))))
    assert len(results) == 1 and "no idea" in next(iter(found.uncounted))


@pytest.mark.parametrize("operation", ["mylib::nothing", "nothing", 7])
def test_a_formula_for_no_operation_is_refused(operation: Any) -> None:
    with pytest.raises(UsageError, match="is not an operation"):
        flops.register_flops(operation, lambda out_shape: 0)


def test_a_formula_that_is_no_function_is_refused() -> None:
    with pytest.raises(UsageError, match="a formula is a function, not 7"):
        flops.register_flops("aten::mm", 7)  # type: ignore[arg-type]


# --- what is left behind


class Modes(torch.utils.data.Dataset[int]):
    """How many dispatch modes are active where an item is made."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return torch._C._len_torch_dispatch_stack()


def test_a_process_that_is_forked_meanwhile_does_not_count() -> None:
    def work() -> None:
        found.extend(torch.utils.data.DataLoader(Modes(), num_workers=1, multiprocessing_context="fork"))

    found: list[Tensor] = []
    live(work)
    assert [int(each) for each in found] == [0, 0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of dynamo's own
@pytest.mark.parametrize("how", ["torch.compile", "compile()", "per block"])
def test_compiled_code_is_still_compiled_after_a_count(how: str) -> None:
    torch._dynamo.reset()
    backend, bare = Graphs(), Gpt()
    model: Any = bare
    ids = indices(B, T)
    if how == "torch.compile":
        model = torch.compile(bare, backend=backend)
    parts: dict[str, Any] = {"compile()": [bare], "per block": bare.blocks}
    for part in parts.get(how, []):
        part.compile(backend=backend)
    loss_of(model, ids).backward()
    graphs = backend.runs
    assert live(lambda: loss_of(model, ids).backward()).model_flops == gpt(B, T)
    assert count(model, ids).model_flops == gpt(B, T)
    assert backend.runs == graphs > 0
    loss_of(model, ids).backward()
    assert backend.runs == 2 * graphs


class Moody(nn.Module):
    """Depends on its data, so it can't run without any; and changes by running."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x))) if x.sum() < 1e9 else x


def test_a_model_that_needs_values_runs_in_place_and_is_left_as_it_was() -> None:
    model = Moody()
    model(torch.randn(4, 8)).sum().backward()
    averages = model.norm.running_mean
    assert averages is not None
    gradient, mean = model.layer.weight.grad, averages.clone()
    inputs, state = torch.randn(4, 8), torch.random.get_rng_state()
    found = count(model, inputs)
    assert found.model_flops == 2 * 2 * 4 * 8 * 8 and found.how.startswith("run in place, because")
    assert model.layer.weight.grad is gradient and torch.equal(averages, mean)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_meta_copy_takes_no_memory_and_shares_nothing() -> None:
    model = nn.Linear(1 << 20, 1 << 20, device="meta")  # 4 TiB
    assert count(model, torch.empty(1, 1 << 20, device="meta")).model_flops == 2 * 2 * (1 << 40)
    assert model.weight.grad is None


def test_nothing_of_counting_stays_in_torch() -> None:
    engine, stance = torch.autograd._engine_run_backward, torch._dynamo.eval_frame._stance
    with pytest.raises(ZeroDivisionError), Counting():
        _ = 1 / 0
    assert torch.autograd._engine_run_backward is engine
    assert torch._dynamo.eval_frame._stance == stance
    assert torch._C._len_torch_dispatch_stack() == 0


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.Linear(2, 2),), "needs a batch for Linear"),
        ((7,), "wants a model and a batch"),
        ((lambda: None, torch.ones(2)), "with a model only"),
    ],
)
def test_a_wrong_call_says_what_is_right(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        count(*arguments)


def test_a_model_that_gives_nothing_to_differentiate_is_named() -> None:
    with pytest.raises(UsageError, match="backward=False"):
        count(nn.Flatten(), torch.ones(2, 2))
