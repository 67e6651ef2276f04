"""The plan of a session: `%distributed plan`, and what the ranks' own libraries make of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import LIMIT, Kernel

PLAN_ON_RANKS = "%%distributed\nfrom nbdist.plan import Plan; Plan.from_environment().to_json()"
VARIABLES = "import os; {n: v for n, v in os.environ.items() if n.startswith(('ACCEL', 'FSDP', 'PARALL'))}"
OLD_MODELS = "Models that were prepared earlier keep the old plan"


@pytest.fixture
def plain(ranks: Kernel) -> Iterator[Kernel]:
    """Two ranks with the default plan, now and afterwards."""
    ranks.ok("%distributed plan --reset")
    yield ranks
    ranks.ok("%distributed plan --reset")


def plan_of_ranks(kernel: Kernel) -> dict[str, Any]:
    """What all ranks find in their environment."""
    (text,) = kernel.ok(PLAN_ON_RANKS).plain
    assert text.startswith("[0-1] "), text
    return dict(kernel.value(f"__import__('json').loads({ast.literal_eval(text.removeprefix('[0-1] '))!r})"))


def variables_of_ranks(kernel: Kernel) -> dict[str, str]:
    kernel.ok(f"%%distributed --capture kept\n{VARIABLES}")
    zero, one = kernel.value("[kept[rank].result for rank in (0, 1)]")
    assert zero == one
    return dict(ast.literal_eval(zero))


def call(kernel: Kernel, code: str, result: str) -> Any:
    """Run code on the ranks, and give what an expression is worth on all of them."""
    kernel.ok(f"%%distributed --quiet\n{code}")
    zero, one = kernel.value(f"nbdist.get_session().pull({result!r})")
    assert zero == one
    return zero


@pytest.fixture(autouse=True, scope="module")
def imported(ranks: Kernel) -> None:
    ranks.ok("import nbdist")
    ranks.ok("from nbdist.plan import Plan")


# --- shown and changed


def test_the_plan_is_shown_as_a_table(plain: Kernel) -> None:
    first, second, last = plain.ok("%distributed plan").stdout.splitlines()
    assert first.startswith("strategy   ddp   each rank holds the whole model") and "over 2 ranks" in first
    assert second.startswith("precision  fp32") and last.startswith("Everything else")


def test_a_change_is_told_and_reaches_all_ranks(plain: Kernel) -> None:
    shown = plain.ok("%distributed plan fsdp --precision bf16 --accumulate 4 --compile").stdout.splitlines()
    assert shown[:4] == ["strategy: ddp -> fsdp", "precision: fp32 -> bf16", "accumulate: 1 -> 4", "compile: off -> on"]
    assert shown[4].startswith(OLD_MODELS)
    found = plan_of_ranks(plain)
    assert [found[name] for name in ("strategy", "precision", "accumulate", "compile")] == ["fsdp", "bf16", 4, True]


def test_only_what_is_named_changes(plain: Kernel) -> None:
    plain.ok("%distributed plan fsdp --shard-by Block,Head --seed 3 --compile")
    assert plain.ok("%distributed plan --no-compile --seed none").stdout.splitlines()[:2] == [
        "compile: on -> off",
        "seed: 3 -> not set",
    ]
    found = plan_of_ranks(plain)
    assert found["strategy"] == "fsdp" and found["shard_by"] == ["Block", "Head"] and found["seed"] is None


def test_reset_begins_from_the_default_plan(plain: Kernel) -> None:
    plain.ok("%distributed plan fsdp --accumulate 4")
    shown = plain.ok("%distributed plan --reset --precision bf16").stdout
    assert shown.splitlines()[:3] == ["strategy: fsdp -> ddp", "precision: fp32 -> bf16", "accumulate: 4 -> 1"]
    assert plain.ok("%distributed plan --precision bf16").stdout == "No change: this is already the plan.\n"


def test_a_file_of_accelerate_becomes_the_plan(plain: Kernel, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    plain.ok("%distributed plan --seed 3")
    assert plain.ok(f"%distributed plan --from {file} --accumulate 2").stdout.splitlines() == [
        "strategy: ddp -> fsdp",
        "precision: fp32 -> bf16",
        "accumulate: 1 -> 2",
        "seed: 3 -> not set",
        f"{OLD_MODELS}: prepare them again to use this one.",
        "num_processes: 2: the number of ranks is not part of a plan: `%distributed start -n 2`",
    ]
    assert plan_of_ranks(plain)["strategy"] == "fsdp"


def test_a_file_of_accelerate_that_no_plan_follows_changes_nothing(plain: Kernel, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MEGATRON_LM\n")
    assert "MEGATRON_LM has no equivalent" in plain.fails(f"%distributed plan --from {file}", "UsageError").evalue
    assert plain.value("nbdist.get_session().plan == Plan()")


def test_options_of_a_hook_go_with_it(plain: Kernel) -> None:
    plain.ok("%distributed plan --comm-hook powersgd --comm-hook-options matrix_approximation_rank=2 warm_start=off")
    assert plan_of_ranks(plain)["comm_hook_options"] == {"matrix_approximation_rank": 2, "warm_start": False}
    plain.ok("%distributed plan --comm-hook none")
    assert plan_of_ranks(plain)["comm_hook_options"] == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--precision bf61", "did you mean 'bf16'?"),
        ("--precision fp16 fsdp", "precision 'fp16' under fsdp is for GPUs"),
        ("--comm-hook bf16", "needs NCCL, and the ranks' backend is gloo"),
        ("--comm-hook fp16 fsdp", "excludes comm_hook ('fp16')"),
        ("hsdp --replicas 3", "replicas (3) must divide the number of ranks, which is 2: set replicas to 1 or 2"),
        ("--sync-batchnorm", "sync_batchnorm is for GPUs"),
        ("fsdp --bucket-mb 50", "Set bucket_mb to 25.0, or strategy to 'ddp'"),
        ("--model m --batch b", "--model and --batch belong to `%distributed plan auto`, which needs both"),
        ("auto", "--model model --batch batch"),
        ("--seed 3 --nonsense", "unknown option --nonsense"),
    ],
)
def test_what_is_refused_changes_nothing_anywhere(plain: Kernel, line: str, message: str) -> None:
    plain.ok("%distributed plan --accumulate 2")
    before = plan_of_ranks(plain), variables_of_ranks(plain)
    assert message in plain.fails(f"%distributed plan {line}", "UsageError").evalue
    assert (plan_of_ranks(plain), variables_of_ranks(plain)) == before
    assert plain.value("nbdist.get_session().plan == Plan(accumulate=2)")


def test_a_strategy_that_settings_of_the_last_one_stand_against_comes_with_the_line_that_drops_them(
    plain: Kernel,
) -> None:
    plain.ok("%distributed plan ddp --bucket-mb 50 --accumulate 2")
    refused = plain.fails("%distributed plan fsdp", "UsageError").evalue
    line = "%distributed plan fsdp --bucket-mb 25.0"
    assert refused.endswith(f": `{line}`")
    plain.ok(line)
    assert plan_of_ranks(plain)["strategy"] == "fsdp" and plan_of_ranks(plain)["accumulate"] == 2


def test_ranks_that_are_busy_keep_their_plan_and_so_does_the_session(plain: Kernel) -> None:
    plain.ok("%%distributed -r 1 --background\nimport time\ntime.sleep(60)")
    plain.ok("handle = _")
    plain.fails("%distributed plan fsdp", "SessionBusy")
    plain.ok("handle.interrupt()\ntry: handle.wait()\nexcept KeyboardInterrupt: pass")
    assert plan_of_ranks(plain)["strategy"] == "ddp"
    assert plain.ok("%distributed plan").stdout.startswith("strategy   ddp")


def test_python_reads_and_sets_the_plan_as_well(plain: Kernel) -> None:
    plain.ok("nbdist.get_session().set_plan(Plan(strategy='fsdp', shard_by=('A', 'B')))")
    assert plan_of_ranks(plain)["shard_by"] == ["A", "B"]
    assert plain.value("nbdist.get_session().plan.strategy") == "fsdp"
    outcome = plain.fails("nbdist.get_session().set_plan(Plan(strategy='fsdp', shard_by=lambda m: True))", "UsageError")
    assert "shard_by is a function" in outcome.evalue
    assert plan_of_ranks(plain)["shard_by"] == ["A", "B"]


def test_a_plan_loads_no_torch_into_the_notebook(plain: Kernel) -> None:
    plain.ok("%distributed plan fsdp")
    assert plain.value("'torch' in __import__('sys').modules") is False


def test_tab_completes_settings_and_their_values(plain: Kernel) -> None:
    def offered(text: str) -> list[str]:
        reply = plain.client.complete(text, len(text), reply=True, timeout=LIMIT)["content"]
        return list(reply["matches"])

    assert offered("%distributed pla") == ["plan"]
    assert offered("%distributed plan fs") == ["fsdp"]
    assert offered("%distributed plan fsdp --prec") == ["--precision"]
    assert offered("%distributed plan --precision b") == ["bf16"]
    assert offered("%dist plan --no-comp") == ["--no-compile", "--no-compile-fullgraph"]


def test_help_has_a_line_for_every_setting(plain: Kernel) -> None:
    text = plain.ok("%distributed plan --help").stdout
    settings = plain.value("list(__import__('nbdist.planning.settings', fromlist=['']).SETTINGS)")
    assert [name for name in settings[1:] if not any(name.replace("_", "-") in line for line in text.split("\n"))] == []
    assert len(text.splitlines()) < len(settings) + 30


# --- what code on the ranks sees


def test_what_nothing_was_prepared_with_takes_on_the_new_plan(plain: Kernel) -> None:
    look = "from nbdist.train import state; state.forget(); state.current()"
    assert call(plain, look, "state.current().plan.accumulate") == 1
    plain.ok("%distributed plan --accumulate 4")
    assert call(plain, "pass", "state.current().plan.accumulate") == 4


def test_what_was_prepared_earlier_keeps_its_plan(plain: Kernel) -> None:
    prepared = "import torch\nfrom nbdist.train import state; state.forget()\nm = torch.nn.Linear(1, 1)"
    call(plain, f"{prepared}; state.current().models.append(m)", "state.current().plan.accumulate")
    plain.ok("%distributed plan --accumulate 4")
    assert call(plain, "pass", "state.current().plan.accumulate") == 1
    assert call(plain, "state.forget()", "state.current().plan.accumulate") == 4


def test_variables_of_the_plan_before_are_removed(plain: Kernel) -> None:
    plain.ok("%distributed plan fsdp --precision bf16 --accumulate 4 --compile")
    assert variables_of_ranks(plain)["FSDP_VERSION"] == "2"
    plain.ok("%distributed plan --reset")
    assert variables_of_ranks(plain) == {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}


ACCELERATE = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
AcceleratorState._reset_state(reset_partial_state=True); GradientState._reset_state()
accelerator = Accelerator()
told = (
    accelerator.num_processes, accelerator.mixed_precision, accelerator.gradient_accumulation_steps,
    accelerator.state.dynamo_plugin.backend.value,
)
"""


def test_an_accelerator_follows_precision_accumulation_and_compilation(plain: Kernel) -> None:
    assert call(plain, ACCELERATE, "told") == (2, "no", 1, "NO")
    plain.ok("%distributed plan --precision bf16 --accumulate 4 --compile")
    assert call(plain, ACCELERATE, "told") == (2, "bf16", 4, "INDUCTOR")


def test_an_accelerator_follows_a_plan_that_is_newer_than_the_first_accelerator(plain: Kernel) -> None:
    first, second = f"{ACCELERATE}\nearlier = accelerator", ACCELERATE.replace("AcceleratorState._reset", "# ")
    assert call(plain, first, "told") == (2, "no", 1, "NO")
    plain.ok("%distributed plan --precision bf16 --accumulate 4")
    assert call(plain, second, "told, earlier.mixed_precision") == ((2, "bf16", 4, "NO"), "no")


def test_an_accelerator_of_the_default_plan_takes_its_arguments(plain: Kernel) -> None:
    given = ACCELERATE.replace("Accelerator()", "Accelerator(mixed_precision='bf16', gradient_accumulation_steps=3)")
    assert call(plain, given, "told") == (2, "bf16", 3, "NO")


PLUGIN = """
from accelerate.utils import FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin()
told = (
    plugin.fsdp_version, plugin.reshard_after_forward, type(plugin.cpu_offload).__name__,
    plugin.activation_checkpointing, plugin.transformer_cls_names_to_wrap,
)
"""


def test_accelerate_s_fsdp_plugin_follows_the_plan(plain: Kernel) -> None:
    plain.ok("%distributed plan fsdp")
    assert call(plain, PLUGIN, "told") == (2, True, "OffloadPolicy", False, None)
    plain.ok("%distributed plan --reshard off --activation-checkpointing full --shard-by Block,Head")
    assert call(plain, PLUGIN, "told") == (2, False, "OffloadPolicy", True, ["Block", "Head"])


def test_accelerate_s_groups_of_replicas_follow_the_plan(plain: Kernel) -> None:
    """Only on GPUs does `Accelerator` make them, so its own reader of the variables is asked."""
    groups = """
import os
from accelerate import ParallelismConfig
from nbdist.plan import Plan
kept = dict(os.environ)
os.environ.update(Plan(strategy="hsdp", replicas=2).environment(world_size=8, device="cuda:0"))
told = (ParallelismConfig().dp_replicate_size, ParallelismConfig().dp_shard_size)
os.environ.clear(); os.environ.update(kept)
"""
    assert call(plain, groups, "told") == (2, 4)


def test_training_arguments_follow_precision_and_ranks(plain: Kernel) -> None:
    plain.ok("%distributed plan --precision bf16")
    arguments = "from transformers import TrainingArguments\narguments = TrainingArguments(output_dir=os.devnull)"
    told = "(arguments.mixed_precision, arguments.world_size, arguments.device.type)"
    assert call(plain, f"import os\n{arguments}", told) == ("bf16", 2, "cpu")


# --- over starts


def test_a_plan_lives_through_starts(kernel: Kernel) -> None:
    """One kernel for the whole life: typed before the start, carried by restarts, checked against each."""
    kernel.ok("%load_ext nbdist")
    kernel.ok("import os, nbdist; os.environ['NBDIST_PLAN'] = '{\"accumulate\": \"4\"}'")
    outcome = kernel.fails("%distributed start -n 2", "UsageError")
    assert outcome.evalue.startswith("NBDIST_PLAN: accumulate must be a whole number")

    kernel.ok("os.environ['NBDIST_PLAN'] = '{\"accumulate\": 4}'; os.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'")
    kernel.ok("%distributed start -n 2")
    assert plan_of_ranks(kernel)["accumulate"] == 4
    assert variables_of_ranks(kernel)["ACCELERATE_MIXED_PRECISION"] == "bf16"  # nobody has typed a plan
    assert kernel.ok("%distributed plan").stdout.splitlines()[2].startswith("accumulate  4")

    kernel.ok("%distributed plan hsdp --replicas 2")
    kernel.ok("%distributed restart")
    found = plan_of_ranks(kernel)
    assert (found["strategy"], found["replicas"], found["accumulate"]) == ("hsdp", 2, 4)
    assert variables_of_ranks(kernel)["ACCELERATE_MIXED_PRECISION"] == "no"

    before = kernel.rank_pids()
    outcome = kernel.fails("%distributed restart -n 3", "UsageError")
    assert "replicas (2) must divide the number of ranks, which is 3" in outcome.evalue
    assert kernel.rank_pids() == before

    kernel.ok("%distributed stop")
    assert "the next one will use this plan" in kernel.ok("%distributed plan").stdout
    shown = kernel.ok("%distributed plan fsdp --replicas none --precision bf16").stdout
    assert shown.splitlines()[-1] == "No session is running: the next one will use this plan."
    kernel.fails("%distributed plan --precision fp61", "UsageError")
    kernel.ok("%distributed start -n 2")
    assert (plan_of_ranks(kernel)["strategy"], plan_of_ranks(kernel)["precision"]) == ("fsdp", "bf16")


# --- proposed

MODEL = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
batch = torch.zeros(8, 512)
def propose(memory, world_size=2, **settings):
    from nbdist.plan import Plan
    from nbdist.train.estimate.propose import propose
    plan = Plan(precision="bf16", bucket_mb=5, **settings)
    found = propose(model, batch, plan, world_size=world_size, memory=memory)
    return found["plan"] and Plan.from_json(found["plan"]), [name for name, _ in found["tried"]]
"""


def test_the_first_strategy_that_fits_is_proposed_and_nothing_changes(plain: Kernel) -> None:
    plain.ok(f"%%distributed -r 0\n{MODEL}")
    shown = plain.ok("%distributed plan auto --model model --batch batch --precision bf16").stdout
    assert shown.splitlines()[1].startswith("ddp ") and "Proposed: ddp, the fastest that fits" in shown
    assert "`%distributed plan --precision bf16` applies it." in shown
    assert plain.value("nbdist.get_session().plan == Plan()")


def test_strategies_are_tried_in_the_order_of_what_they_cost(plain: Kernel) -> None:
    """Offload is not among them: these ranks have no GPU from whose memory to move anything."""
    plain.ok(f"%%distributed -r 0\n{MODEL}\nnone, tried = propose(1)")
    assert plain.value("nbdist.get_session().pull('(none, tried)', 0)") == (
        None,
        ["ddp", "fsdp", "fsdp + activation checkpointing full"],
    )


def test_with_accumulation_exchanging_gradients_in_each_micro_batch_is_tried_before_more_work(plain: Kernel) -> None:
    tried = "propose(1, accumulate=2)[1]"
    plain.ok(f"%%distributed -r 0\n{MODEL}\ntried = {tried}")
    assert plain.value("nbdist.get_session().pull('tried', 0)") == [
        "ddp",
        "fsdp",
        "fsdp + gradients exchanged in each micro-batch",
        "fsdp + gradients exchanged in each micro-batch + activation checkpointing full",
    ]


def test_a_proposal_keeps_all_other_settings(plain: Kernel) -> None:
    plain.ok(f"%%distributed -r 0\n{MODEL}\nproposed = propose(1 << 40)[0].to_json()")
    proposed = plain.value("Plan.from_json(nbdist.get_session().pull('proposed', 0)).diff(Plan())")
    assert proposed == ["precision: bf16 -> fp32", "bucket_mb: 5 -> 25"]


def test_what_a_proposal_is_asked_for_must_be_on_rank_0(plain: Kernel) -> None:
    outcome = plain.fails("%distributed plan auto --model nobody --batch nothing", "UsageError")
    assert (
        outcome.evalue
        == "--model and --batch are variables of rank 0, or of the notebook: name 'nobody' is not defined"
    )
