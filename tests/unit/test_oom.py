"""What is said of an out-of-memory error, and which tensors are named in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.metrics.allocation import oom, tensors
from nbdist.metrics.allocation.oom import Account
from nbdist.metrics.allocation.tensors import Block
from nbdist.metrics.node.sample import GpuSample
from testbed.kernel import wait_until
from testbed.nvml import FakeNvml, machine
from tests.stand_ins.cuda import ASSERTED, OUT_OF_MEMORY, Torch, accelerator_error

GIB = 1 << 30


class OutOfMemoryError(RuntimeError):
    """Called as torch's is, which a CPU build raises nowhere."""


CUDA_WORDS = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 79.10 GiB of which 3.20 GiB is "
    "free. Including non-PyTorch memory, this process has 75.90 GiB memory in use."
)


def caught(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:
        function()
    return info.value


@pytest.mark.parametrize(
    ("error", "device", "asked"),
    [
        (OutOfMemoryError(CUDA_WORDS), "cuda:1", 20 * GIB),
        (
            MemoryError("Unable to allocate 7.50 GiB for an array with shape (1,) and data type int8"),
            "cpu",
            15 * GIB // 2,
        ),
        (MemoryError(), "cpu", None),
        (RuntimeError("CUDA error: device-side assert triggered"), "", None),
        (ValueError("out of memory"), "", None),
    ],
)
def test_what_ran_out_and_how_much_was_asked_for_is_in_the_errors_words(
    error: BaseException, device: str, asked: int | None
) -> None:
    assert (oom.device_of(error), oom.asked_for(error)) == (device, asked)


def test_torchs_own_words_for_the_cpu_are_known() -> None:
    error = caught(lambda: torch.empty(1 << 50, dtype=torch.uint8))
    assert (oom.device_of(error), oom.asked_for(error)) == ("cpu", 1 << 50)


def test_an_error_on_the_cpu_is_explained_with_the_largest_tensors_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2000, 2000))
    names: dict[str, Any] = {"model": model, "data": {"train": [np.ones(3_000_000)]}, "step": 3}

    def train() -> None:
        scratch = torch.ones(8_000_000)
        torch.empty(scratch.numel() << 30)

    text = oom.explain(caught(train), names)
    assert text.splitlines()[0] == "nbdist: out of memory on cpu"
    assert "asked for          30.5 PiB" in text
    found = [text.find(name) for name in ("scratch (float32, 8000000)", "data['train'][0]", "model.0.weight")]
    assert -1 not in found
    assert found == sorted(found)
    assert "%distributed free" in text


def test_other_errors_are_not_explained() -> None:
    assert oom.explain(caught(lambda: 1 / 0), {}) == ""


def test_the_account_of_a_gpu_tells_who_has_what() -> None:
    account = Account(
        device="cuda:0",
        asked=20 * GIB,
        total=80 * GIB,
        free=3 * GIB,
        allocated=60 * GIB,
        cached=8 * GIB,
        outside=2 * GIB,
        others=7 * GIB,
    )
    text = oom.render(account, [Block("cache[3]", 9 * GIB, "cuda:0", (9, 1024), "float32")])
    assert text.splitlines() == [
        "nbdist: out of memory on cuda:0",
        "  asked for          20.0 GiB",
        "  free                3.0 GiB  of 80.0 GiB",
        "  in tensors         60.0 GiB",
        "  cached              8.0 GiB  held by torch, in no tensor",
        "  this process        2.0 GiB  outside torch: context, kernels, libraries",
        "  other processes     7.0 GiB",
        "  largest tensors     9.0 GiB  cache[3] (float32, 9 x 1024)",
        "  what the traceback above and Out hold is freed by `%distributed free`",
    ]


def test_tensors_too_small_to_matter_are_not_listed() -> None:
    account = Account(device="cpu", asked=None, total=80 * GIB, free=3 * GIB, allocated=GIB, cached=None)
    text = oom.render(
        account, [Block("w", 2 << 20, "cpu", (2, 262_144), "float32"), Block("t", 88, "cpu", (22,), "float32")]
    )
    assert "w (float32" in text and "t (float32" not in text


def test_enough_memory_in_pieces_is_called_that() -> None:
    account = Account(device="cuda:0", asked=2 * GIB, total=80 * GIB, free=GIB, allocated=60 * GIB, cached=5 * GIB)
    assert "expandable_segments:True" in oom.render(account)


def test_what_is_set_already_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    account = Account(device="cuda:0", asked=2 * GIB, total=80 * GIB, free=GIB, allocated=60 * GIB, cached=5 * GIB)
    assert "expandable_segments" not in oom.render(account)


def test_where_the_driver_hides_processes_what_is_outside_torch_is_one_figure() -> None:
    assert oom.share(GpuSample("GPU-1", 0), pid=7, used=30, reserved=20) == (None, 10)
    assert oom.share(None, pid=7, used=30, reserved=20) == (None, 10)
    account = Account(device="cuda:0", total=GIB, free=0, allocated=GIB // 2, cached=0, others=GIB // 2)
    assert "outside torch       512 MiB  contexts, libraries and other processes" in oom.render(account)


def test_where_the_driver_tells_processes_apart_each_has_its_share() -> None:
    gpu = GpuSample("GPU-1", 0, by_pid={7: 24, 8: 6})
    assert oom.share(gpu, pid=7, used=30, reserved=20) == (4, 6)


# --- the driver, on a GPU of a stand-in's


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A machine whose GPU 1 has 80 GiB, of which torch holds 60 here and a context takes 2."""
    state = machine(2)
    state["gpus"][1].update(total=80 * GIB + GIB // 2, used=72 * GIB, processes={"self": 62 * GIB, "1": 10 * GIB})
    driver = FakeNvml(state)
    stand_in = Torch("GPU-00000000", "GPU-00000001", total=80 * GIB, taken=12 * GIB)
    stand_in.gpus[1].allocate(60 * GIB)
    monkeypatch.setattr(torch, "cuda", stand_in.cuda)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    yield driver
    state["gpus"][0]["seconds"] = 0.0
    wait_until(lambda: not driver.opened, "the driver to be let go of")


def explained() -> list[str]:
    return [" ".join(line.split()) for line in oom.explain(OutOfMemoryError(CUDA_WORDS), {}).splitlines()]


def test_the_driver_tells_what_is_this_process_s_outside_torch(driver: FakeNvml) -> None:
    assert "this process 2.0 GiB outside torch: context, kernels, libraries" in explained()
    assert "other processes 10.0 GiB" in explained()


def test_the_total_is_nvidia_smi_s_and_names_what_the_driver_keeps(driver: FakeNvml) -> None:
    assert "free 8.0 GiB of 80.5 GiB, of which the driver keeps 512 MiB" in explained()


def test_memory_that_cuda_itself_could_not_have_is_explained_too(driver: FakeNvml) -> None:
    """For a context, a library or NCCL, past torch's allocator: on the GPU that is in use."""
    torch.cuda.current_device = lambda: 1
    error = accelerator_error("out of memory", "cudaErrorMemoryAllocation", OUT_OF_MEMORY)
    assert oom.explain(error, {}).startswith("nbdist: out of memory on cuda:1")
    assert oom.explain(accelerator_error("device-side assert triggered", "cudaErrorAssert", ASSERTED), {}) == ""


def test_a_driver_that_never_answers_holds_up_no_explanation(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.metrics.node.driver.PATIENCE", 0.1)
    driver.state["gpus"][0]["seconds"] = 30.0
    began = driver.calls
    assert "outside torch 12.0 GiB contexts, libraries and other processes" in explained()
    assert driver.opened and driver.calls > began  # it is still being asked


# --- names


def names_of(**namespace: Any) -> dict[str, int]:
    return {block.name: block.size for block in tensors.find(namespace).values()}


def test_parameters_gradients_and_optimizer_state_have_the_names_that_code_uses() -> None:
    layer = torch.nn.Linear(3, 1, bias=False)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(3)).backward()
    adam.step()
    found = names_of(layer=layer, adam=adam)
    assert {"layer.weight", "layer.weight.grad"} <= set(found)
    assert any("exp_avg" in name for name in found)


def test_memory_that_several_names_share_counts_once_by_the_shortest_way_to_it() -> None:
    weights = torch.ones(1000)
    assert names_of(views={"half": weights[:500]}, weights=weights) == {"weights": 4000}
    array = np.ones(1000)
    assert names_of(part=[array[10:20]], array=array) == {"array": 8000}


def test_looking_runs_nothing_of_the_users() -> None:
    class Lazy:
        def __init__(self) -> None:
            self.held = torch.ones(2)

        @property
        def costly(self) -> None:
            raise AssertionError

        def __getattr__(self, name: str) -> None:
            raise AssertionError

    assert names_of(lazy=Lazy()) == {"lazy.held": 8}


def test_what_holds_itself_is_looked_at_once() -> None:
    ring: list[Any] = [torch.ones(1)]
    ring.append(ring)
    assert names_of(ring=ring) == {"ring[0]": 4}


def test_tensors_without_memory_are_left_out() -> None:
    assert names_of(meta=torch.ones(5, device="meta"), sparse=torch.ones(2).to_sparse()) == {}
