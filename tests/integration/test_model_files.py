"""Weights as safetensors: what `transformers` reads, from any wrapping, and back into any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nbdist.errors import CheckpointError, UsageError
from nbdist.train.checkpoint.model_files import load_model, save_model
from testbed.kernel import Kernel
from tests.support import train_checkpoint
from tests.support.cells import shown_by
from tests.support.train_checkpoint import Net, equal

HELPERS = Path(train_checkpoint.__file__).read_text()
HELPERS += """
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from nbdist.train.checkpoint.model_files import load_model, save_model

def weights(model):
    return {name: whole(tensor) for name, tensor in get_model_state_dict(model).items()}

def gpt(seed):
    torch.manual_seed(seed)
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32))
"""


@pytest.fixture(scope="module")
def two(ranks: Kernel) -> Kernel:
    ranks.ok(f"%%distributed\n{HELPERS}")
    return ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", ["'8KB'", "'5GB'"])
def test_transformers_reads_equal_parameters(two: Kernel, tmp_path: Path, strategy: str, size: str) -> None:
    transformers = pytest.importorskip("transformers")
    shown_by(two, f"net = gpt(0); expected = weights(net)\n{_wrap(strategy)}")
    shown_by(two, f"save_model(model, '{tmp_path}/gpt', max_shard_size={size}, metadata={{'run': 'first'}})")
    shown_by(two, f"if rank == 0: torch.save(expected, '{tmp_path}/expected')")
    files = sorted(path.name for path in (tmp_path / "gpt").glob("*.safetensors"))
    assert files[0] == ("model-00001-of-00006.safetensors" if size == "'8KB'" else "model.safetensors")
    assert all(path.stat().st_size < 12_000 for path in (tmp_path / "gpt").glob("model-*"))
    transformers.logging.disable_progress_bar()
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt")
    assert equal(dict(read.state_dict()), torch.load(tmp_path / "expected"))


def _wrap(strategy: str) -> str:
    if strategy == "ddp":
        return "model = DistributedDataParallel(net)"
    return "for block in net.transformer.h: fully_shard(block)\nmodel = fully_shard(net)"


@pytest.mark.parametrize("saved", ["ddp", "fsdp"])
@pytest.mark.parametrize("loaded", ["ddp", "fsdp", "none"])
def test_what_one_wrapping_saves_another_loads(two: Kernel, tmp_path: Path, saved: str, loaded: str) -> None:
    shown_by(two, f"torch.manual_seed(0); model = wrapped(Net(), '{saved}'); expected = weights(model)")
    shown_by(two, f"save_model(model, '{tmp_path}', max_shard_size=400)")
    shown_by(two, f"torch.manual_seed(7); model = wrapped(Net(), '{loaded}'); load_model(model, '{tmp_path}')")
    assert shown_by(two, "equal(weights(model), expected)") == "[0-1] True"


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_a_model_on_the_meta_device_gets_storage_and_stays_tied(two: Kernel, tmp_path: Path, strategy: str) -> None:
    shown_by(two, f"torch.manual_seed(0); model = Net(); expected = weights(model); save_model(model, '{tmp_path}')")
    shown_by(two, f"with torch.device('meta'): net = Net()\nmodel = wrapped(net, '{strategy}')")
    shown_by(two, f"load_model(model, '{tmp_path}'); model(torch.ones(5, 8)).sum().backward()")
    assert shown_by(two, "equal(weights(model)['head.weight'], expected['head.weight'])") == "[0-1] True"
    assert shown_by(two, "net.unembed.weight is net.embed.weight") == "[0-1] True"


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    save_model(Net(), tmp_path, max_shard_size=400)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "embed.weight" in index["weight_map"] and "unembed.weight" not in index["weight_map"]
    assert index["metadata"]["unembed.weight"] == "embed.weight"
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in [*Net().parameters(), *Net().buffers()])


def test_a_new_model_takes_the_place_of_the_old_one_and_leaves_other_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    for size in (400, 400, "1MB", 600, "1MB"):
        model, read = Net(), Net()
        save_model(model, tmp_path, max_shard_size=size)
        load_model(read, tmp_path)
        assert equal(dict(read.state_dict()), dict(model.state_dict()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "tokenizer.json"]


def test_what_fails_half_way_leaves_the_model_that_was_there(two: Kernel, tmp_path: Path) -> None:
    shown_by(two, "model = wrapped(Net(), 'fsdp'); expected = weights(model)")
    shown_by(two, f"save_model(model, '{tmp_path}', max_shard_size=400)")
    files = sorted(tmp_path.iterdir())
    full = "import resource\nlimits = resource.getrlimit(resource.RLIMIT_FSIZE)\nlarge = wrapped(Net(3000), 'fsdp')\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))\n"
    save = f"try: save_model(large, '{tmp_path}')\nfinally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)"
    outcome = two.run(f"%%distributed\n{full}{save}")
    assert "CheckpointError: rank 0: " in outcome.traceback and "File too large" in outcome.traceback
    assert sorted(tmp_path.iterdir()) == files
    shown_by(two, f"torch.manual_seed(3); model = Net(); load_model(model, '{tmp_path}')")
    assert shown_by(two, "equal(weights(model), expected)") == "[0-1] True"


def test_a_call_on_one_rank_only_is_refused(two: Kernel, tmp_path: Path) -> None:
    outcome = two.run(f"%%distributed\nif rank == 0: save_model(Net(), '{tmp_path}', limit=0.2)")
    assert "save_model was called on rank 0 only (rank 1 has not arrived within 0.2 s)" in outcome.traceback


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    save_model(Net(), tmp_path)
    model = Net(9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del model.inner
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError) as refusal:
        load_model(model, tmp_path)
    for difference in ("embed.weight is [6, 8] there and [6, 9] here", "extra.weight is missing there", "and 2 more"):
        assert difference in str(refusal.value)
    assert torch.equal(model.embed.weight, before["embed.weight"])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(Net(), tmp_path, max_shard_size=400)
    first = min(tmp_path.glob("model-*"))
    first.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {first.name} \(1 of \d files\)"):
        load_model(Net(), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"max_shard_size": "much"}, 'give bytes, or a text such as "5GB"'),
        ({"max_shard_size": 0}, "max_shard_size=0"),
        ({"metadata": {"step": 3}}, r"metadata\['step'\] is int: these files can hold only strings"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: dict[str, object], advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        save_model(Net(), tmp_path / "a", **arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"does not exist, so it has neither model\.safetensors nor"):
        load_model(Net(), tmp_path / "a")
