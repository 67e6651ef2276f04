"""What only the main thread may look at is seen by it, and nobody waits for it while it is in a call into C."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nbdist.base import limits
from nbdist.worker.control.main_thread import MainThreadLook
from testbed.kernel import wait_until

LIMIT = 20.0
MAIN = threading.main_thread().ident


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """A thread that asks."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def looker(seen: list[int | None]) -> dict[str, Any]:
    seen.append(threading.get_ident())
    return {"look": len(seen)}


def compute_until(done: Future[Any]) -> None:
    """What the main thread does in Python."""
    while not done.done():
        pass


def ask_from_c(other: ThreadPoolExecutor, look: MainThreadLook, oldest: float = LIMIT) -> dict[str, Any]:
    """What the other thread is told while the main thread reads from a pipe."""
    read, write = os.pipe()

    def ask() -> dict[str, Any]:
        try:
            wait_until(lambda: "pipe" in Path(f"/proc/self/task/{os.getpid()}/wchan").read_text(), "a read")
            return look.newest(oldest)
        finally:
            os.write(write, b".")

    asked = other.submit(ask)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    return asked.result(LIMIT)


def test_the_main_thread_looks_while_it_computes(other: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAIN_THREAD", LIMIT)
    seen: list[int | None] = []
    look = MainThreadLook(lambda: looker(seen), idle=lambda: False)
    for number in (1, 2):
        asked = other.submit(look.newest, LIMIT)
        compute_until(asked)
        assert asked.result() == {"look": number}
    assert seen == [MAIN, MAIN]


def test_while_the_main_thread_is_in_c_the_last_look_serves(other: ThreadPoolExecutor) -> None:
    seen: list[int | None] = []
    look = MainThreadLook(lambda: looker(seen), idle=lambda: False)
    with pytest.raises(TimeoutError, match="in a call into C"):
        ask_from_c(other, look)
    assert seen == [MAIN]  # when it came back
    assert ask_from_c(other, look) == {"look": 1}


def test_but_not_one_that_was_older_than_it_may_be_when_the_main_thread_was_asked(other: ThreadPoolExecutor) -> None:
    """What the process holds may have changed since, and nobody has looked."""
    seen: list[int | None] = []
    look = MainThreadLook(lambda: looker(seen), idle=lambda: False)
    assert look.newest(LIMIT) == {"look": 1}
    with pytest.raises(TimeoutError, match="in a call into C"):
        ask_from_c(other, look, oldest=0.0)


def test_while_the_main_thread_is_idle_any_thread_looks(other: ThreadPoolExecutor) -> None:
    seen: list[int | None] = []
    look = MainThreadLook(lambda: looker(seen), idle=lambda: True)
    assert other.submit(look.newest, LIMIT).result(LIMIT) == {"look": 1}
    assert seen != [MAIN]


def test_the_main_thread_does_not_wait_for_itself() -> None:
    seen: list[int | None] = []
    assert MainThreadLook(lambda: looker(seen), idle=lambda: False).newest(LIMIT) == {"look": 1}
