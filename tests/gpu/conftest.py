"""Sessions for checks on GPUs. One GPU is enough: two ranks share it then; with several each rank has its own.

With NBDIST_GPU_REHEARSAL=1 what asks for a `device` runs on a machine without a GPU, too, on the CPU with gloo: that
shows that a check itself is right, and nothing of GPUs. NBDIST_GPU_NCCL=0 leaves NCCL out, where it hangs.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import nbdist
from nbdist.client.start.connection import close_idle
from testbed.gpu_sharing import ENVIRONMENT, make_group
from tests.conftest import gpu_works

Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def no_warm_processes() -> Iterator[None]:
    """Sessions of this process keep a controller warm for the next one, as they do in a notebook: end it."""
    yield
    close_idle()


@pytest.fixture
def device() -> str:
    """Where a check computes: "cuda", or "cpu" in a rehearsal."""
    return "cuda" if gpu_works() else "cpu"


@pytest.fixture
def two(device: str) -> Iterator[nbdist.Session]:
    """Two ranks as a user gets them: with NCCL if each has a GPU of its own, else with gloo."""
    with nbdist.Session(2) as session:
        yield session


@pytest.fixture
def nccl(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[nbdist.Session]:
    """Two ranks with NCCL, on one GPU if there is no other; skips where NCCL refuses that."""
    with nccl_session(monkeypatch) as session:
        join_nccl(session)
        yield session


@pytest.fixture
def pair(device: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> Iterator[nbdist.Session]:
    """Two ranks with NCCL if that can be, else with gloo."""
    with nccl_session(monkeypatch) as session:
        if not refusal_of_nccl(session):
            yield session
            return
    record_property("backend", "gloo")
    with nbdist.Session(2) as session:
        yield session


def join_nccl(session: nbdist.Session, seconds: float = 600) -> None:
    """Make the ranks' group, with this time-out; skip where NCCL refuses."""
    if refusal := refusal_of_nccl(session, seconds):
        pytest.skip(refusal)


def refusal_of_nccl(session: nbdist.Session, seconds: float = 600) -> str:
    """Make the ranks' group. Why it can't be made; empty: it is. With NBDIST_GPU_NCCL=0 it is not tried."""
    if os.environ.get("NBDIST_GPU_NCCL") == "0":
        return "NBDIST_GPU_NCCL is 0"
    try:
        make_group(session, seconds)
    except nbdist.RankError as error:
        return f"NCCL does not take two ranks on one GPU here: {error}"
    return ""


def nccl_session(monkeypatch: pytest.MonkeyPatch) -> nbdist.Session:
    """Two ranks without a group, with what NCCL wants to be told before they start."""
    for name, setting in ENVIRONMENT.items():
        monkeypatch.setenv(name, setting)
    return nbdist.Session(2, init=False)


def values(session: nbdist.Session, code: str, timeout: float | None = None) -> list[Any]:
    """What the last line of a cell is worth on each rank; `programs` is `testbed.gpu_programs` there."""
    found = session.run(f"from testbed import gpu_programs as programs\n{code}", timeout=timeout)
    return [ast.literal_eval(each.result or "None") for each in found.values()]


def value(session: nbdist.Session, code: str, timeout: float | None = None) -> Any:
    """What the last line is worth, the same on all ranks."""
    first, *others = values(session, code, timeout)
    assert all(each == first for each in others), (first, others)
    return first
