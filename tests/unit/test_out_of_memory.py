"""Which errors say that memory was short: one answer for the explanation, for smaller batches and for optimizers."""

from __future__ import annotations

import pytest
import torch

from nbdist.metrics.allocation import oom
from nbdist.train.loop import batch_size
from tests.stand_ins.cuda import ASSERTED, OUT_OF_MEMORY, accelerator_error

SHORT: list[Exception] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 3.20 GiB free."),
    torch.OutOfMemoryError("XPU out of memory. Tried to allocate 20.00 GiB."),
    accelerator_error("out of memory", "cudaErrorMemoryAllocation", OUT_OF_MEMORY),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"),
    MemoryError(),
]
OTHERS: list[Exception] = [
    accelerator_error("device-side assert triggered", "cudaErrorAssert", ASSERTED),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA out of memory."),
]


def words(error: Exception) -> str:
    return f"{type(error).__name__} {error}"[:50].splitlines()[0]


@pytest.mark.parametrize("error", SHORT, ids=words)
def test_a_batch_is_made_smaller_where_memory_was_short(error: Exception) -> None:
    sizes = []

    def train(size: int) -> None:
        sizes.append(size)
        if size > 2:
            raise error

    batch_size.find_executable_batch_size(train, starting_batch_size=4)()
    assert oom.is_out_of_memory(error) and sizes == [4, 3, 2]


@pytest.mark.parametrize("error", OTHERS, ids=words)
def test_other_errors_are_passed_on(error: Exception) -> None:
    def train(size: int) -> None:
        raise error

    with pytest.raises(type(error)):
        batch_size.find_executable_batch_size(train, starting_batch_size=4)()
    assert not oom.is_out_of_memory(error) and oom.device_of(error) == ""
