"""What is counted and timed of training steps on a GPU, against the textbook and the wall."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.gpu.conftest import Record

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def linear(device: str, width: int, depth: int = 8) -> tuple[Any, Any, Any]:
    """A model in bf16, its optimizer, a batch."""
    import torch
    from torch import nn

    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).to(device, torch.bfloat16)
    x = torch.randn(width // 2, width, device=device, dtype=torch.bfloat16)
    return model, torch.optim.SGD(model.parameters(), 1e-6), x


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(("every", "stall"), [(10, 0.0), (4, 0.1)], ids=["item", "stalls"])
def test_the_time_of_a_step_is_that_of_the_wall(device: str, every: int, stall: float, record_property: Record) -> None:
    from nbdist.metrics.steps import StepMeter

    model, optimizer, x = linear(device, 8192 if device == "cuda" else 256)
    began = 0.0
    with StepMeter() as meter:
        for number in range(60):
            if number == 10:
                synchronize(device)
                meter.lap()
                began = time.perf_counter()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % every == 0:
                loss.item()
                time.sleep(stall)
        synchronize(device)
        wall = (time.perf_counter() - began) / 50
        found = meter.lap()
    assert found.seconds is not None
    record_property(f"shown / wall, item() each {every}th step", f"{found.seconds / wall:.3f}")
    if device == "cuda" and found.peak is not None and found.flops is not None:
        record_property("TFLOPS, MFU", f"{found.flops / wall / 1e12:.0f}, {found.flops / wall / found.peak:.2f}")
    assert device == "cpu" or stall or found.seconds == pytest.approx(wall, rel=0.05)


def test_the_peak_of_this_gpu_is_known_and_the_estimate_is_near_it(record_property: Record) -> None:
    import torch

    from nbdist.metrics.rates import peaks

    chip = torch.cuda.get_device_properties(0)
    clock = 1e3 * getattr(chip, "clock_rate", 0)
    listed = peaks.peak(chip.name, "bf16")
    guessed = peaks.estimate(chip.name, (chip.major, chip.minor), chip.multi_processor_count, clock, "bf16")
    record_property("clock, processors", f"{clock / 1e6:.0f} MHz, {chip.multi_processor_count}")
    record_property("bf16 peak listed, estimated", f"{listed}; {guessed}")
    assert listed is not None or guessed is not None
    if listed is not None and guessed is not None and clock:
        assert guessed.tflops == pytest.approx(listed.tflops, rel=0.25)


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"])
def test_attention_counts_three_times_its_forward_whatever_kernel_runs(kernel: str) -> None:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from nbdist.metrics.flops import count

    q, kv = (torch.randn(2, 16, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def attend() -> None:
        F.scaled_dot_product_attention(q, kv, kv, is_causal=True).sum().backward()

    with sdpa_kernel(getattr(SDPBackend, kernel)):
        try:
            attend()
        except RuntimeError as error:
            pytest.skip(f"{kernel} does not run here: {str(error).splitlines()[0]}")
        found = count(attend)
    forward = 4 * 2 * 16 * 1024**2 * 128
    assert (found.model_flops / forward, found.uncounted) == (3.0, {})
    assert found.hardware_flops / forward == pytest.approx(3.5)


def test_a_convolution_in_tf32_is_held_against_tf32_s_peak(record_property: Record) -> None:
    import torch
    from torch import nn

    from nbdist.metrics.steps import StepMeter

    model = nn.Sequential(*[nn.Conv2d(512, 512, 3, padding=1) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    x = torch.randn(32, 512, 56, 56, device="cuda")
    with StepMeter() as meter:
        for _ in range(20):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        found = meter.sample()
    assert found.flops is not None and found.seconds is not None
    if found.peak is None:
        pytest.skip(f"no peak is known: {found.why}")
    rate = found.flops / found.seconds
    record_property("TFLOPS, of the peak", f"{rate / 1e12:.0f}, {rate / found.peak:.2f}")
    assert rate < found.peak


def test_work_in_a_cuda_graph_is_counted_or_named() -> None:
    import torch

    from nbdist.metrics.flops import count

    model, _, x = linear("cuda", 1024, 2)
    graphed = torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))
    found = count(lambda: graphed(x).sum().backward())
    assert found.model_flops or found.uncounted


def test_counting_a_compiled_flex_attention_takes_no_more_memory_than_there_is(record_property: Record) -> None:
    """The counted step runs eagerly, where FlexAttention makes all scores; it is given up or bounded."""
    import torch
    from torch import nn
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from nbdist.metrics.steps import StepMeter

    length = 8192
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 256), None, None, length, length)
    attend = torch.compile(flex_attention)
    weights = nn.Linear(1024, 3072).cuda().bfloat16()
    optimizer = torch.optim.SGD(weights.parameters(), 1e-6)
    x = torch.randn(1, length, 1024, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        query, key, value = [each.view(1, length, 16, 64).transpose(1, 2) for each in weights(x).chunk(3, -1)]
        attend(query, key, value, block_mask=mask).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    compiled = torch.cuda.max_memory_allocated() // MIB
    with StepMeter() as meter:
        for _ in range(5):
            step()
        why = meter.sample().why
    measured = torch.cuda.max_memory_allocated() // MIB
    record_property("MiB compiled, with the meter", f"{compiled}, {measured}; {why}")
    assert measured * MIB < torch.cuda.get_device_properties(0).total_memory


def test_measuring_does_not_change_a_compiled_model_with_dropout(device: str) -> None:
    import torch
    from torch import nn

    from nbdist.metrics.steps import StepMeter

    def losses(measured: bool) -> list[float]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to(device)
        backend = "inductor" if device == "cuda" else "aot_eager"
        step_of = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        x = torch.ones(16, 64, device=device)
        meter = StepMeter()
        if measured:
            meter.start()
        found = []
        for _ in range(8):
            loss = step_of(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        meter.stop()
        return found

    assert losses(True) == losses(False)


def test_advice_is_measured_and_leaves_random_numbers_and_memory_alone(device: str, record_property: Record) -> None:
    """A vocabulary that is odd, in bf16: rows of the result begin at 2 bytes."""
    import torch
    from torch import nn

    from nbdist.metrics import steps
    from nbdist.metrics.advice.shapes import advise_on_shapes
    from nbdist.metrics.node import active_meter

    rows, width, vocabulary = (8192, 1024, 50257) if device == "cuda" else (64, 32, 1003)
    model = nn.Linear(width, vocabulary, bias=False).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    steps.start()
    try:
        for _ in range(8):
            model(torch.randn(rows, width, device=device, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronize(device)
        active_meter.end_lap()
        state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        found = advise_on_shapes(20)
    finally:
        active_meter.stop()
    assert torch.equal(state, torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state())
    assert found.why == "" and any(f"width {vocabulary} -> " in tried for tried in found.tried)
    record_property("gains of a vocabulary of 50304", "; ".join(f"{one.size} -> {one.other}" for one in found.changes))
    if device == "cuda":
        assert torch.cuda.memory_allocated() == held
        assert any(line.alignment == 2 and line.tile is not None for line in found.lines)
