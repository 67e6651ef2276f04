"""What a step costs that a plan has divided among two ranks, over the same work written by hand with torch's calls."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import _tools
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2
ROUNDS = 30
STEPS = _tools.size(4, 1)  # of one measurement
ROWS, LENGTH = 8, _tools.size(128, 8)
WIDTH, LAYERS = _tools.size(256, 32), 4
MICRO_BATCHES = 4
BUDGET = 1.01

Step = Callable[[], object]


def main() -> None:
    _tools.prepare()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    mp.spawn(_rank, nprocs=RANKS)


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def _rank(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # by hand; the plan's models take it apart
    dist.init_process_group("gloo")
    if rank == 0:
        _tools.header(f"a step of a Llama {WIDTH} wide, {ROWS} x {LENGTH} words, two ranks")
    for name, (by_hand, settings) in _WAYS.items():
        _compare(name, by_hand(), _by_plan(settings))
    dist.destroy_process_group()


def _compare(name: str, by_hand: Step, by_plan: Step) -> None:
    measures = {"by hand": lambda: _seconds(by_hand), "by the plan": lambda: _seconds(by_plan)}
    samples = _tools.rounds(ROUNDS, measures, warm_up=2)
    if dist.get_rank() == 0:
        _tools.row(f"{name}, by hand", samples["by hand"])
        by_hand_too = ("by hand", samples["by hand"])
        _tools.row(f"{name}, by the plan", samples["by the plan"], over=by_hand_too, at_most=BUDGET)


def _seconds(step: Step) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - began) / STEPS


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


def _words(batches: int = RANKS) -> torch.Tensor:
    """This rank's share of as many different batches as there are."""
    torch.manual_seed(1)
    return torch.randint(0, 1024, (ROWS, LENGTH)).chunk(batches)[dist.get_rank() % batches]


def _step_of(model: Any, words: torch.Tensor, backward: Callable[[torch.Tensor], object]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)  # foreach takes no mixture of tensors

    def step() -> None:
        backward(model(input_ids=words, labels=words, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _by_plan(settings: dict[str, Any]) -> Step:
    import nbdist

    model = nbdist.prepare(_model(), plan=nbdist.Plan(strategy="fsdp", **settings))
    return _step_of(model, _words(1 if settings else RANKS), nbdist.backward)


# --- by hand


def _sharded() -> Step:
    model = _model()
    return _step_of(_shard(model), _words(), torch.Tensor.backward)


def _shard(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    for end in (model.model.embed_tokens, nn.ModuleList([model.model.norm, model.lm_head])):
        fully_shard(list(end) if isinstance(end, nn.ModuleList) else end, **options)
    return fully_shard(model, **options)


def _divided(*, tokens: bool = False, loss: bool = False) -> Step:
    """By torch's styles, sharded over the one rank that has each part, as under the plan.

    Args:
        tokens: Whether they are divided between the first and the last layer.
        loss: Whether it is computed on logits that stay divided.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    model = _model()
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            names = [name for name, _ in part.named_children()]
            styles: dict[str, Any] = {name: ColwiseParallel() for name in columns if name in names}
            given: dict[str, Any] = {"output_layouts": Shard(1)} if tokens else {}
            styles |= {name: RowwiseParallel(**given) for name in rows if name in names}
            parallelize_module(part, mesh["tp"], styles)
        if tokens:
            _divide_tokens(layer, mesh["tp"])
    if tokens:
        layers = model.model.layers
        layers[0].register_forward_pre_hook(lambda _, inputs: _laid_out(inputs, mesh["tp"], Replicate(), Shard(1)))
        layers[-1].register_forward_hook(lambda *all: _laid_out((all[-1],), mesh["tp"], Shard(1), Replicate())[0])
    last = ColwiseParallel(use_local_output=False) if loss else ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"lm_head": last})
    model = _shard(model, mesh=mesh["dp"])
    return _step_of_divided_loss(model, _words(1)) if loss else _step_of(model, _words(1), torch.Tensor.backward)


def _divide_tokens(layer: Any, mesh: Any) -> None:
    """Let norms work on this rank's tokens, and attention and MLP gather them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, parallelize_module

    every, some = Replicate(), Shard(1)
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": some}, desired_input_kwarg_layouts={"hidden_states": every}
    )
    mlp = PrepareModuleInput(input_layouts=(some,), desired_input_layouts=(every,))
    norms = {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    parallelize_module(layer, mesh, {**norms, "self_attn": attention, "mlp": mlp})


def _laid_out(inputs: tuple[Any, ...], mesh: Any, now: Any, then: Any) -> tuple[Any, ...]:
    """Return inputs of which the first, hidden states, are laid out in another way."""
    from torch.distributed.tensor import DTensor

    hidden = DTensor.from_local(inputs[0], mesh, [now]).redistribute(placements=[then])
    return hidden.to_local(), *inputs[1:]


def _step_of_divided_loss(model: Any, words: torch.Tensor) -> Step:
    """By torch's own context, in which backward has to be as well."""
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)

    def step() -> None:
        with loss_parallel():
            logits = model(input_ids=words, use_cache=False).logits
            labels = nn.functional.pad(words[:, 1:], (0, 1), value=-100)
            nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _staged() -> Step:
    """By torch's schedule, each stage sharded over the one rank that has it, as under the plan."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
    rank, words = dist.get_rank(), _words(1)
    stage = _Stage(_model(), is_first=rank == 0)
    for layer in stage.layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
    hidden = torch.empty(ROWS // MICRO_BATCHES, LENGTH, WIDTH, device="meta", requires_grad=True)
    first = torch.empty(ROWS // MICRO_BATCHES, LENGTH, dtype=torch.long, device="meta")
    given: dict[str, Any] = {
        "input_args": hidden if rank else first,
        "output_args": hidden,
        "group": mesh.get_group("pp"),
    }
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, RANKS, torch.device("cpu"), **given), MICRO_BATCHES, loss_fn=_loss
    )
    optimizer = torch.optim.SGD(stage.parameters(), 1e-3, foreach=False)

    last: dict[str, Any] = {"target": words} if rank else {}

    def step() -> None:
        schedule.step(*([] if rank else [words]), **last)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Stage(nn.Module):
    """The first or the second half of a Llama."""

    def __init__(self, model: Any, *, is_first: bool) -> None:
        super().__init__()
        half = LAYERS // 2
        layers = model.model.layers
        self.layers = layers[:half] if is_first else layers[half:]
        self.embedding = model.model.embed_tokens if is_first else nn.Identity()
        self.rotary = model.model.rotary_emb
        self.head = nn.Identity() if is_first else nn.Sequential(model.model.norm, model.lm_head)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(value)
        positions = torch.arange(LENGTH)[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        found: torch.Tensor = self.head(hidden)
        return found


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


_WAYS: dict[str, tuple[Callable[[], Step], dict[str, Any]]] = {
    "fsdp": (_sharded, {}),
    "tp": (_divided, {"tp": RANKS}),
    "tp, tokens": (lambda: _divided(tokens=True), {"tp": RANKS, "sequence_parallel": True}),
    "tp, loss": (lambda: _divided(loss=True), {"tp": RANKS, "loss_parallel": True}),
    "pp": (_staged, {"pp": RANKS, "pp_micro_batches": MICRO_BATCHES}),
}


if __name__ == "__main__":
    main()
