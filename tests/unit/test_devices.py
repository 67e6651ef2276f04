"""Which GPUs there are, by what NVML says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist import devices
from nbdist.devices import nccl_variables, unusable_gpus, visible_gpus
from testbed.nvml import FakeNvml, gpu, machine


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A driver of four GPUs."""
    driver = FakeNvml(machine(4))
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def test_all_gpus_are_visible_unless_said_otherwise(nvml: FakeNvml) -> None:
    assert visible_gpus({}) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("listed", "visible"),
    [
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("GPU-5e6a,MIG-1", ["GPU-5e6a", "MIG-1"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["0"]),
        ("1,9,0", ["1"]),
        ("1,,0", ["1"]),
    ],
)
def test_cuda_visible_devices_counts_up_to_the_first_that_cuda_does_not_know(
    nvml: FakeNvml, listed: str, visible: list[str]
) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == visible


INSTANCES = [gpu(uuid="MIG-a"), gpu(uuid="MIG-b")]


def test_a_gpu_in_mig_mode_counts_as_its_instances(nvml: FakeNvml) -> None:
    """CUDA knows them by UUID only; beside them, a whole GPU's index depends on what a process is shown."""
    nvml.state["gpus"] = [gpu(0, mig=INSTANCES)]
    assert visible_gpus({}) == ["MIG-a", "MIG-b"]
    nvml.state["gpus"] = [gpu(0, mig=INSTANCES), gpu(1)]
    assert visible_gpus({}) == ["MIG-a", "MIG-b", "GPU-00000001"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-b"}) == ["MIG-b"]


@pytest.mark.parametrize("mig", [None, []])
def test_a_gpu_that_has_fallen_off_the_bus_does_not_hide_the_others(nvml: FakeNvml, mig: Any) -> None:
    nvml.state.update(machine(3, name="NVIDIA GeForce RTX 4090", mig=mig), driver="535.104.05")
    nvml.state["gpus"][1]["handle"] = "GPU_IS_LOST"
    assert visible_gpus({}) == ["0", "1", "2"]
    assert sorted(nccl_variables({})) == ["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE"]


def test_without_gpus_nothing_is_visible(nvml: FakeNvml) -> None:
    nvml.state["gpus"].clear()
    assert visible_gpus({}) == [] and visible_gpus({"CUDA_VISIBLE_DEVICES": "0,GPU-5e6a"}) == []


@pytest.mark.parametrize("call", ["init", "count", "shutdown"])
def test_a_driver_that_does_not_work_counts_as_none(nvml: FakeNvml, call: str) -> None:
    nvml.state[call] = "UNKNOWN"
    assert visible_gpus({}) == []


def test_a_driver_that_never_answers_counts_as_none(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DRIVER_LIMIT", 0.1)
    nvml.state["seconds"] = 1e9
    assert visible_gpus({}) == []
    nvml.state["seconds"] = 0.0


def test_nvml_is_left_as_it_was_found(nvml: FakeNvml) -> None:
    visible_gpus({})
    nvml.state["count"] = "UNKNOWN"
    visible_gpus({})
    assert nvml.opened == 0


def test_without_the_module_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_gpus({}) == []


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
    nvml: FakeNvml, gpus: int, name: str, driver: str, expected: list[str]
) -> None:
    nvml.state.update(machine(gpus, name=name), driver=driver)
    assert sorted(nccl_variables({})) == expected


def test_what_the_user_has_said_of_links_stays(nvml: FakeNvml) -> None:
    nvml.state.update(machine(2, name="NVIDIA GeForce RTX 4090"), driver="535.104.05")
    assert list(nccl_variables({"NCCL_P2P_DISABLE": "0"})) == ["NCCL_IB_DISABLE"]


@pytest.fixture
def device_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of a machine's device files. In it is a PyTorch, too, which counts as many GPUs as `count` says."""
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    (tmp_path / "torch.py").write_text(
        "import os, pathlib, types\n"
        "counted = int((pathlib.Path(__file__).parent / 'count').read_text())\n"
        "cuda = types.SimpleNamespace(device_count=lambda: 0 if 'CUDA_VISIBLE_DEVICES' in os.environ else counted)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    devices.count_by_torch.cache_clear()
    yield tmp_path
    devices.count_by_torch.cache_clear()


@pytest.mark.parametrize("file", ["nvidia0", "dxg", "kfd", "nvhost-gpu"])
def test_gpus_that_the_management_library_does_not_see_are_counted_by_torch(
    nvml: FakeNvml, device_files: Path, file: str
) -> None:
    nvml.state["init"] = "UNKNOWN"
    (device_files / file).touch()
    (device_files / "count").write_text("2")
    assert visible_gpus({}) == ["0", "1"] and unusable_gpus({}) == []


def test_a_list_of_visible_gpus_does_not_change_how_many_there_are(
    nvml: FakeNvml, device_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.state["init"] = "UNKNOWN"
    (device_files / "nvidia0").touch()
    (device_files / "count").write_text("4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpus() == ["3"]


@pytest.mark.parametrize("count", ["0", "no number"])
def test_gpus_that_torch_can_not_use_are_named(nvml: FakeNvml, device_files: Path, count: str) -> None:
    nvml.state["init"] = "UNKNOWN"
    (device_files / "nvidia0").touch()
    (device_files / "nvidiactl").touch()
    (device_files / "count").write_text(count)
    assert visible_gpus({}) == [] and unusable_gpus({}) == [str(device_files / "nvidia0")]
    assert unusable_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_without_device_files_torch_is_not_asked(nvml: FakeNvml, device_files: Path) -> None:
    nvml.state["gpus"].clear()
    (device_files / "count").write_text("2")
    assert visible_gpus({}) == []
