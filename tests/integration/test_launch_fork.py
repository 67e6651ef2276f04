"""notebook_launcher on children of the kernel: asked for by `start_method="fork"`, or since nothing else works."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, both, lines_by_rank, wait_until
from tests.stand_ins.guard import write_packages
from tests.support.leftovers import files_of_sessions
from tests.support.torch_build import cpu_torch

SETUP = """
import os, signal, sys, threading, time
from nbdist import notebook_launcher
lock = threading.Lock()
"""


@pytest.fixture
def kernel(notebook: Kernel) -> Iterator[Kernel]:
    """A kernel that has the launcher and something that can't travel. Nothing that a test forks is left."""
    notebook.ok(SETUP)
    before = state(notebook)
    yield notebook
    assert state(notebook) == before


def state(kernel: Kernel) -> object:
    """What a launch must leave as it was: the kernel's own children, threads, handlers and environment."""
    forks = [child.pid for child in psutil.Process(kernel.pid).children() if "ipykernel" in " ".join(child.cmdline())]
    # Those of classes of their own are IPython's and zmq's, which come and go; so does the way to the warm controller.
    plain = "type(thread) is threading.Thread and thread.name != 'nbdist-client'"
    threads = kernel.value(f"[thread.name for thread in threading.enumerate() if {plain}]")
    return forks, threads, kernel.value("(str(signal.getsignal(signal.SIGINT)), dict(os.environ))")


@contextlib.contextmanager
def clean(kernel: Kernel) -> Iterator[None]:
    """While the body runs, libraries may set variables of the kernel's environment (Accelerate does, torch too)."""
    kernel.ok("environment = dict(os.environ)")
    yield
    kernel.ok("os.environ.clear(); os.environ.update(environment)")


def fork(body: str, options: str = "num_processes=2, start_method='fork'") -> str:
    """A cell that forks a function of this body; `result` is what it returned."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"def train():\n{lines}result = notebook_launcher(train, (), {options})"


def output(text: str) -> dict[int, list[str]]:
    """The lines of ranks, without nbdist's own."""
    own = ("nbdist:", "Launching ")
    return lines_by_rank("".join(line for line in text.splitlines(keepends=True) if not line.startswith(own)))


# --- the notebook's memory


def test_a_function_uses_what_cannot_travel(kernel: Kernel) -> None:
    kernel.ok(fork("with lock:\n    return int(os.environ['RANK']) * 10"))
    assert kernel.value("result") == [0, 10]


def test_a_queue_of_the_notebook_is_shared_by_all_ranks(kernel: Kernel) -> None:
    kernel.ok("import multiprocessing\nqueue = multiprocessing.get_context('fork').Queue()\nqueue.put('notebook')")
    kernel.ok(fork("queue.put(os.environ['RANK'])"))
    assert kernel.value("sorted(queue.get(timeout=30) for _ in range(3))") == ["0", "1", "notebook"]
    kernel.ok("queue.close(); queue.join_thread()")


def test_what_belongs_to_the_thread_of_the_cell_is_there(kernel: Kernel) -> None:
    kernel.ok("import torch\nown = threading.local()\nown.value = 7\nbefore = torch.set_grad_enabled(False)")
    kernel.ok(fork("return own.value, torch.is_grad_enabled()"))
    kernel.ok("torch.set_grad_enabled(True)")
    assert kernel.value("result") == [(7, False), (7, False)]


def test_names_of_the_rank_s_shell_hide_none_of_the_notebook_s(kernel: Kernel) -> None:
    kernel.ok("device = 'theirs'\nnotebook = get_ipython()")
    kernel.ok(fork("import __main__\nreturn device, __main__.device, get_ipython() is notebook"))
    assert kernel.value("result") == [("theirs", "theirs", False)] * 2


def test_random_numbers_continue_from_the_notebook_s(kernel: Kernel) -> None:
    draw = "numpy.random.rand(), torch.rand(1).item()"
    kernel.ok("import numpy, torch\nnumpy.random.seed(1); before = torch.manual_seed(1)")
    kernel.ok(fork(f"return {draw}"))
    kernel.ok(f"own = ({draw})")
    assert kernel.value("[drawn == own for drawn in result]") == [True, True]


def test_a_value_that_cannot_come_back_is_said_and_the_others_arrive(kernel: Kernel) -> None:
    shown = kernel.ok(fork("return lock if os.environ['RANK'] == '1' else 'fine'"))
    assert kernel.value("result") == ["fine", None]
    assert "cannot send the value that rank 1 returned: it is a _thread.lock" in shown.stdout


def test_large_tensors_come_back(kernel: Kernel) -> None:
    kernel.ok("import torch\n" + fork("return torch.full((1_000_000,), float(os.environ['RANK']))"))
    assert kernel.value("[value.sum().item() for value in result]") == [0.0, 1_000_000.0]


# --- by default


def test_what_cannot_travel_is_forked_by_default_and_said(kernel: Kernel) -> None:
    shown = kernel.ok(fork("with lock:\n    return os.getppid()", "num_processes=2"))
    assert (
        "nbdist: forked from the notebook, because function 'train' → global 'lock' is a _thread.lock\n" in shown.stdout
    )
    assert kernel.value("result") == [kernel.pid, kernel.pid]


def test_what_can_travel_is_not_forked(kernel: Kernel) -> None:
    kernel.ok(fork("return os.getppid()", "num_processes=2"))
    assert kernel.pid not in kernel.value("result")


@pytest.mark.parametrize("way", ["warm", "spawn"])
def test_where_another_way_is_asked_for_the_error_names_this_one(kernel: Kernel, way: str) -> None:
    refused = kernel.fails(fork("with lock: pass", f"num_processes=2, start_method={way!r}"), "TransferError")
    assert "function 'train' → global 'lock' is a _thread.lock" in refused.evalue
    assert "`start_method='fork'`" in refused.evalue


def test_debug_launcher_forks_what_cannot_travel(kernel: Kernel) -> None:
    kernel.ok(
        "from nbdist import debug_launcher\ndef train():\n    with lock: return 1\nresult = debug_launcher(train)"
    )
    assert kernel.value("result") == [1, 1]


def test_what_it_lacks_is_said_once_in_a_kernel() -> None:
    with Kernel() as kernel:
        kernel.ok(SETUP)
        assert kernel.ok(fork("pass")).stdout.count("docs/launcher.md lists what else differs") == 1
        assert "lists what else differs" not in kernel.ok(fork("pass")).stdout


# --- torch


def test_ranks_have_torchruns_environment_and_meet_again_and_again(kernel: Kernel) -> None:
    kernel.ok(
        fork("""
import torch, torch.distributed as dist
sums = []
for _ in range(2):
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    sums.append(ones.item())
    dist.destroy_process_group()
return sums, [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
""")
    )
    assert kernel.value("result") == [([2.0, 2.0], [str(rank), str(rank), "2", "2", "127.0.0.1"]) for rank in (0, 1)]


def test_ranks_train_after_the_notebook_has_used_its_threads(kernel: Kernel) -> None:
    kernel.ok("import torch\nwide = torch.randn(600, 600, requires_grad=True)\n(wide @ wide).sum().backward()")
    kernel.ok(
        fork("""
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(600, 600))
model(wide.detach()).sum().backward()
return torch.get_num_threads()
""")
    )
    assert kernel.value("result") == [1, 1]


def test_workers_of_a_data_loader_work_on_ranks(kernel: Kernel) -> None:
    kernel.ok(fork("from torch.utils.data import DataLoader\nreturn len(list(DataLoader(range(8), num_workers=2)))"))
    assert kernel.value("result") == [8, 8]


def test_accelerate_sees_all_ranks_though_the_notebook_has_asked_it_before(kernel: Kernel) -> None:
    pytest.importorskip("accelerate")
    with clean(kernel):
        kernel.ok("import accelerate\nalone = accelerate.PartialState(cpu=True).num_processes")
        kernel.ok(fork("return accelerate.PartialState().num_processes"))
        kernel.ok("accelerate.PartialState._reset_state()")
    assert kernel.value("[alone, *result]") == [1, 2, 2]


def test_an_accelerator_of_the_notebook_is_refused_as_in_accelerate(kernel: Kernel) -> None:
    pytest.importorskip("accelerate")
    with clean(kernel):
        kernel.ok("import accelerate\naccelerate.Accelerator(cpu=True)")
        refused = kernel.fails(fork("pass"), "UsageError")
        by_itself = kernel.fails(fork("with lock: pass", "num_processes=2"), "TransferError")
        kernel.ok("accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)")
    assert "this notebook has created an `Accelerator`" in refused.evalue and "leave out start_method" in refused.evalue
    assert "would avoid sending it, does not work here" in by_itself.evalue and "an `Accelerator`" in by_itself.evalue


# --- output


def test_prints_c_code_children_and_loggers_are_named_by_rank(kernel: Kernel) -> None:
    kernel.ok("import logging\nlogging.basicConfig(stream=sys.stderr, level=logging.INFO)")
    shown = kernel.ok(
        fork("""
print("Python")
os.write(1, b"C\\n")
os.system("echo a child")
logging.info("a logger")
""")
    )
    assert output(shown.stdout) == both("Python", "C", "a child")
    assert output(shown.stderr) == both("INFO:root:a logger")
    kernel.ok("logging.basicConfig(force=True)")


def test_displays_stand_between_the_lines_around_them(kernel: Kernel) -> None:
    shown = kernel.ok(
        fork("""
from IPython.display import display, HTML
if os.environ["RANK"] == "0":
    print("above")
    display(HTML("<b>shown</b>"))
    print("below")
""")
    )
    assert shown.displays[1] == {"text/plain": "<IPython.core.display.HTML object>", "text/html": "<b>shown</b>"}
    kinds = [kind for kind, content in shown.events if kind in ("display_data", "stream")]
    assert kinds[-1] == "stream" and kinds.count("display_data") == 2


def test_a_widget_that_a_rank_makes_is_shown_as_one(kernel: Kernel) -> None:
    pytest.importorskip("ipywidgets")
    shown = kernel.ok(
        fork("import ipywidgets\nif os.environ['RANK'] == '0':\n    display(ipywidgets.IntSlider(description='steps'))")
    )
    assert any("application/vnd.jupyter.widget-view+json" in data for data in shown.displays), str(shown)


def test_figures_are_shown_as_the_notebook_shows_them(kernel: Kernel) -> None:
    kernel.ok(
        "class Figure: pass\n"
        "html = get_ipython().display_formatter.formatters['text/html']\n"
        "before = html.for_type(Figure, lambda figure: '<b>drawn</b>')"
    )
    shown = kernel.ok(fork("if os.environ['RANK'] == '1': display(Figure())"))
    assert any(data.get("text/html") == "<b>drawn</b>" for data in shown.displays), str(shown)


def test_a_flood_of_lines_comes_whole(kernel: Kernel) -> None:
    shown = kernel.ok(fork("for line in range(10_000):\n    print(line, os.environ['RANK'])"))
    assert output(shown.stdout) == {rank: [f"{line} {rank}" for line in range(10_000)] for rank in (0, 1)}


# --- failures


def test_the_rank_that_raised_is_named_with_the_users_lines(kernel: Kernel) -> None:
    failed = kernel.fails(
        fork("if os.environ['RANK'] == '1':\n    raise ValueError('too small')\ntime.sleep(60)"), "LaunchError"
    )
    assert failed.evalue == "rank 1 raised ValueError: too small"
    assert "raise ValueError('too small')" in failed.traceback and "Cell In[" in failed.traceback
    assert failed.traceback.splitlines()[-1].startswith("rank 0: ended, because rank 1 failed")
    assert "nbdist/" not in failed.traceback


def test_ranks_that_wait_in_a_collective_for_one_that_raised_end_with_it(kernel: Kernel) -> None:
    failed = kernel.fails(
        fork("""
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("too small")
dist.barrier()
"""),
        "LaunchError",
    )
    assert failed.evalue == "rank 1 raised ValueError: too small"


def test_a_death_is_named_with_its_exit_code_and_last_words(kernel: Kernel) -> None:
    failed = kernel.fails(
        fork(
            "if os.environ['RANK'] == '1':\n    print('last words', file=sys.stderr)\n    os._exit(3)\ntime.sleep(60)"
        ),
        "LaunchError",
    )
    assert failed.evalue.startswith("rank 1 died: exit code 3, pid ")
    assert "its last lines on stderr:\n  last words\n" in failed.traceback


def test_a_death_by_a_signal_is_named(kernel: Kernel) -> None:
    failed = kernel.fails(
        fork("if os.environ['RANK'] == '0':\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"), "LaunchError"
    )
    assert failed.evalue.startswith("rank 0 died: SIGKILL")


def commands() -> list[list[str]]:
    return [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


def test_what_a_rank_started_ends_with_it(kernel: Kernel) -> None:
    kernel.fails(fork("import subprocess\nsubprocess.Popen(['sleep', '1357'])\nos._exit(1)"), "LaunchError")
    wait_until(lambda: ["sleep", "1357"] not in commands(), "the end of what the rank started")


def test_a_launch_on_a_forked_rank_is_refused(kernel: Kernel) -> None:
    failed = kernel.fails(fork("notebook_launcher(print, num_processes=2)"), "LaunchError")
    assert "launch from the notebook, not from a function" in failed.evalue


def test_input_says_that_nobody_can_answer(kernel: Kernel) -> None:
    assert "input is not available here" in kernel.fails(fork("input()"), "LaunchError").evalue


def test_nothing_is_left_of_ranks_whose_agent_is_killed() -> None:
    with Kernel(NBDIST_PREWARM="0") as kernel:
        kernel.ok(SETUP)
        running = kernel.start(fork("print('up')\ntime.sleep(60)"))
        running.wait_until(lambda outcome: output(outcome.stdout) == both("up"))
        below = psutil.Process(kernel.pid).children(recursive=True)
        agent = next(process for process in below if "nbdist.agent.agent_boot" in " ".join(process.cmdline()))
        agent.kill()
        assert running.finish().ename == "SessionBroken"
        psutil.wait_procs(below, timeout=10)
        assert not [process for process in below if process.is_running()]


def test_nothing_is_left_of_a_kernel_that_is_killed_with_its_ranks() -> None:
    before = files_of_sessions()
    with Kernel(NBDIST_PREWARM="0") as kernel:
        kernel.ok(SETUP)
        running = kernel.start(fork("print('up')\ntime.sleep(60)"))
        running.wait_until(lambda outcome: output(outcome.stdout) == both("up"))
        below = psutil.Process(kernel.pid).children(recursive=True)
        os.kill(kernel.pid, signal.SIGKILL)
        psutil.wait_procs(below, timeout=10)
        assert not [process for process in below if process.is_running()]
    assert files_of_sessions() <= before


# --- waiting


def test_who_is_still_at_it_is_said_when_others_have_finished(kernel: Kernel) -> None:
    kernel.ok("import multiprocessing\ngo_on = multiprocessing.get_context('fork').Event()")
    running = kernel.start(fork("if os.environ['RANK'] == '1':\n    go_on.wait(60)\nreturn 'done'"))
    running.wait_late("rank 0 finished ")
    assert any("rank 1 is at cell " in text and "go_on.wait(60)" in text for text in running.outcome.plain)
    kernel.interrupt()
    assert running.finish().ename == "KeyboardInterrupt"


def test_an_interrupt_ends_ranks_wherever_they_are(kernel: Kernel) -> None:
    running = kernel.start(
        fork("""
import torch.distributed as dist
dist.init_process_group("gloo")
print("up")
if dist.get_rank() == 0:
    time.sleep(60)
dist.barrier()
""")
    )
    running.wait_until(lambda outcome: output(outcome.stdout) == both("up"))
    kernel.interrupt()
    ended = running.finish()
    assert ended.ename == "KeyboardInterrupt"
    assert ended.evalue == "ranks 0-1 interrupted; they have ended"


@pytest.mark.parametrize("way", ["warm", "fork"])
def test_a_function_that_catches_the_interrupt_has_the_time_to_save(kernel: Kernel, way: str) -> None:
    body = """
try:
    print("up")
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(2)  # it takes longer than what is stuck is given
    print("saved")
    raise
"""
    running = kernel.start(fork(body, f"num_processes=2, start_method={way!r}"))
    running.wait_until(lambda outcome: output(outcome.stdout) == both("up"))
    kernel.interrupt()
    ended = running.finish()
    assert ended.evalue == "ranks 0-1 interrupted; they have ended"
    assert ended.stdout.count("saved") == 2 or "[0-1] saved" in ended.stdout, str(ended)


def test_a_rank_is_freed_from_a_collective_so_that_it_can_save(kernel: Kernel) -> None:
    running = kernel.start(
        fork("""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
try:
    print("up")
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), 1)
    time.sleep(60)
finally:
    print("saved")
""")
    )
    running.wait_until(lambda outcome: output(outcome.stdout) == both("up"))
    kernel.interrupt()
    ended = running.finish()
    assert ended.evalue == "ranks 0-1 interrupted; they have ended"
    assert output(ended.stdout) == both("up", "saved")


def test_a_function_that_swallows_the_interrupt_ends_with_the_next(kernel: Kernel) -> None:
    running = kernel.start(
        fork("""
while True:
    try:
        print("up")
        time.sleep(60)
    except KeyboardInterrupt:
        print("swallowed")
""")
    )
    running.wait_until(lambda outcome: output(outcome.stdout) == both("up"))
    kernel.interrupt()
    running.wait_for("Interrupt again to stop them now")
    kernel.interrupt()
    ended = running.finish()
    assert ended.evalue == "ranks 0-1 interrupted; they have ended"
    assert "swallowed" in ended.stdout


def test_a_function_that_swallows_the_interrupt_ends_with_a_rank_that_failed(kernel: Kernel) -> None:
    body = """
import ctypes
if os.environ["RANK"] == "1":
    raise ValueError("too small")
ctypes.PyDLL(None).usleep(1_200_000)  # Python is back, and interrupted, when the launch is being ended
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        pass
"""
    assert kernel.fails(fork(body), "LaunchError").evalue == "rank 1 raised ValueError: too small"


def test_a_default_port_that_is_taken_just_now_is_exchanged_for_another(kernel: Kernel) -> None:
    take = """
import socket
held = []
def take(frame, event, arg):
    bound = event == "c_return" and arg.__name__ == "bind"
    if bound and arg.__self__.getsockname() == ("127.0.0.1", 29500) and not held:
        held.append(socket.create_server(("127.0.0.1", 29500)))
sys.setprofile(take)
"""
    kernel.ok(take)
    kernel.ok(fork("return int(os.environ['MASTER_PORT'])"))
    kernel.ok("sys.setprofile(None)\nfor server in held: server.close()")
    assert kernel.value("result")[0] != 29500


def test_a_timeout_interrupts(kernel: Kernel) -> None:
    late = kernel.fails(fork("time.sleep(60)", "num_processes=2, start_method='fork', timeout=0.5"), "RankTimeout")
    assert late.evalue == "not done after 0.5 s (timeout); the ranks were interrupted"


def test_the_next_launch_works_after_each_failure(kernel: Kernel) -> None:
    for body in ("1 / 0", "os._exit(1)", "sys.exit(2)"):
        kernel.fails(fork(body), "LaunchError")
    kernel.ok(fork("return 'fine'"))
    assert kernel.value("result") == ["fine", "fine"]


# --- ports


TAKE_THE_DEFAULT_PORT = """
import time
end = time.monotonic() + 60
while True:  # another test may have it for a moment
    try:
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        break
    except OSError:
        if time.monotonic() > end:
            raise
        time.sleep(0.1)
"""


def test_a_default_port_that_is_taken_is_replaced_and_a_named_one_is_an_error(kernel: Kernel) -> None:
    kernel.ok("import socket\ntaken = socket.create_server(('127.0.0.1', 0))\nport = taken.getsockname()[1]")
    refused = kernel.fails(fork("pass", "2, 'no', port, start_method='fork'"), "UsageError")
    assert refused.evalue.startswith("use_port: port ") and f"is taken by process {kernel.pid}" in refused.evalue
    kernel.ok("taken.close()\ntaken = socket.socket()\ntaken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)")
    kernel.ok(TAKE_THE_DEFAULT_PORT)
    kernel.ok(fork("return int(os.environ['MASTER_PORT'])"))
    assert 29500 not in kernel.value("result")
    kernel.ok("taken.close()")


# --- threads and CUDA


def test_threads_that_ranks_lack_are_named(kernel: Kernel) -> None:
    kernel.ok("stop = threading.Event()\nthread = threading.Thread(target=stop.wait, name='prefetch')\nthread.start()")
    shown = kernel.ok(fork("return 'prefetch' in [thread.name for thread in threading.enumerate()]"))
    assert "this kernel runs the thread 'prefetch'" in shown.stdout
    assert kernel.value("result") == [False, False]
    kernel.ok("stop.set(); thread.join()")


@pytest.mark.parametrize("options", ["num_processes=2, start_method='fork'", "num_processes=2"])
def test_a_tensor_on_a_gpu_is_refused_by_name(kernel: Kernel, options: str) -> None:
    with clean(kernel):
        kernel.ok("from torch._subclasses import FakeTensorMode\nimport torch")
        kernel.ok("with FakeTensorMode(): weights = {'head': torch.empty(2, device='cuda')}")
        refused = kernel.fails(fork("return lock, weights", options), "TransferError")
    assert "function 'train' → global 'weights'['head'] is a tensor on cuda:0" in refused.evalue


@pytest.fixture
def kernel_with_cuda(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel whose torch takes itself for one with CUDA."""
    write_packages(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    with Kernel(PYTHONPATH=path, NBDIST_PREWARM="0") as kernel:
        kernel.ok(SETUP)
        kernel.ok("import pretend")
        yield kernel


def test_who_initialized_cuda_is_named_instead_of_forking(kernel_with_cuda: Kernel) -> None:
    kernel_with_cuda.ok("import peft")
    refused = kernel_with_cuda.fails(fork("pass"), "UsageError")
    assert "CUDA was initialized by bitsandbytes/cextension.py:5 (probe), imported by peft in cell 3" in refused.evalue
    assert "use the default start_method, which works anyway" in refused.evalue
    refused = kernel_with_cuda.fails(fork("with lock: pass", "num_processes=2"), "TransferError")
    assert (
        "would avoid sending it, does not work here" in refused.evalue
        and "bitsandbytes/cextension.py:5" in refused.evalue
    )


def test_a_preflight_says_what_it_has_checked(kernel_with_cuda: Kernel) -> None:
    kernel_with_cuda.ok("os.environ['ACCELERATE_DEBUG_MODE'] = 'yes'\ntorch = sys.modules['torch']")
    shown = kernel_with_cuda.ok(fork("return 1", "num_processes=2, gpus=[]"))
    assert "who initialized CUDA: CUDA is not initialized in this process.\n" in shown.stdout
    assert "a forked process could use CUDA\n" in shown.stdout
    assert "GPU memory: the kernel holds none\n" in shown.stdout


@cpu_torch
def test_memory_that_ranks_will_miss_is_said_where_they_are_not_forked(kernel_with_cuda: Kernel) -> None:
    kernel_with_cuda.ok("import torch\nfrom nbdist import debug_launcher\ntorch.cuda._lazy_init()")
    said = "nbdist: the kernel holds 1.0 GiB on GPU 0 that the ranks will miss"
    assert said in kernel_with_cuda.ok(fork("return 1", "num_processes=2, start_method='warm'")).stdout
    for without in ("notebook_launcher(train, (), 2, gpus=[])", "debug_launcher(train)"):
        assert said not in kernel_with_cuda.ok(without).stdout


@cpu_torch  # another's own code notices the fork, too, and blames it
@pytest.mark.parametrize("way", ["warm", "fork"])
def test_cuda_that_a_forked_process_cannot_use_comes_with_advice(kernel: Kernel, way: str) -> None:
    raised = "raise RuntimeError('Cannot re-initialize CUDA in forked subprocess')"
    failed = kernel.fails(fork(raised, f"num_processes=2, start_method={way!r}"), "LaunchError")
    assert "nbdist: this rank uses CUDA, so processes that it forks can't: start them by " in failed.traceback


@pytest.mark.parametrize("way", ["warm", "fork"])
def test_cuda_that_torch_refuses_to_a_rank_comes_with_advice(kernel: Kernel, way: str) -> None:
    refused = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.cuda._lazy_init()"
    failed = kernel.fails(fork(refused, f"num_processes=2, start_method={way!r}"), "LaunchError")
    assert "nbdist: CUDA was initialized by a call that was not seen" in failed.traceback
    assert "restart the process, and move what does it into the function" in failed.traceback


# --- one process


def test_one_process_is_the_notebooks_own(kernel: Kernel) -> None:
    shown = kernel.ok(fork("print('hello')\nreturn os.getpid()", "num_processes=1"))
    assert shown.stdout == (
        "nbdist: train runs in the notebook's own process, because it is the only one "
        "(`start_method='warm'` runs it on a rank)\n"
        "hello\n"
    )
    assert kernel.value("result") == [kernel.pid]


def test_one_process_computes_in_the_precision_that_was_asked_for(kernel: Kernel) -> None:
    kernel.ok(
        fork(
            "import nbdist, torch\nones = torch.ones(2, 2)\n"
            "with nbdist.autocast():\n    return os.environ['ACCELERATE_MIXED_PRECISION'], str((ones @ ones).dtype)",
            "num_processes=1, mixed_precision='bf16'",
        )
    )
    assert kernel.value("result") == [("bf16", "torch.bfloat16")]


def test_an_exception_of_one_process_passes_unchanged_and_leaves_the_environment_as_it_was(kernel: Kernel) -> None:
    kernel.fails(fork("os.environ['LEFT'] = 'behind'\nraise KeyError('lr')", "num_processes=1"), "KeyError")


def test_one_process_with_a_timeout_is_a_rank(kernel: Kernel) -> None:
    kernel.ok(fork("return os.getpid()", "num_processes=1, timeout=60"))
    assert kernel.value("result") != [kernel.pid]
