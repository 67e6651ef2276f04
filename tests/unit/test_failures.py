from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from nbdist.worker.cell import failures
from nbdist.worker.cell.interrupts import StepStop
from tests.support.native_errors import from_native_code

PEER = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:123"


def raised(error: BaseException) -> BaseException:
    """The error, as it is after a `raise`."""
    try:
        raise error
    except BaseException as caught:
        return caught


def kind(error: BaseException) -> str:
    return failures.describe(error, "").kind


def test_a_stop_between_two_steps_is_known_by_its_type() -> None:
    assert kind(raised(StepStop("stopped after step 9"))) == "stopped"
    assert kind(raised(KeyboardInterrupt("stopped after step 9"))) == "interrupted"
    assert kind(raised(RuntimeError("stopped after step 9"))) == "raised"


@pytest.mark.parametrize(
    ("filename", "users"),
    [
        ("/home/somebody/train.py", True),
        ("<ipython-input-3-5d41402abc4b>", True),
        (json.__file__, False),
        (dist.__file__, False),
        ("/home/somebody/.local/lib/python3.11/site-packages/IPython/core/interactiveshell.py", False),
        ("/usr/lib/python3/dist-packages/IPython/core/interactiveshell.py", False),
        (failures.__file__, False),
    ],
)
def test_libraries_are_not_the_users_code_wherever_they_are_installed(filename: str, users: bool) -> None:
    assert failures.is_users_code(compile("", filename, "exec")) is users


def test_an_interrupt_is_known_by_its_type() -> None:
    own = type("KeyboardInterrupt", (Exception,), {})
    assert kind(raised(own())) == "raised"
    assert kind(raised(type("Stop", (KeyboardInterrupt,), {})())) == "interrupted"


@pytest.mark.parametrize(
    "text",
    [
        PEER,
        "NCCL communicator was aborted on rank 1",
        "Broken pipe",
        "Timed out waiting 1000ms for recv",
        "Connection reset by peer",
    ],
)
def test_what_torch_s_native_code_says_of_a_failed_peer_is_a_lost_one(text: str) -> None:
    assert kind(from_native_code(text)) == "lost"


def test_a_store_that_is_not_there_is_a_lost_one() -> None:
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=0.1))
    assert kind(caught.value) == "lost"


@pytest.mark.parametrize("error", [RuntimeError(PEER), OSError(PEER), dist.DistBackendError(PEER)])
def test_what_python_raises_is_not(error: BaseException) -> None:
    assert kind(raised(error)) == "raised"


def test_other_errors_of_native_code_are_not() -> None:
    assert kind(from_native_code("mat1 and mat2 shapes cannot be multiplied")) == "raised"


def test_what_is_raised_from_a_lost_peer_is_one_too() -> None:
    try:
        raise ValueError("the step has failed") from from_native_code(PEER)
    except ValueError as error:
        assert kind(error) == "lost"


def test_a_traceback_may_have_an_entry_without_a_line() -> None:
    """An interrupt can come where there is none, as at the end of a `with`."""

    def leaves_something() -> Iterator[types.FrameType]:
        with contextlib.nullcontext():
            yield sys._getframe()

    frame = next(leaves_something())
    offsets = [start for start, _, line in frame.f_code.co_lines() if line is None]
    traceback = types.TracebackType(None, frame, offsets[0], -1)
    assert traceback.tb_lineno in (None, -1)
    trimmed = failures.trim(traceback)
    assert trimmed is not None and trimmed.tb_lineno == frame.f_code.co_firstlineno
