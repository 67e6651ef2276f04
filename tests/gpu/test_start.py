"""Ranks come up on a GPU, and what the notebook did with CUDA before does not keep them from it."""

from __future__ import annotations

import time

import pytest

import nbdist
from testbed.kernel import Kernel, wait_until
from tests.gpu.conftest import Record, value, values

pytestmark = pytest.mark.gpu


def test_two_ranks_compute_on_the_gpu(device: str, record_property: Record) -> None:
    began = time.perf_counter()
    with nbdist.Session(2) as session:
        record_property("started in", f"{time.perf_counter() - began:.2f} s")
        found = values(session, "import torch\ndevice.type, torch.ones(3, device=device).sum().item()")
        assert found == [(device, 3.0)] * 2
        record_property("backend", value(session, "torch.distributed.get_backend_config()"))
        began = time.perf_counter()
        session.restart()
        record_property("restarted in", f"{time.perf_counter() - began:.2f} s")
        assert value(session, "import torch\ntorch.ones(3, device=device).sum().item()") == 3.0


def test_a_launch_works_after_the_notebook_has_used_the_gpu(kernel: Kernel, device: str) -> None:
    kernel.ok(f"import nbdist, torch\nx = torch.ones(1, device={device!r})")
    kernel.ok(
        f"def f(): return torch.ones(1, device={device!r}).item()\n"
        "found = nbdist.notebook_launcher(f, num_processes=2, start_method='warm')"
    )
    assert kernel.value("found") == [1.0, 1.0]


def test_a_fork_is_refused_after_the_notebook_has_used_the_gpu(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\nimport nbdist, torch")
    kernel.ok("x = torch.ones(1).cuda()")
    outcome = kernel.run("nbdist.notebook_launcher(lambda: 1, num_processes=2, start_method='fork')")
    assert outcome.status == "error" and "CUDA was initialized" in outcome.evalue and "cell 2" in outcome.evalue


def test_a_rank_with_a_gpu_of_its_own_is_connected_without_a_first_collective(device: str) -> None:
    if device == "cpu":
        pytest.skip("no GPU")
    with nbdist.Session(1) as session:
        code = "import torch.distributed as dist\ndist.group.WORLD._get_backend(device)._is_initialized()"
        wait_until(lambda: value(session, code) is True, "NCCL to connect", 30)
        assert value(session, "dist.group.WORLD.bound_device_id is None")


def test_ranks_on_a_gpu_have_what_libraries_read_but_once(two: nbdist.Session) -> None:
    if two.ranks[0].device == "cpu":
        pytest.skip("no GPU")
    code = "import torch\nx = torch.ones(1, device=device)\ntorch.cuda.memory._snapshot()['allocator_settings']"
    assert value(two, code)["expandable_segments"] is True
