"""What ranks are told on a machine with GPUs: a stand-in for the driver says that there are some."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import Kernel
from testbed.nvml import as_module, machine
from tests.stand_ins import heartbeat

NAMES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# Both kinds of errors that torch raises once a kernel has failed: its own, and those of libraries on top of CUDA.
LOSE = """%%distributed
import torch
def lost():
    error = torch.AcceleratorError("CUDA error: words")
    error.error_code = 710
    return error
"""
LOSE_LATER = """%%distributed -r 1
class Stream:
    def query(self): raise lost()
torch.cuda.is_initialized = lambda: True
torch.cuda.current_stream = lambda: Stream()
raise RuntimeError("words of a library")
"""


@pytest.fixture
def machine_with_gpus(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel on a machine with two GPUs."""
    as_module(tmp_path, machine(2))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Kernel(PYTHONPATH=path) as kernel:
        kernel.ok("%load_ext nbdist")
        yield kernel


def on_ranks(kernel: Kernel, expression: str) -> list[Any]:
    return list(kernel.value(f"__import__('nbdist').get_session().pull({expression!r})"))


def test_ranks_on_gpus_find_what_libraries_read_but_once(machine_with_gpus: Kernel) -> None:
    machine_with_gpus.ok("%env CUBLAS_WORKSPACE_CONFIG=:16:8\n%distributed start -n 2 --backend gloo")
    found = on_ranks(machine_with_gpus, f"{{name: __import__('os').environ.get(name) for name in {NAMES}}}")
    assert found == [dict(zip(NAMES, ("0", "0", "0", ":16:8", "expandable_segments:True"), strict=True))] * 2


@pytest.fixture
def long_hold(tmp_path: Path) -> str:
    """A cell in which rank 1 holds the GIL for longer than NCCL's watchdog may be without a heartbeat."""
    library = heartbeat.compiled(tmp_path)
    if library is None:
        pytest.skip("NCCL's heartbeat monitor has to be compiled, and there is no C compiler")
    return f"%%distributed -r 1\nfrom tests.stand_ins.heartbeat import Heart\nHeart({str(library)!r}).hold_gil()"


def test_a_rank_survives_a_long_hold_of_the_gil(machine_with_gpus: Kernel, long_hold: str) -> None:
    machine_with_gpus.ok("%env TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1\n%distributed start -n 2 --backend gloo")
    machine_with_gpus.ok("%%distributed\nkept = 10 + rank")
    machine_with_gpus.ok(long_hold)
    assert on_ranks(machine_with_gpus, "kept") == [10, 11]


def test_nccl_s_monitor_ends_a_rank_if_the_user_wants_it(machine_with_gpus: Kernel, long_hold: str) -> None:
    machine_with_gpus.ok("%env TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1\n%env TORCH_NCCL_ENABLE_MONITORING=1")
    machine_with_gpus.ok("%distributed start -n 2 --backend gloo")
    outcome = machine_with_gpus.run(long_hold, limit=60)
    assert outcome.ename == "RankDied" and "rank 1" in outcome.evalue and "SIGABRT" in outcome.evalue, str(outcome)


def test_ranks_without_gpus_find_nothing_of_that(ranks: Kernel) -> None:
    assert on_ranks(ranks, f"[name for name in {NAMES} if name in __import__('os').environ]") == [[]] * 2


def test_a_lost_gpu_is_named_with_what_to_type(own_ranks: Kernel) -> None:
    own_ranks.ok(LOSE)
    outcome = own_ranks.run("%%distributed -r 1\nraise lost()")
    assert "rank 1 raised AcceleratorError" in outcome.evalue
    assert "this rank has lost its GPU (CUDA error 710, device-side assert)" in outcome.traceback
    assert "`%distributed restart`" in outcome.traceback


def test_a_lost_gpu_is_named_whoever_notices(own_ranks: Kernel) -> None:
    own_ranks.ok(LOSE)
    assert "has lost its GPU" in own_ranks.run(LOSE_LATER).traceback


def test_another_error_is_none_of_a_lost_gpu(own_ranks: Kernel) -> None:
    own_ranks.ok(LOSE)
    code = "%%distributed -r 1\nerror = lost()\nerror.error_code = 2\nraise error"
    assert "has lost its GPU" not in own_ranks.run(code).traceback
