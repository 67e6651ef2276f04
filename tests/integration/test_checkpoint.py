"""Checkpoints: a run that loads one goes on as if nothing had been, on other ranks too; a broken one is never taken."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nbdist.errors import CheckpointError, UsageError
from nbdist.train import state
from nbdist.train.checkpoint.checkpoint import load_state, save_state
from nbdist.train.data.loaders import prepare_loader
from testbed.kernel import Kernel, Outcome
from tests.conftest import shared_kernel
from tests.support import train_checkpoint
from tests.support.cells import shown_by
from tests.support.train_checkpoint import Training, equal

HELPERS = Path(train_checkpoint.__file__).read_text()
HELPERS += "\nfrom nbdist import latest_state, load_state, register_for_checkpointing, save_state\n"


@pytest.fixture(scope="module")
def two(ranks: Kernel) -> Kernel:
    ranks.ok(f"%%distributed\n{HELPERS}")
    return ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Kernel]:
    with shared_kernel(4) as kernel:
        kernel.ok(f"%%distributed\n{HELPERS}")
        yield kernel


@pytest.fixture(autouse=True)
def nothing_prepared() -> Iterator[None]:
    yield
    state.forget()


def refused(kernel: Kernel, code: str, error: str = "UsageError") -> str:
    """The one error that all ranks raise which do not finish."""
    outcome: Outcome = kernel.run(f"%%distributed\n{code}")
    assert f"{error}: " in outcome.traceback, str(outcome)
    return outcome.traceback


# --- going on


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_run_equals_one_without_interruption_bit_for_bit(two: Kernel, tmp_path: Path, strategy: str) -> None:
    shown_by(
        two, f"run = Training('{strategy}').steps(3); save_state('{tmp_path}/a'); run.steps(3); expected = run.exact()"
    )
    shown_by(two, f"run = Training('{strategy}', seed=7).steps(2); load_state('{tmp_path}/a'); run.steps(3)")
    assert shown_by(two, "equal(run.exact(), expected), state.current().steps") == "[0-1] (True, 6)"


def test_one_process_without_a_group_resumes_too(tmp_path: Path) -> None:
    run = Training().steps(3)
    save_state(tmp_path / "a")
    expected = run.steps(3).exact()
    resumed = Training(seed=7)
    load_state(tmp_path / "a")
    assert equal(resumed.steps(3).exact(), expected)


@pytest.mark.parametrize("settings", ["kind=torch.optim.AdamW", "kind=torch.optim.SGD, momentum=0.9, dampening=0.5"])
def test_saving_before_the_first_step_leaves_the_optimizer_as_it_is(two: Kernel, tmp_path: Path, settings: str) -> None:
    shown_by(two, f"expected = Training('fsdp', {settings}).steps(2).exact()")
    shown_by(two, f"run = Training('fsdp', {settings}); save_state('{tmp_path}/a'); run.steps(2)")
    assert shown_by(two, "equal(run.exact(), expected)") == "[0-1] True"
    shown_by(two, f"run = Training('fsdp', seed=7, {settings}).steps(2); load_state('{tmp_path}/a'); run.steps(2)")
    assert shown_by(two, "equal(run.exact(), expected)") == "[0-1] True"


def test_parameters_that_were_never_trained_have_no_state_after_loading_either(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, "run = Training('ddp').steps(1); del run.optimizer.state[run.model.module.head.bias]")
    shown_by(two, f"save_state('{tmp_path}/a')")
    shown_by(two, f"run = Training('ddp', seed=7).steps(1); load_state('{tmp_path}/a')")
    assert (
        shown_by(two, "run.model.module.head.bias in run.optimizer.state, len(run.optimizer.state)")
        == "[0-1] (False, 6)"
    )


def test_each_rank_gets_its_own_buffers_back(two: Kernel, tmp_path: Path) -> None:
    shown_by(
        two, f"run = Training('fsdp').steps(1); own = run.model.norm.running_mean.clone(); save_state('{tmp_path}/a')"
    )
    shown_by(two, f"run = Training('fsdp', seed=7); load_state('{tmp_path}/a')")
    assert shown_by(two, "torch.equal(run.model.norm.running_mean, own)") == "[0-1] True"


def test_prepared_wrappers_do_not_show_in_names(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, f"run = Training('ddp').steps(2); expected = run.kept(); save_state('{tmp_path}/a')")
    shown_by(two, f"run = Training('fsdp', seed=7); load_state('{tmp_path}/a')")
    assert shown_by(two, "equal(run.kept(), expected)") == "[0-1] True"


@pytest.mark.parametrize("plan", ["", "%distributed plan --clip-grad-norm 1"], ids=["same plan", "plan set between"])
def test_what_is_registered_before_anything_is_prepared_is_kept(two: Kernel, plan: str, tmp_path: Path) -> None:
    shown_by(two, "_ = nbdist.free_memory(); early = Counter(); register_for_checkpointing(early)")
    two.ok(plan)
    shown_by(two, f"model = nbdist.prepare(Net()); early.count = 3; save_state('{tmp_path}/a'); early.count = 0")
    two.ok("%distributed plan --reset")
    assert shown_by(two, f"_ = load_state('{tmp_path}/a'); early.count") == "[0-1] 3"


def test_a_registered_module_is_sharded_and_kept_like_a_model(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, "run = Training('fsdp'); average = wrapped(Net(), 'fsdp'); register_for_checkpointing(average)")
    shown_by(
        two, f"expected = whole(average.head.weight); save_state('{tmp_path}/a'); average.head.weight.data.zero_()"
    )
    assert (
        shown_by(two, f"load_state('{tmp_path}/a'); torch.equal(whole(average.head.weight), expected)") == "[0-1] True"
    )


PREPARED = """
def prepared(strategy, seed):
    state.begin(Plan(strategy=strategy, accumulate=2))
    torch.manual_seed(seed)
    net = Net()
    data = torch.utils.data.DataLoader(torch.arange(480.0).reshape(60, 8) / 480, batch_size=3, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return prepare(net, optimizer, data, scheduler, plan=state.current().plan)

def train(model, optimizer, data, scheduler, windows, save_after=0, path=None):
    seen = []
    for batch in data:
        seen.append(batch)
        with accumulate(model):
            backward(model(batch).square().sum()); optimizer.step(); scheduler.step(); optimizer.zero_grad()
        if len(seen) == 2 * save_after:
            save_state(path)
            seen, save_after, windows = [], 0, windows - save_after
        if len(seen) == 2 * windows:
            break
    return seen, [whole(parameter) for parameter in model.parameters()], scheduler.get_last_lr(), torch.rand(1)
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_is_prepared_goes_on_in_the_middle_of_an_epoch(two: Kernel, tmp_path: Path, strategy: str) -> None:
    shown_by(
        two,
        f"{PREPARED}\nfrom nbdist import accumulate, backward, prepare",
    )
    shown_by(two, f"run = prepared('{strategy}', 1); expected = train(*run, 5, save_after=3, path='{tmp_path}/a')")
    shown_by(two, f"run = prepared('{strategy}', 7); load_state('{tmp_path}/a'); found = train(*run, 2)")
    same = "[equal(one, other) for one, other in zip(found, expected)], state.current().steps"
    assert shown_by(two, same) == "[0-1] ([True, True, True, True], 5)"
    assert max(path.stat().st_size for path in (tmp_path / "a").glob("rank-*")) < 30_000


def test_the_scale_of_fp16_is_kept(two: Kernel, tmp_path: Path) -> None:
    steps = f"""
from nbdist.train.loop.loop import backward
from nbdist.train.prepare.prepare import prepare
def begun():
    net = torch.nn.Linear(4, 4)
    return prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan=Plan(precision='fp16'))
model, optimizer = begun()
for factor in (float('inf'), 1.0):
    backward(model(torch.ones(2, 4)).mean() * factor); optimizer.step(); optimizer.zero_grad()
kept = lambda: (state.current().scaler.get_scale(), state.current().skipped_steps, state.current().steps)
expected = kept(); save_state('{tmp_path}/a')
state.begin(state.current().plan); model, optimizer = begun(); fresh = kept()
load_state('{tmp_path}/a')"""
    shown_by(two, steps)
    assert shown_by(two, "kept() == expected, expected, fresh[1:]") == "[0-1] (True, (32768.0, 1, 1), (0, 0))"


# --- other ranks, other strategies


@pytest.mark.parametrize(("saved", "loaded"), [("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp", "fsdp")])
def test_four_ranks_save_and_two_ranks_and_one_process_load(
    two: Kernel, four: Kernel, tmp_path: Path, saved: str, loaded: str
) -> None:
    shown_by(four, f"run = Training('{saved}').steps(2); save_state('{tmp_path}/a'); kept = run.kept()")
    shown_by(four, f"if rank == 0: torch.save(kept, '{tmp_path}/kept')")
    shown_by(two, f"run = Training('{loaded}', seed=7).steps(1); load_state('{tmp_path}/a')")
    assert shown_by(two, f"equal(run.kept(), torch.load('{tmp_path}/kept'))") == "[0-1] True"
    alone = Training(seed=7)
    with pytest.warns(UserWarning, match="1 rank now: random generators have new seeds"):
        load_state(tmp_path / "a")
    assert equal(alone.kept(), torch.load(tmp_path / "kept"))


def test_one_process_saves_and_two_ranks_load(two: Kernel, tmp_path: Path) -> None:
    run = Training().steps(2)
    save_state(tmp_path / "a")
    torch.save(run.kept(), tmp_path / "kept")
    shown_by(two, f"run = Training('fsdp', seed=7); load_state('{tmp_path}/a')")
    assert shown_by(two, f"equal(run.kept(), torch.load('{tmp_path}/kept'))") == "[0-1] True"


def test_for_another_number_of_ranks_seeds_are_derived_and_that_is_said(
    two: Kernel, four: Kernel, tmp_path: Path
) -> None:
    shown_by(four, f"run = Training('ddp'); random.seed(5); save_state('{tmp_path}/a')")
    load = f"run = Training('ddp', seed=7)\nreport = load_state('{tmp_path}/a'); first = torch.rand(1).item()"
    shown_by(two, f"{load}; values = [None, None]; torch.distributed.all_gather_object(values, first)")
    assert shown_by(two, "values[0] != values[1]") == "[0-1] True"
    assert shown_by(two, f"before = first\n{load}; first == before") == "[0-1] True"
    notes = shown_by(two, "report")
    assert "saved by 4 ranks; there are 2 ranks now: random generators have new seeds (numpy, torch)" in notes
    # What was equal on all ranks goes on.
    assert shown_by(two, "random.random()") == f"[0-1] {random.Random(5).random()!r}"


# --- whole or not at all


def test_a_killed_save_leaves_the_one_before_and_is_told_apart(own_ranks: Kernel, tmp_path: Path) -> None:
    own_ranks.ok(f"%%distributed\n{HELPERS}")
    shown_by(own_ranks, f"run = Training('fsdp').steps(1); save_state('{tmp_path}/a'); run.steps(1)")
    die = "import os, signal\nfrom torch.distributed.checkpoint import FileSystemWriter\nif rank == 0:\n"
    die += "    FileSystemWriter.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
    own_ranks.fails(f"%%distributed\n{die}save_state('{tmp_path}/b')", "RankDied")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b.partial"]

    run = Training(seed=7)
    with pytest.warns(UserWarning, match=r"b\.partial is ignored: it was never completed"):
        report = load_state(tmp_path)
    assert report.path == tmp_path / "a"
    with pytest.raises(UsageError, match=r"b was never completed"):
        load_state(tmp_path / "b")
    run.steps(1)
    save_state(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_a_full_disk_is_one_error_and_the_one_before_stays(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, f"run = Training('fsdp', width=512).steps(1); save_state('{tmp_path}/a'); expected = run.kept()")
    full = "import resource\nlimits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
    full += "if rank == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))\n"
    save = f"try: save_state('{tmp_path}/b')\nfinally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)"
    text = refused(two, full + save, "CheckpointError")
    print(text)
    assert "was not saved: rank 1: File too large" in text
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    shown_by(two, f"run.steps(1); load_state('{tmp_path}')")
    assert shown_by(two, "equal(run.kept()['groups'], expected['groups'])") == "[0-1] True"


def test_an_existing_checkpoint_of_the_name_is_replaced(two: Kernel, tmp_path: Path) -> None:
    shown_by(
        two, f"run = Training('ddp').steps(1); save_state('{tmp_path}/a'); run.steps(1); save_state('{tmp_path}/a')"
    )
    assert shown_by(two, f"load_state('{tmp_path}/a').steps") == "[0-1] 2"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_newest_are_kept(two: Kernel, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    shown_by(two, f"run = Training('ddp')\nfor n in range(4): save_state(f'{tmp_path}/{{n}}', keep=2)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "mine"]
    assert shown_by(two, f"latest_state('{tmp_path}').name") == "[0-1] '3'"


# --- beside training


def test_an_asynchronous_save_holds_what_was_there_when_it_was_called(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, "run = Training('fsdp', width=256).steps(2); then = run.exact()")
    shown_by(two, f"save = save_state('{tmp_path}/a', asynchronous=True); run.steps(4); save.wait()")
    shown_by(two, f"run = Training('fsdp', width=256, seed=7); load_state('{tmp_path}')")
    assert shown_by(two, "equal(run.exact(), then), save.done") == "[0-1] (True, True)"


def test_the_next_save_waits_for_the_one_before(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, "run = Training('ddp', width=256)")
    saves = "; ".join(f"run.steps(1); save_state('{tmp_path}/{n}', asynchronous=True, keep=2)" for n in range(3))
    assert shown_by(two, f"{saves}; load_state('{tmp_path}').steps") == "[0-1] 3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_the_end_of_the_process_waits_for_a_save(own_ranks: Kernel, tmp_path: Path) -> None:
    own_ranks.ok(f"%%distributed\n{HELPERS}")
    shown_by(own_ranks, f"run = Training('ddp', width=20000); save = save_state('{tmp_path}/a', asynchronous=True)")
    own_ranks.ok("%distributed stop")
    run = Training(width=20000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_state(tmp_path).world_size == 2
    assert run.counter.count == 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_asynchronous_saves_copy_into_the_same_memory(two: Kernel, tmp_path: Path, strategy: str) -> None:
    """Fresh memory takes longer than the copying, and on a GPU's way it would have to be pinned each time."""
    places = "[getattr(copy, '_local_tensor', copy).data_ptr() for copy in kept.values()]"
    code = f"""
run = Training({strategy!r}).steps(1)
kept = state.current().copies
save_state('{tmp_path}/a', asynchronous=True).wait(); first = {places}
run.steps(1); expected = run.kept()
save_state('{tmp_path}/b', asynchronous=True).wait(); second = {places}
run = Training({strategy!r}, seed=7); load_state('{tmp_path}/b')
len(first) > 10, first == second, equal(run.kept(), expected), len(state.current().copies)"""
    assert shown_by(two, code) == "[0-1] (True, True, True, 0)"


def test_a_failed_asynchronous_save_tells_its_handle(two: Kernel, tmp_path: Path) -> None:
    full = "import resource\nlimits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))\nrun = Training('ddp', width=512)\n"
    save = f"save = save_state('{tmp_path}/a', asynchronous=True)\n"
    wait = "try: save.wait()\nfinally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)"
    text = refused(two, full + save + wait, "CheckpointError")
    assert "was not saved: File too large" in text
    assert list(tmp_path.iterdir()) == []
    shown_by(two, f"save_state('{tmp_path}/b')")


# Rank 0's thread is in a collective by then: else nothing of the save is cut, and it is completed later.
BARRIER_WHILE_A_SAVE_WAITS = """
import sys, threading, time, traceback

(writer,) = (thread for thread in threading.enumerate() if thread.name.startswith("nbdist saves"))

def place():
    return str(traceback.extract_stack(sys._current_frames()[writer.ident]))

if rank == 0:
    while "distributed_c10d" not in place():
        time.sleep(0.01)
    print("waiting", flush=True)
    torch.distributed.barrier()
"""


def test_a_save_beside_training_that_lost_its_connection_does_not_keep_the_next_one_from_working(
    own_ranks: Kernel, tmp_path: Path
) -> None:
    own_ranks.ok(f"%%distributed\n{HELPERS}")
    hold = "import threading\nfrom torch.distributed.checkpoint import FileSystemWriter\ngo = threading.Event()\n"
    hold += "write = FileSystemWriter.write_data\n"
    hold += "if rank == 1: FileSystemWriter.write_data = lambda *given: (go.wait(), write(*given))[1]\n"
    shown_by(own_ranks, f"{hold}run = Training('ddp'); save = save_state('{tmp_path}/a', asynchronous=True)")
    stuck = own_ranks.start(f"%%distributed\n{BARRIER_WHILE_A_SAVE_WAITS}")
    stuck.wait_for("waiting")
    own_ranks.interrupt()  # which takes all groups down
    assert stuck.finish().status == "error"
    shown_by(own_ranks, "FileSystemWriter.write_data = write; go.set()")
    assert shown_by(own_ranks, f"run = Training('ddp'); save_state('{tmp_path}/b').path.name") == "[0-1] 'b'"
    shown = shown_by(own_ranks, "repr(save)")
    assert "a was not saved: " in shown, shown


# --- on one rank only


@pytest.mark.torch_private
@pytest.mark.parametrize("function", ["save_state", "load_state"])
def test_a_call_on_one_rank_only_is_refused_and_the_next_one_works(two: Kernel, tmp_path: Path, function: str) -> None:
    shown_by(two, f"run = Training('ddp'); save_state('{tmp_path}/a')")
    text = refused(two, f"if rank == 0: {function}('{tmp_path}/a', limit=0.2)")
    assert f"{function} was called on rank 0 only (rank 1 has not arrived within 0.2 s): call it on all ranks" in text
    assert shown_by(two, f"{function}('{tmp_path}/a').path.name") == "[0-1] 'a'"


@pytest.mark.torch_private
def test_a_call_that_was_interrupted_is_not_waited_for_later(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, "run = Training('ddp')")
    alone = two.start(f"%%distributed\nif rank == 0: print('waiting', flush=True); save_state('{tmp_path}/a')")
    alone.wait_for("waiting")
    two.interrupt()
    assert alone.finish().status == "error"
    text = refused(two, f"if rank == 1: save_state('{tmp_path}/a', limit=0.2)")
    assert "save_state was called on rank 1 only (rank 0 has not arrived within 0.2 s)" in text
    assert shown_by(two, f"save_state('{tmp_path}/a').path.name") == "[0-1] 'a'"


# --- bad input


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, f"run = Training('ddp'); save_state('{tmp_path}/a')")
    shown_by(two, "run = Training('fsdp', width=9); before = run.exact()")
    text = refused(two, f"load_state('{tmp_path}/a')")
    assert "for another model: embed.weight is [6, 8] there and [6, 9] here; head.weight is [8, 6] there" in text
    more = "state.current().models[0].module.spare = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))\n"
    text = refused(two, f"run = Training('ddp')\n{more}load_state('{tmp_path}/a')")
    assert "spare.0.weight is missing in the checkpoint;" in text and "; and 3 more. Nothing was loaded" in text
    shown_by(two, "run = Training('fsdp', width=9)")
    assert shown_by(two, "equal(run.exact(), before)") == "[0-1] True"


def test_a_checkpoint_with_other_optimizers_is_refused(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, f"run = Training('ddp'); save_state('{tmp_path}/a')")
    code = "run = Training('ddp'); last = run.optimizer.param_groups[0]['params'].pop()\n"
    code += "run.optimizer.add_param_group({'params': [last]})\n"
    text = refused(two, f"{code}load_state('{tmp_path}/a')")
    assert "optimizers.0 has 1 group of parameters in the checkpoint and 2 here" in text
    text = refused(
        two, f"run = Training('ddp'); state.current().optimizers.append(run.optimizer)\nload_state('{tmp_path}/a')"
    )
    assert "the checkpoint holds 1 optimizer, and 2 are prepared here" in text


def test_loading_before_anything_is_prepared_is_refused(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, f"run = Training('ddp'); save_state('{tmp_path}/a')")
    text = refused(two, f"state.forget()\nload_state('{tmp_path}/a')")
    assert "nothing is prepared, so there is nothing to load into: call nbdist.prepare(model, ...) first" in text


def test_a_position_that_does_not_fit_is_an_error_that_says_that_the_rest_was_loaded(tmp_path: Path) -> None:
    run = Training()
    data: Any = [torch.ones(8)] * 6
    shuffled = prepare_loader(DataLoader(data, shuffle=True, generator=torch.Generator()))
    state.current().loaders.append(shuffled)
    save_state(tmp_path / "a")
    plain = prepare_loader(DataLoader(data))
    state.current().loaders[:] = [plain]
    with pytest.raises(CheckpointError, match=r"it belongs to one with another sampler.* may now hold a part of .*a$"):
        load_state(tmp_path)
    assert run.counter.count == 0


def test_a_missing_file_is_named_before_anything_is_loaded(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, f"run = Training('fsdp').steps(1); save_state('{tmp_path}/a')")
    shard = next((tmp_path / "a").glob("__1_*.distcp"))
    content = shard.read_bytes()
    shown_by(two, "run = Training('fsdp', seed=7); before = run.exact()")
    shard.write_bytes(content[:-1])
    assert f"{shard.name} has {len(content) - 1:,} bytes instead of" in refused(
        two, f"load_state('{tmp_path}/a')", "CheckpointError"
    )
    shard.unlink()
    assert f"a is incomplete: {shard.name} is missing. Nothing was loaded" in refused(
        two, f"load_state('{tmp_path}')", "CheckpointError"
    )
    assert shown_by(two, "equal(run.exact(), before)") == "[0-1] True"


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        ("load_state('{0}/none')", "there is no"),
        ("load_state('{0}')", "is not a checkpoint of save_state and holds none: it has no checkpoint.json"),
        ("save_state('{0}')", "exists and is not a checkpoint: give a name inside it"),
        ("save_state('{0}/a.partial')", "is not a name for a checkpoint"),
        ("save_state(f'{0}/{{rank}}')", "ranks called save_state with different arguments: rank 0 with path="),
        ("save_state('{0}/a') if rank else load_state('{0}/a')", "rank 0 called load_state, rank 1 save_state"),
        ("save_state('{0}/a', keep=0)", "keep=0: give how many checkpoints may stay, at least 1"),
        ("save_state('{0}/a', limit=0)", "limit of save_state is 0: give a number of seconds"),
        ("register_for_checkpointing(3)", "int has no state_dict()"),
        ("run.counter.count = lambda: 0; save_state('{0}/a')", "the registered objects can't be saved"),
        ("run.optimizer.add_param_group({{'params': [torch.ones(3)]}}); save_state('{0}/a')", "of shape [3] that"),
        ("state.begin(Plan()); save_state('{0}/a')", "nothing is prepared, so there is nothing to save"),
    ],
)
def test_bad_input_is_one_error_on_all_ranks(two: Kernel, tmp_path: Path, call: str, advice: str) -> None:
    shown_by(two, "run = Training('ddp')")
    assert advice in refused(two, call.format(tmp_path))
    assert list(tmp_path.iterdir()) == []
