"""What a fork asks of the process that it starts from, and the parts of a launch that need no ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import nbdist
from nbdist import transfer
from nbdist.errors import TransferError, UsageError
from nbdist.launch import in_process
from nbdist.launch.request import Request
from nbdist.train import state as training
from nbdist.worker.cell import failures
from tests.stand_ins.guard import write_packages

ROOT = Path(__file__).resolve().parents[2]
CANNOT = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ..."


def program(code: str, folder: Path = ROOT) -> str:
    """What a program prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-W", "error", "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# --- threads


DESCRIBE = "from nbdist.launch.fork.kernel_threads import describe_threads\nprint(describe_threads())"


def test_a_process_without_threads_of_the_users_has_none_to_name() -> None:
    assert program(f"import numpy, zmq\nzmq.Context().socket(zmq.PUB)\n{DESCRIBE}") == "\n"


def test_threads_are_named() -> None:
    threads = """
import threading
for name in ("prefetch", "log"):
    threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()
"""
    assert program(threads + DESCRIBE) == "the threads 'prefetch', 'log'\n"


def test_the_pool_of_threads_that_computes_for_torch_is_named() -> None:
    compute = """
import os, time, torch
torch.set_num_threads(3)
wide = torch.randn(600, 600)
wide @ wide
from nbdist.launch.fork.kernel_threads import describe_threads
while not (found := describe_threads()):  # they spin for a moment before they wait
    time.sleep(0.01)
print(found)
"""
    assert " of OpenMP (" in program(compute)


# --- what can't travel


def test_an_error_tells_the_part_that_cannot_travel_and_the_way_to_it() -> None:
    with open(os.devnull, "rb") as file, pytest.raises(TransferError) as caught:
        transfer.pack({"file": file}, name="args[0]")
    assert caught.value.part == "args[0]['file'] is a _io.BufferedReader"
    assert not caught.value.on_gpu


def test_an_error_tells_that_it_is_about_a_gpu() -> None:
    with FakeTensorMode():
        value = [torch.empty(1, device="cuda")]
    with pytest.raises(TransferError) as caught:
        transfer.pack(value, name="value", cuda=False)
    assert caught.value.on_gpu
    assert caught.value.part == "value[0] is a tensor on cuda:0"


def test_a_tensor_on_a_gpu_is_found_behind_what_does_not_pickle() -> None:
    model, lock = torch.nn.Module(), threading.Lock()
    with FakeTensorMode():
        model.weight = torch.nn.Parameter(torch.empty(2, device="cuda"))
    found = transfer.find_on_gpu((lock, {"model": model}), "args")
    assert found.startswith("args[1]['model']") and found.endswith("is a tensor on cuda:0")
    assert transfer.find_on_gpu((lock, torch.ones(1)), "args") == ""


# --- advice


def test_a_rank_is_told_what_to_do_about_processes_that_it_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    failure = failures.describe(RuntimeError(CANNOT), "the traceback")
    assert failure.traceback.startswith("the traceback\nnbdist: this rank uses CUDA, so processes that it forks can't")
    assert "get_context('spawn')" in failure.traceback


def test_a_forked_rank_names_who_initialized_cuda_in_the_notebook(tmp_path: Path) -> None:
    write_packages(tmp_path)
    code = f"""
import nbdist.cuda_guard, os, pretend, sys
import peft
os.environ["LOCAL_RANK"] = "0"
if os.fork() == 0:
    from nbdist.worker.cell import failures
    print(failures.describe(RuntimeError({CANNOT!r}), "").traceback, flush=True)
    os._exit(0)
os.wait()
"""
    assert "CUDA was initialized by bitsandbytes/cextension.py:5 (probe), imported by peft" in program(code, tmp_path)


def test_other_errors_get_no_advice() -> None:
    assert failures.describe(ValueError("too small"), "the traceback").traceback == "the traceback"


# --- the notebook's own process


def test_the_environment_is_as_before_whatever_the_function_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")

    def train() -> str:
        os.environ["NEW"] = "left behind"
        del os.environ["KEPT"]
        return os.environ["ACCELERATE_MIXED_PRECISION"]

    before = dict(os.environ)
    assert in_process.launch(Request(train, num_processes=1, mixed_precision="fp16")) == ["fp16"]
    assert dict(os.environ) == before


def test_an_exit_without_an_error_is_an_end_like_another() -> None:
    assert in_process.launch(Request(sys.exit, num_processes=1)) == [None]
    with pytest.raises(SystemExit):
        in_process.launch(Request(sys.exit, (3,), num_processes=1))


def test_the_plan_that_was_typed_counts_in_the_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.client.start.session_plan.chosen_plan", nbdist.Plan(precision="bf16"))
    assert in_process.launch(Request(lambda: nbdist.Plan.from_environment().precision, num_processes=1)) == ["bf16"]


def test_each_launch_computes_in_its_own_precision_whatever_was_prepared_before() -> None:
    def prepare() -> torch.nn.Module:
        model: torch.nn.Module = nbdist.prepare(torch.nn.Linear(2, 2))
        return model

    def dtype() -> torch.dtype:
        ones = torch.ones(2, 2)
        with nbdist.autocast():
            return (ones @ ones).dtype

    kept = in_process.launch(Request(prepare, num_processes=1))
    computed = [
        *in_process.launch(Request(dtype, num_processes=1, mixed_precision="bf16")),
        *in_process.launch(Request(dtype, num_processes=1)),
    ]
    nbdist.free_memory(*kept)
    assert computed == [torch.bfloat16, torch.float32]


def test_what_the_notebook_has_prepared_is_there_after_a_launch_that_prepares_nothing() -> None:
    model = nbdist.prepare(torch.nn.Linear(2, 2))
    before = training.current()
    in_process.launch(Request(training.current, num_processes=1))
    assert training.current() is before
    nbdist.free_memory(model)


def test_an_exception_comes_through_unchanged() -> None:
    error = KeyError("lr")

    def train() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        in_process.launch(Request(train, num_processes=1))
    assert caught.value is error


# --- autocast


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", torch.bfloat16)],
)
def test_autocast_computes_in_the_precision_asked_for(
    monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    ones = torch.ones(2, 2, device="cuda" if torch.cuda.is_available() else "cpu")
    with nbdist.autocast():
        assert (ones @ ones).dtype == dtype
    assert (ones @ ones).dtype == torch.float32


def test_autocast_works_as_a_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    ones = torch.ones(2, 2, device="cuda" if torch.cuda.is_available() else "cpu")

    @nbdist.autocast()  # type: ignore[operator]
    def dtype() -> torch.dtype:
        return (ones @ ones).dtype

    assert [dtype(), dtype()] == [torch.bfloat16, torch.bfloat16]


def test_autocast_lists_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bogus")
    with pytest.raises(UsageError, match="allowed are no, bf16, fp16 and fp8"), nbdist.autocast():
        pass
