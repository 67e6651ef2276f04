"""Which GPUs there are, by what NVML says."""

from __future__ import annotations

import sys

import pytest

from nbdist.devices import visible_gpus
from tests.stand_ins.nvml import FakeNvml, machine


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A driver of four GPUs."""
    driver = FakeNvml(machine(4))
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
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


def test_without_gpus_nothing_is_visible(nvml: FakeNvml) -> None:
    nvml.state["gpus"].clear()
    assert visible_gpus({}) == [] and visible_gpus({"CUDA_VISIBLE_DEVICES": "0,GPU-5e6a"}) == []


@pytest.mark.parametrize("call", ["init", "count", "shutdown"])
def test_a_driver_that_does_not_work_counts_as_none(nvml: FakeNvml, call: str) -> None:
    nvml.state[call] = "UNKNOWN"
    assert visible_gpus({}) == []


def test_nvml_is_left_as_it_was_found(nvml: FakeNvml) -> None:
    visible_gpus({})
    nvml.state["count"] = "UNKNOWN"
    visible_gpus({})
    assert nvml.opened == 0


def test_without_the_module_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_gpus({}) == []
