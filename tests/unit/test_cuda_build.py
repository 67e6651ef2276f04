"""A torch that is built for CUDA, without a GPU: the stand-ins have nothing that it lacks, and its errors are known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist.metrics.allocation import oom
from nbdist.worker.cell import failures
from tests.stand_ins import nccl
from tests.stand_ins.cuda import ASSERTED, Torch, accelerator_error
from tests.stand_ins.streams import Gpu, Stream

pytestmark = pytest.mark.cuda_build

OF_TESTS = {"aborted"}  # what a stand-in tells its test


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("__")}


def raised(function: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as info:
        function()
    return info.value


@pytest.mark.parametrize(
    ("stand_in", "real"),
    [
        pytest.param(nccl.NcclBackend, lambda: dist.ProcessGroupNCCL, id="NCCL's backend"),
        pytest.param(nccl.Options(), lambda: dist.ProcessGroupNCCL.Options, id="its options"),
        pytest.param(nccl.Group, lambda: dist.ProcessGroup, id="a group"),
        pytest.param(Torch("GPU-1")._C, lambda: torch._C, id="torch._C"),
        pytest.param(Torch("GPU-1").cuda, lambda: torch.cuda, id="torch.cuda"),
        pytest.param(Gpu().cuda, lambda: torch.cuda, id="torch.cuda, of streams"),
        pytest.param(Stream, lambda: torch.cuda.Stream, id="a stream"),
    ],
)
def test_a_stand_in_has_no_name_that_the_real_one_lacks(stand_in: Any, real: Callable[[], Any]) -> None:
    assert public(stand_in) - OF_TESTS <= public(real())


def test_the_time_out_of_nccl_is_the_stand_in_s() -> None:
    assert nccl.Options()._timeout == dist.ProcessGroupNCCL.Options()._timeout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_error_of_cuda_s_is_what_the_stand_in_raises() -> None:
    real, stand_in = raised(torch.cuda.Stream), accelerator_error("device-side assert triggered", "x", ASSERTED)
    assert type(real) is type(stand_in) and vars(real).keys() == vars(stand_in).keys()
    first, second, *_ = str(real).splitlines()
    assert first.startswith("CUDA error: ") and second.startswith("Search for `cudaError")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_error_of_cuda_s_comes_from_native_code_and_is_neither_a_peer_s_nor_about_memory() -> None:
    error = raised(torch.cuda.Stream)
    assert failures.from_torch(error) and not failures.from_communication(error) and oom.device_of(error) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_s_refusal_without_a_gpu_is_known_as_torch_s() -> None:
    options = dist.ProcessGroupNCCL.Options()
    error = raised(lambda: dist.ProcessGroupNCCL(dist.HashStore(), 0, 2, options))
    assert failures.from_torch(error) and not failures.from_communication(error)


def test_importing_nbdist_s_modules_initializes_no_cuda() -> None:
    code = (
        "import nbdist, nbdist.launcher, nbdist.worker.rank, torch\n"
        "from nbdist import prepare\n"
        "from nbdist.metrics.allocation import oom\n"
        "print(torch.cuda.is_initialized(), torch._C._cuda_isInBadFork())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
