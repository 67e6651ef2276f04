"""The guard names who initialized CUDA. The programs are real ones; their torch takes itself for one that has CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nbdist import cuda_guard
from nbdist.errors import RankError
from testbed.kernel import wait_until
from testbed.nvml import FakeNvml, machine
from tests.stand_ins.driver import compiled
from tests.stand_ins.guard import seen_by_nvml, write_packages

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "CUDA is not initialized in this process."
NO_GPU: tuple[()] = ()


@pytest.fixture(autouse=True)
def packages(tmp_path: Path) -> Path:
    """A folder of packages: peft, bitsandbytes, ..., and `pretend`, which gives torch its CUDA."""
    write_packages(tmp_path)
    return tmp_path


def program(folder: Path, code: str, gpus: tuple[int | None, ...] = (None,)) -> list[str]:
    """Run a program to its end.

    Args:
        folder: Where its packages are.
        code: The program; it may import all of them.
        gpus: What NVML says of each GPU: the bytes that the program itself holds there, None if it has no context.

    Returns:
        The lines that it printed.
    """
    file = folder / "program.py"
    file.write_text(code)
    (folder / "gpus.json").write_text(json.dumps(seen_by_nvml(gpus)))
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # Lightning sets it when another test imports it
    command = [sys.executable, "-W", "error", str(file)]
    ended = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


# --- armed


def test_the_guard_imports_no_torch(packages: Path) -> None:
    assert program(packages, "import sys, nbdist.cuda_guard; print('torch' in sys.modules)") == ["False"]


def test_without_torch_nobody_has_initialized_cuda(packages: Path) -> None:
    code = "from nbdist import cuda_guard\ncuda_guard.report(); print(cuda_guard.first(), cuda_guard.safe_to_fork())"
    assert program(packages, code) == [NOBODY, "None True"]


def test_torch_that_is_imported_later_is_watched_once_and_no_hook_remains(packages: Path) -> None:
    code = """
import sys
from nbdist import cuda_guard
cuda_guard.arm()
print(sum(type(finder).__module__ == "nbdist.base.imports" for finder in sys.meta_path))
import torch
cuda_guard.arm()
print(sum(type(finder).__module__ == "nbdist.base.imports" for finder in sys.meta_path))
print(sum(call.__module__ == 'nbdist.cuda_guard' for call, _ in torch.cuda._queued_calls))
print(vars(torch.cuda.__loader__).keys() & {"exec_module"} or "loader as it was", torch.cuda.is_initialized())
"""
    assert program(packages, code) == ["1", "0", "1", "loader as it was False"]


def test_another_import_hook_that_asks_all_others_is_no_hindrance(packages: Path) -> None:
    code = """
import importlib.util, sys
from nbdist import cuda_guard
class Hook:
    busy = False
    def find_spec(self, name, path=None, target=None):
        if name != "torch.cuda" or self.busy:
            return None
        self.busy = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False
sys.meta_path.insert(1, Hook())
import pretend, bitsandbytes
print(cuda_guard.first())
"""
    (says,) = program(packages, code)
    assert says.startswith("CUDA was initialized by bitsandbytes/cextension.py:5 ")


def test_a_torch_that_does_not_tell_costs_the_name_and_says_so(packages: Path) -> None:
    code = """
import torch
del torch.cuda._queued_calls
from nbdist import cuda_guard
print(cuda_guard.describe())
"""
    (says,) = program(packages, code)
    assert "this version of torch has no `torch.cuda._queued_calls`" in says


# --- the culprit


def test_an_import_is_named_with_who_imported_it(packages: Path) -> None:
    code = """
from nbdist import cuda_guard
import pretend
import peft
seen = cuda_guard.first()
print(seen)
print(seen.file, seen.line, seen.function, seen.cell, seen.imported, seen.before_guard)
print(*seen.chain)
"""
    says, where, chain = program(packages, code)
    assert says.startswith(
        "CUDA was initialized by bitsandbytes/cextension.py:5 (probe), imported by peft, imported by program.py:4, "
    )
    assert says.endswith(" s after the process's start")
    assert where == f"{packages}/bitsandbytes/cextension.py 5 probe None True False"
    assert chain == (
        "program.py:4 peft/__init__.py:1 peft/tuners/lora.py:2 bitsandbytes/__init__.py:1 "
        "bitsandbytes/cextension.py:7 bitsandbytes/cextension.py:5"
    )


def test_a_call_is_named_with_its_function(packages: Path) -> None:
    code = """
import pretend
from nbdist import cuda_guard
import helper
print(cuda_guard.first())
helper.Model().put()
print(cuda_guard.first())
"""
    before, after = program(packages, code)
    assert before == "None"
    function = "Model.put" if sys.version_info >= (3, 11) else "put"
    assert after.startswith(f"CUDA was initialized by helper.py:5 ({function}), ")


def test_only_the_first_is_named(packages: Path) -> None:
    code = "from nbdist import cuda_guard\nimport pretend\nimport bitsandbytes, helper\nhelper.Model().put()\n"
    (says, *_) = program(packages, f"{code}cuda_guard.report()")
    assert "bitsandbytes/cextension.py:5" in says


def test_the_report_shows_the_chain(packages: Path) -> None:
    code = "from nbdist import cuda_guard\nimport pretend\nimport bitsandbytes\ncuda_guard.report()"
    assert program(packages, code)[1:] == [
        "  program.py:3",
        "    bitsandbytes/__init__.py:1",
        "      bitsandbytes/cextension.py:7",
        "        bitsandbytes/cextension.py:5",
    ]


def test_an_initialization_that_fails_half_way_has_a_culprit_too(packages: Path) -> None:
    code = """
import pretend, torch
def fails():
    raise ValueError
torch.cuda._queued_calls.append((fails, []))
from nbdist import cuda_guard
try:
    import bitsandbytes
except Exception as error:
    print(type(error).__name__)
cuda_guard.report()
"""
    name, says, *_ = program(packages, code)
    assert name == "DeferredCudaCallError" and "bitsandbytes/cextension.py:5" in says


def test_what_came_before_the_guard_has_no_name_but_suspects(packages: Path) -> None:
    code = """
import pretend, bitsandbytes
from nbdist import cuda_guard
cuda_guard.report()
print(cuda_guard.first().before_guard)
"""
    says, before = program(packages, code)
    assert says == (
        "CUDA was initialized before nbdist watched, so the caller is unknown "
        "(bitsandbytes, imported here, would do it at its import)."
    )
    assert before == "True"


# --- forks


def test_a_fork_is_safe_until_cuda_is_initialized_and_asking_does_not_do_it(packages: Path) -> None:
    code = """
from nbdist import cuda_guard
import pretend, torch, helper
print(cuda_guard.safe_to_fork(), torch.cuda.is_initialized())
helper.Model().put()
print(cuda_guard.safe_to_fork())
"""
    assert program(packages, code) == ["True False", "False"]


def test_a_refused_fork_names_the_import_and_the_way_out(packages: Path) -> None:
    code = "from nbdist import cuda_guard\nimport pretend, peft\n"
    (says,) = program(packages, code + REFUSED)
    assert says.startswith(
        "UsageError CUDA was initialized by bitsandbytes/cextension.py:5 (probe), imported by peft, "
    )
    assert says.endswith(
        "and processes forked from here can't use it: restart the process, and move the import into the function, "
        "or use the default start_method, which works anyway"
    )


def test_a_question_that_initializes_nothing_but_spoils_forks_is_found(packages: Path) -> None:
    code = (
        "from nbdist import cuda_guard\nimport pretend, torch\ntorch.cuda.is_available()\nprint(cuda_guard.first())\n"
    )
    first, says = program(packages, code + REFUSED)
    assert first == "None"
    assert says.startswith("UsageError CUDA was initialized by a call that was not seen, in torch or in a library, ")
    assert "`%load_ext nbdist` in the first cell" in says


def test_without_a_gpu_asking_for_one_spoils_no_fork(packages: Path) -> None:
    code = "from nbdist import cuda_guard\nimport pretend, torch\ntorch.cuda.is_available()\n"
    assert program(packages, f"{code}cuda_guard.check_fork(); print(cuda_guard.safe_to_fork())", NO_GPU) == ["True"]


def test_a_driver_call_outside_torch_is_found(packages: Path) -> None:
    library = compiled(packages)
    if library is None:
        pytest.skip("the stand-in for the driver has to be compiled, and there is no C compiler")
    code = f"""
import ctypes
from nbdist import cuda_guard
driver = ctypes.CDLL({str(library)!r})
print(cuda_guard.safe_to_fork())
driver.cuInit(0)
print(cuda_guard.safe_to_fork())
cuda_guard.report()
"""
    before, after, says = program(packages, code)
    assert (before, after) == ("True", "False")
    assert says.startswith("CUDA was initialized bypassing torch's own initialization, so the caller is unknown: ")


def test_torchs_own_error_in_a_forked_process_becomes_advice_that_names_the_parents_culprit(packages: Path) -> None:
    code = """
import os
from nbdist import cuda_guard
import pretend, peft, helper
if os.fork() == 0:
    try:
        helper.Model().put()
    except RuntimeError as error:
        print(cuda_guard.advice_for(error), flush=True)
    os._exit(0)
os.wait()
"""
    (says,) = program(packages, code)
    assert says.startswith("CUDA was initialized by bitsandbytes/cextension.py:5 (probe), imported by peft, ")
    assert "the process that failed was forked after that: restart the process" in says


# --- memory and contexts, by NVML


def test_a_context_made_outside_torch_is_found_by_nvml(packages: Path) -> None:
    code = "from nbdist import cuda_guard\nprint(cuda_guard.context_outside_torch())\ncuda_guard.report()"
    devices, says = program(packages, code, (None, 2**29, None))
    assert devices == "[1]"
    assert says.startswith("CUDA was initialized on GPU 1 bypassing torch's own initialization")


def test_contexts_of_torch_itself_are_not_outside_torch(packages: Path) -> None:
    code = "import pretend, bitsandbytes\nfrom nbdist import cuda_guard\nprint(cuda_guard.context_outside_torch())"
    assert program(packages, code, (2**29,)) == ["[]"]


def test_so_it_is_beside_a_gpu_that_has_fallen_off_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    state = machine(2, processes={"self": 2**30})
    state["gpus"][0]["handle"] = "GPU_IS_LOST"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(state))
    assert cuda_guard.context_outside_torch() == [1] and cuda_guard.held_memory() == {1: 2**30}


def test_without_nvml_there_are_no_contexts_and_no_memory_is_held(packages: Path) -> None:
    code = "from nbdist import cuda_guard\nprint(cuda_guard.context_outside_torch(), cuda_guard.held_memory())"
    assert program(packages, code, NO_GPU) == ["[] {}"]


def test_held_memory_is_nvmls_figure_for_this_process(packages: Path) -> None:
    code = "from nbdist import cuda_guard\nprint(cuda_guard.held_memory())\nprint(cuda_guard.memory_warning())"
    held, warning = program(packages, code, (3 * 2**30, None, 20 * 2**20))
    assert held == str({0: 3 * 2**30, 2: 20 * 2**20})
    assert warning.startswith("the process holds 3.0 GiB on GPU 0 and 20.0 MiB on GPU 2 that the ranks will miss: ")


def test_held_memory_is_what_torch_has_reserved_where_nvml_tells_less(packages: Path) -> None:
    code = "import pretend, bitsandbytes\nfrom nbdist import cuda_guard\nprint(cuda_guard.held_memory())"
    assert program(packages, code, (None, None)) == [str({1: 2**30})]  # torch's GPU 0 is the machine's GPU 1


def test_who_holds_no_memory_is_not_warned(packages: Path) -> None:
    assert program(packages, "from nbdist import cuda_guard\nprint(cuda_guard.memory_warning())") == ["None"]


def test_a_driver_that_never_answers_holds_up_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    state = seen_by_nvml([2**30])
    state["seconds"], driver = 1e6, FakeNvml(state)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr("nbdist.metrics.node.driver.PATIENCE", 0.1)
    assert cuda_guard.memory_warning() is None
    state["seconds"] = 0.0  # now it answers: who has asked gets it late
    wait_until(lambda: driver.calls > 0 and not driver.opened, "the driver to be let go of")


# --- preflight and advice


@pytest.mark.parametrize(
    ("value", "asked"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("y", True), (" T ", True), ("0", False), ("", False)],
)
def test_a_preflight_is_asked_for_in_any_true_spelling(
    monkeypatch: pytest.MonkeyPatch, value: str, asked: bool
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", value)
    assert cuda_guard.preflight_asked() is asked


def test_the_preflight_prints_what_it_checked(packages: Path) -> None:
    assert program(packages, "from nbdist import cuda_guard\ncuda_guard.preflight()") == [
        f"who initialized CUDA: {NOBODY}",
        "a forked process could use CUDA",
        "GPU memory: the process holds none",
    ]


def test_it_needs_no_package_but_python_s_own() -> None:
    """It is what people call when something is broken already."""
    code = "import sys\nbefore = set(sys.modules)\nimport nbdist.cuda_guard\nprint(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) == {"nbdist"}


def test_the_error_is_recognized_in_what_caused_another_and_in_a_report() -> None:
    cause = RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")
    error = ValueError("step failed")
    error.__cause__ = cause
    for given in (cause, error, RankError(f"rank 1 raised\nRuntimeError: {cause}"), str(cause)):
        assert "use the default start_method" in (cuda_guard.advice_for(given) or "")


def test_what_torch_refuses_is_recognized_in_whatever_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError) as refused:
        torch.cuda._lazy_init()
    refused.value.args = ("words of a later version",)
    assert "use the default start_method" in (cuda_guard.advice_for(refused.value) or "")
    with pytest.raises(RuntimeError) as own:
        raise RuntimeError("words of the user's")
    assert cuda_guard.advice_for(own.value) is None


def test_a_worker_of_a_loader_gets_advice_of_its_own() -> None:
    text = "Caught RuntimeError in DataLoader worker process 0.\nCannot re-initialize CUDA in forked subprocess. ..."
    assert "let the dataset return CPU tensors" in (cuda_guard.advice_for(RuntimeError(text)) or "")


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_whose_words_can_t_be_had_gets_no_advice() -> None:
    assert cuda_guard.advice_for(Wordless()) is None


def test_other_errors_get_no_advice() -> None:
    error = RuntimeError("CUDA out of memory")
    error.__context__ = error
    assert cuda_guard.advice_for(error) is None


# --- a real GPU


@pytest.mark.gpu
def test_on_a_gpu_a_tensor_and_a_driver_call_are_both_found(packages: Path) -> None:
    (packages / "pynvml.py").unlink()
    (packages / "driver.py").write_text("import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n")
    code = "from nbdist import cuda_guard\nimport torch\nprint(cuda_guard.safe_to_fork())\n{}\n" + REFUSED
    safe, says = program(packages, code.format("torch.zeros(1).cuda()"))
    assert safe == "True" and says.startswith("UsageError CUDA was initialized by program.py:4, ")
    safe, says = program(packages, code.format("import driver"))
    assert safe == "True" and says.startswith("UsageError CUDA was initialized by a call that was not seen")


REFUSED = """
from nbdist.errors import UsageError
try:
    cuda_guard.check_fork()
except UsageError as error:
    print(type(error).__name__, error)
"""
