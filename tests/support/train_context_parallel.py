"""Small language models of transformers that ranks train with their sequences divided, and one process by itself."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import nbdist
from nbdist.plan import Plan
from tests.support import train_tensor_parallel
from tests.support.train_tensor_parallel import distance, values

Kind = Literal["llama", "mistral"]
Text = Literal["plain", "few labels", "odd length", "padded left", "padded right", "documents"]

SEQUENCES, WORDS = 8, 64
CLIP = 0.05  # below all norms that occur


def make(kind: Kind = "llama", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_cache": False,  # else transformers takes documents in a row for one
    }
    if kind == "mistral":  # its tokens see no more than the last five
        return MistralForCausalLM(MistralConfig(sliding_window=5, **sizes)).double()
    return LlamaForCausalLM(LlamaConfig(**sizes)).double()


def text(kind: Text = "plain") -> list[dict[str, torch.Tensor]]:
    """Samples, which a DataLoader puts into batches."""
    length = 13 if kind == "odd length" else 16
    words = torch.randint(0, WORDS, (SEQUENCES, length), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": each, "labels": each.clone()} for each in words]
    for number, sample in enumerate(samples):
        if kind == "few labels":  # none in the pieces of some ranks
            sample["labels"][: 9 + number % 3] = -100
        if kind == "documents":
            sample["position_ids"] = torch.cat([torch.arange(5 + number % 3), torch.arange(11 - number % 3)])
        if kind.startswith("padded"):
            there = torch.arange(length) >= number if kind == "padded left" else torch.arange(length) < length - number
            sample["attention_mask"] = there.long()
            sample["labels"][~there] = -100
    return samples


def step(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor]) -> float:
    loss = model(**batch).loss
    nbdist.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def trained_alone(
    kind: Kind, samples: Text, groups: int, accumulate: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What one process comes to that takes the mean over the batches of all groups, and the losses of each."""
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    batches = list(DataLoader(text(samples), 4 // groups))  # type: ignore[arg-type]
    each = groups * accumulate
    for first in range(0, len(batches), each):
        for batch in batches[first : first + each]:
            loss = model(**batch).loss
            losses.append(float(loss))
            (loss / each).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), losses


def distance_from_one_process(kind: Kind, samples: Text, plan: Plan) -> float:
    """How far parameters and losses are from those of one process, after all of the text."""
    plan = plan.replace(clip_grad_norm=CLIP)
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    groups = dist.get_world_size() // (plan.cp * plan.tp)
    loader: Any = DataLoader(text(samples), 4 // groups)  # type: ignore[arg-type]
    model, optimizer, loader = nbdist.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for batch in loader:
        with nbdist.accumulate(model):
            losses.append(step(model, optimizer, batch))
    wanted, wanted_losses = trained_alone(kind, samples, groups, plan.accumulate)
    mine = wanted_losses[dist.get_rank() // (plan.cp * plan.tp) :: groups]
    of_losses = max(abs(found - want) / want for found, want in zip(losses, mine, strict=True))
    assert of_losses < 1e-6  # transformers computes losses in float32
    return distance(values(model), wanted)


def whole(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def difference_between_precisions(plan: Plan) -> float:
    """How far a step in bf16 is from one in which no sequences are divided, relative to the step."""
    steps = []
    for each in (plan, Plan(strategy="fsdp")):
        model = make().float()
        before = values(model)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        model, optimizer = nbdist.prepare(model, optimizer, plan=each.replace(precision="bf16"))
        step(model, optimizer, whole(text("few labels")))
        steps.append({name: value - before[name] for name, value in values(model).items()})
    return distance(*steps)


def training(plan: Plan) -> tuple[nn.Module, Any]:
    model = make()
    return nbdist.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)


def distance_of_gradients(model: nn.Module) -> float:
    """How far they are from those of one process whose model has the same values."""
    return train_tensor_parallel.distance_of_gradients(model, make(), whole(text()))


def distance_after_loading(saved: Plan, loaded: Plan, folder: str) -> float:
    """How far a model of another seed is from one that was saved in another division, after a step of both."""
    return train_tensor_parallel.after_loading(saved, loaded, folder, partial(make, "llama"), whole(text()))


def losses_seen(plan: Plan) -> tuple[int, float]:
    """How many losses and samples `gather_for_metrics` gives in a pass, and how far their mean is from one process."""
    model, loader = nbdist.prepare(make(), DataLoader(text(), 2), plan=plan)  # type: ignore[arg-type]
    losses, samples = [], 0
    with torch.no_grad():
        for batch in loader:
            losses += nbdist.gather_for_metrics(model(**batch).loss).tolist()
            samples += len(nbdist.gather_for_metrics(batch["input_ids"]))
    alone = [float(make()(**batch).loss) for batch in DataLoader(text(), 2)]  # type: ignore[arg-type]
    assert abs(sum(losses) / len(losses) - sum(alone) / len(alone)) < 1e-6
    return len(losses), samples


def distance_of_logits(plan: Plan) -> float:
    """How far logits are from those of one process, if the model is called without labels."""
    words = whole(text())["input_ids"]
    model = nbdist.prepare(make(), plan=plan)
    with torch.no_grad():
        return float((model(input_ids=words).logits - make()(input_ids=words).logits).abs().max())


def trained_without_labels(plan: Plan) -> None:
    model = nbdist.prepare(make(), plan=plan)
    nbdist.backward(model(input_ids=whole(text())["input_ids"]).logits.mean())


def continued(plan: Plan) -> bool:
    """Whether a prepared model writes the same text as one process."""
    words = whole(text())["input_ids"][:2]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    alone: Any = make()
    model = nbdist.prepare(make(), plan=plan)
    return bool((model.generate(words, **options) == alone.generate(words, **options)).all())


def called_with_batches_of_ranks(plan: Plan) -> None:
    """Give ranks that divide sequences another batch each."""
    model = nbdist.prepare(make(), plan=plan)
    words = whole(text())["input_ids"] + dist.get_rank() % 2
    model(input_ids=words, labels=words)


def called_with(plan: Plan, **more: Any) -> None:
    model = nbdist.prepare(make(), plan=plan)
    model(**whole(text()), **more)


def estimated_activations(plan: Plan) -> int:
    config = LlamaConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    tokens = torch.zeros(2, 1024, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    return nbdist.estimate(lambda: LlamaForCausalLM(config), batch, plan, world_size=4).activations


def trained_for_a_while(plan: Plan) -> Any:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader: Any = DataLoader(text() * 5, 4)  # type: ignore[arg-type]
    model, optimizer, loader = nbdist.prepare(model, optimizer, loader, plan=plan)
    for batch in loader:
        step(model, optimizer, batch)
    return model, optimizer  # what is trained tells which ranks share a batch


def mesh_of(plan: Plan) -> tuple[tuple[str, ...], list[int], tuple[str, ...]]:
    """The dimensions of the mesh, the ranks that divide sequences with this one, and the dimensions of parameters."""
    model = nbdist.prepare(make(), plan=plan)
    mesh = nbdist.mesh()
    return tuple(mesh.mesh_dim_names), mesh["cp"].mesh.tolist(), next(model.parameters()).device_mesh.mesh_dim_names
