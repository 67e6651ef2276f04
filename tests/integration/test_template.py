from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, wait_until
from tests.support.roles import await_role, children, find, open_files

TRAIN = """%%distributed
import sys, torch
before = set(sys.modules)
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
loss = model(torch.randn(8, 4)).mean()
loss.backward()
optimizer.step()
new = sorted(set(sys.modules) - before)
"""


@pytest.fixture
def template(ranks: Kernel) -> psutil.Process:
    return psutil.Process(find(ranks.pid, "template"))


@pytest.mark.torch_private
def test_the_template_is_one_thread(template: psutil.Process) -> None:
    assert template.num_threads() == 1


def test_ranks_are_forked_from_the_template_and_share_what_it_imported(ranks: Kernel, template: psutil.Process) -> None:
    assert set(ranks.rank_pids()) <= set(children(template.pid))
    ranks.ok("%%distributed\nimport gc\nfrozen, collects = gc.get_freeze_count(), gc.isenabled()")
    frozen = ranks.value("__import__('nbdist').get_session().pull('(frozen, collects)')")
    assert all(count > 100_000 and collects for count, collects in frozen)


@pytest.mark.torch_private
def test_a_ranks_first_optimizer_step_imports_nothing(own_ranks: Kernel) -> None:
    own_ranks.ok(TRAIN)
    assert own_ranks.value("__import__('nbdist').get_session().pull('new')") == [[], []]


@pytest.mark.torch_private
@pytest.mark.parametrize(
    "imports",
    [
        "import torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.checkpoint",
        "from torch.nn.parallel import DistributedDataParallel; from torch.utils.data import DataLoader",
        "import torch._dynamo, sympy, numpy",
    ],
)
def test_what_training_needs_is_imported_already(ranks: Kernel, imports: str) -> None:
    ranks.ok(f"%%distributed\nimport sys\nbefore = set(sys.modules)\n{imports}\nnew = set(sys.modules) - before")
    assert ranks.value("__import__('nbdist').get_session().pull('new')") == [set(), set()]


@pytest.mark.torch_private
def test_neither_the_template_nor_a_fresh_rank_has_touched_a_gpu(own_ranks: Kernel) -> None:
    template = psutil.Process(find(own_ranks.pid, "template"))
    assert not [file for file in open_files(template.pid) if file.startswith("/dev/nvidia")]
    assert "libcuda.so" not in Path(f"/proc/{template.pid}/maps").read_text()


def test_nothing_of_the_users_folder_gets_into_the_template(kernel: Kernel, tmp_path: Path) -> None:
    for module in ("random", "json", "torch", "numpy", "IPython", "zmq", "nbdist"):
        (tmp_path / f"{module}.py").write_text("open(__file__ + '.imported', 'w').close(); raise SystemExit(7)")
    kernel.ok(f"import nbdist.client.session.session, os; os.chdir({str(tmp_path)!r})")
    kernel.ok("%load_ext nbdist")
    kernel.ok("%distributed start -n 1")
    template = psutil.Process(await_role(kernel.pid, "template"))
    assert template.cwd() == "/"
    assert not list(tmp_path.glob("*.imported"))


def test_ranks_have_the_kernels_priority_although_their_template_warmed_up_at_a_low_one(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    template = psutil.Process(await_role(kernel.pid, "template"))
    own = psutil.Process(kernel.pid).nice()
    if os.geteuid() == 0:  # who is not root could not raise it again
        wait_until(lambda: template.nice() > own, "the template's low priority")
    kernel.ok("%distributed start -n 1")
    assert [psutil.Process(pid).nice() for pid in kernel.rank_pids()] == [own]


def test_template_and_ranks_have_nothing_on_standard_input(ranks: Kernel, template: psutil.Process) -> None:
    for pid in (template.pid, *ranks.rank_pids()):
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"


@pytest.mark.torch_private
def test_ranks_draw_different_random_numbers_but_start_from_the_same_torch_seed(ranks: Kernel) -> None:
    ranks.ok("%distributed restart")
    ranks.ok(
        "%%distributed\nimport random, numpy, torch\ndrawn = random.random(), numpy.random.rand(), torch.rand(1).item()"
    )
    first, second = ranks.value("__import__('nbdist').get_session().pull('drawn')")
    assert first[0] != second[0] and first[1] != second[1] and first[2] == second[2]
