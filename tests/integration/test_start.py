from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel, both, wait_until
from testbed.nvml import as_module, machine
from tests.conftest import sharing
from tests.support.roles import alive, family, find, listening
from tests.support.torch_build import cpu_torch

HANG = 30.0
REDUCE = """%%distributed
import torch, torch.distributed as dist
{init}
x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
"""


@pytest.fixture
def notebook(ranks: Kernel) -> Iterator[Kernel]:
    """The shared kernel without a session."""
    ranks.run("%distributed stop")
    yield ranks


@pytest.fixture
def session(ranks: Kernel) -> Iterator[Kernel]:
    """The shared kernel with two fresh ranks."""
    ranks.ok("%distributed start -n 2 --replace")
    yield ranks


# --- the process group


@pytest.mark.torch_private
def test_the_group_is_there_and_its_backend_is_said(notebook: Kernel) -> None:
    assert re.search(
        r"3 ranks ready in [\d.]+ s: cpu; process group gloo", notebook.ok("%distributed start -n 3").stdout
    )
    notebook.ok("%%distributed\nimport torch.distributed as dist\nassert dist.is_initialized()")
    facts = notebook.value(
        "__import__('nbdist').get_session().pull('(dist.get_rank(), dist.get_world_size(), dist.get_backend())')"
    )
    assert facts == [(rank, 3, "gloo") for rank in range(3)]


@pytest.mark.torch_private
def test_no_init_leaves_the_group_to_the_user(notebook: Kernel) -> None:
    assert "no process group" in notebook.ok("%distributed start -n 2 --no-init").stdout
    notebook.ok("%%distributed\nimport torch.distributed as dist\nassert not dist.is_initialized()")
    for _ in range(3):  # a cell that is run again, as cells are
        outcome = notebook.ok(REDUCE.format(init="dist.init_process_group('gloo')"))
        assert outcome.lines == both("[3.0, 3.0, 3.0]")


@pytest.mark.torch_private
def test_the_user_may_leave_the_group_and_make_one_again_many_times_in_a_cell(session: Kernel) -> None:
    code = (
        "%%distributed\nimport torch, torch.distributed as dist\nfor round in range(5):\n"
        "    dist.destroy_process_group()\n    dist.init_process_group()\n"
        "    x = torch.ones(1); dist.all_reduce(x); dist.barrier()\nprint(int(x))"
    )
    assert session.ok(code).lines == both("2")


@pytest.mark.torch_private
def test_a_subset_may_make_a_group_in_an_environment_of_its_own(session: Kernel) -> None:
    code = (
        "%%rank 1\nimport os, torch.distributed as dist\ndist.destroy_process_group()\n"
        "os.environ.update(RANK='0', WORLD_SIZE='1')\ndist.init_process_group()\nprint(dist.get_world_size())"
    )
    assert session.ok(code).stdout == "[1] 1\n"


@pytest.mark.torch_private
def test_the_timeout_is_the_groups(notebook: Kernel) -> None:
    notebook.ok("%distributed start -n 2 --timeout 7")
    notebook.ok("%%distributed\nimport torch, torch.distributed as dist")
    expression = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    assert notebook.value(f"__import__('nbdist').get_session().pull({expression!r})") == [7.0, 7.0]


def test_a_backend_that_torch_lacks_is_one_message_and_the_next_start_works(notebook: Kernel) -> None:
    outcome = notebook.fails("%distributed start -n 2 --backend mpi", "SessionBroken", HANG)
    assert "could not join the process group" in outcome.evalue and "mpi" in outcome.evalue.lower()
    assert "`--backend gloo`" in outcome.evalue
    assert len(outcome.traceback.splitlines()) < 6, outcome.traceback
    notebook.ok("%distributed start -n 2", HANG)


@pytest.mark.parametrize("count", [1, 3])
def test_a_restart_may_change_the_number_of_ranks(session: Kernel, count: int) -> None:
    before = session.rank_pids()
    session.ok(f"%distributed restart -n {count}")
    assert len(session.rank_pids()) == count and not any(map(alive, before))
    assert session.ok("%%distributed\nprint(world_size)").stdout.endswith(f"] {count}\n")


# --- who listens where


def test_everything_listens_on_loopback_only(session: Kernel) -> None:
    ours = family(find(session.pid, "controller"))
    session.ok("%%distributed\nimport torch.distributed as dist\ngroup = dist.new_group()")
    found = listening(ours)
    assert len(found) >= 2 and {address for address, _ in found} == {"127.0.0.1"}


@pytest.mark.torch_private
def test_ranks_listen_only_while_they_have_a_group(session: Kernel) -> None:
    pids = session.rank_pids()
    session.ok("%%distributed\nimport torch.distributed as dist\ndist.barrier()\ndist.destroy_process_group()")
    assert listening(pids) == []


@pytest.mark.torch_private
def test_the_store_and_the_controller_listen_once_each(session: Kernel) -> None:
    template = find(session.pid, "template")
    (store,) = {child for child in family(template)} - {template, *session.rank_pids()}
    ports = [port for _, port in listening([store])]
    assert (
        session.value("__import__('nbdist').get_session().pull('int(__import__(\"os\").environ[\"MASTER_PORT\"])', 0)")
        == ports[0]
    )
    assert len(ports) == 1 and len(listening([find(session.pid, "controller")])) == 1
    assert listening([template, find(session.pid, "agent")]) == []


# --- GPUs, by a stand-in for NVML


@pytest.fixture
def gpus(ranks: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """The shared kernel, without a session, with two GPUs that only NVML's stand-in knows."""
    as_module(tmp_path, machine(2))
    ranks.run("%distributed stop")
    ranks.ok(f"import sys; real = sys.modules.pop('pynvml', None); sys.path.insert(0, {str(tmp_path)!r})")
    yield ranks
    ranks.ok("sys.path.pop(0); sys.modules.pop('pynvml', None)\nif real: sys.modules['pynvml'] = real")


def test_without_a_session_as_many_ranks_as_gpus_are_offered(gpus: Kernel) -> None:
    assert "`%distributed start -n 2`" in gpus.fails("%%distributed\nx", "SessionClosed").evalue


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--gpus 2", "GPU 2 isn't on this machine: it has 0, 1"),
        ("--gpus x", "GPU x isn't on this machine"),
        ("--gpus 0,0", "names a GPU twice"),
        ("-n 3 --backend nccl", "nccl needs a GPU for each rank, and there are 3 ranks for 2 GPUs"),
        ("-n 2 --gpus 1 --backend nccl", "there are 2 ranks for 1 GPU"),
        ("-n 2 --gpus 1 --backend nccl", "`%env NCCL_MULTI_RANK_GPU_ENABLE=1` first"),
    ],
)
def test_gpus_that_can_not_be_had_are_refused_with_what_there_is(gpus: Kernel, flags: str, says: str) -> None:
    assert says in gpus.fails(f"%distributed start {flags}", "UsageError").evalue


@cpu_torch
def test_a_torch_without_cuda_uses_the_cpu_and_says_so(gpus: Kernel) -> None:
    printed = gpus.ok("%distributed start", HANG).stdout
    assert "built without CUDA" in printed and "2 ranks ready" in printed and "cpu; process group gloo" in printed


@cpu_torch
@pytest.mark.parametrize(
    ("flags", "before", "visible"),
    [
        ("-n 1", None, "0"),
        ("-n 4", None, "0,1"),
        ("-n 1 --gpus 1", None, "1"),
        ("-n 1", "1", "1"),
        ("-n 1 --gpus 0", "1,0", "1"),
    ],
)
def test_ranks_see_the_gpus_that_were_chosen(gpus: Kernel, flags: str, before: str | None, visible: str) -> None:
    gpus.ok(f"import os\nif {before!r}: os.environ['CUDA_VISIBLE_DEVICES'] = {before!r}")
    gpus.ok(f"%distributed start {flags}", HANG)
    gpus.ok("os.environ.pop('CUDA_VISIBLE_DEVICES', None)")
    seen = gpus.value("__import__('nbdist').get_session().pull('__import__(\"os\").environ[\"CUDA_VISIBLE_DEVICES\"]')")
    assert set(seen) == {visible}


@cpu_torch
def test_ranks_may_share_a_gpu_by_nccl_where_nccl_was_told_so(gpus: Kernel) -> None:
    gpus.ok("%env NCCL_MULTI_RANK_GPU_ENABLE=1")
    gpus.ok("%distributed start -n 2 --gpus 1 --backend nccl --no-init", HANG)
    gpus.ok("import os; os.environ.pop('NCCL_MULTI_RANK_GPU_ENABLE')")
    assert len(gpus.rank_pids()) == 2


@pytest.mark.gpu
def test_more_ranks_than_gpus_share_them_with_gloo_and_that_is_said(notebook: Kernel) -> None:
    printed = notebook.ok("%distributed start -n 2 --gpus 0", 120.0).stdout
    assert "2 ranks share 1 GPU, so their group uses gloo" in printed
    assert notebook.ok(REDUCE.format(init="x = torch.ones(1, device=device)")).lines == both("[3.0, 3.0, 3.0]")


@pytest.mark.gpu
def test_a_rank_on_a_gpu_of_its_own_uses_nccl_and_leaves_no_memory_after_stop(notebook: Kernel) -> None:
    notebook.ok("%distributed start -n 1", 120.0)
    code = (
        "%%distributed\nimport torch.distributed as dist\nx = torch.ones(1, device=device)\ndist.all_reduce(x)\n"
        "print(device, int(x))"
    )
    assert (
        notebook.ok(code.replace("import torch.distributed", "import torch, torch.distributed")).stdout
        == "[0] cuda:0 1\n"
    )
    (pid,) = notebook.rank_pids()
    notebook.ok("%distributed stop")
    import pynvml

    pynvml.nvmlInit()
    users = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    pynvml.nvmlShutdown()
    assert not alive(pid) and pid not in {user.pid for user in users}


# --- what keeps ranks from starting


@pytest.fixture
def shadowed(tmp_path: Path) -> Iterator[tuple[Kernel, Path]]:
    """A kernel of its own whose Python finds `torch.py` of a folder first."""
    path = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with Kernel(PYTHONPATH=os.pathsep.join(path)) as kernel:
        yield kernel, tmp_path / "torch.py"


def test_a_torch_that_is_missing_or_broken_is_one_message_and_once_mended_the_next_start_works(
    shadowed: tuple[Kernel, Path],
) -> None:
    kernel, torch_file = shadowed
    torch_file.write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    kernel.ok("%load_ext nbdist")
    for _ in range(2):  # warmed, and cold
        outcome = kernel.fails("%distributed start -n 2", "SessionBroken", HANG)
        assert "PyTorch is not installed" in outcome.evalue and "`%pip install torch`" in outcome.evalue
        assert len(outcome.traceback.splitlines()) < 4, outcome.traceback
    torch_file.write_text("raise ImportError('libtorch.so: undefined symbol')")
    outcome = kernel.fails("%distributed start -n 2", "SessionBroken", HANG)
    assert "ImportError: libtorch.so: undefined symbol" in outcome.evalue
    torch_file.unlink()
    kernel.ok("%distributed start -n 1", HANG)


@pytest.fixture(scope="module")
def frugal() -> Iterator[Kernel]:
    """A kernel that may open few files, though the system allows more."""
    with Kernel() as kernel, sharing(kernel):
        kernel.ok("import resource; limits = resource.getrlimit(resource.RLIMIT_NOFILE)")
        kernel.ok("%load_ext nbdist")
        kernel.ok("resource.setrlimit(resource.RLIMIT_NOFILE, (80, limits[1]))")
        yield kernel


def test_ranks_start_where_the_notebook_may_open_few_files_but_the_system_allows_more(frugal: Kernel) -> None:
    frugal.ok("%distributed start -n 4", HANG)
    outcome = frugal.ok("%%distributed\nimport torch.distributed as dist\ndist.new_group(); print(1)")
    assert outcome.lines == {rank: ["1"] for rank in range(4)}


def test_too_few_file_handles_for_that_many_ranks_is_said_before_anything_starts(frugal: Kernel) -> None:
    frugal.ok("%distributed stop\nresource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))")
    outcome = frugal.fails("%distributed start -n 60", "UsageError")
    assert "60 ranks need about 400 file descriptors" in outcome.evalue and "`ulimit -n 4096`" in outcome.evalue
    frugal.ok("%distributed start -n 2", HANG)


def test_a_notebook_that_has_no_file_handle_left_says_so_and_starts_when_it_has(kernel: Kernel) -> None:
    kernel.ok("import nbdist, nbdist.client.session.session, os, resource")
    kernel.ok("limits = resource.getrlimit(resource.RLIMIT_NOFILE)")
    code = (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 1, limits[1]))\n"
        "try:\n    nbdist.Session(1)\nexcept nbdist.SessionBroken as error:\n    text = str(error)\n"
        "finally:\n    resource.setrlimit(resource.RLIMIT_NOFILE, limits)"
    )
    kernel.ok(code, HANG)
    assert "Too many open files" in kernel.value("text") and "`ulimit -n 4096`" in kernel.value("text")
    kernel.ok("session = nbdist.Session(1)", HANG)


def test_without_a_runtime_folder_that_can_be_written_the_keys_lie_in_a_private_folder(
    kernel: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    kernel.ok(f"import nbdist, os; os.environ['JUPYTER_RUNTIME_DIR'] = {str(tmp_path / 'file' / 'folder')!r}")
    kernel.ok("%load_ext nbdist")
    kernel.ok("%distributed start -n 1", HANG)
    kernel.ok("from nbdist.client.session.session import rank_set_of")
    kernel.ok("from nbdist.client.start.connection import close_idle")
    keys = Path(kernel.value("str(rank_set_of(nbdist.get_session()).key_file)"))
    assert keys.stat().st_mode & 0o777 == 0o600 and keys.parent.stat().st_mode & 0o777 == 0o700
    assert kernel.ok("%%distributed\nprint(rank)").stdout == "[0] 0\n"
    kernel.ok("%distributed stop\nclose_idle()")
    assert not keys.parent.exists()


def test_a_runtime_folder_that_is_not_there_is_made(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(f"import os; os.environ['JUPYTER_RUNTIME_DIR'] = {str(tmp_path / 'new')!r}")
    kernel.ok("%load_ext nbdist")
    wait_until(lambda: [*(tmp_path / "new").glob("nbdist-*.json")], "keys", HANG)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


# Lets the kernel refuse pidfd_open (434 everywhere), as Linux before 5.3 does.
WITHOUT_PIDFD = """
import ctypes, errno, struct
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x50000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)]
steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
program = Program(len(code), ctypes.addressof(steps))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program)) == 0, ctypes.get_errno()
import nbdist
try: nbdist.Session(1)
except nbdist.SessionBroken as error: print(error)
"""


def test_a_system_without_pidfds_is_told_what_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PIDFD], capture_output=True, text=True, check=True)
    assert "nbdist needs Linux 5.3 or newer with the system call pidfd_open" in done.stdout
