"""A process as a sample, which GPU it means, and what of that GPU's memory is the process's but not torch's."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from nbdist.metrics.node import device
from nbdist.metrics.node.nvml import Nvml
from nbdist.metrics.node.sample import GpuSample, NodeSample, RankSample, gpu_of, non_torch
from testbed.nvml import GIB, FakeNvml, gpu, machine
from tests.stand_ins.cuda import Torch


def with_gpus(*uuids: str, reserved: dict[int, int] | None = None) -> Torch:
    """A torch that sees these GPUs, in this order, and has reserved so much on each."""
    found = Torch(*uuids)
    for index, amount in (reserved or {}).items():
        found.gpus[index].allocate(amount)
    return found


def look(monkeypatch: pytest.MonkeyPatch, torch: Torch, own: int = 0) -> RankSample:
    monkeypatch.setitem(sys.modules, "torch.cuda", torch.cuda)
    return device.look(3, gpu=own)


NODE = NodeSample("here", 0.0, [*Nvml(FakeNvml(machine(2))).read(), GpuSample("MIG-2f00", 2), GpuSample("", 3)])
GPU = NODE.gpus[0]


def test_a_process_without_cuda_has_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, with_gpus())
    assert (found.rank, found.pid, found.device, found.gpu, found.reserved) == (3, os.getpid(), "cpu", "", None)
    assert found.private


def test_memory_that_a_process_was_forked_with_is_not_its_own() -> None:
    assert device.look(0, inherited=1 << 50).private == 0


def test_a_process_tells_of_its_own_gpu_whichever_thread_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, with_gpus("GPU-a", "GPU-b", reserved={0: GIB, 1: 4}), own=1)
    assert (found.device, found.gpu, found.reserved, found.allocated, found.ooms) == ("cuda:1", "GPU-b", 4, 4, 0)


def test_a_process_that_uses_another_gpu_than_its_own_tells_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, with_gpus("GPU-a", "GPU-b", "GPU-c", reserved={1: 1, 2: GIB}))
    assert found.device == "cuda:2"


def test_a_process_that_uses_none_yet_tells_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, with_gpus("GPU-a", "GPU-b"), own=1).device == "cuda:1"


def test_what_torch_says_instead_of_an_answer_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = with_gpus("GPU-a")

    def refuse(index: int) -> None:
        raise RuntimeError("no such device\nmore")

    torch.cuda.get_device_properties = refuse
    found = look(monkeypatch, torch)
    assert found.why.endswith("RuntimeError: no such device")
    assert found.private


def test_after_a_kernel_has_failed_torchs_own_counters_are_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = with_gpus("GPU-a", reserved={0: GIB})
    torch.lose_context()
    found = look(monkeypatch, torch)
    assert (found.reserved, found.why) == (GIB, "")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("0,1", ["GPU-00000000", "GPU-00000001"]),
        ("1,0", ["GPU-00000001", "GPU-00000000"]),
        ("1", ["GPU-00000001"]),
        ("GPU-00000001", ["GPU-00000001"]),
        ("GPU-00000001,0", ["GPU-00000001", "GPU-00000000"]),
        ("MIG-2f00", ["MIG-2f00"]),
    ],
)
def test_whatever_cuda_visible_devices_says_a_rank_names_its_gpu(
    visible: str, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices are nowhere translated, so the variable does not matter: CUDA heeds it, and torch tells the UUID."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    named = [look(monkeypatch, with_gpus(*seen), own=index).gpu for index in range(len(seen))]
    assert [found.uuid for name in named if (found := gpu_of(name, [NODE]))] == seen


def test_an_empty_cuda_visible_devices_leaves_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_of(look(monkeypatch, with_gpus()).gpu, [NODE]) is None


def test_a_torch_that_does_not_tell_uuids_has_no_gpu_rather_than_any() -> None:
    assert gpu_of("", [NODE]) is None


def test_memory_beyond_torch_is_the_processs_share_without_what_torch_holds() -> None:
    sample = Nvml(FakeNvml({"init": None, "gpus": [gpu(processes={"self": 3 * GIB})]})).read()[0]
    assert non_torch(RankSample(0, pid=os.getpid(), reserved=GIB), sample) == 2 * GIB


def test_in_a_container_where_the_driver_hides_processes_it_is_not_known() -> None:
    assert non_torch(RankSample(0, pid=7, reserved=GIB), GPU) is None


def test_a_process_of_the_host_with_the_same_number_is_not_taken_for_the_rank() -> None:
    sample = Nvml(FakeNvml({"init": None, "gpus": [gpu(processes={"self": GIB})]})).read()[0]
    assert non_torch(RankSample(0, pid=os.getpid(), reserved=2 * GIB), sample) is None


def test_without_torchs_own_figure_it_is_not_known() -> None:
    sample = Nvml(FakeNvml({"init": None, "gpus": [gpu(processes={"self": GIB})]})).read()[0]
    assert non_torch(RankSample(0, pid=os.getpid()), sample) is None


@pytest.mark.gpu
def test_torch_and_the_driver_name_a_gpu_alike() -> None:
    kept = torch.ones(1 << 20, device="cuda:0")
    node = NodeSample("here", 0.0, Nvml().read())
    found = device.look(0)
    sample = gpu_of(found.gpu, [node])
    assert sample is not None and sample.name == torch.cuda.get_device_name(0)
    assert found.reserved is not None and sample.used is not None and kept.nbytes <= found.reserved <= sample.used
