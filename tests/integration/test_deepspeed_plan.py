"""The strategy deepspeed of a plan: a plain loop trains like one process, and what ZeRO can't do is refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel
from tests.support.cells import TRAINING, on_ranks, refused, value

if importlib.util.find_spec("deepspeed") is None:  # its import here would look for GPUs
    pytest.skip("DeepSpeed isn't installed", allow_module_level=True)

NAMES = f"""{TRAINING}
import gc, weakref
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
torch.set_num_threads(1)
from tests.support.train_deepspeed import *
"""
STAGES = [1, 2, 3]
STAGE = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(scope="module")
def two(ranks: Kernel) -> Kernel:
    on_ranks(ranks, NAMES)
    return ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Kernel]:
    with shared_kernel(4) as kernel:
        on_ranks(kernel, NAMES)
        yield kernel


def trained(settings: str, given: str = "") -> str:
    """Code that trains two epochs by windows with a short last one, and says how far from one process it is."""
    return (
        f"everything = prepared(Plan('deepspeed', accumulate=WINDOW, clip_grad_norm=CLIP, {settings}), {given})\n"
        "train(*everything)\nmodel = everything[0]\n"
    )


# --- it trains like one process


@STAGE
@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ("", ""),
        ("offload=True", ""),
        ("", "stream=True"),
        ("offload=True", "stream=True"),
        ("activation_checkpointing='full'", ""),
    ],
    ids=["", "offload", "of unknown length", "offload of unknown length", "checkpointing"],
)
def test_windows_clipping_and_schedules_are_those_of_one_process(
    two: Kernel, stage: int, settings: str, given: str
) -> None:
    code = trained(f"stage={stage}, {settings}", given)
    assert value(two, f"{code}apart(model, alone()) < 1e-6, state.current().steps") == "(True, 10)"


@STAGE
def test_so_they_are_on_four_ranks(four: Kernel, stage: int) -> None:
    (text,) = on_ranks(four, f"{trained(f'stage={stage}')}apart(model, alone()) < 1e-6")
    assert text == "[0-3] True"


@STAGE
def test_parameters_of_64_bits_stay_what_they_are(two: Kernel, stage: int) -> None:
    code = trained(f"stage={stage}", "kind=torch.float64")
    seen = f"{code}apart(model, alone(kind=torch.float64)) < 1e-6, next(model.parameters()).dtype"
    assert value(two, seen) == "(True, torch.float64)"


@pytest.mark.parametrize("settings", ["stage=2", "stage=3", "stage=3, activation_checkpointing='full'"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_language_model_of_transformers_trains_like_in_one_process(two: Kernel, settings: str, tied: bool) -> None:
    code = f"""
from tests.support.train_weights import llama
def fresh(seed):
    torch.manual_seed(seed); model = llama(tie_word_embeddings={tied})
    return model, torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = nbdist.prepare(*fresh(rank), plan=Plan("deepspeed", {settings}))
other, own_optimizer = fresh(0)
words = torch.arange(48).reshape(4, 12) % other.config.vocab_size
for _ in range(3):
    mine = own(words)
    nbdist.backward(model(input_ids=mine, labels=mine).loss); optimizer.step(); optimizer.zero_grad()
    other(input_ids=words, labels=words).loss.backward(); own_optimizer.step(); own_optimizer.zero_grad()
apart(model, other) < 1e-6, type(model(input_ids=words)).__name__"""
    assert value(two, code) == "(True, 'CausalLMOutputWithPast')"


@STAGE
def test_half_precision_is_near_and_results_are_whole(two: Kernel, stage: int) -> None:
    code = trained(f"stage={stage}, precision='bf16'")
    seen = f"{code}0 < apart(model, alone()) < 0.05, next(model.parameters()).dtype, model(ROWS).dtype"
    assert value(two, seen) == "(True, torch.bfloat16, torch.float32)"


@STAGE
@pytest.mark.parametrize(
    "step",
    [
        "(loss.backward(), optimizer.step(), optimizer.zero_grad())",
        "(optimizer.zero_grad(), nbdist.backward(loss), optimizer.step())",
        "(model.backward(loss), model.step())",
    ],
    ids=["torch", "nbdist", "deepspeed"],
)
def test_loops_of_any_style_make_its_steps(two: Kernel, stage: int, step: str) -> None:
    code = f"""
model, optimizer, *_ = prepared(Plan("deepspeed", stage={stage}))
steps(model, 5, lambda loss: {step})
apart(model, stepped_alone(5)) < 1e-6, model.global_steps"""
    assert value(two, code) == "(True, 5)"


@STAGE
def test_gradients_of_a_window_that_is_given_up_are_dropped(two: Kernel, stage: int) -> None:
    code = f"""
from nbdist.train.loop.loop import give_up_window
model, optimizer, *_ = prepared(Plan("deepspeed", stage={stage}, accumulate=3))
def micro_batch(loss):
    with nbdist.accumulate(model):
        nbdist.backward(loss); optimizer.step(); optimizer.zero_grad()
steps(model, 2, lambda loss: micro_batch(100 * loss))
give_up_window(state.current())
for number in range(5):
    for _ in range(3): steps(model, 1, micro_batch, number)
apart(model, stepped_alone(5)) < 1e-6"""
    assert value(two, code) == "True"


@STAGE
def test_gradients_that_are_zeroed_without_a_step_are_dropped(two: Kernel, stage: int) -> None:
    code = f"""
model, optimizer, *_ = prepared(Plan("deepspeed", stage={stage}))
for number in range(5):
    steps(model, 1, lambda loss: (nbdist.backward(100 * loss), optimizer.zero_grad()), number)
    steps(model, 1, lambda loss: (nbdist.backward(loss), optimizer.step(), optimizer.zero_grad()), number)
apart(model, stepped_alone(5)) < 1e-6"""
    assert value(two, code) == "True"


@STAGE
def test_gradients_under_no_sync_count_in_the_next_step(two: Kernel, stage: int) -> None:
    code = f"""
model, optimizer, *_ = prepared(Plan("deepspeed", stage={stage}))
for number in range(5):
    with nbdist.no_sync(model): steps(model, 1, lambda loss: nbdist.backward(loss / 2), number)
    steps(model, 1, lambda loss: (nbdist.backward(loss / 2), optimizer.step()), number)
apart(model, stepped_alone(5)) < 1e-6"""
    assert value(two, code) == "True"


@STAGE
def test_two_models_train_side_by_side(two: Kernel, stage: int) -> None:
    code = f"""
plan = Plan("deepspeed", stage={stage})
(one, first, *_), (other, second, *_) = prepared(plan), prepared(plan)
for number in range(5):
    for model, optimizer in ((one, first), (other, second)):
        steps(model, 1, lambda loss: (nbdist.backward(loss), optimizer.step(), optimizer.zero_grad()), number)
apart(one, stepped_alone(5)) < 1e-6, apart(other, one.module) < 1e-6 if {stage} < 3 else True"""
    assert value(two, code) == "(True, True)"


def test_a_second_pair_may_come_with_the_first(two: Kernel) -> None:
    code = """
plan = Plan("deepspeed")
one, first, *_ = prepared(plan)
other = model_of(rank); second = optimizer_of(other)
one, first, other, second = nbdist.prepare(one, first, other, second, plan=plan)
steps(other, 5, lambda loss: (nbdist.backward(loss), second.step(), second.zero_grad()))
apart(other, stepped_alone(5)) < 1e-6, apart(one, model_of()) == 0"""
    assert value(two, code) == "(True, True)"


# --- the model that comes back


@STAGE
def test_it_is_freed_when_nobody_holds_it(two: Kernel, stage: int) -> None:
    code = f"""
model = optimizer = everything = one = other = first = second = None
model, optimizer, *_ = prepared(Plan("deepspeed", stage={stage}))
steps(model, 2, lambda loss: (nbdist.backward(loss), optimizer.step()))
gone = [weakref.ref(each) for each in (model, model.engine.optimizer.optimizer)]
held = [weakref.ref(each) for each in optimizer.state]
model = optimizer = _ = None; gc.collect()
[each() is None for each in (*gone, *held)]"""
    assert "False" not in value(two, code)


def test_it_is_given_back_as_it_is(two: Kernel) -> None:
    code = """
plan = Plan("deepspeed")
model, optimizer, *_ = prepared(plan)
again = nbdist.prepare(nbdist.unwrap(model), optimizer, plan=plan)
again[0] is model, again[1] is optimizer, type(nbdist.unwrap(model)).__name__"""
    assert value(two, code) == "(True, True, 'Net')"


@STAGE
def test_its_weights_are_saved_whole_under_their_own_names(two: Kernel, stage: int, tmp_path: Path) -> None:
    code = f"""
model, optimizer, *_ = prepared(Plan("deepspeed", stage={stage}))
steps(model, 2, lambda loss: (nbdist.backward(loss), optimizer.step()))
nbdist.save_model(model, {str(tmp_path)!r}); other = model_of(5)
nbdist.load_model(other, {str(tmp_path)!r})
apart(model, other)"""
    assert value(two, code) == "0.0"


@STAGE
def test_weights_from_a_file_reach_a_model_without_memory(two: Kernel, stage: int, tmp_path: Path) -> None:
    code = f"""
nbdist.save_model(model_of(), {str(tmp_path)!r})
with torch.device("meta"): model = Net()
optimizer = optimizer_of(model)
model, optimizer = nbdist.prepare(model, optimizer, plan=Plan("deepspeed", stage={stage}), weights={str(tmp_path)!r})
steps(model, 3, lambda loss: (nbdist.backward(loss), optimizer.step()))
apart(model, stepped_alone(3)) < 1e-6"""
    assert value(two, code) == "True"


@STAGE
@pytest.mark.parametrize("settings", ["", "offload=True", "precision='bf16'"], ids=["", "offload", "bf16"])
def test_a_run_that_loads_a_state_goes_on_as_if_it_had_not_been_interrupted(
    two: Kernel, stage: int, settings: str, tmp_path: Path
) -> None:
    code = f"""
plan = Plan("deepspeed", accumulate=WINDOW, clip_grad_norm=CLIP, stage={stage}, {settings})
whole_run = prepared(plan)
train(*whole_run, epochs=2)
with whole(whole_run[0]) as one: wished = [each.detach().clone() for each in one.parameters()]
whole_run = None
first = prepared(plan)
train(*first, epochs=1)
saved = nbdist.save_state({str(tmp_path / "one")!r}); first = None
second = prepared(plan)
loaded = nbdist.load_state({str(tmp_path)!r})
train(*second, epochs=1)
with whole(second[0]) as other: same = [torch.equal(a, b) for a, b in zip(wished, other.parameters())]
all(same), loaded.steps, state.current().steps, second[1].param_groups[0]["lr"] == 0.01 / 32"""
    assert value(two, code) == "(True, 5, 10, True)"


def test_a_state_of_another_stage_or_strategy_is_refused(two: Kernel, tmp_path: Path) -> None:
    save = f"_ = nbdist.save_state({str(tmp_path / 'one')!r})"
    load = f"nbdist.load_state({str(tmp_path)!r})"
    on_ranks(two, f"everything = prepared(Plan('deepspeed', stage=2))\n{save}")
    on_ranks(two, "everything = prepared(Plan('deepspeed', stage=3))")
    assert "set stage to 2 and prepare again" in refused(two, load)
    on_ranks(two, "everything = prepared(Plan('fsdp'))")
    assert "Nothing was loaded" in refused(two, load)
    on_ranks(two, f"{save}\neverything = prepared(Plan('deepspeed'))")
    assert "Nothing was loaded" in refused(two, load)


def test_a_state_of_two_ranks_is_not_for_four(two: Kernel, four: Kernel, tmp_path: Path) -> None:
    on_ranks(two, f"everything = prepared(Plan('deepspeed'))\n_ = nbdist.save_state({str(tmp_path / 'one')!r})")
    on_ranks(four, "everything = prepared(Plan('deepspeed'))")
    error = four.fails(f"%%distributed\nnbdist.load_state({str(tmp_path)!r})", "RankError").traceback
    assert "that 2 ranks saved can't be loaded by 4 ranks" in error


@STAGE
def test_its_own_checkpoint_brings_training_back(two: Kernel, stage: int, tmp_path: Path) -> None:
    code = f"""
def fresh(): return prepared(Plan("deepspeed", stage={stage}))[:2]
model, optimizer = fresh()
steps(model, 3, lambda loss: (nbdist.backward(loss), optimizer.step()))
model.save_checkpoint({str(tmp_path)!r})
model, optimizer = fresh()
_ = model.load_checkpoint({str(tmp_path)!r})
steps(model, 3, lambda loss: (nbdist.backward(loss), optimizer.step()), 3)
apart(model, stepped_alone(6)) < 1e-6, model.global_steps"""
    assert value(two, code) == "(True, 6)"


@STAGE
def test_an_interrupt_stops_all_ranks_after_the_same_step_and_training_goes_on(two: Kernel, stage: int) -> None:
    on_ranks(two, f"model, optimizer, *_ = prepared(Plan('deepspeed', stage={stage}))")
    cell = two.start(
        "%%distributed\nfor number in range(10**6):\n"
        "    steps(model, 1, lambda loss: (nbdist.backward(loss), optimizer.step()), number % 13)\n"
        "    if number == 20: print('on')"
    )
    cell.wait_for_ranks(2, "on")
    two.interrupt()
    assert cell.finish().evalue.startswith("all ranks stopped after step")
    made = value(two, "model.global_steps")
    code = f"""
steps(model, 1, lambda loss: (nbdist.backward(loss), optimizer.step()), {made} % 13)
other = model_of(); own_optimizer = optimizer_of(other)
for number in range({made} + 1):
    loss_of(other, *(each.split(BATCH)[number % 13] for each in (ROWS, WISHED))).backward()
    own_optimizer.step(); own_optimizer.zero_grad()
apart(model, other) < 1e-3, state.current().steps"""
    assert value(two, code) == str((True, int(made) + 1))


@pytest.mark.torch_private
@pytest.mark.parametrize("stage", [2, 3])
def test_after_a_lost_step_another_one_is_prepared(two: Kernel, stage: int) -> None:
    """Rank 1 waits for a message that nobody sends, rank 0 for its gradients."""
    on_ranks(two, f"model, optimizer, *_ = prepared(Plan('deepspeed', stage={stage}))")
    cell = two.start(
        "%%distributed\nprint('on')\nif rank: dist.recv(torch.ones(1), 0)\n"
        "steps(model, 3, lambda loss: (nbdist.backward(loss), optimizer.step()))"
    )
    cell.wait_for_ranks(2, "on")
    two.interrupt()
    assert "build and prepare the model" in str(cell.finish())
    assert value(two, f"{trained(f'stage={stage}')}apart(model, alone()) < 1e-6") == "True"


def test_after_a_resize_another_one_is_prepared(own_ranks: Kernel) -> None:
    on_ranks(own_ranks, f"{NAMES}model, optimizer, *_ = prepared(Plan('deepspeed'))")
    assert "DeepSpeed engines were created before this change" in own_ranks.ok("%distributed shrink -r 1", 60).stdout
    (text,) = on_ranks(own_ranks, f"{trained('stage=2')}apart(model, alone()) < 1e-6")
    assert text.endswith("True")


# --- what it can't do


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("nbdist.clip_grad_norm_(model.parameters(), 1.0)", "Set clip_grad_norm in the plan"),
        ("nbdist.clip_grad_value_(model.parameters(), 1.0)", "Set clip_grad_norm in the plan"),
        ("optimizer.step(lambda: 1)", "can't be combined with strategy deepspeed"),
        ("nbdist.save_state('never', asynchronous=True)", "leave out asynchronous"),
        ("nbdist.replicate()", "write nbdist.save_state() instead"),
        ("nbdist.prepare(model_of(), plan=plan)", "takes a model and its optimizer together, and prepare got 1 and 0"),
        (
            "nbdist.prepare(*(each for m in (model_of(), model_of()) for each in (m, optimizer_of(m))), plan=plan)",
            "prepare got 2 and 2 new ones",
        ),
        (
            "m = model_of(); o = optimizer_of(m); m(ROWS).sum().backward(); o.step(); nbdist.prepare(m, o, plan=plan)",
            "DeepSpeed drops the state of an optimizer that has made steps: make the AdamW again",
        ),
        ("nbdist.prepare(nbdist.unwrap(model), plan=Plan('ddp'))", "prepared under an earlier plan (deepspeed)"),
        ("nbdist.estimate(model_of(), ROWS, plan)", "estimate strategy 'fsdp' instead"),
        ("nbdist.join_uneven_inputs([model]).__enter__()", "join_uneven_inputs works for DDP"),
        ("nbdist.load_model(model, 'never')", "engine.load_checkpoint"),
        (
            "nbdist.prepare(model, plan=plan, weights=model_of().state_dict() if rank == 0 else {})",
            "keeps their values in its optimizer",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_with_what_to_do(two: Kernel, code: str, message: str) -> None:
    on_ranks(two, "plan = Plan('deepspeed')\nmodel, optimizer, *_ = prepared(plan)")
    assert message in refused(two, code)


def test_batch_norm_is_refused_in_half_precision(two: Kernel) -> None:
    code = """
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
nbdist.prepare(net, torch.optim.SGD(net.parameters()), plan=Plan("deepspeed", precision="bf16"))"""
    assert "set precision to 'fp32', or strategy to 'fsdp'" in refused(two, code)


def test_a_package_that_is_missing_is_named_with_what_to_type(two: Kernel) -> None:
    code = """
import importlib.util, unittest.mock
with unittest.mock.patch("importlib.util.find_spec", lambda name: None): Plan("deepspeed").check(world_size=2)"""
    assert "needs DeepSpeed: `%pip install deepspeed`" in refused(two, code)


# --- files of DeepSpeed


@pytest.fixture
def plain(two: Kernel) -> Iterator[Kernel]:
    two.ok("import nbdist\n%distributed plan --reset")
    yield two
    two.ok("%distributed plan --reset")


def test_a_file_becomes_the_plan_and_what_is_auto_stays(plain: Kernel, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "overlap_comm": True}
    file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}, "gradient_clipping": 0.5}))
    plain.ok("%distributed plan fsdp --tp 2 --precision bf16")
    assert plain.ok(f"%distributed plan deepspeed --config {file} --accumulate 4").stdout.splitlines() == [
        "strategy: fsdp -> deepspeed",
        "accumulate: 1 -> 4",
        "clip_grad_norm: not set -> 0.5",
        "tp: 2 -> 1",
        "stage: 2 -> 3",
        "Models that were prepared earlier keep the old plan: prepare them again to use this one.",
        "overlap_comm: true: no setting of a plan has this effect",
    ]


def test_a_plan_is_written_as_a_file(plain: Kernel, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    shown = plain.ok(f"%distributed plan deepspeed --stage 1 --accumulate 2 --write {file}").stdout.splitlines()
    assert shown[:3] == ["strategy: ddp -> deepspeed", "accumulate: 1 -> 2", "stage: 2 -> 1"]
    assert shown[-1].startswith(f"wrote {file}: ") and json.loads(file.read_text())["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--write {folder}/ds.json", "--write is for DeepSpeed, and the strategy is 'ddp'"),
        ("deepspeed --write {folder}/none/ds.json", "can't be written (No such file or directory): give another path"),
        ("deepspeed --config {folder}/none.json", "can't be read"),
        ("--from {folder}/none.yaml --config {folder}/none.json", "without --from or auto"),
        ("deepspeed --tp 2", "strategy 'deepspeed' excludes tp (2)"),
        ("deepspeed --ema 0.9", "strategy 'deepspeed' excludes ema (0.9)"),
        ("deepspeed --precision fp16", "precision 'fp16' under deepspeed is for GPUs"),
        ("deepspeed --stage 4", "stage must be a whole number from 1 to 3, not 4"),
    ],
)
def test_a_line_that_is_refused_changes_nothing(plain: Kernel, tmp_path: Path, line: str, message: str) -> None:
    assert message in plain.fails(f"%distributed plan {line.format(folder=tmp_path)}", "UsageError").evalue
    assert plain.value("nbdist.get_session().plan == nbdist.Plan()") and not list(tmp_path.iterdir())
