"""What is done about GPUs that NVML does not count, or that NCCL can't link: stand-ins for NVML and for torch."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist import devices
from nbdist.devices import nccl_variables, unusable_gpus, visible_gpus


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A driver of four GPUs, which answers nothing where `works` is False."""
    driver = types.SimpleNamespace(works=True, gpus=4, name="NVIDIA H100", version="535.104.05")

    def begin() -> None:
        if not driver.works:
            raise RuntimeError("driver not loaded")

    driver.nvmlInit, driver.nvmlShutdown = begin, lambda: None
    driver.nvmlDeviceGetCount = lambda: driver.gpus
    driver.nvmlDeviceGetHandleByIndex = lambda index: index
    driver.nvmlDeviceGetName = lambda handle: driver.name
    driver.nvmlSystemGetDriverVersion = lambda: driver.version
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    return driver


@pytest.mark.parametrize(
    ("gpus", "name", "driver", "expected"),
    [
        (2, "NVIDIA GeForce RTX 4090", "535.104.05", ["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE"]),
        (2, "NVIDIA GeForce RTX 4090", "550.40.06", ["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE"]),
        (2, "NVIDIA GeForce RTX 4090", "550.40.07", []),
        (2, "NVIDIA GeForce RTX 4090", "560.28.03", []),
        (1, "NVIDIA GeForce RTX 4090", "535.104.05", []),
        (2, "NVIDIA H100 80GB HBM3", "535.104.05", []),
    ],
)
def test_nccl_leaves_links_alone_that_only_an_old_driver_offers(
    nvml: Any, gpus: int, name: str, driver: str, expected: list[str]
) -> None:
    nvml.gpus, nvml.name, nvml.version = gpus, name, driver
    assert sorted(nccl_variables({})) == expected


def test_what_the_user_has_said_of_links_stays(nvml: Any) -> None:
    nvml.name = "NVIDIA GeForce RTX 4090"
    assert list(nccl_variables({"NCCL_P2P_DISABLE": "0"})) == ["NCCL_IB_DISABLE"]


@pytest.fixture
def device_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of a machine's device files. In it is a PyTorch, too, which counts as many GPUs as `count` says."""
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    (tmp_path / "torch.py").write_text(
        "import os, pathlib, types\n"
        "counted = int((pathlib.Path(__file__).parent / 'count').read_text())\n"
        "cuda = types.SimpleNamespace(device_count=lambda: 0 if 'CUDA_VISIBLE_DEVICES' in os.environ else counted)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    devices._count_by_torch.cache_clear()
    yield tmp_path
    devices._count_by_torch.cache_clear()


@pytest.mark.parametrize("file", ["nvidia0", "dxg", "kfd", "nvhost-gpu"])
def test_gpus_that_the_management_library_does_not_see_are_counted_by_torch(
    nvml: Any, device_files: Path, file: str
) -> None:
    nvml.works = False
    (device_files / file).touch()
    (device_files / "count").write_text("2")
    assert visible_gpus({}) == ["0", "1"] and unusable_gpus({}) == []


def test_a_list_of_visible_gpus_does_not_change_how_many_there_are(
    nvml: Any, device_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.works = False
    (device_files / "nvidia0").touch()
    (device_files / "count").write_text("4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpus() == ["3"]


@pytest.mark.parametrize("count", ["0", "no number"])
def test_gpus_that_torch_can_not_use_are_named(nvml: Any, device_files: Path, count: str) -> None:
    nvml.works = False
    (device_files / "nvidia0").touch()
    (device_files / "nvidiactl").touch()
    (device_files / "count").write_text(count)
    assert visible_gpus({}) == [] and unusable_gpus({}) == [str(device_files / "nvidia0")]
    assert unusable_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_without_device_files_torch_is_not_asked(nvml: Any, device_files: Path) -> None:
    nvml.gpus = 0
    (device_files / "count").write_text("2")
    assert visible_gpus({}) == []
