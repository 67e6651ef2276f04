"""A cell that builds, prepares, trains, saves and loads can be run again: nothing of the run before is left."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.support.cells import on_ranks, refused, value

SETUP = """
import gc, json, os, torch, nbdist
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from nbdist.plan import Plan
from nbdist.train import state
from tests.support.train_models import *

def bytes_of_tensors():
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not hasattr(thing, "fake_mode"):  # a compiler's, without values
            storage = (thing.to_local() if hasattr(thing, "to_local") else thing).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())

def left():
    now = state.current()
    return {
        "tensors": bytes_of_tensors(),
        "prepared": [len(things) for things in (now.models, now.optimizers, now.schedulers, now.loaders)],
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }

def held_by(path):
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    return sorted({".".join(name.split(".")[:2]) for name in names})

choose = getattr(torch.compiler, "set_default_backend", lambda _: None)  # else compiling takes a minute
choose("aot_eager")
"""
RUN = """
torch.manual_seed(0)  # else chance may skip all of the first run's steps in fp16, and the optimizer has no state then
net = Net()
optimizer = torch.optim.AdamW(net.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(torch.randn(3 * 2 * world_size, 4), 2)
model, optimizer, scheduler, loader = nbdist.prepare(net, optimizer, scheduler, loader, plan=Plan({plan}))
for samples in loader:
    with nbdist.accumulate(model):
        nbdist.backward(model(samples).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
nbdist.save_state({path!r})
report = nbdist.load_state({path!r})
"""
PLANS = [
    "strategy='none'",
    "strategy='ddp'",
    "strategy='ddp', precision='fp16', activation_checkpointing='full'",
    "strategy='ddp', comm_hook='powersgd'",
    "strategy='fsdp', ema=0.9",
    "strategy='fsdp', precision='bf16', accumulate=2, prefetch=1",
    "strategy='hsdp', replicas=2",
    "strategy='ddp', compile=True",  # behind the others: what the compiler imports makes each collection dearer
    "strategy='fsdp', compile=True, activation_checkpointing='selective'",
]


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> Iterator[None]:
    on_ranks(ranks, SETUP)
    yield
    on_ranks(ranks, "choose(None); _ = nbdist.free_memory()")


def left_after(kernel: Kernel, run: str) -> dict[str, object]:
    on_ranks(kernel, run)
    found = ast.literal_eval(value(kernel, "repr(left())"))
    return dict(ast.literal_eval(found))


@pytest.mark.parametrize("plan", PLANS)
def test_three_runs_leave_what_one_run_leaves(ranks: Kernel, tmp_path: Path, plan: str) -> None:
    after = [left_after(ranks, RUN.format(plan=plan, path=str(tmp_path / str(number)))) for number in range(3)]
    assert after[1:] == after[:1] * 2
    assert after[0]["prepared"] == [1, 1, 1, 1]
    kept = ["averages.models"] * ("ema" in plan) + ["models.0", "optimizers.0"]
    assert value(ranks, f"held_by('{tmp_path}/2')") == str(kept)


def test_plans_of_the_same_shape_share_the_groups_of_hsdp(ranks: Kernel) -> None:
    code = """
found = []
for number in range(4):
    model, optimizer = prepared("hsdp", replicas=2, accumulate=1 + number)
    step(model, optimizer)
    now = left()
    found.append((now["groups"], now["threads"], now["files"]))
    model, optimizer = nbdist.free_memory(model, optimizer)
len(set(found))"""
    assert value(ranks, code) == "1"


def test_a_mesh_that_one_rank_has_lost_is_made_again_by_all(ranks: Kernel) -> None:
    plan = "Plan(strategy='hsdp', replicas=2)"
    on_ranks(ranks, f"model = nbdist.prepare(Net(), plan={plan}); del model; _ = nbdist.free_memory()")
    on_ranks(ranks, "from nbdist.train.prepare import meshes\nif rank == 1: meshes.kept_meshes.clear()")
    on_ranks(ranks, "model, optimizer = prepared('hsdp', replicas=2); lost = step(model, optimizer)")
    assert value(ranks, "len(state.current().models)") == "1"


def test_a_replaced_model_is_freed_before_the_next_training_begins(ranks: Kernel) -> None:
    """In the cell that replaces it: what the new one computes needs the room."""
    on_ranks(ranks, "model, optimizer = prepared('fsdp'); step(model, optimizer)")
    code = """
import weakref
before = weakref.ref(model)
model, optimizer = prepared('fsdp')
step(model, optimizer)
before() is None"""
    assert value(ranks, code) == "True"


def test_a_cell_that_only_prepares_frees_what_it_has_replaced(ranks: Kernel) -> None:
    on_ranks(
        ranks, "import weakref; model, optimizer = prepared('fsdp'); step(model, optimizer); old = weakref.ref(model)"
    )
    on_ranks(ranks, "model, optimizer = prepared('fsdp')")
    assert value(ranks, "old() is None") == "True"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_nobody_holds_is_not_in_the_checkpoint(ranks: Kernel, tmp_path: Path, strategy: str) -> None:
    """Saved and loaded in the cell in which it was replaced."""
    code = f"""
for number in range(2):
    model, optimizer = prepared({strategy!r})
    step(model, optimizer)
    nbdist.save_state('{tmp_path}/a')
model, optimizer = prepared({strategy!r})
nbdist.load_state('{tmp_path}/a').notes"""
    assert value(ranks, code) == "()"
    assert value(ranks, f"held_by('{tmp_path}/a')") == "['models.0', 'optimizers.0']"


def test_a_model_that_is_still_held_somewhere_is_a_note_when_a_checkpoint_is_loaded(
    ranks: Kernel, tmp_path: Path
) -> None:
    """As where an earlier one stands in Out: the newest gets the values of the newest."""
    on_ranks(ranks, "earlier = prepared('fsdp'); model, optimizer = prepared('fsdp'); step(model, optimizer)")
    on_ranks(ranks, f"expected = values(model); nbdist.save_state('{tmp_path}/two')")
    on_ranks(ranks, "del earlier; model, optimizer = prepared('fsdp'); step(model, optimizer); step(model, optimizer)")
    loaded = ranks.ok(f"%%distributed\nreport = nbdist.load_state('{tmp_path}/two'); report.notes")
    assert "it holds 2 models, 1 prepared here: the newest were loaded" in str(loaded.plain)
    assert value(ranks, "torch.equal(values(model), expected)") == "True"

    on_ranks(ranks, f"nbdist.save_state('{tmp_path}/one'); earlier = model, optimizer; kept = values(model)")
    on_ranks(ranks, "model, optimizer = prepared('fsdp'); step(earlier[0], earlier[1]); moved = values(earlier[0])")
    loaded = ranks.ok(f"%%distributed\nreport = nbdist.load_state('{tmp_path}/one'); report.notes")
    assert "it holds 1 model, 2 prepared here: the newest were loaded, the others here stay" in str(loaded.plain)
    assert value(ranks, "torch.equal(values(model), kept), torch.equal(values(earlier[0]), moved)") == "(True, True)"


def test_a_model_that_only_some_ranks_still_hold_is_refused_when_saving(ranks: Kernel, tmp_path: Path) -> None:
    code = f"""
model, optimizer = prepared('fsdp')
if rank == 1: earlier = model, optimizer
model, optimizer = prepared('fsdp')
nbdist.save_state('{tmp_path}/a')"""
    assert "ranks hold different prepared models (1 on rank 0, 2 on rank 1)" in refused(ranks, code)
    on_ranks(ranks, "if rank == 1: del earlier")
    assert value(ranks, f"nbdist.save_state('{tmp_path}/a').path.name") == "'a'"
