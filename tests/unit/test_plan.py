"""What a plan may hold, how it is told, and what others read of it."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from nbdist.client.magic_lines.plan_line import allowed_words, flags, named_settings, plan_parser, text_of, words_for
from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.planning.kinds import Choice
from nbdist.planning.rules import own_settings
from nbdist.planning.settings import SETTINGS
from nbdist.planning.variables import NAMES

ROOT = Path(__file__).resolve().parents[2]


def every_block(module: object) -> bool:
    return True


# A value for each setting that is not its default, with what it needs around it.
OTHERS: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "fsdp"},
    "precision": {"precision": "bf16"},
    "fp8_recipe": {"precision": "fp8", "fp8_recipe": "rowwise"},
    "accumulate": {"accumulate": 4},
    "clip_grad_norm": {"clip_grad_norm": 1.5},
    "ema": {"ema": 0.99},
    "compile": {"compile": "max-autotune"},
    "compile_dynamic": {"compile": True, "compile_dynamic": False},
    "compile_fullgraph": {"strategy": "fsdp", "compile": True, "compile_fullgraph": True},
    "activation_checkpointing": {"activation_checkpointing": "selective"},
    "activation_budget": {"activation_budget": 0.5},
    "activation_offload": {"activation_offload": True},
    "comm_hook": {"comm_hook": "fp16"},
    "comm_hook_options": {"comm_hook": "powersgd", "comm_hook_options": {"matrix_approximation_rank": 7}},
    "bucket_mb": {"bucket_mb": 77.0},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": False},
    "broadcast_buffers": {"broadcast_buffers": False},
    "sync_batchnorm": {"sync_batchnorm": True},
    "shard_by": {"strategy": "fsdp", "shard_by": ("Block", "Head")},
    "methods": {"strategy": "fsdp", "methods": ("encode", "decoder.logits")},
    "reshard": {"strategy": "fsdp", "reshard": False},
    "prefetch": {"strategy": "fsdp", "prefetch": 2},
    "exchange": {"strategy": "fsdp", "exchange": "each"},
    "offload": {"strategy": "fsdp", "offload": True},
    "replicas": {"strategy": "hsdp", "replicas": 2},
    "tp": {"strategy": "fsdp", "tp": 2},
    "sequence_parallel": {"strategy": "fsdp", "tp": 2, "sequence_parallel": True},
    "loss_parallel": {"strategy": "fsdp", "tp": 2, "loss_parallel": True},
    "pp": {"strategy": "fsdp", "pp": 2},
    "pp_schedule": {"strategy": "fsdp", "pp": 2, "pp_schedule": "gpipe"},
    "pp_micro_batches": {"strategy": "fsdp", "pp": 2, "pp_micro_batches": 8},
    "cp": {"strategy": "fsdp", "cp": 2},
    "cp_method": {"strategy": "fsdp", "cp": 2, "cp_method": "ulysses"},
    "ep": {"strategy": "fsdp", "ep": 2},
    "stage": {"strategy": "deepspeed", "stage": 3},
    "local_sgd_steps": {"local_sgd_steps": 8},
    "seed": {"seed": 0},
    "seed_per_rank": {"seed": 0, "seed_per_rank": True},
    "deterministic": {"deterministic": True},
    "tf32": {"tf32": False},
    "numa": {"numa": "exclusive"},
    "gc_interval": {"gc_interval": 100},
    "dispatch": {"dispatch": True},
    "even_batches": {"even_batches": False},
}
EVERY_SETTING = pytest.mark.parametrize("name", SETTINGS)


def refused(**settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        Plan(**settings)
    return str(caught.value)


def refused_by_ranks(plan: Plan, **ranks: Any) -> str:
    with pytest.raises(UsageError) as caught:
        plan.check(**ranks)
    return str(caught.value)


# --- values


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "strategy",
            "fsd",
            "strategy 'fsd' is unknown: did you mean 'fsdp'? Allowed values: 'none', 'ddp', 'fsdp', 'hsdp', 'deep",
        ),
        (
            "precision",
            "bf61",
            "precision 'bf61' is unknown: did you mean 'bf16'? Allowed values: 'fp32', 'bf16', 'fp16'",
        ),
        ("precision", "BF16", "did you mean 'bf16'?"),
        ("precision", 16, "precision 16 is unknown"),
        ("comm_hook", "power", "did you mean 'powersgd'?"),
        ("activation_checkpointing", True, "Allowed values: 'none', 'full', 'selective', 'selective-half'"),
        ("accumulate", 0, "accumulate must be a whole number of 1 or more, not 0"),
        ("accumulate", 1.5, "not 1.5"),
        ("accumulate", True, "not True"),
        ("accumulate", "4", "not '4'"),
        ("stage", 0, "stage must be a whole number from 1 to 3, not 0"),
        ("stage", 4, "stage must be a whole number from 1 to 3, not 4"),
        ("gc_interval", -1, "gc_interval must be a whole number of 0 or more, not -1"),
        ("replicas", 0, "replicas must be a whole number of 1 or more, or None, not 0"),
        ("seed", 2**32, "seed must be a whole number less than 4294967296"),
        ("clip_grad_norm", 0, "clip_grad_norm must be a number greater than 0, or None, not 0"),
        ("clip_grad_norm", float("nan"), "not nan"),
        ("ema", 1, "ema must be a number between 0 and 1, such as 0.999, or None, not 1"),
        ("ema", "0.9", "not '0.9'"),
        ("ema", True, "not True"),
        ("activation_budget", 1, "activation_budget must be a number from 0 to less than 1, such as 0.5"),
        ("activation_budget", -0.1, "not -0.1"),
        ("bucket_mb", None, "bucket_mb must be a number greater than 0, not None"),
        (
            "compile",
            1,
            "compile 1 is unknown. Allowed values: True, False, 'default', 'reduce-overhead', 'max-autotune'",
        ),
        ("compile", "max-autotun", "did you mean 'max-autotune'?"),
        ("compile_dynamic", "yes", "compile_dynamic must be True, False or None, not 'yes'"),
        ("compile_fullgraph", 1, "compile_fullgraph must be True or False, not 1"),
        (
            "fp8_recipe",
            "row",
            "fp8_recipe 'row' is unknown: did you mean 'rowwise'? Allowed values: 'tensorwise', 'rowwise', ",
        ),
        ("fp8_recipe", "mxfp8", "fp8_recipe 'mxfp8' is unknown. Allowed values: 'tensorwise', 'rowwise'"),
        ("tf32", "yes", "tf32 must be True, False or None, not 'yes'"),
        ("shard_by", dict, "shard_by must be the name of a module's class like 'Block'"),
        ("shard_by", "not a name", "shard_by must be"),
        ("shard_by", (), "shard_by must be"),
        ("comm_hook_options", ["rank"], "comm_hook_options must be a dictionary"),
        ("comm_hook_options", {"matrix_rank": 2}, "option 'matrix_rank' is unknown: did you mean 'matrix_approx"),
        ("comm_hook_options", {"warm_start": 1}, "the comm_hook option warm_start must be True or False, not 1"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(setting: str, value: Any, message: str) -> None:
    assert message in refused(**{setting: value})


def test_every_setting_can_have_another_value() -> None:
    assert set(OTHERS) == set(SETTINGS)
    for name, settings in OTHERS.items():
        assert getattr(Plan(**settings), name) != getattr(Plan(), name)


def test_what_can_be_written_in_two_ways_is_kept_in_one() -> None:
    assert Plan(precision="no") == Plan(precision="fp32")  # type: ignore[arg-type]
    assert Plan(compile="default") == Plan(compile=True)
    assert Plan(strategy="fsdp", shard_by=["A", "B"]).shard_by == ("A", "B")  # type: ignore[arg-type]
    assert Plan(clip_grad_norm=1).to_json() == Plan(clip_grad_norm=1.0).to_json()


def test_a_plan_never_changes_and_can_travel_and_be_a_key() -> None:
    options = {"matrix_approximation_rank": 2}
    plan = Plan(comm_hook="powersgd", comm_hook_options=options)
    options["matrix_approximation_rank"] = 3
    assert plan.comm_hook_options == {"matrix_approximation_rank": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.accumulate = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(plan)) == plan and {plan: 1}[plan.replace()] == 1


def test_a_plan_needs_no_torch() -> None:
    program = "import sys, nbdist.plan; nbdist.plan.Plan().table(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- combinations


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"strategy": "fsdp", "comm_hook": "fp16"},
            "strategy 'fsdp' excludes comm_hook ('fp16'), as only DDP has communication hooks. "
            "Set comm_hook to 'none', or strategy to 'ddp'",
        ),
        ({"strategy": "fsdp", "local_sgd_steps": 4}, "as a rank steps alone only if it holds the whole model"),
        ({"strategy": "none", "offload": True}, "Set offload to False, or strategy to 'fsdp' or 'hsdp'"),
        ({"offload": True}, "as only shards are moved to the CPU"),
        ({"replicas": 2}, "Set replicas to None, or strategy to 'hsdp'"),
        ({"tp": 2}, "Set tp to 1, or strategy to 'fsdp' or 'hsdp'"),
        (
            {"strategy": "fsdp", "tp": 2, "compile": True, "activation_checkpointing": "full"},
            "tp (2) excludes compile with activation_checkpointing 'full'",
        ),
        ({"strategy": "fsdp", "tp": 2, "offload": True}, "tp (2) excludes offload (True)"),
        ({"pp": 2}, "Set pp to 1, or strategy to 'fsdp'"),
        ({"strategy": "fsdp", "pp": 2, "tp": 2, "loss_parallel": True}, "pp (2) excludes loss_parallel (True)"),
        ({"strategy": "fsdp", "pp": 2, "cp": 2}, "pp (2) excludes cp (2)"),
        ({"strategy": "fsdp", "pp": 2, "compile": True}, "pp (2) excludes compile (True)"),
        ({"strategy": "fsdp", "pp": 2, "dispatch": True}, "pp (2) excludes dispatch (True)"),
        ({"strategy": "fsdp", "pp": 2, "precision": "fp16"}, "pp (2) excludes precision 'fp16'"),
        ({"strategy": "fsdp", "pp": 4, "pp_micro_batches": 2}, "pp_micro_batches (2) must be at least pp (4)"),
        ({"strategy": "fsdp", "pp_schedule": "gpipe"}, "pp_schedule ('gpipe') is for pipelines, and pp is 1"),
        ({"strategy": "fsdp", "tp": 2, "precision": "fp8"}, "tp (2) excludes precision 'fp8'"),
        ({"strategy": "fsdp", "sequence_parallel": True}, "tp is 1: set tp to 2 or more"),
        ({"strategy": "fsdp", "loss_parallel": True}, "tp is 1: set tp to 2 or more"),
        ({"cp": 2}, "Set cp to 1, or strategy to 'fsdp' or 'hsdp'"),
        ({"strategy": "fsdp", "cp": 2, "compile": True}, "cp (2) excludes compile (True)"),
        ({"strategy": "fsdp", "cp": 2, "dispatch": True}, "cp (2) excludes dispatch (True)"),
        ({"strategy": "fsdp", "cp_method": "ulysses"}, "set cp to 2 or more, or cp_method to 'gather'"),
        ({"ep": 2}, "Set ep to 1, or strategy to 'fsdp' or 'hsdp'"),
        ({"strategy": "fsdp", "ep": 2, "tp": 2}, "ep (2) excludes tp (2)"),
        ({"strategy": "fsdp", "ep": 2, "cp": 2}, "ep (2) excludes cp (2)"),
        ({"strategy": "fsdp", "ep": 2, "compile": True}, "ep (2) excludes compile (True)"),
        ({"strategy": "fsdp", "ep": 2, "offload": True}, "ep (2) excludes offload (True)"),
        ({"strategy": "fsdp", "ep": 2, "activation_offload": True}, "ep (2) excludes activation_offload (True)"),
        ({"strategy": "fsdp", "ep": 2, "precision": "fp16"}, "ep (2) excludes precision 'fp16'"),
        ({"strategy": "none", "sync_batchnorm": True}, "as ranks don't train together otherwise"),
        ({"strategy": "hsdp", "static_graph": True, "bucket_mb": 50}, "Set bucket_mb to 25.0, static_graph to False"),
        ({"shard_by": every_block}, "shard_by (every_block)"),
        ({"comm_hook": "fp16", "comm_hook_options": {"warm_start": True}}, "comm_hook 'fp16' has no options"),
        ({"precision": "bf16", "fp8_recipe": "rowwise"}, "set precision to 'fp8', or fp8_recipe to 'tensorwise'"),
        ({"comm_hook": "powersgd", "comm_hook_options": {"start_powerSGD_iter": 1}}, "must be 2 or more"),
        ({"static_graph": True, "accumulate": 2}, "static_graph excludes accumulate (2)"),
        ({"static_graph": True, "local_sgd_steps": 2}, "static_graph excludes local SGD (2)"),
        ({"local_sgd_steps": 2, "comm_hook": "fp16"}, "local SGD exchanges none"),
        (
            {"activation_budget": 0.5, "activation_checkpointing": "full"},
            "set activation_checkpointing to 'none', or activation_budget to None",
        ),
        (
            {"activation_offload": True, "activation_checkpointing": "selective-half"},
            "Set activation_checkpointing to 'full' or 'none', or activation_offload to False",
        ),
        (
            {"strategy": "none", "compile": True, "compile_fullgraph": True, "activation_offload": True},
            "compile_fullgraph excludes activation_offload",
        ),
        ({"ema": 0.9, "local_sgd_steps": 2}, "ema (0.9) excludes local SGD (2)"),
        ({"seed_per_rank": True}, "no seed is set: set seed"),
        (
            {"strategy": "fsdp", "compile_fullgraph": True},
            "compile is off: set compile to True, or compile_fullgraph to False",
        ),
        ({"compile": True, "compile_fullgraph": True}, "or strategy to 'none' or 'fsdp' or 'hsdp'"),
        ({"compile_dynamic": False}, "compile_dynamic (False) is for compiled models"),
        ({"compile": "reduce-overhead", "accumulate": 2}, "that CUDA graphs overwrite in the next"),
        ({"compile": "max-autotune", "compile_dynamic": True}, "CUDA graphs have fixed shapes"),
    ],
)
def test_what_excludes_each_other_is_refused_with_the_reason(settings: dict[str, Any], message: str) -> None:
    assert message in refused(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"static_graph": True, "find_unused_parameters": True},
        {"comm_hook": "powersgd", "accumulate": 3, "precision": "bf16"},
        {"strategy": "fsdp", "offload": True, "accumulate": 3, "clip_grad_norm": 1, "compile": True},
        {"compile": "max-autotune-no-cudagraphs", "accumulate": 3, "compile_dynamic": True},
        {"strategy": "none", "compile": "reduce-overhead", "compile_dynamic": False, "compile_fullgraph": True},
        {"activation_budget": 0, "shard_by": "Block"},
        {"activation_checkpointing": "full", "activation_offload": True},
        {"activation_offload": True, "activation_budget": 0.5, "shard_by": "Block"},
        {"activation_checkpointing": "full", "shard_by": "Block"},  # it says which blocks are computed again
        {
            "comm_hook": "powersgd",
            "comm_hook_options": {"start_powerSGD_iter": 1, "warm_start": False, "use_error_feedback": False},
        },
    ],
)
def test_what_goes_together_is_allowed(settings: dict[str, Any]) -> None:
    Plan(**settings)


@EVERY_SETTING
@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp", "hsdp"])
def test_a_plan_can_be_taken_to_any_strategy_without_what_is_not_for_it(name: str, strategy: str) -> None:
    plan = Plan(**OTHERS[name])
    assert plan.replace(**own_settings(plan, strategy)).strategy == strategy


# --- ranks


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"strategy": "fsdp", "precision": "fp16"}, {"device": "cpu"}, "under fsdp is for GPUs"),
        ({"precision": "fp8"}, {"device": "cpu"}, "needs GPUs of compute capability 8.9 or more, not a CPU"),
        ({"precision": "fp8"}, {"device": "cuda:0", "capability": (8, 6)}, "and these have 8.6"),
        ({"activation_offload": True}, {"device": "cpu"}, "the activations of CPU ranks are in CPU memory already"),
        ({"comm_hook": "bf16"}, {"backend": "gloo"}, "comm_hook 'bf16' needs NCCL, and the ranks' backend is gloo"),
        ({"sync_batchnorm": True}, {"device": "cpu", "world_size": 2}, "sync_batchnorm is for GPUs"),
        ({"strategy": "hsdp", "replicas": 4}, {"world_size": 6}, "which is 6: set replicas to 1 or 2 or 3 or 6"),
        ({"strategy": "fsdp", "tp": 4}, {"world_size": 6}, "tp (4) must divide the number of ranks, which is 6"),
        ({"strategy": "fsdp", "pp": 4}, {"world_size": 6}, "pp (4) must divide the number of ranks, which is 6"),
        (
            {"strategy": "hsdp", "tp": 2, "replicas": 4},
            {"world_size": 4},
            "divided by tp (2), which is 2: set",
        ),
        ({"strategy": "fsdp", "cp": 4}, {"world_size": 6}, "cp (4) must divide the number of ranks, which is 6"),
        ({"strategy": "fsdp", "ep": 4}, {"world_size": 6}, "ep (4) must divide the number of ranks, which is 6"),
        (
            {"strategy": "hsdp", "replicas": 2, "ep": 4},
            {"world_size": 4},
            "ep (4) must divide the number of ranks divided by replicas (2), which is 2: set ep to 1 or 2",
        ),
        (
            {"strategy": "fsdp", "tp": 2, "cp": 4},
            {"world_size": 4},
            "cp (4) must divide the number of ranks divided by tp (2), which is 2: set cp to 1 or 2",
        ),
        (
            {"strategy": "hsdp", "tp": 2, "cp": 2, "replicas": 2},
            {"world_size": 4},
            "replicas (2) must divide the number of ranks divided by tp (2) divided by cp (2), which is 1",
        ),
        (
            {"strategy": "fsdp", "offload": True},
            {"device": "cuda:0", "backend": "nccl"},
            "start the ranks with the backend cpu:gloo,cuda:nccl",
        ),
    ],
)
def test_what_ranks_of_a_kind_can_not_do_is_refused(
    settings: dict[str, Any], ranks: dict[str, Any], message: str
) -> None:
    assert message in refused_by_ranks(Plan(**settings), **ranks)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"precision": "fp16"}, {"device": "cpu", "world_size": 2}),
        ({"strategy": "fsdp", "precision": "fp16"}, {"device": "cuda:1", "world_size": 2}),
        ({"activation_offload": True}, {"device": "cuda:0"}),
        ({"comm_hook": "fp16"}, {"backend": "gloo"}),
        ({"comm_hook": "powersgd"}, {"backend": "gloo"}),
        ({"comm_hook": "bf16"}, {"backend": "cpu:gloo,cuda:nccl"}),
        ({"strategy": "hsdp", "replicas": 2}, {"world_size": 4}),
        ({"strategy": "hsdp"}, {"world_size": 3}),
        ({"numa": True, "tf32": True}, {"device": "cpu"}),
        ({"strategy": "fsdp", "precision": "fp16", "offload": True}, {}),
    ],
)
def test_what_ranks_can_do_or_what_is_not_known_of_them_is_allowed(
    settings: dict[str, Any], ranks: dict[str, Any]
) -> None:
    Plan(**settings).check(**ranks)


# --- the settings


def test_every_setting_has_a_line_in_the_plan_s_docstring_in_order() -> None:
    text = (Plan.__doc__ or "").partition("Attributes:")[2]
    assert re.findall(r"^        (\w+): ", text, re.MULTILINE) == list(SETTINGS)


def test_every_setting_stands_once_in_the_table_of_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \|", page.partition("| setting |")[2].partition("\n\n")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(
        SETTINGS.keys() - {"replicas"}
    )  # hsdp's own: in its row


def test_the_values_of_a_setting_are_those_of_its_type() -> None:
    hints = get_type_hints(Plan)
    for name, setting in SETTINGS.items():
        if isinstance(setting.kind, Choice):
            assert get_args(hints[name]) == setting.kind.words


# --- words


def test_the_table_of_the_default_plan_is_short_and_has_no_setting_that_does_nothing() -> None:
    assert Plan().table(world_size=4).splitlines() == [
        "strategy   ddp   each rank holds the whole model; gradients are averaged over 4 ranks during backward, "
        "in buckets of 25 MiB",
        "precision  fp32  nothing is cast: computed as the model's parameters are, float32 in general",
        "Everything else is PyTorch's default.",
    ]


@EVERY_SETTING
def test_every_setting_changes_what_the_table_says(name: str) -> None:
    settings = OTHERS[name]
    without = {other: value for other, value in settings.items() if other != name}
    assert Plan(**settings).table() != Plan(**without).table()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"strategy": "none"}, "each rank trains on its own: nothing is exchanged"),
        (
            {"strategy": "hsdp", "replicas": 2},
            "inside each of 2 groups of ranks; gradients are averaged between groups",
        ),
        ({"strategy": "fsdp", "precision": "bf16"}, "blocks are gathered and computed in bfloat16"),
        ({"precision": "fp16"}, "a step with an overflow is skipped"),
        ({"accumulate": 4}, "an optimizer step every 4 micro-batches; gradients are exchanged in the last"),
        ({"strategy": "fsdp", "shard_by": ("A", "B")}, "each module of class A or B is a block"),
        ({"strategy": "fsdp", "shard_by": every_block}, "every_block  this function says which modules are blocks"),
        ({"strategy": "fsdp", "compile": "reduce-overhead"}, "recorded again when parameters are gathered elsewhere"),
        ({"strategy": "fsdp", "tp": 2}, "dp_shard 2 x tp 2  ranks that share a batch: 0-1 | 2-3"),
        ({"strategy": "fsdp", "pp": 2}, "pp 2 x dp_shard 2  ranks that share a batch: 0,2 | 1,3"),
        ({"strategy": "hsdp", "replicas": 2, "cp": 2}, "dp_replicate 2 x dp_shard 1 x cp 2"),
        ({"strategy": "fsdp", "ep": 2}, "efsdp 2 x ep 2  each rank has a batch of its own"),
        ({"numa": True}, "on    nothing to do: these ranks have no GPU"),
        ({"seed": 7, "seed_per_rank": True}, "start from 7 plus the rank"),
        (OTHERS["comm_hook_options"], "from step 1000 on gradients travel as factors of rank 7"),
    ],
)
def test_the_table_says_what_will_be_done(settings: dict[str, Any], line: str) -> None:
    assert line in Plan(**settings).table(world_size=4, device="cpu")


def test_one_rank_has_nothing_to_exchange() -> None:
    assert "one rank only: nothing to exchange" in Plan().table(world_size=1)


def test_a_difference_is_a_line_for_each_setting() -> None:
    before = Plan(clip_grad_norm=0.5)
    after = Plan(strategy="fsdp", precision="bf16", compile=True, shard_by=("A", "B"))
    assert before.diff(after) == [
        "strategy: ddp -> fsdp",
        "precision: fp32 -> bf16",
        "clip_grad_norm: 0.5 -> not set",
        "compile: off -> on",
        "shard_by: not set -> A, B",
    ]
    assert after.diff(after) == []


def test_only_what_is_named_is_replaced() -> None:
    plan = Plan(strategy="fsdp", seed=3)
    assert plan.replace(seed=4) == Plan(strategy="fsdp", seed=4)
    with pytest.raises(UsageError, match="no setting 'precison': did you mean 'precision'"):
        plan.replace(precison="bf16")
    with pytest.raises(UsageError, match="excludes local_sgd_steps"):
        plan.replace(local_sgd_steps=2)


# --- JSON


@EVERY_SETTING
def test_json_brings_a_plan_back(name: str) -> None:
    plan = Plan(**OTHERS[name])
    assert Plan.from_json(plan.to_json()) == plan


def test_settings_that_json_lacks_have_their_defaults() -> None:
    assert Plan.from_json('{"strategy": "fsdp"}') == Plan(strategy="fsdp")


def test_a_function_is_no_json_and_the_error_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"shard_by is a function \(every_block\).*name classes"):
        Plan(strategy="fsdp", shard_by=every_block).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp", "this is not JSON"),
        ('"fsdp"', "a plan is a JSON object"),
        ('{"stategy": "fsdp"}', "a plan has no setting 'stategy': did you mean 'strategy'?"),
        ('{"precision": "bf61"}', "did you mean 'bf16'?"),
        ('{"accumulate": 2.5}', "accumulate must be a whole number"),
        ('{"offload": true}', "strategy 'ddp' excludes offload"),
    ],
)
def test_json_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Plan.from_json(text)
    assert message in str(caught.value)


# --- NBDIST_PLAN


@pytest.mark.parametrize("nothing", [None, "", "  "])
def test_without_the_variable_there_is_the_default_plan(monkeypatch: pytest.MonkeyPatch, nothing: str | None) -> None:
    monkeypatch.delenv("NBDIST_PLAN", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if nothing is not None:
        monkeypatch.setenv("NBDIST_PLAN", nothing)
    assert Plan.from_environment() == Plan()


def test_a_launcher_may_say_the_precision_and_a_plan_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBDIST_PLAN", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Plan.from_environment() == Plan(precision="bf16")
    monkeypatch.setenv("NBDIST_PLAN", '{"strategy": "fsdp"}')
    assert Plan.from_environment() == Plan(strategy="fsdp")
    monkeypatch.delenv("NBDIST_PLAN")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf61")
    with pytest.raises(UsageError, match=r"ACCELERATE_MIXED_PRECISION: .*did you mean 'bf16'"):
        Plan.from_environment()


def test_the_variable_holds_json_or_names_a_file_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NBDIST_PLAN", '{"strategy": "fsdp"}')
    assert Plan.from_environment() == Plan(strategy="fsdp")
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"precision": "bf16"}))
    monkeypatch.setenv("NBDIST_PLAN", str(file))
    assert Plan.from_environment() == Plan(precision="bf16")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fsdp", "NBDIST_PLAN is 'fsdp', neither JSON nor a file that can be read (No such file or directory)"),
        ('{"stategy": "fsdp"}', "NBDIST_PLAN: a plan has no setting 'stategy'"),
        ("{strategy: fsdp}", "NBDIST_PLAN: a plan is a JSON object"),
    ],
)
def test_an_error_in_it_names_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    monkeypatch.setenv("NBDIST_PLAN", value)
    with pytest.raises(UsageError) as caught:
        Plan.from_environment()
    assert str(caught.value).startswith(message)


def test_an_error_in_the_file_names_the_variable_and_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("[]")
    monkeypatch.setenv("NBDIST_PLAN", str(file))
    with pytest.raises(UsageError, match=r"NBDIST_PLAN=.*plan\.json: a plan is a JSON object"):
        Plan.from_environment()


# --- variables for others


@EVERY_SETTING
@pytest.mark.parametrize("device", ["cpu", "cuda:0", None])
def test_all_variables_are_known_so_that_the_next_plan_can_remove_them(name: str, device: str | None) -> None:
    assert set(Plan(**OTHERS[name]).environment(world_size=4, device=device)) <= set(NAMES)


def test_the_default_plan_leaves_accelerate_s_own_arguments_alone() -> None:
    assert Plan().environment(world_size=4, device="cuda:0") == {"ACCELERATE_MIXED_PRECISION": "no"}


# --- as it is typed


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--compile", {"compile": True}),
        ("--compile max-autotune", {"compile": "max-autotune"}),
        ("--compile=max-autotune", {"compile": "max-autotune"}),
        ("--compile fsdp", {"compile": True, "strategy": "fsdp"}),
        ("fsdp --compile reduce-overhead --seed 1", {"compile": "reduce-overhead", "strategy": "fsdp", "seed": 1}),
        ("--no-compile none", {"compile": False, "strategy": "none"}),
    ],
)
def test_a_mode_may_follow_what_is_on_or_off(line: str, settings: dict[str, Any]) -> None:
    assert named_settings(plan_parser().read(line)) == settings


@EVERY_SETTING
def test_every_setting_can_be_typed(name: str) -> None:
    plan = Plan(**OTHERS[name])
    for before, after in ((Plan(), plan), (plan, Plan())):
        changes = named_settings(plan_parser().read(flags(before, after)))
        assert before.replace(**changes) == after


def test_the_line_that_changes_a_plan_names_classes_as_they_are() -> None:
    assert flags(Plan(strategy="fsdp"), Plan(strategy="fsdp", shard_by="Block")) == "--shard-by Block"


@EVERY_SETTING
def test_every_setting_can_be_entered_in_a_form(name: str) -> None:
    plan = Plan(**OTHERS[name])
    texts = {each: text_of(SETTINGS[each].kind, getattr(plan, each)) for each in SETTINGS}
    line = shlex.join(words_for(texts))
    assert Plan().replace(**named_settings(plan_parser().read(line))) == plan


def test_a_page_offers_the_strategies_and_precisions_that_there_are() -> None:
    offered = json.loads((ROOT / "labextension/src/lab/plan_words.json").read_text())
    found = {"strategies": SETTINGS["strategy"].kind, "precisions": SETTINGS["precision"].kind}
    assert offered == {name: list(allowed_words(kind)) for name, kind in found.items()}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fsp", "unknown strategy 'fsp': did you mean fsdp?"),
        ("--precision bf61", "precision 'bf61' is unknown: did you mean 'bf16'?"),
        ("--acumulate 3", "%distributed plan: unknown option --acumulate: did you mean --accumulate?"),
        (
            "--comm-hook-options rank",
            "invalid option 'rank': write NAME=VALUE, for example matrix_approximation_rank=2",
        ),
        ("--tf32 maybe", "invalid choice: 'maybe'"),
        ("--compile yes", "compile 'yes' is unknown"),
        ("--no-compile max-autotune", "--no-compile takes no value, got 'max-autotune'"),
        ("--compile fsp", "compile 'fsp' is unknown"),
    ],
)
def test_what_is_typed_wrong_is_one_error(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_parser().read(line)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", {"fsdp", "auto", "--precision", "--no-compile", "--reset"}),
        ("fsdp --precision ", {"fp32", "bf16"}),
        ("--tf32 ", {"on", "off", "default"}),
        ("--comm-hook ", {"powersgd", "none"}),
        ("--compile ", {"reduce-overhead", "max-autotune", "fsdp", "--precision"}),
    ],
)
def test_what_may_come_next_is_offered(typed: str, offered: set[str]) -> None:
    assert offered <= set(plan_parser().suggest(typed))


def test_a_flag_that_was_typed_is_not_offered_again() -> None:
    assert not {"--compile", "--no-compile"} & set(plan_parser().suggest("--no-compile --"))
