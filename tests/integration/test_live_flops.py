"""`%distributed tflops on`: each rank's own share of a step, exactly, whatever makes the model distributed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from nbdist.metrics.compute.counting import bears_compiled_code
from testbed.closed_forms import gpt, gpt_blocks, gpt_scores_again
from testbed.kernel import Kernel, Outcome
from tests.support.spare import spare_with_ranks

pytestmark = pytest.mark.torch_private

beside_compiled = pytest.mark.skipif(
    not bears_compiled_code(), reason="modes of this torch switch compiled code off, so it is not counted"
)

B, T = 2, 16

SETUP = """%%distributed
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from testbed.closed_forms import Gpt, Graphs, indices, loss_of
torch.set_num_threads(1)
mesh, backend, each = init_device_mesh("cpu", (2,)), Graphs(), []

def sharded(model):
    for block in model.blocks: fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def train(model, steps, passes=1):
    optimizer, before = torch.optim.SGD(model.parameters(), 0.01), backend.runs
    each.clear()
    for _ in range(steps):
        for _ in range(passes):
            loss_of(model, indices(2, 16)).backward()
        optimizer.step(); optimizer.zero_grad()
        each.append(backend.runs - before); before = backend.runs
"""


@pytest.fixture(scope="module")
def measured(ranks: Kernel) -> Iterator[Kernel]:
    """Two ranks whose steps are measured."""
    ranks.ok("import nbdist")
    ranks.ok("from nbdist.client.ranks.observers import Observer, subscribe")
    ranks.ok("class Laps(Observer):\n    def cell_ended(self, task): self.replies = task.replies")
    ranks.ok("laps = Laps(); unsubscribe = subscribe(laps)")
    ranks.ok("%distributed tflops on")
    ranks.ok(SETUP)
    yield ranks
    ranks.ok("%distributed tflops off")
    ranks.ok("unsubscribe()")


def unwrapped(outcome: Outcome) -> str:
    """Return what was printed in one line: where lines end depends on the lengths of figures."""
    return " ".join(outcome.stdout.split())


def flops(kernel: Kernel, cell: str) -> list[tuple[float, float]]:
    """Model and hardware FLOPs of a step by rank, as the line below this cell is made of."""
    outcome = kernel.ok(f"%%distributed\n{cell}")
    assert "steps" in unwrapped(outcome) and "TFLOPS n/a" not in unwrapped(outcome), str(outcome)
    answers = kernel.value(
        "{rank: (reply.steps.flops, reply.steps.hardware_flops) for rank, reply in laps.replies.items()}"
    )
    return [answers[rank] for rank in (0, 1)]


def test_the_line_below_a_cell_tells_steps_time_rates_and_what_is_not_known(measured: Kernel) -> None:
    outcome = measured.ok("%%distributed\ntrain(DistributedDataParallel(Gpt()), 5)")
    for words in ("5 steps", "ms a step", "tokens/s", "FLOPS a rank", "in all"):
        assert words in outcome.stdout, str(outcome)
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "MFU n/a: no peak is known for the CPU at fp32" in " ".join(line.strip() for line in lines)


def test_each_rank_of_ddp_counts_its_own_batch(measured: Kernel) -> None:
    truth = (gpt(B, T), gpt(B, T) + gpt_scores_again(B, T))
    assert flops(measured, "train(DistributedDataParallel(Gpt()), 4)") == [truth] * 2
    assert flops(measured, "train(DistributedDataParallel(Gpt()), 4, passes=2)") == [(2 * truth[0], 2 * truth[1])] * 2


def test_each_rank_of_fsdp_counts_its_own_batch(measured: Kernel) -> None:
    truth = (gpt(B, T), gpt(B, T) + gpt_scores_again(B, T))
    assert flops(measured, "train(sharded(Gpt()), 4)") == [truth] * 2


def test_fsdp_with_checkpoints_tells_recomputation_apart(measured: Kernel) -> None:
    cell = "with torch.utils.checkpoint.set_checkpoint_early_stop(False):\n"
    cell += "    train(sharded(Gpt('manual', 'not reentrant')), 4)"
    assert flops(measured, cell) == [(gpt(B, T), gpt(B, T) + gpt_blocks(B, T))] * 2


def test_a_cell_that_recomputes_what_its_last_run_kept_says_what_that_cost(measured: Kernel) -> None:
    run = "%%distributed\ntrain(model, 6)"
    measured.ok("%%distributed\nmodel = DistributedDataParallel(Gpt('manual'))")
    kept = measured.ok(run)
    before = measured.value("len(In) - 1")
    measured.ok("%%distributed\nmodel = DistributedDataParallel(Gpt('manual', 'not reentrant'))")
    again = unwrapped(measured.ok(run))
    assert re.search(rf"more FLOPs besides the model's than in cell {before} .* a typical step takes \d+ %", again)
    assert "besides the model's" not in kept.stdout + measured.ok(run).stdout


@beside_compiled
@pytest.mark.parametrize("wrap", ["sharded(model)", "DistributedDataParallel(model)"])
def test_blocks_that_are_compiled_are_so_in_the_counted_step_too(measured: Kernel, wrap: str) -> None:
    cell = f"""
torch._dynamo.reset()
model = Gpt()
for block in model.blocks: block.compile(backend=backend)
train({wrap}, 5)
assert each == [3] * 5, each"""
    assert flops(measured, cell) == [(gpt(B, T), gpt(B, T) + gpt_scores_again(B, T))] * 2


@beside_compiled
@pytest.mark.parametrize("wrap", ["sharded(model)", "DistributedDataParallel(model)"])
def test_blocks_with_a_compiled_backward_pass_are_counted_too(measured: Kernel, wrap: str) -> None:
    cell = f"""
torch._dynamo.reset()
model = Gpt()
for block in model.blocks: block.compile(backend="aot_eager")
train({wrap}, 6)"""
    assert flops(measured, cell) == [(gpt(B, T), gpt(B, T) + gpt_scores_again(B, T))] * 2


def test_each_rank_of_a_tensor_parallel_model_counts_its_share(measured: Kernel) -> None:
    cell = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
inputs = torch.randn(32, 64, requires_grad=True)
for _ in range(4):
    model(inputs).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()"""
    share = 3 * 2 * 32 * 2 * 64 * 256 // 2
    assert flops(measured, cell) == [(share, share)] * 2


@pytest.mark.parametrize(
    ("wrap", "shared"),
    [
        ('parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})', True),
        ("DistributedDataParallel(net)", False),
        ("fully_shard(net)", False),
        ("net", False),
    ],
)
def test_equal_batches_count_once_where_the_model_is_split_between_ranks(
    measured: Kernel, wrap: str, shared: bool
) -> None:
    """The same numbers on all ranks may be dummy data: that ranks share them, the model's parallelism shows."""
    cell = f"""
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
def train_all():
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    model = {wrap}
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in torch.utils.data.DataLoader(torch.ones(40, 64), batch_size=8):
        model(batch).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
train_all()  # the optimizer is gone when the cell ends"""
    shown = measured.ok(f"%%distributed\n{cell}").stdout
    assert ("ranks 0-1 share their batches" in shown) == shared, shown
    steps = measured.value("[(reply.steps.units, reply.steps.seconds) for reply in laps.replies.values()]")
    samples = (1 if shared else 2) * 8 / max(seconds for _, seconds in steps)
    assert {units for units, _ in steps} == {8} and f"{samples:,.0f} samples/s" in shown, shown


@pytest.mark.torch_private
@pytest.mark.parametrize("wrap", ["DistributedDataParallel(net)", "fully_shard(net)"])
def test_a_batch_whose_sequences_are_divided_between_ranks_counts_once(measured: Kernel, wrap: str) -> None:
    cell = f"""
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
model = {wrap}
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in torch.utils.data.DataLoader(torch.ones(40, 16, 32), batch_size=8):
    with context_parallel(mesh, buffers=[batch], buffer_seq_dims=[1]):
        assert batch.shape == (8, 8, 32), batch.shape
        model(batch).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()"""
    assert "ranks 0-1 share their batches" in unwrapped(measured.ok(f"%%distributed\n{cell}"))


@pytest.mark.torch_private
def test_a_batch_whose_sequences_and_products_are_divided_counts_once() -> None:
    """Two ranks have each half of the sequences, and two each half of the weights."""
    cell = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
both = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
parallelize_module(net, both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
model = fully_shard(net, mesh=both["context"])
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in torch.utils.data.DataLoader(torch.ones(40, 16, 32), batch_size=8):
    with context_parallel(both["context"], buffers=[batch], buffer_seq_dims=[1]):
        assert batch.shape == (8, 8, 32), batch.shape
        model(batch).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()"""
    with spare_with_ranks(4) as kernel:
        kernel.ok("%distributed tflops on")
        kernel.ok(SETUP)
        assert "ranks 0-3 share their batches" in unwrapped(kernel.ok(f"%%distributed\n{cell}"))


@pytest.mark.torch_private
def test_a_division_of_sequences_is_forgotten_with_the_default_group_of_then() -> None:
    train = """
model = DistributedDataParallel(nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in torch.utils.data.DataLoader(torch.ones(40, 16, 32), batch_size=8):
    with division(batch):
        model(batch).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()"""
    with spare_with_ranks(2) as kernel:
        kernel.ok("%distributed tflops on")
        kernel.ok(SETUP)
        divided = """from torch.distributed.tensor.experimental import context_parallel
def division(batch): return context_parallel(mesh, buffers=[batch], buffer_seq_dims=[1])"""
        assert "ranks 0-1 share their batches" in unwrapped(kernel.ok(f"%%distributed\n{divided}{train}"))
        kernel.ok("%distributed grow")
        whole = "from contextlib import nullcontext as division"
        shown = unwrapped(kernel.ok(f"%%distributed\n{whole}{train}"))
        assert "5 steps" in shown and "share their batches" not in shown, shown


def test_why_a_step_is_slow_is_shown_below_the_cell_and_by_rank(measured: Kernel) -> None:
    cell = """
import time
torch._dynamo.reset()
model = DistributedDataParallel(Gpt())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(12):
    time.sleep(0.05 if rank == 1 else 0)  # work, which rank 0 has less of
    loss_of(model, indices(2, 16)).backward()
    optimizer.step(); optimizer.zero_grad()"""
    outcome = measured.ok(f"%%distributed\n{cell}")
    assert "waiting for rank 1 (it works" in unwrapped(outcome), str(outcome)
    table = unwrapped(measured.ok("%distributed why"))
    assert "waiting for rank 1" in table and "waiting for ranks" in table, table
    assert "cell that trains" not in table


def test_evaluations_between_steps_are_named_below_the_cell_and_by_rank(measured: Kernel) -> None:
    cell = """
import time
model = DistributedDataParallel(Gpt())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(31):
    loss_of(model, indices(2, 16)).backward()
    optimizer.step(); optimizer.zero_grad()
    if step % 10 == 9:
        model.eval()
        with torch.inference_mode():
            loss_of(model, indices(2, 16)).item()
            time.sleep(0.5)
        model.train()"""
    shown = unwrapped(measured.ok(f"%%distributed\n{cell}"))
    assert "31 steps, 30 timed" in shown, shown
    assert re.search(r"evaluation took [2-9]\d % of the time; without it a step takes .*, [\d,]+ tokens/s", shown), (
        shown
    )
    why = unwrapped(measured.ok("%distributed why"))
    assert "% evaluation" in why and "rank step work evaluation waiting for data" in why, why


def test_a_cell_that_fails_leaves_nothing_of_a_count_behind(measured: Kernel) -> None:
    measured.fails("%%distributed\ntrain(Gpt(), 1)\n1 / 0", "RankError")
    left = "(torch._C._len_torch_dispatch_stack(), torch._dynamo.eval_frame._stance.stance)"
    assert measured.value(f"nbdist.get_session().pull({left!r})") == [(0, "default")] * 2


def test_cells_without_steps_have_no_line(measured: Kernel) -> None:
    assert measured.ok("%%distributed\nGpt()(indices(1, 4)).sum().item() > 0 or None").stdout.count("step") == 0


def test_a_cell_that_trains_without_an_optimizer_has_a_line_with_the_reason(measured: Kernel) -> None:
    cell = "model = Gpt()\nfor _ in range(3): loss_of(model, indices(2, 16)).backward()"
    shown = unwrapped(measured.ok(f"%%distributed\n{cell}"))
    assert "training steps n/a" in shown and "without an optimizer" in shown, shown


def test_the_panel_gets_the_last_steps_while_a_cell_runs(measured: Kernel) -> None:
    cell = measured.start("%%distributed --background\nwhile True: train(Gpt(), 10); print('ten', flush=True)")
    cell.finish()
    try:
        cell.wait_late("ten")
        measured.ok("from nbdist.wire.questions.knowing import GetMetrics\nfrom tests.support.inside import ask")
        answers = "ask(nbdist.get_session(), GetMetrics(), timeout=5.0)"
        found = measured.value(f"[answer.sample.step.flops for answer in {answers}.values()]")
        assert found == [gpt(B, T)] * 2
    finally:
        measured.ok("%distributed interrupt --now")
        cell.wait_late("KeyboardInterrupt")


def test_a_peak_that_was_measured_gives_mfu_on_a_processor(measured: Kernel) -> None:
    outcome = measured.ok("%distributed peak --seconds 0.2")
    assert "the CPU" in outcome.stdout and "in all: " in outcome.stdout
    outcome = measured.ok("%%distributed\ntrain(Gpt(), 5)")
    assert "(of a peak measured here)" in unwrapped(outcome) and "MFU n/a" not in unwrapped(outcome)


def test_the_peak_is_measured_in_the_dtypes_of_the_last_steps(measured: Kernel) -> None:
    outcome = measured.ok("%%distributed\ntrain(Gpt().double(), 5)")
    assert "no peak is known for the CPU at fp64" in unwrapped(outcome)
    outcome = measured.ok("%distributed peak --seconds 0.2")
    assert "fp64" in outcome.stdout and "fp32" not in outcome.stdout
    outcome = measured.ok("%%distributed\ntrain(Gpt().double(), 5)")
    assert "(of a peak measured here)" in unwrapped(outcome) and "MFU n/a" not in unwrapped(outcome)


def test_a_dtype_without_products_is_refused(measured: Kernel) -> None:
    outcome = measured.run("%distributed peak --dtype tf32")
    assert outcome.status == "error" and "fp32, fp16, bf16, fp64" in outcome.traceback


def test_fresh_ranks_are_measured_as_well() -> None:
    with spare_with_ranks(1) as kernel:
        kernel.ok("%distributed tflops on")
        kernel.ok("%distributed restart")
        kernel.ok(SETUP.replace("(2,)", "(1,)"))
        assert "4 steps" in kernel.ok("%%distributed\ntrain(Gpt(), 4)").stdout
        kernel.ok("%distributed tflops off")
        assert kernel.ok("%%distributed\ntrain(Gpt(), 4)").stdout == ""


def test_a_notebook_without_ranks_has_its_own_line(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    kernel.ok("%distributed tflops on")
    kernel.ok("import torch\nfrom testbed.closed_forms import *\nmodel = Gpt(); ids = indices(2, 16)")
    cell = """optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(5):
    loss_of(model, ids).backward()
    optimizer.step()"""
    assert "5 steps" in kernel.ok(cell).stdout
    kernel.ok("%distributed tflops off")
    assert kernel.ok(cell).stdout == ""


def test_an_interrupted_cell_stops_at_a_step_as_ever_and_has_its_line(measured: Kernel) -> None:
    cell = measured.start(
        "%%distributed\nmodel = DistributedDataParallel(Gpt())\nwhile True: train(model, 10); print('ten', flush=True)"
    )
    cell.wait_for("ten")
    measured.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt" and "all ranks stopped after step" in outcome.evalue, str(outcome)
    assert "ms a step" in unwrapped(outcome) and "TFLOPS n/a" not in unwrapped(outcome)
    left = "(torch._C._len_torch_dispatch_stack(), torch._dynamo.eval_frame._stance.stance)"
    assert measured.value(f"nbdist.get_session().pull({left!r})") == [(0, "default")] * 2


SLOW = """
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, number):
        time.sleep(0.01)
        return indices(1, 16)[0]
loader = torch.utils.data.DataLoader(Slow(), batch_size=2)
model = Gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in loader:
    loss_of(model, batch).backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_advice_is_measured_on_a_rank_and_why_names_what_the_dataloader_needs(measured: Kernel) -> None:
    measured.ok(f"%%distributed\n{SLOW}")
    measured.ok("%%distributed\nbefore = torch.get_rng_state()")
    advice, why = measured.ok("%distributed advise -r 1").stdout, measured.ok("%distributed why").stdout
    for line in ("loader: waiting for it takes", "an item takes", "give the DataLoader num_workers="):
        assert line in advice and line in why, advice + why
    assert "measured on rank 1 (the CPU)" in advice
    measured.ok("%%distributed\nassert torch.equal(before, torch.get_rng_state())")


def test_a_dataloader_that_the_loop_makes_itself_is_measured_as_well(measured: Kernel) -> None:
    made_in_loop = SLOW.replace("in loader:", "in torch.utils.data.DataLoader(Slow(), batch_size=2):")
    measured.ok(
        "%%distributed\n" + made_in_loop.replace("loader = torch.utils.data.DataLoader(Slow(), batch_size=2)", "")
    )
    why = measured.ok("%distributed why").stdout
    assert "DataLoader of Slow: waiting for it takes" in why and "give the DataLoader num_workers=" in why
