"""Which GPUs there are, with a stand-in for NVML that a dict drives."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from nbdist.devices import visible_gpus


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the stand-in answers: "gpus", and "fails" with the name of a call that raises."""
    state: dict[str, Any] = {"gpus": 4, "fails": "", "open": 0}
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
