"""In a notebook the guard names cells as the notebook does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.stand_ins.guard import write_packages


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel with nbdist loaded in its first cell, and a torch that takes itself for one with CUDA in its second."""
    write_packages(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    with Kernel(PYTHONPATH=path, NBDIST_PREWARM="0") as kernel:
        kernel.ok("%load_ext nbdist")
        kernel.ok("import pretend, nbdist.cuda_guard")
        yield kernel


def test_an_import_is_named_with_its_cell_from_load_ext_on(kernel: Kernel) -> None:
    kernel.ok("import helper\nimport peft")
    says, *chain = kernel.ok("nbdist.cuda_guard.report()").stdout.splitlines()
    assert says.startswith("CUDA was initialized by bitsandbytes/cextension.py:5 (probe), imported by peft in cell 3, ")
    assert says.endswith(" s after the kernel's start.")
    assert chain[:2] == ["  cell 3, line 2", "    peft/__init__.py:1"]
    assert kernel.value("nbdist.cuda_guard.first().cell") == 3


def test_code_in_the_cells_themselves_is_named_by_cell_and_line(kernel: Kernel) -> None:
    kernel.ok("import torch\ndef train():\n    torch.cuda._lazy_init()")
    kernel.ok("%%time\ntrain()")
    says = kernel.ok("nbdist.cuda_guard.report()").stdout
    assert says.startswith("CUDA was initialized by cell 3, line 3 (train), called in cell 4, ")


def test_a_library_that_a_cell_calls_is_named_with_the_cell(kernel: Kernel) -> None:
    kernel.ok("import helper")
    kernel.ok("helper.Model().put()")
    refused = kernel.fails("nbdist.cuda_guard.check_fork()", "UsageError")
    assert refused.evalue.startswith("CUDA was initialized by helper.py:5 (")
    assert ", called in cell 4, " in refused.evalue and "restart the kernel, and move that call" in refused.evalue


def test_a_fork_is_tried_in_a_kernel_with_its_threads_without_harm(kernel: Kernel) -> None:
    assert kernel.ok("print(nbdist.cuda_guard.safe_to_fork())").stdout == "True\n"
    assert kernel.ok("print(nbdist.cuda_guard.safe_to_fork())").stdout == "True\n"
