"""What the memory's figures say of a GPU, and that a look at them never waits for it."""

from __future__ import annotations

import time

import pytest

import nbdist
from testbed.kernel import wait_until
from tests.gpu.conftest import Record, values

pytestmark = pytest.mark.gpu
MIB, GIB = 1 << 20, 1 << 30


def test_nvml_answers_soon_and_makes_no_context(record_property: Record) -> None:
    import os

    import pynvml

    from nbdist.metrics.node.nvml import Nvml

    driver = Nvml()
    began = time.perf_counter()
    found = driver.read()[0]
    record_property("a look at all GPUs", f"{1e3 * (time.perf_counter() - began):.2f} ms")
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    users = {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    record_property("kept by the driver", f"{(memory.total - memory.used - memory.free) // MIB} MiB")
    assert os.getpid() not in users and not found.why
    assert found.used == pytest.approx(memory.used, abs=64 * MIB) and found.total == memory.total
    driver.close()


def test_ranks_answer_while_the_allocator_waits_for_the_gpu(two: nbdist.Session, record_property: Record) -> None:
    if two.ranks[0].device == "cpu":
        pytest.skip("no GPU")
    background = two.run_in_background(
        "import torch\nheld = torch.empty(8 << 30, dtype=torch.uint8, device=device)\ndel held\n"
        "torch.cuda._sleep(int(1e10))  # about 5 s\nprint('waiting', flush=True)\ntorch.cuda.empty_cache()",
        ranks=[0],
    )
    wait_until(lambda: "waiting" in background.output[0].stdout, "rank 0 to wait for the GPU", 30)
    began = time.perf_counter()
    row = two.status()[0]
    seconds = time.perf_counter() - began
    was_waiting = not background.done
    background.wait(30)
    record_property("status took", f"{1e3 * seconds:.1f} ms")
    assert was_waiting and row["memory"] is not None and seconds < 0.5


def test_the_parts_of_a_gpu_s_memory_add_up(two: nbdist.Session, record_property: Record) -> None:
    import pynvml

    if two.ranks[0].device == "cpu":
        pytest.skip("no GPU")
    two.run("import torch\nkept = torch.ones(1 << 30, dtype=torch.uint8, device=device); torch.cuda.synchronize()")
    reserved = sum(values(two, "import torch\ntorch.cuda.memory_reserved()"))
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    shares = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    used = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
    mine = [shares.get(info.pid) for info in two.ranks]
    record_property("MiB used, of each rank by NVML, reserved by torch", [used // MIB, mine, reserved // MIB])
    pynvml.nvmlShutdown()
    if None in mine:
        pytest.skip("NVML does not name these processes here (a container)")
    assert reserved <= sum(each or 0 for each in mine) <= used
    assert (sum(each or 0 for each in mine) - reserved) / 2 < 2 * GIB  # contexts


def test_a_rank_reports_what_torch_holds(two: nbdist.Session) -> None:
    two.run("import torch\nkept = torch.ones(1 << 28, dtype=torch.uint8, device=device)")
    rows = two.status()
    if two.ranks[0].device == "cpu":
        assert [row["device"] for row in rows] == ["cpu"] * 2
        return
    assert all(row["device_memory"] >= 1 << 28 for row in rows)


def test_free_gives_a_rank_s_cache_back(two: nbdist.Session) -> None:
    two.run("import torch\nlost = torch.ones(1 << 28, dtype=torch.uint8, device=device)\ndel lost")
    freed = two.free()
    assert two.ranks[0].device == "cpu" or all(each["device"] >= 1 << 28 for each in freed.values())
