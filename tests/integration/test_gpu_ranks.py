"""What ranks are told on a machine with GPUs: a stand-in for the driver says that there are some."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel, wait_until
from testbed.nvml import GIB, as_module, gpu, machine
from tests.stand_ins import heartbeat
from tests.support.cells import pulled
from tests.support.torch_build import cpu_torch

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


# As when torch empties its cache while a collective never ends: nobody has asked it for its memory before.
WAIT_IN_CUDA = """
import sys, time
from tests.stand_ins.cuda import Torch
sys.modules["torch.cuda"] = Torch("GPU-00000000").cuda
print("w", end="", flush=True)
time.sleep(600)
"""


@cpu_torch
def test_each_rank_is_shown_only_its_own_mig_instance_and_they_do_not_use_nccl(tmp_path: Path) -> None:
    """CUDA shows a process one instance at most, whatever the variable names (MIG User Guide, "CUDA Device
    Enumeration"), and to NCCL those of one GPU are the same GPU.
    """
    as_module(tmp_path, {**machine(0), "gpus": [gpu(mig=[gpu(uuid="MIG-a"), gpu(uuid="MIG-b")])]})
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Kernel(PYTHONPATH=path) as kernel:
        kernel.ok("%load_ext nbdist")
        refused = kernel.run("%distributed start -n 2 --backend nccl")
        assert "MIG instances" in refused.evalue and "`--backend gloo`" in refused.evalue, str(refused)
        kernel.ok("%distributed start -n 2")
        assert pulled(kernel, "__import__('os').environ['CUDA_VISIBLE_DEVICES']") == ["MIG-a", "MIG-b"]
        assert kernel.value("__import__('nbdist').get_session().backend") == "gloo"


# A long call into C that keeps Python's own lock.
HOLD_GIL = """
import ctypes, os
gate = os.open({!r}, os.O_RDWR)
print("h", end="", flush=True)
ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), 1)
os.close(gate)
"""


@pytest.fixture
def machine_with_gpus(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel on a machine with two GPUs."""
    as_module(tmp_path, machine(2))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Kernel(PYTHONPATH=path) as kernel:
        kernel.ok("%load_ext nbdist")
        yield kernel


@cpu_torch
def test_ranks_on_gpus_find_what_libraries_read_but_once(machine_with_gpus: Kernel) -> None:
    machine_with_gpus.ok("%env CUBLAS_WORKSPACE_CONFIG=:16:8\n%distributed start -n 2 --backend gloo")
    found = pulled(machine_with_gpus, f"{{name: __import__('os').environ.get(name) for name in {NAMES}}}")
    assert found == [dict(zip(NAMES, ("0", "0", "0", ":16:8", "expandable_segments:True"), strict=True))] * 2


@pytest.fixture
def long_hold(tmp_path: Path) -> str:
    """A cell in which rank 1 holds the GIL for longer than NCCL's watchdog may be without a heartbeat."""
    library = heartbeat.compiled(tmp_path)
    if library is None:
        pytest.skip("NCCL's heartbeat monitor has to be compiled, and there is no C compiler")
    return f"%%distributed -r 1\nfrom tests.stand_ins.heartbeat import Heart\nHeart({str(library)!r}).hold_gil()"


@cpu_torch
def test_a_rank_survives_a_long_hold_of_the_gil(machine_with_gpus: Kernel, long_hold: str) -> None:
    machine_with_gpus.ok("%env TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1\n%distributed start -n 2 --backend gloo")
    machine_with_gpus.ok("%%distributed\nkept = 10 + rank")
    machine_with_gpus.ok(long_hold)
    assert pulled(machine_with_gpus, "kept") == [10, 11]


@cpu_torch
def test_nccl_s_monitor_ends_a_rank_if_the_user_wants_it(machine_with_gpus: Kernel, long_hold: str) -> None:
    machine_with_gpus.ok("%env TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1\n%env TORCH_NCCL_ENABLE_MONITORING=1")
    machine_with_gpus.ok("%distributed start -n 2 --backend gloo")
    outcome = machine_with_gpus.run(long_hold, limit=60)
    assert outcome.ename == "RankDied" and "rank 1" in outcome.evalue and "SIGABRT" in outcome.evalue, str(outcome)


@cpu_torch
def test_a_rank_that_waits_in_cuda_s_allocator_has_a_row_with_what_the_driver_reports(tmp_path: Path) -> None:
    as_module(tmp_path, machine(1))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Kernel(PYTHONPATH=path) as kernel:
        kernel.ok("%load_ext nbdist\n%distributed start -n 2 --backend gloo")
        kernel.ok(f"%%distributed --background\n{WAIT_IN_CUDA}")
        pids = kernel.value("[info.pid for info in __import__('nbdist').get_session().ranks]")
        as_module(tmp_path, machine(1, processes=dict.fromkeys(pids, 3 * GIB)))
        kernel.ok("handle = _\nwhile len(handle.output[0].stdout + handle.output[1].stdout) < 2: pass")
        rows = kernel.value("__import__('nbdist').get_session().status()")
        assert [(row["device_memory"], row["device_memory_by"]) for row in rows] == [(3 * GIB, "driver")] * 2
        assert all(row["memory"] > 0 for row in rows)
        assert "3.0 GiB (driver)" in kernel.ok("%distributed status").stdout
        panel = "%distributed panel"
        wait_until(
            lambda: "the driver's figure" in str(kernel.ok(panel).plain), "the panel to have asked the driver", 30
        )


@cpu_torch
def test_so_has_one_that_does_not_answer_at_all(tmp_path: Path) -> None:
    as_module(tmp_path, machine(1))
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Kernel(PYTHONPATH=path) as kernel:
        kernel.ok("%load_ext nbdist\n%distributed start -n 2 --backend gloo")
        kernel.ok(
            f"import nbdist\nhandle = nbdist.get_session().run_in_background({HOLD_GIL.format(str(gate))!r}, [1])"
        )
        pids = kernel.rank_pids()
        as_module(tmp_path, machine(1, processes=dict.fromkeys(pids, 3 * GIB)))
        kernel.ok("while 'h' not in handle.output[1].stdout: pass")
        status = "nbdist.get_session().status()"
        kernel.ok(f"while {status}[1]['device_memory'] is None: pass")
        row = kernel.value(f"{status}[1]")
        assert (row["device_memory"], row["device_memory_by"]) == (3 * GIB, "driver")
        assert row["memory"] > 0
        assert "3.0 GiB (driver)" in kernel.ok("%distributed status").stdout
        gate.write_text(".")
        kernel.ok("handle.wait(30)")
        assert kernel.value(f"{status}[1]['device_memory_by']") == ""


def test_ranks_without_gpus_find_nothing_of_that(ranks: Kernel) -> None:
    assert pulled(ranks, f"[name for name in {NAMES} if name in __import__('os').environ]") == [[]] * 2


def test_a_lost_gpu_is_named_with_what_to_type(own_ranks: Kernel) -> None:
    own_ranks.ok(LOSE)
    outcome = own_ranks.run("%%distributed -r 1\nraise lost()")
    assert "rank 1 raised AcceleratorError" in outcome.evalue
    assert "this rank has lost its GPU (CUDA error 710, device-side assert)" in outcome.traceback
    assert "`%distributed restart`" in outcome.traceback


def test_a_lost_gpu_is_named_whoever_notices(own_ranks: Kernel) -> None:
    own_ranks.ok(LOSE)
    assert "has lost its GPU" in own_ranks.run(LOSE_LATER).traceback


@cpu_torch
def test_a_gpu_that_has_fallen_off_the_bus_is_named_with_what_to_do(tmp_path: Path) -> None:
    """CUDA calls that an unknown error; the driver knows."""
    as_module(tmp_path, machine(1, handle="GPU_IS_LOST"))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Kernel(PYTHONPATH=path) as kernel:
        kernel.ok("%load_ext nbdist\n%distributed start -n 2 --backend gloo")
        kernel.ok(LOSE)
        outcome = kernel.run(
            "%%distributed -r 1\nimport sys\nfrom tests.stand_ins.cuda import Torch\n"
            "sys.modules['torch.cuda'] = Torch('GPU-00000000').cuda\n"
            "error = lost()\nerror.error_code = 999\nraise error"
        )
        assert "GPU of this rank has fallen off the bus" in outcome.traceback, str(outcome)
        assert "--gpus" in outcome.traceback


def test_another_error_is_none_of_a_lost_gpu(own_ranks: Kernel) -> None:
    own_ranks.ok(LOSE)
    code = "%%distributed -r 1\nerror = lost()\nerror.error_code = 2\nraise error"
    assert "has lost its GPU" not in own_ranks.run(code).traceback
