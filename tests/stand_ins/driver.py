"""CUDA's driver, libcuda.so.1, compiled for a test.

It refuses every call before `cuInit` (CUDA Driver API, "Initialization": CUDA_ERROR_NOT_INITIALIZED, 3), and has
one GPU afterwards. It has no other calls.
"""

from __future__ import annotations

from pathlib import Path

from tests.stand_ins import native

_SOURCE = """
static int ready;
int cuInit(unsigned flags) { ready = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return ready ? 0 : 3; }
"""


def compiled(folder: Path) -> Path | None:
    """The library, made in a folder; None without a C compiler."""
    return native.compiled(folder, "driver", _SOURCE, "-Wl,-soname,libcuda.so.1")
