from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import runpy
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from nbdist.devices import visible_gpus
from testbed.kernel import Kernel, kernel_with_ranks, wait_until
from testbed.ports import free_port
from tests.support.leftovers import MARK, files_of_sessions, processes_of_this_run
from tests.support.scheduling import pytest_xdist_make_scheduler  # noqa: F401 # a hook
from tests.support.spare import close_spares, processes_of_spares, spare_with_ranks
from tests.support.verdict import pytest_addoption, pytest_sessionfinish  # noqa: F401 # hooks

REHEARSAL = "NBDIST_GPU_REHEARSAL"  # set to 1: tests marked `gpu` that can do with a CPU run there


class Process(Protocol):
    """A process that several tests use."""

    @property
    def pid(self) -> int: ...


_shared: list[Process] = []


def pytest_configure(config: pytest.Config) -> None:
    """Give this run's processes a mark of their own, and its files folders of their own."""
    folder = Path(tempfile.mkdtemp(prefix="tests-of-nbdist-", dir="/tmp"))  # short: paths of sockets lie in it
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ[MARK] = secrets.token_hex(8)
    multiprocessing.set_start_method("fork", force=True)  # as ranks do; Python 3.14 has another
    os.environ["NBDIST_LINGER"] = "0"  # a kernel that a test kills leaves nothing, unless it says so
    os.environ["NBDIST_SLACK"] = "1"  # what a slow answer changes is tested by name, and nowhere by accident
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # torch 2.8 starts and keeps others
    for name in ("TMPDIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "XDG_STATE_HOME"):
        path = folder / name.lower()
        path.mkdir(mode=0o700)
        os.environ[name] = str(path)
    tempfile.tempdir = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first and those of single modules last, so that all workers end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, "unit" in item.path.parts))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a GPU what needs one is skipped, before any of its fixtures is made; so it is where torch is for CPUs."""
    if item.get_closest_marker("cuda_build") is not None and not built_for_cuda():
        pytest.skip("this torch is built for CPUs")
    if item.get_closest_marker("gpu") is None or gpu_works():
        return
    if not os.environ.get(REHEARSAL) or "device" not in item.fixturenames:  # type: ignore[attr-defined]
        pytest.skip("no GPU")


@functools.cache
def gpu_works() -> bool:
    """Whether this machine has an NVIDIA GPU and this torch is built for it. Imports no torch: that takes seconds."""
    return bool(visible_gpus()) and built_for_cuda()


def built_for_cuda() -> bool:
    """Whether this torch is. Imports none."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] is not None


def pytest_exception_interact() -> None:
    """What a failed test has left running in a kernel that others share ends now, and doesn't fail them, too."""
    for process in _shared:
        if isinstance(process, Kernel):
            process.reclaim()


@pytest.fixture(autouse=True)
def environment_is_as_it_was() -> Iterator[None]:
    """After each test: what code in this process has set, such as a deterministic plan, is inherited by no kernel."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test: no process, key file or log folder but those of kernels that tests share."""
    files = files_of_sessions()
    yield
    wait_until(lambda: not _leaked(), lambda: f"leftover processes to end: {_leaked()}", limit=6.0)
    if not _shared:
        assert files_of_sessions() <= files


@pytest.fixture(scope="session", autouse=True)
def no_spare_is_left() -> Iterator[None]:
    """In the end nothing is left of the kernels that tests have handed on to each other."""
    yield
    close_spares()
    wait_until(lambda: not _leaked(), lambda: f"leftover processes to end: {_leaked()}")
    left = files_of_sessions()
    assert not left, [str(path) for folder in left for path in (Path(folder), *Path(folder).rglob("*"))]


def _leaked() -> dict[int, str]:
    # Python's own helper of multiprocessing lives as long as the test run.
    found = {pid: command for pid, command in processes_of_this_run().items() if "resource_tracker" not in command}
    spares = processes_of_spares() if found else set()
    found = {pid: command for pid, command in found.items() if pid not in spares}
    for kernel in _shared:
        try:
            root = psutil.Process(kernel.pid)
            kept = {kernel.pid, *(child.pid for child in root.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
        found = {pid: command for pid, command in found.items() if pid not in kept}
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Kernel]:
    """A kernel with two new ranks, shared by the tests of a module that leave it as they found it."""
    with shared_kernel(2) as kernel:
        yield kernel


@contextmanager
def shared_kernel(count: int, **environment: str) -> Iterator[Kernel]:
    """A kernel with ranks that several tests use: its processes are not left behind by any of them."""
    made = kernel_with_ranks(count, **environment) if environment else spare_with_ranks(count)
    with made as kernel, sharing(kernel):
        yield kernel


@contextmanager
def sharing(process: Process) -> Iterator[None]:
    """It and its descendants are not left behind by the tests that run meanwhile."""
    _shared.append(process)
    yield
    _shared.remove(process)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    """A kernel without a session, shared by the tests of a module."""
    with Kernel() as kernel, sharing(kernel):
        yield kernel


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A kernel of the test's own, without nbdist."""
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def own_ranks() -> Iterator[Kernel]:
    """Two new ranks in a kernel that only this test uses."""
    with spare_with_ranks(2) as kernel:
        yield kernel


@pytest.fixture
def port() -> int:
    """A port that nobody uses."""
    return free_port()
