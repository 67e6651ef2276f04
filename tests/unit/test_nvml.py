"""What is read from the NVIDIA driver, and what is said where it does not tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest

from nbdist.metrics.node import energy
from nbdist.metrics.node.energy import GpuEnergy, Spending
from nbdist.metrics.node.nvml import Nvml
from nbdist.metrics.node.sample import GpuSample, has_lost
from testbed.nvml import GIB, FakeNvml, as_module, gpu, machine
from tests.stand_ins.cuda import Torch

NO_PROCESS = (1 << 22) + 1  # Linux numbers none higher than 1 << 22


def read(state: dict[str, Any]) -> list[GpuSample]:
    return Nvml(FakeNvml(state)).read()


def test_a_gpu_in_good_health() -> None:
    assert read(machine(processes={"self": GIB})) == [
        GpuSample(
            uuid="GPU-00000000",
            index=0,
            name="NVIDIA H100 80GB HBM3",
            total=80 * GIB,
            used=10 * GIB,
            kept=GIB // 2,
            by_pid={os.getpid(): GIB},
            utilization=0.55,
            temperature=41,
            power=350.0,
            power_limit=700.0,
        )
    ]


def test_the_energy_of_a_cell_is_the_difference_of_the_drivers_counter() -> None:
    state = machine(2)
    counter = GpuEnergy("GPU-00000001", FakeNvml(state))
    state["gpus"][1]["energy"] = 5_000
    before = counter.read()
    state["gpus"][1]["energy"] = 1_517_000  # millijoules
    after = counter.read()
    assert before is not None and after is not None and after - before == 1512.0


@pytest.mark.parametrize(("shortest", "joules"), [(0.0, 7.0), (1e6, None)])
def test_the_energy_of_a_cell_so_short_that_the_counter_may_be_late_is_not_known(
    monkeypatch: pytest.MonkeyPatch, shortest: float, joules: float | None
) -> None:
    state = machine()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(state))
    monkeypatch.setitem(sys.modules, "torch.cuda", Torch("GPU-00000000").cuda)
    monkeypatch.setattr(energy, "SHORTEST", shortest)
    spending = Spending()
    spending.begin()
    state["gpus"][0]["energy"] = 7_000
    assert spending.end().joules == joules


@pytest.mark.parametrize("uuid", ["GPU-00000000", "MIG-7"])
def test_a_gpu_that_does_not_count_its_energy_is_asked_once(uuid: str) -> None:
    nvml = FakeNvml(machine(energy="NOT_SUPPORTED"))
    counter = GpuEnergy(uuid, nvml)
    assert counter.read() is None
    calls = nvml.calls
    assert counter.read() is None and nvml.calls == calls


def test_all_gpus_of_a_machine_in_their_order() -> None:
    assert [sample.index for sample in read(machine(8))] == list(range(8))


def test_what_the_driver_keeps_for_itself_is_in_the_total_but_is_not_used() -> None:
    (sample,) = read(machine(total=80 * GIB, used=10 * GIB, reserved=GIB))
    assert (sample.total, sample.used, sample.kept) == (80 * GIB, 10 * GIB, GIB)


def test_an_old_driver_counts_its_own_memory_as_used() -> None:
    (sample,) = read(machine(memory_v2=False))
    assert (sample.total, sample.used, sample.kept) == (80 * GIB, 10 * GIB + GIB // 2, 0)


def test_mig_instances_stand_in_place_of_their_gpu() -> None:
    parts = [gpu(uuid=f"MIG-{n}", total=10 * GIB, used=n * GIB, utilization="NOT_SUPPORTED") for n in range(2)]
    whole = gpu(mig=parts, power=200_000)
    samples = read({"init": None, "gpus": [whole, gpu(1)]})
    assert [sample.uuid for sample in samples] == ["MIG-0", "MIG-1", "GPU-00000001"]
    assert [sample.used for sample in samples[:2]] == [0, GIB]
    assert samples[0].power == 200.0
    assert samples[0].utilization is None
    assert samples[0].why == "no utilization: this GPU does not report it"


def test_a_gpu_older_than_mig_is_read_as_a_whole() -> None:
    assert len(read(machine(mig=None))) == 1


def test_a_gpu_that_falls_off_the_bus_is_named_and_the_others_go_on() -> None:
    state = machine(3)
    state["gpus"][1]["used"] = "GPU_IS_LOST"
    samples = read(state)
    assert "fallen off the bus" in samples[1].why
    assert samples[1].temperature is None
    assert [bool(sample.used) for sample in samples] == [True, False, True]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        pytest.param({"utilization": (1 << 32) - 1}, "utilization", id="a share of more than all"),
        pytest.param({"utilization": "much"}, "utilization", id="no number"),
        pytest.param({"used": 1 << 63}, "memory", id="more in use than there is"),
        pytest.param({"power": (1 << 32) - 1}, "power", id="more power than any chip draws"),
        pytest.param({"temperature": 1 << 31}, "temperature", id="hotter than any chip gets"),
    ],
)
def test_an_answer_that_makes_no_sense_is_left_out_and_the_rest_is_shown(changes: dict[str, Any], missing: str) -> None:
    """What a driver answers for a while about a GPU that is about to be lost."""
    state = machine(2)
    state["gpus"][0].update(changes)
    first, second = read(state)
    assert first.why == f"no {missing}: the driver's answer makes no sense" and second.why == ""
    assert getattr(first, {"memory": "used"}.get(missing, missing)) is None
    assert first.name == second.name


def test_a_gpu_that_is_lost_before_it_is_asked() -> None:
    state = machine(2)
    state["gpus"][0]["handle"] = "GPU_IS_LOST"
    assert [sample.why.startswith("it has fallen") for sample in read(state)] == [True, False]


@pytest.mark.parametrize(
    ("own", "lost", "expected"),
    [
        pytest.param("GPU-00000000", [0], True, id="the others have other names"),
        pytest.param("GPU-00000001", [0], False, id="it is there"),
        pytest.param("", [0], False, id="it may be another"),
        pytest.param("", [0, 1], True, id="all are"),
    ],
)
def test_a_process_has_lost_its_gpu_if_it_can_be_no_other(own: str, lost: list[int], expected: bool) -> None:
    state = machine(2)
    for index in lost:
        state["gpus"][index]["handle"] = "GPU_IS_LOST"
    assert has_lost(own, read(state)) == expected


def test_memory_of_processes_that_may_not_be_seen_is_left_out() -> None:
    (sample,) = read(machine(processes={1: None, "self": GIB}))
    assert sample.by_pid == {os.getpid(): GIB}


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param({"self": 0}, id="the container's numbers, without memory"),
        pytest.param({"self": 3 * GIB, str(NO_PROCESS): GIB}, id="the host's numbers, one of which is a rank's too"),
    ],
)
def test_in_a_container_memory_is_nobodys(processes: dict[str, int]) -> None:
    (sample,) = read(machine(processes=processes))
    assert (sample.by_pid, sample.used, sample.why) == ({}, 10 * GIB, "")


def test_what_is_forbidden_is_said_in_one_line() -> None:
    (sample,) = read(machine(power="NO_PERMISSION", power_limit="NO_PERMISSION"))
    assert sample.why == "no power, power limit: the driver does not let this user read it"


@pytest.mark.parametrize(("bits", "words"), [(0x1, []), (0x4, ["power limit"]), (0x24, ["power limit", "heat"])])
def test_a_gpu_that_is_held_back_says_by_what(bits: int, words: list[str]) -> None:
    (sample,) = read(machine(clocks=bits))
    assert sample.throttled == words


def test_a_driver_older_than_the_new_name_of_that_function_is_asked_by_the_old_one() -> None:
    (sample,) = read(machine(clocks=0x4, event_reasons=False))
    assert (sample.throttled, sample.why) == (["power limit"], "")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LIBRARY_NOT_FOUND", "this machine has no NVIDIA driver"),
        ("DRIVER_NOT_LOADED", "is not loaded"),
        ("NO_PERMISSION", "does not let this user in"),
        ("FUNCTION_NOT_FOUND", "too old"),
        ("LIB_RM_VERSION_MISMATCH", "a reboot is needed"),
        ("UNKNOWN", "does not answer"),
    ],
)
def test_without_a_driver_that_works_there_are_no_gpus_and_a_reason(error: str, words: str) -> None:
    nvml = Nvml(FakeNvml({"init": error, "gpus": []}))
    assert nvml.read() == []
    assert words in nvml.why


def test_a_driver_without_gpus_says_so() -> None:
    nvml = Nvml(FakeNvml(machine(0)))
    assert nvml.read() == []
    assert nvml.why == "the driver reports no GPU"


def test_the_stand_in_has_no_function_that_pynvml_lacks() -> None:
    assert {name for name in dir(FakeNvml) if name.startswith("nvml")} <= set(dir(pynvml))


def test_other_processes_can_be_given_the_same_gpus(tmp_path: Path) -> None:
    as_module(tmp_path, machine(2))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from nbdist.metrics.node.nvml import Nvml; print(len(Nvml().read()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "2\n"
