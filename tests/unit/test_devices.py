"""Which GPUs there are, with a stand-in for NVML that a dict drives."""

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
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the stand-in answers: "gpus", and "fails" with the name of a call that raises."""
    state: dict[str, Any] = {"gpus": 4, "fails": "", "open": 0, "name": "NVIDIA H100", "driver": "535.104.05"}
    module = types.ModuleType("pynvml")

    def call(name: str, answer: Any = None, opens: int = 0) -> None:
        def stand_in() -> Any:
            if state["fails"] == name:
                raise RuntimeError(f"{name}: driver not loaded")
            state["open"] += opens
            return answer() if answer is not None else None

        setattr(module, name, stand_in)

    call("nvmlInit", opens=1)
    call("nvmlShutdown", opens=-1)
    call("nvmlDeviceGetCount", lambda: state["gpus"])
    call("nvmlSystemGetDriverVersion", lambda: state["driver"])
    module.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    module.nvmlDeviceGetName = lambda handle: state["name"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return state


def test_all_gpus_are_visible_unless_said_otherwise(nvml: dict[str, Any]) -> None:
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
    nvml: dict[str, Any], listed: str, visible: list[str]
) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == visible


def test_without_gpus_nothing_is_visible(nvml: dict[str, Any]) -> None:
    nvml["gpus"] = 0
    assert visible_gpus({}) == [] and visible_gpus({"CUDA_VISIBLE_DEVICES": "0,GPU-5e6a"}) == []


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"])
def test_a_driver_that_does_not_work_counts_as_none(nvml: dict[str, Any], call: str) -> None:
    nvml["fails"] = call
    assert visible_gpus({}) == []


def test_nvml_is_left_as_it_was_found(nvml: dict[str, Any]) -> None:
    visible_gpus({})
    nvml["fails"] = "nvmlDeviceGetCount"
    visible_gpus({})
    assert nvml["open"] == 0


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
    nvml: dict[str, Any], gpus: int, name: str, driver: str, expected: list[str]
) -> None:
    nvml.update(gpus=gpus, name=name, driver=driver)
    assert sorted(nccl_variables({})) == expected


def test_what_the_user_has_said_of_links_stays(nvml: dict[str, Any]) -> None:
    nvml["name"] = "NVIDIA GeForce RTX 4090"
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
    nvml: dict[str, Any], device_files: Path, file: str
) -> None:
    nvml["fails"] = "nvmlInit"
    (device_files / file).touch()
    (device_files / "count").write_text("2")
    assert visible_gpus({}) == ["0", "1"] and unusable_gpus({}) == []


def test_a_list_of_visible_gpus_does_not_change_how_many_there_are(
    nvml: dict[str, Any], device_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml["fails"] = "nvmlInit"
    (device_files / "nvidia0").touch()
    (device_files / "count").write_text("4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpus() == ["3"]


@pytest.mark.parametrize("count", ["0", "no number"])
def test_gpus_that_torch_can_not_use_are_named(nvml: dict[str, Any], device_files: Path, count: str) -> None:
    nvml["fails"] = "nvmlInit"
    (device_files / "nvidia0").touch()
    (device_files / "nvidiactl").touch()
    (device_files / "count").write_text(count)
    assert visible_gpus({}) == [] and unusable_gpus({}) == [str(device_files / "nvidia0")]
    assert unusable_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_without_device_files_torch_is_not_asked(nvml: dict[str, Any], device_files: Path) -> None:
    nvml["gpus"] = 0
    (device_files / "count").write_text("2")
    assert visible_gpus({}) == []
