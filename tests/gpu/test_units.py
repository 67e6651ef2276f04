"""Unit tests that stand in for CUDA elsewhere, with a torch that is built for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
ABOUT_GPUS = ("cuda_guard", "nvml", "devices", "template", "memory")


def test_unit_tests_about_gpus_pass_with_this_torch() -> None:
    files = [f"tests/unit/test_{name}.py" for name in ABOUT_GPUS]
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-W", "default", "-p", "no:cacheprovider"]
    done = subprocess.run([*pytest_here, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
