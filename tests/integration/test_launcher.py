"""notebook_launcher and debug_launcher in real kernels: ranks from the template, and ranks that are new Pythons."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, both, lines_by_rank, ranks_with_line, wait_until
from tests.conftest import sharing
from tests.support.roles import await_end, children, find

SETUP = """
import os, signal, sys, threading, time
from nbdist import debug_launcher, notebook_launcher
"""

# A group as Accelerate makes it: launched functions have torchrun's environment, and no group yet.
GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


@pytest.fixture
def kernel(notebook: Kernel) -> Iterator[Kernel]:
    """A kernel that has the launcher. Whatever a test launches has no rank and no store when it ends."""
    notebook.ok(SETUP)
    yield notebook
    wait_until(lambda: not launched(notebook), "an end of what was launched")


@pytest.fixture(scope="module")
def other() -> Iterator[Kernel]:
    """Another notebook, which does not use torch itself."""
    with Kernel() as kernel, sharing(kernel):
        kernel.ok(SETUP)
        yield kernel


def launched(kernel: Kernel) -> list[int]:
    """The processes of a launch: what the kernel's template has forked."""
    template = find(kernel.pid, "template")
    return children(template) if template else []


def function(body: str, name: str = "train", arguments: str = "") -> str:
    """A cell that defines a function."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"def {name}({arguments}):\n{lines}"


def launch(body: str, options: str = "num_processes=2") -> str:
    """A cell that launches a function of this body; `result` is what it returned."""
    return f"{function(body)}result = notebook_launcher(train, (), {options})"


def both_ways(test: object) -> object:
    """For what is promised of ranks from the template and of new Pythons alike."""
    marks = [pytest.param("warm"), pytest.param("spawn")]
    return pytest.mark.parametrize("way", marks)(test)


# --- values


@both_ways
def test_returns_what_the_function_returned_by_rank(kernel: Kernel, way: str) -> None:
    kernel.ok(function('return factor * (int(os.environ["RANK"]) + 1)', arguments="factor"))
    assert kernel.value(f"notebook_launcher(train, (10,), num_processes=2, start_method={way!r})") == [10, 20]


@pytest.mark.parametrize(
    "launched",
    [
        "lambda: Offset(40).plus(2)",
        "Offset(40).bound",
        "make_closure(40)",
        "functools.partial(Offset.plus, Offset(40), 2)",
        "Offset(42).__call__",
        "Offset(42)",
    ],
)
def test_what_is_defined_in_the_notebook_travels_by_value(kernel: Kernel, launched: str) -> None:
    kernel.ok(
        "import functools\n"
        "class Offset:\n"
        "    def __init__(self, value): self.value = value\n"
        "    def __call__(self): return self.value\n"
        "    def plus(self, more): return self.value + more\n"
        "    def bound(self): return self.plus(two)\n"
        "def make_closure(value):\n"
        "    return lambda: value + two\n"
        "two = 2"
    )
    assert kernel.value(f"notebook_launcher({launched}, num_processes=2)") == [42, 42]


def test_instances_of_the_notebook_s_classes_come_back_as_such(kernel: Kernel) -> None:
    kernel.ok("import dataclasses\n@dataclasses.dataclass\nclass Score:\n    value: float")
    kernel.ok(launch('return Score(float(os.environ["RANK"]))'))
    assert kernel.value("[score.value for score in result]") == [0.0, 1.0]
    assert kernel.value("isinstance(result[0], Score)") is True


def test_ranks_can_not_change_what_the_notebook_gave_them(kernel: Kernel) -> None:
    kernel.ok("import torch\nmodel, table = torch.nn.Linear(1000, 1000), {'a': 1}")
    kernel.ok("before = model.weight.detach().clone()")
    kernel.ok(
        function("model.weight.data.zero_(); table['b'] = 2; return table", arguments="model, table")
        + "result = notebook_launcher(train, (model, table), num_processes=2)"
    )
    assert kernel.value("(result, table, bool((model.weight == before).all()))") == (
        [{"a": 1, "b": 2}] * 2,
        {"a": 1},
        True,
    )


def test_large_tensors_are_shared_by_the_ranks_not_copied(kernel: Kernel) -> None:
    kernel.ok("import torch\nlarge = torch.ones(25_000_000)")  # 100 MB
    own = (  # what is only read stays the notebook's, mapped by both; a copy would be anonymous memory
        "def own():\n"
        "    lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "    return sum(int(line.split()[1]) for line in lines if line.startswith('Anonymous:')) << 10\n"
    )
    kernel.ok(own + function("before = own()\nreturn large.sum().item(), own() - before", "read", "large"))
    for total, grown in kernel.value("notebook_launcher(read, (large,), num_processes=2)"):
        assert total == 25_000_000 and grown < 50_000_000


def test_a_value_that_can_not_come_back_is_said_and_the_others_arrive(kernel: Kernel) -> None:
    outcome = kernel.ok(launch('return threading.Lock() if os.environ["RANK"] == "1" else "fine"'))
    assert "the value that rank 1 returned: it is a _thread.lock" in outcome.stdout
    assert "its result is None" in outcome.stdout
    assert kernel.value("result") == ["fine", None]


def test_a_value_that_can_not_be_rebuilt_here_is_said_and_the_others_arrive(kernel: Kernel) -> None:
    kernel.ok(
        "class Bound:\n"
        "    def __init__(self): self.pid = os.getpid()\n"
        "    def __setstate__(self, state): raise ValueError('lives elsewhere')"
    )
    outcome = kernel.ok(launch('return Bound() if os.environ["RANK"] == "0" else "fine"'))
    assert "the value that rank 0 returned has arrived, but can't be rebuilt" in outcome.stdout
    assert "(ValueError: lives elsewhere)" in outcome.stdout and "its result is None" in outcome.stdout
    assert kernel.value("result") == [None, "fine"]


@pytest.mark.parametrize(
    ("way", "end"),
    [("warm", "sys.exit()"), ("warm", "sys.exit(0)"), ("fork", "sys.exit(0)")],
)
def test_an_exit_without_an_error_is_an_end_like_another(kernel: Kernel, way: str, end: str) -> None:
    kernel.ok(launch(f'if os.environ["RANK"] == "1": {end}\nreturn "done"', f"num_processes=2, start_method={way!r}"))
    assert kernel.value("result") == ["done", None]


def test_an_exit_with_an_error_is_an_error_with_its_code(kernel: Kernel) -> None:
    kernel.ok(function('if os.environ["RANK"] == "1": sys.exit(3)'))
    kernel.ok("try:\n    notebook_launcher(train, num_processes=2)\nexcept Exception as caught:\n    error = caught")
    assert kernel.value("(str(error), error.failures[1].exitcode)") == ("rank 1 raised SystemExit: 3", 3)


def test_a_value_larger_than_the_memory_is_said_and_the_others_arrive(kernel: Kernel) -> None:
    kernel.ok("import mmap, numpy")
    untouched = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000"  # no memory is set aside for it
    huge = f"numpy.frombuffer(mmap.mmap(-1, 1 << 42, {untouched}))"
    outcome = kernel.ok(launch(f'return {huge} if os.environ["RANK"] == "1" else "fine"'))
    assert "the value that rank 1 returned: no memory for its 4.0 TiB (" in outcome.stdout
    assert kernel.value("result") == ["fine", None]


def test_without_all_results_only_rank_0_s_value_comes_back(kernel: Kernel) -> None:
    outcome = kernel.ok(
        launch('return threading.Lock() if os.environ["RANK"] == "1" else "mine"', "num_processes=2, all_results=False")
    )
    assert "cannot send" not in outcome.stdout
    assert kernel.value("result") == ["mine"]


def test_without_all_results_what_can_not_travel_is_named_as_the_user_knows_it(kernel: Kernel) -> None:
    kernel.ok("lock = threading.Lock()")
    refused = kernel.fails(launch("return lock", "2, all_results=False, start_method='warm'"), "TransferError")
    assert "function 'train' → global 'lock' is a _thread.lock" in refused.evalue


# --- what the function finds


@both_ways
def test_the_environment_is_torchrun_s(kernel: Kernel, way: str) -> None:
    kernel.ok('os.environ["FROM_THE_NOTEBOOK"] = "kept"')
    kernel.ok(launch("return dict(os.environ)", f"num_processes=2, start_method={way!r}"))
    for rank in (0, 1):
        seen = kernel.value(f"result[{rank}]")
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "ACCELERATE_MIXED_PRECISION": "no",
            "FROM_THE_NOTEBOOK": "kept",
        }
        assert {name: seen.get(name) for name in expected} == expected
        assert int(seen["MASTER_PORT"]) > 0 and seen["TORCHELASTIC_RUN_ID"]


@both_ways
def test_the_function_makes_its_own_process_group_as_often_as_it_likes(kernel: Kernel, way: str) -> None:
    body = """
import torch, torch.distributed as dist
sums = [dist.is_initialized()]
for _ in range(2):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    sums.append(total.item())
    dist.destroy_process_group()
return sums
"""
    kernel.ok(launch(body, f"num_processes=2, start_method={way!r}"))
    assert kernel.value("result") == [[False, 2.0, 2.0]] * 2


def test_the_function_s_globals_are_those_of_the_notebook(kernel: Kernel) -> None:
    kernel.ok("given = 1")
    kernel.ok(launch('return given, "rank" in globals(), __name__'))
    assert kernel.value("result") == [(1, False, "__main__")] * 2


def test_sets_of_strings_have_one_order_on_ranks_of_new_pythons(kernel: Kernel) -> None:
    kernel.ok(launch('return hash("a")', 'num_processes=2, start_method="spawn"'))
    assert kernel.value("result[0] == result[1]")


def test_a_rank_of_a_new_python_heeds_what_is_read_only_at_its_start(kernel: Kernel) -> None:
    kernel.ok('os.environ["PYTHONHASHSEED"] = "7"')
    kernel.ok(launch('return hash("a")', 'num_processes=2, start_method="spawn"'))
    fresh = "int(__import__('subprocess').check_output([sys.executable, '-c', 'print(hash(\"a\"))']))"
    assert kernel.value(f"[value == {fresh} for value in result]") == [True, True]
    kernel.ok('del os.environ["PYTHONHASHSEED"]')


def test_no_gpus_and_debug_launcher_hide_the_gpus(kernel: Kernel) -> None:
    body = f"{GROUP}\nreturn os.environ['CUDA_VISIBLE_DEVICES'], dist.get_backend(), dist.get_world_size()"
    kernel.ok(launch(body, "num_processes=2, gpus=[]"))
    assert kernel.value("result") == [("", "gloo", 2)] * 2
    assert kernel.value("debug_launcher(train)") == [("", "gloo", 2)] * 2
    assert kernel.value("debug_launcher(train, num_processes=3)") == [("", "gloo", 3)] * 3


@pytest.mark.torch_private
def test_a_function_may_destroy_its_group_before_its_model_is_freed(kernel: Kernel) -> None:
    body = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
for count in range(30):
    dist.init_process_group("gloo")
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    for _ in range(3):
        model(torch.randn(8, 64)).sum().backward()
    dist.destroy_process_group()
    del model
return count
"""
    kernel.ok(launch(body))
    assert kernel.value("result") == [29, 29]


# --- what the notebook keeps

STATE = "(dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.enumerate())"
LAUNCHES = {
    "a success": "return 1",
    "a failure": 'raise ValueError("no")',
    "a death": "os._exit(3)",
}


@pytest.mark.parametrize("how", LAUNCHES)
def test_environment_signals_and_threads_are_as_before(kernel: Kernel, how: str) -> None:
    kernel.ok(launch("return 0"))  # whatever stays for the next launch is there now
    kernel.ok(f"before = {STATE}")
    kernel.run(launch(LAUNCHES[how]))
    kernel.ok(f"after = {STATE}")
    assert kernel.value("[after[place] == before[place] for place in range(3)]") == [True] * 3
    assert kernel.value("[each.name for each in after[3] if each not in before[3]]") == []


def test_torch_is_not_loaded_into_the_notebook(other: Kernel) -> None:
    assert other.value("notebook_launcher(lambda: str(__import__('torch').__version__), num_processes=2)")
    other.fails(launch('raise ValueError("no")'), "LaunchError")
    assert other.value("'torch' in sys.modules") is False


# --- output


def test_output_is_named_by_rank(kernel: Kernel) -> None:
    body = 'print("same"); print("mine", os.environ["RANK"])\nprint("to stderr", file=sys.stderr)'
    outcome = kernel.ok(launch(body))
    said, _, printed = outcome.stdout.partition("\n")
    assert said == "Launching train on 2 CPU ranks."
    outcome.stdout = printed
    assert outcome.lines == {0: ["same", "mine 0"], 1: ["same", "mine 1"]}
    assert "to stderr" in outcome.stderr


def test_what_a_rank_printed_before_it_was_killed_is_shown(kernel: Kernel) -> None:
    body = 'print("last words", end="")\nsys.stdout.flush()\nos.kill(os.getpid(), signal.SIGKILL)'
    assert "last words" in kernel.fails(launch(body), "LaunchError").stdout


# --- errors


def test_the_rank_that_failed_first_is_named_first_and_what_follows_from_it_later(kernel: Kernel) -> None:
    body = f'{GROUP}\nif rank == 1:\n    raise ValueError("the cause")\ndist.barrier()'
    outcome = kernel.fails(launch(body), "LaunchError")
    lines = outcome.traceback.splitlines()
    assert outcome.evalue == lines[0] == "rank 1 raised ValueError: the cause"
    assert "---->" in outcome.traceback and 'raise ValueError("the cause")' in outcome.traceback
    assert lines[-1].startswith("rank 0: ")


def test_a_failure_on_a_rank_ends_the_others(kernel: Kernel) -> None:
    outcome = kernel.fails(
        launch('if os.environ["RANK"] == "0": raise KeyError("gone")\ntime.sleep(600)'), "LaunchError"
    )
    assert outcome.evalue == "rank 0 raised KeyError: 'gone'"
    assert "rank 1: ended, because rank 0 failed; it was in cell " in outcome.traceback


def test_the_error_is_torch_s_as_well(kernel: Kernel) -> None:
    kernel.ok(
        "import pickle, nbdist\nfrom torch.distributed.elastic.multiprocessing.errors import ChildFailedError\n"
        + function(f'{GROUP}\nif rank == 1:\n    raise ValueError("the cause")\ndist.barrier()')
        + "try:\n    notebook_launcher(train, num_processes=2)\nexcept ChildFailedError as caught:\n    error = caught"
    )
    assert kernel.value("[isinstance(error, kind) for kind in (nbdist.LaunchError, nbdist.RankError)]") == [True, True]
    assert kernel.value("(error.name, error.get_first_failure()[0], error.first.rank)") == ("train", 1, 1)
    assert kernel.value("(error.failures[1].exitcode, 'ValueError: the cause' in error.failures[1].message)") == (
        1,
        True,
    )
    kernel.ok("copy = pickle.loads(pickle.dumps(error))")
    assert kernel.value("isinstance(copy, ChildFailedError) and isinstance(copy, nbdist.LaunchError)") is True
    assert kernel.value("(copy.name, copy.report == error.report, copy.failures == error.failures)") == (
        "train",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("way", "end", "said", "code"),
    [
        ("warm", "os._exit(3)", "rank 1 died: exit code 3, pid ", 3),
        ("warm", "os.kill(os.getpid(), signal.SIGKILL)", "rank 1 died: SIGKILL (killed; ", -9),
        ("warm", "__import__('ctypes').string_at(0)", "rank 1 died: SIGSEGV (segmentation fault), pid ", -11),
        ("spawn", "os.kill(os.getpid(), signal.SIGKILL)", "rank 1 died: SIGKILL (killed; ", -9),
    ],
)
def test_a_rank_that_dies_is_named_with_how(kernel: Kernel, way: str, end: str, said: str, code: int) -> None:
    kernel.ok(function(f'if os.environ["RANK"] == "1":\n    {end}\ntime.sleep(600)'))
    options = f"num_processes=2, start_method={way!r}"
    kernel.ok(f"try:\n    notebook_launcher(train, {options})\nexcept Exception as caught:\n    error = caught")
    assert kernel.value("str(error)").startswith(said) and kernel.value("str(error)").endswith(", while it ran train")
    assert kernel.value("(list(error.failures), error.failures[1].exitcode)") == ([1, 0], code)


def test_the_next_launch_works_after_a_failure(kernel: Kernel) -> None:
    kernel.fails(launch("os._exit(3)"), "LaunchError")
    assert ranks_with_line(kernel.ok(launch('print("again")')).stdout, "again") == [0, 1]


def test_what_can_not_travel_is_named_and_nothing_is_started(kernel: Kernel) -> None:
    kernel.ok("def make():\n    lock = threading.Lock()\n    def train(): return lock\n    return train")
    outcome = kernel.fails('notebook_launcher(make(), num_processes=2, start_method="warm")', "TransferError")
    assert "function 'train'" in outcome.evalue and "'lock'" in outcome.evalue and "_thread.lock" in outcome.evalue
    assert outcome.stdout == ""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("notebook_launcher(print)", "give the number of ranks: `notebook_launcher(train, num_processes=2)`"),
        ("notebook_launcher(5, num_processes=2)", "must be callable, not an int"),
        ("notebook_launcher(print, 5, num_processes=2)", "args must be a tuple, not an int: `args=(value,)`"),
        ("notebook_launcher(print, (), 2, 'bf61')", "did you mean 'bf16'? Allowed values: 'no', 'fp16', 'bf16', 'fp8'"),
    ],
)
def test_wrong_arguments_are_one_clear_error_without_frames_of_ours(kernel: Kernel, call: str, said: str) -> None:
    outcome = kernel.fails(call, "UsageError")
    assert said in outcome.evalue and outcome.stdout == ""
    assert outcome.traceback == f"UsageError: {outcome.evalue}"


# --- interrupt and time-out

BUSY = {
    "sleeping": 'print("up")\ntime.sleep(600)',
    "waiting_for_each_other": f'{GROUP}\nprint("up")\ndist.recv(torch.ones(1), 1 - rank)',
    "computing": 'print("up")\nwhile True: pass',
}


@pytest.mark.parametrize("how", BUSY)
def test_an_interrupt_leaves_nothing(kernel: Kernel, how: str) -> None:
    kernel.ok(launch("return 0"))
    kernel.ok(f"before = {STATE}")
    cell = kernel.start(launch(BUSY[how]))
    cell.wait_until(lambda seen: sum(map(len, seen_by_rank(seen.stdout).values())) == 2, "a word of both ranks")
    ranks = launched(kernel)
    kernel.interrupt()
    outcome = cell.finish()
    assert (outcome.ename or outcome.status) in ("KeyboardInterrupt", "LaunchError", "RankTimeout"), str(outcome)
    await_end(ranks)
    kernel.ok(f"after = {STATE}")
    assert kernel.value("[after[place] == before[place] for place in range(3)]") == [True] * 3
    assert kernel.value("[each.name for each in after[3] if each not in before[3]]") == []


def test_a_function_that_catches_the_interrupt_has_its_time_until_the_next(kernel: Kernel) -> None:
    cell = kernel.start(
        launch('while True:\n    try: print("up"); time.sleep(600)\n    except BaseException: print("saved")')
    )
    cell.wait_until(lambda seen: sum(map(len, seen_by_rank(seen.stdout).values())) == 2, "a word of both ranks")
    kernel.interrupt()
    cell.wait_for("Interrupt again to stop them now")
    kernel.interrupt()
    outcome = cell.finish()
    assert outcome.status == "error" and "saved" in outcome.stdout, str(outcome)


def seen_by_rank(stdout: str) -> dict[int, list[str]]:
    return lines_by_rank(stdout.partition("\n")[2])


ANNOY = "import atexit; atexit.register(os.kill, notebook, signal.SIGINT)"  # while the notebook ends the ranks


@pytest.mark.parametrize("first", ["an_interrupt", "an_error", "a_success"])
def test_another_interrupt_while_ranks_are_ended_leaves_nothing_and_hides_nothing(kernel: Kernel, first: str) -> None:
    kernel.ok(f"notebook = os.getpid()\n{launch('return 0')}")
    before = family(kernel)
    then = {"an_interrupt": "time.sleep(600)", "an_error": "raise ValueError('no')", "a_success": "return 0"}[first]
    cell = kernel.start(launch(f"{ANNOY}\nprint('up')\n{then}"))
    cell.wait_until(lambda seen: sum(map(len, seen_by_rank(seen.stdout).values())) == 2, "a word of both ranks")
    if first == "an_interrupt":
        kernel.interrupt()
    outcome = cell.finish()
    assert outcome.ename == ("LaunchError" if first == "an_error" else "KeyboardInterrupt"), str(outcome)
    assert "they have ended" in outcome.evalue or first != "an_interrupt", str(outcome)
    kernel.ok(launch("return 0"))
    wait_until(lambda: family(kernel) == before, "the processes from before")


def family(kernel: Kernel) -> set[int]:
    return {process.pid for process in psutil.Process(kernel.pid).children(recursive=True)}


def test_an_interrupt_is_said_with_where_the_ranks_were(kernel: Kernel) -> None:
    cell = kernel.start(launch(BUSY["sleeping"]))
    cell.wait_for("up")
    kernel.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt" and "they have ended" in outcome.evalue
    assert "time.sleep(600)" in outcome.traceback


def test_a_launch_that_is_not_done_in_time_is_interrupted(kernel: Kernel) -> None:
    outcome = kernel.fails(launch("time.sleep(600)", "num_processes=2, timeout=0.5"), "RankTimeout")
    assert outcome.evalue.startswith("not done after 0.5 s (timeout)")


def test_ranks_that_go_on_when_others_have_finished_are_named_with_their_line(kernel: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    body = (
        f'if os.environ["RANK"] == "1":\n    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\nreturn "done"'
    )
    cell = kernel.start(launch(body))
    cell.wait_until(lambda seen: any("finished" in text for text in seen.plain), "a live line")
    (line,) = cell.outcome.plain
    assert line.startswith("nbdist: rank 0 finished ") and "; rank 1 is at cell " in line
    assert "while not os.path.exists" in line
    gate.touch()
    assert cell.finish().status == "ok"
    assert kernel.value("result") == ["done", "done"]


# --- ports


def test_two_notebooks_launch_at_once_on_the_default_port(kernel: Kernel, other: Kernel, tmp_path: Path) -> None:
    body = f"""
import pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path({str(tmp_path)!r}, f"{{os.getpid()}}").touch()
while len(os.listdir({str(tmp_path)!r})) < 4: time.sleep(0.01)
total = torch.ones(1)
dist.all_reduce(total)
return total.item(), os.environ["MASTER_PORT"]
"""
    cells = [each.start(launch(body)) for each in (kernel, other)]
    assert [cell.finish().status for cell in cells] == ["ok", "ok"]
    seen = [each.value("result") for each in (kernel, other)]
    assert [total for ranks in seen for total, _ in ranks] == [2.0] * 4
    assert seen[0][0][1] != seen[1][0][1]


def test_instead_of_the_default_port_that_is_taken_another_is_used(kernel: Kernel) -> None:
    kernel.ok(
        "import contextlib, socket\n"
        "with contextlib.suppress(OSError), socket.create_server(('127.0.0.1', 29500)) as taken:\n"
        "    result = notebook_launcher(lambda: os.environ['MASTER_PORT'], num_processes=2)"
    )
    assert kernel.value("result[0] == result[1] != '29500'") is True


def test_a_port_that_was_named_is_used_or_its_owner_is_named(kernel: Kernel) -> None:
    kernel.ok("import socket\ntaken = socket.create_server(('127.0.0.1', 0)); port = taken.getsockname()[1]")
    code = "notebook_launcher(lambda: os.environ['MASTER_PORT'], num_processes=2, use_port=port)"
    outcome = kernel.fails(code, "UsageError")
    port = kernel.value("port")
    assert outcome.evalue.startswith(f"use_port: port {port} is taken by process {kernel.pid} (")
    kernel.ok("taken.close()")
    assert kernel.value(code) == [str(port)] * 2


# --- beside a session, and inside of it


def test_beside_a_session_the_ranks_are_extra_ones_and_this_is_said(own_ranks: Kernel) -> None:
    own_ranks.ok(SETUP)
    own_ranks.ok("%%distributed\nkept = rank")
    outcome = own_ranks.ok(launch("return os.getpid()"))
    assert "these ranks are extra processes, besides ranks 0-1 of the session" in outcome.stdout
    assert not set(own_ranks.value("result")) & set(own_ranks.rank_pids())
    assert own_ranks.ok("%%distributed\nprint(kept == rank)").lines == both("True")


@pytest.mark.parametrize("name", ["notebook_launcher", "debug_launcher"])
def test_a_launch_on_a_rank_is_refused(kernel: Kernel, name: str) -> None:
    refused = ": launch from the notebook, not from a function or cell that runs on ranks"
    body = f"import nbdist\nnbdist.{name}(print, num_processes=2)"
    outcome = kernel.fails(launch(body), "LaunchError")
    assert outcome.evalue.startswith("rank 0 raised UsageError: this is rank 0" + refused) or (
        outcome.evalue.startswith("rank 1 raised UsageError: this is rank 1" + refused)
    )


def test_a_launch_in_a_cell_on_ranks_is_refused(own_ranks: Kernel) -> None:
    cell = "%%distributed -r 0\nimport nbdist\nnbdist.notebook_launcher(print, num_processes=2)"
    assert "this is rank 0: launch" in own_ranks.fails(cell, "RankError").evalue


# --- the beginning and the end


def test_an_interrupted_start_is_one_line_and_leaves_nothing() -> None:
    with Kernel(NBDIST_PREWARM="0") as kernel:
        kernel.ok(SETUP)
        cell = kernel.start(launch("return 0"))
        wait_until(lambda: find(kernel.pid, "template"), "a template")
        kernel.interrupt()
        outcome = cell.finish()
        assert outcome.traceback == "KeyboardInterrupt: the start was interrupted; no ranks are running"
        wait_until(lambda: not family(kernel), "an end of what was started")
        kernel.ok(launch("return 0"))


def test_a_launch_ends_with_its_kernel() -> None:
    with Kernel() as kernel:
        kernel.ok(SETUP)
        cell = kernel.start(launch(BUSY["sleeping"]))
        cell.wait_for("up")
        before = list(family(kernel))
        os.kill(kernel.pid, signal.SIGKILL)
        await_end(before, limit=20.0)
