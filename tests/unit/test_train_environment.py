"""What a plan asks of the process: seeds, NUMA nodes as Linux tells of them, garbage collection by hand."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import nbdist
from nbdist.plan import Plan
from nbdist.train.prepare import environment
from tests.stand_ins import sysfs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    yield
    environment.apply(Plan(), CPU)
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)


def draws() -> tuple[float, float, float]:
    return random.random(), numpy.random.random(), torch.rand(()).item()


def test_a_seed_is_that_of_all_generators() -> None:
    nbdist.set_seed(7)
    first = draws()
    environment.apply(Plan(seed=7, seed_per_rank=True), CPU)  # this is rank 0
    assert draws() == first
    nbdist.set_seed(8)
    assert not set(draws()) & set(first)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(nbdist.UsageError, match="is not a seed"):
        nbdist.set_seed(seed)  # type: ignore[arg-type]


def test_what_the_plan_leaves_open_is_not_touched() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.get_float32_matmul_precision(), gc.isenabled()
    environment.apply(Plan(), CPU)
    after = torch.get_rng_state(), torch.get_float32_matmul_precision(), gc.isenabled()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_determinism_and_tf32_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    environment.apply(Plan(deterministic=True, tf32=True), CPU)
    assert torch.are_deterministic_algorithms_enabled() and torch.get_float32_matmul_precision() == "high"
    environment.apply(Plan(tf32=False), CPU)
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_an_earlier_plan_has_set_is_taken_back() -> None:
    torch.set_float32_matmul_precision("medium")
    environment.apply(Plan(deterministic=True, tf32=False), CPU)
    environment.apply(Plan(), CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("chosen", ["tf32", "ieee", "none"])
def test_tf32_follows_the_plan_after_torch_s_newer_switches_were_used(chosen: str) -> None:
    backends: Any = torch.backends
    switches = [backends.cuda.matmul, backends.mkldnn.matmul]
    switches[0].fp32_precision = chosen
    before = [switch.fp32_precision for switch in switches]
    for wanted, expected in ((True, "tf32"), (False, "ieee")):
        environment.apply(Plan(tf32=wanted), CPU)
        assert switches[0].fp32_precision == expected
        assert torch.get_float32_matmul_precision() == ("high" if wanted else "highest")  # compilers read the older one
    environment.apply(Plan(), CPU)
    assert [switch.fp32_precision for switch in switches] == before


def test_garbage_that_the_user_collects_by_hand_stays_so() -> None:
    gc.disable()
    environment.apply(Plan(gc_interval=10), CPU)
    environment.apply(Plan(), CPU)
    assert not gc.isenabled()
    gc.enable()


def test_python_collects_garbage_again_under_a_plan_that_does_not() -> None:
    environment.apply(Plan(gc_interval=10), CPU)
    assert not gc.isenabled()
    environment.apply(Plan(), CPU)
    assert gc.isenabled()


def test_the_cores_next_to_a_device_are_read_from_the_kernel(tmp_path: Path) -> None:
    sysfs.gpu(tmp_path, "0000:3b:00.0", node=1)
    sysfs.node(tmp_path, 1, "4-6,12")
    assert environment.numa_node("0000:3b:00.0", tmp_path) == 1
    assert environment.cores_of_node(1, tmp_path) == {4, 5, 6, 12}


def test_a_machine_that_does_not_tell_its_nodes_is_left_alone(tmp_path: Path) -> None:
    sysfs.gpu(tmp_path, "0000:3b:00.0", node=-1)
    assert environment.numa_node("0000:3b:00.0", tmp_path) is None
    assert environment.numa_node("0000:ff:00.0", tmp_path) is None
    assert environment.cores_of_node(0, tmp_path) == set()


def test_ranks_of_a_node_divide_its_physical_cores_with_their_hyperthreads(tmp_path: Path) -> None:
    for number in range(5):
        sysfs.core(tmp_path, [number, number + 8])
    cores = {*range(5), *range(8, 13)} - {9}  # of which a container has not got all
    parts = [environment.part_of_cores(cores, number, 2, tmp_path) for number in range(2)]
    assert parts == [{0, 8, 1}, {2, 10, 3, 11, 4, 12}]
    assert environment.part_of_cores({0, 8}, 0, 2, tmp_path) == set()  # one core for two


def test_cores_are_divided_where_hyperthreads_are_not_reported(tmp_path: Path) -> None:
    assert [environment.part_of_cores({1, 2, 3, 4}, number, 2, tmp_path) for number in range(2)] == [{1, 2}, {3, 4}]


# Two GPUs, on the nodes that the arguments name; -1: the firmware does not report it.
EXCLUSIVE = """
import os, sys, torch
from pathlib import Path
from types import SimpleNamespace
from nbdist.plan import Plan
from nbdist.train.prepare import environment
from tests.stand_ins import sysfs

folder, nodes, cores = Path(sys.argv[1]), eval(sys.argv[2]), sorted(os.sched_getaffinity(0))[:2]
for number, node in enumerate(nodes):
    sysfs.gpu(folder, f"0000:0{number}:00.0", node)
for node in {*nodes} - {-1}:
    sysfs.node(folder, node, ",".join(map(str, cores)))
torch.cuda.device_count = lambda: len(nodes)
torch.cuda.get_device_properties = lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=index, pci_device_id=0)
os.sched_setaffinity(0, cores)
own = int(os.environ["LOCAL_RANK"])
environment.bind_to_numa_node(torch.device("cuda", own), folder, exclusive=True)
bound = {frozenset(os.sched_getaffinity(int(name))) for name in os.listdir("/proc/self/task")}
environment.apply(Plan(), torch.device("cpu"))
print([[cores.index(core) for core in sorted(each)] for each in bound], os.sched_getaffinity(0) == {*cores})
"""


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [([1, 1], ["[[0]]", "[[1]]"]), ([0, 1], ["[[0, 1]]"] * 2), ([-1, -1], ["[[0]]", "[[1]]"])],
    ids=["one node", "a node each", "no nodes"],
)
def test_ranks_share_no_core_until_the_next_plan(tmp_path: Path, nodes: list[int], expected: list[str]) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    for rank in range(2):
        environ = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}
        command = [sys.executable, "-c", EXCLUSIVE, str(tmp_path / str(rank)), str(nodes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
        assert done.stdout == f"{expected[rank]} True\n", done.stderr


def test_without_a_gpu_nothing_is_bound() -> None:
    assert environment.bind_to_numa_node(CPU) is None


def test_all_threads_are_bound_and_the_next_plan_gives_them_their_cores_back() -> None:
    """In a process of its own: threads of the tests keep their cores. Threads stay until the program ends."""
    program = """
import os, threading
import torch
from nbdist.plan import Plan
from nbdist.train.prepare import environment

def start():
    ready = threading.Event()
    threading.Thread(target=lambda: (ready.set(), threading.Event().wait()), daemon=True).start()
    ready.wait()

def cores():
    return {frozenset(os.sched_getaffinity(int(name))) for name in os.listdir("/proc/self/task")}

usual = cores()
assert len(usual) == 1
one = {min(next(iter(usual)))}
start()
environment.bind_threads(one)
start()
assert cores() == {frozenset(one)}, cores()
environment.apply(Plan(), torch.device("cpu"))
assert cores() == usual, cores()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
