"""Blocks and the layers beside them; blocks that are computed again in backward, with the cache of transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist.train.structure.activations import Offloaded, keep_less
from nbdist.train.structure.blocks import Ends, find_blocks, find_ends
from tests.support.train_models import Language

KINDS = ["full", "selective", "selective-half"]
BATCH = torch.arange(12).view(2, 6)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "head_dim": 8,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32))


MODELS = pytest.mark.parametrize("make", [llama, qwen3, gpt2])


# --- what is beside the blocks


def test_a_head_of_its_own_shows_that_the_embedding_is_only_called() -> None:
    model = Language()
    assert find_ends(model, find_blocks(model)) == Ends([model.embed], [model.norm, model.head])


def test_a_model_whose_logits_may_come_from_its_embedding_has_no_ends() -> None:
    tied, bare = Language(), Language()
    tied.head.weight = tied.embed.weight
    bare.register_module("head", nn.Identity())
    for model in (tied, bare):
        assert find_ends(model, find_blocks(model)) == Ends([], [])


def test_a_classifier_is_not_taken_for_a_head_of_a_short_embedding() -> None:
    model = Language()
    model.kinds, model.head = nn.Embedding(2, 4), nn.Linear(4, 2)
    assert find_ends(model, find_blocks(model)) == Ends([], [])


def test_a_head_inside_of_a_list_is_found() -> None:
    model, head = Language(), nn.Sequential(nn.GELU(), nn.Linear(4, 16))
    model.register_module("head", nn.ModuleList([head]))
    assert find_ends(model, find_blocks(model)) == Ends([model.embed], [model.norm, head])


def test_an_embedding_that_is_named_as_a_block_is_one() -> None:
    model = Language()
    blocks = find_blocks(model, ("Block", "Embedding"))
    assert model.embed in blocks and find_ends(model, blocks) == Ends([], [model.norm, model.head])


@MODELS
def test_models_of_transformers_name_their_embedding(make: Callable[[], nn.Module]) -> None:
    model: Any = make().base_model
    assert find_ends(model, find_blocks(model)) == Ends([model.get_input_embeddings()], [])


# --- what is computed again


def made(make: Callable[[], nn.Module], kind: Any = "none", offload: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    for dropout in [module for module in model.modules() if isinstance(module, nn.Dropout)]:
        dropout.p = 0.0
    keep_less(find_blocks(model), kind, offload=offload)
    return model


def gradients(model: nn.Module, **inputs: Any) -> list[torch.Tensor]:
    model(BATCH, labels=BATCH, **inputs).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@MODELS
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_have_the_gradients_of_the_model_as_it_comes(
    make: Callable[[], nn.Module], kind: str
) -> None:
    expected, found = gradients(made(make)), gradients(made(make, kind))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@MODELS
@pytest.mark.parametrize("kind", ["none", "full"])
def test_offloaded_activations_give_the_same_gradients(make: Callable[[], nn.Module], kind: str) -> None:
    expected, found = gradients(made(make)), gradients(made(make, kind, offload=True))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_offload_copies_what_autograd_saves_but_no_parameter() -> None:
    weight, inputs = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4, requires_grad=True)
    with Offloaded():
        saved = nn.functional.linear(inputs, weight).grad_fn
    places = {
        getattr(saved, name).data_ptr() for name in dir(saved) if name.startswith("_saved_mat") and "sym" not in name
    }
    assert weight.data_ptr() in places and inputs.data_ptr() not in places


def saved_bytes(model: nn.Module) -> int:
    """What forward keeps for backward, each storage once, but for the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(BATCH, labels=BATCH).loss
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize(("budget", "checkpointed"), [(0.0, 4), (0.2, 4), (0.25, 3), (0.5, 2), (0.99, 1)])
def test_a_budget_is_met_by_the_fewest_blocks_with_the_same_gradients(budget: float, checkpointed: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def four() -> nn.Module:
        return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=64, n_positions=32))

    plain, model = made(four), made(four)
    keep_less(find_blocks(model), budget=budget)
    assert sum("forward" in block.__dict__ for block in cast(Any, model).transformer.h) == checkpointed
    expected, found = gradients(plain), gradients(model)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    every = made(four, "full")
    assert saved_bytes(model) - saved_bytes(every) <= budget * (saved_bytes(plain) - saved_bytes(every))


def cache_of(output: Any) -> Any:
    """The keys and values of a model's output; transformers before 5.24 has another name for them."""
    return output.cache if "cache" in dir(output) else output.past_key_values


@MODELS
@pytest.mark.parametrize("kind", KINDS)
def test_no_keys_and_values_are_kept_after_a_training_forward(make: Callable[[], nn.Module], kind: str) -> None:
    cache = cache_of(made(make, kind)(BATCH, labels=BATCH))
    assert cache is None or cache.get_seq_length() == 0


@MODELS
def test_a_cache_that_the_caller_has_filled_is_attended_to(make: Callable[[], nn.Module]) -> None:
    plain, model = made(make), made(make, "selective")
    with torch.no_grad():
        filled = cache_of(plain(BATCH, use_cache=True))
    name = "cache" if "cache" in inspect.signature(plain.forward).parameters else "past_key_values"
    expected = gradients(plain, **{name: copy.deepcopy(filled)})
    found = gradients(model, **{name: copy.deepcopy(filled)})
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@MODELS
def test_without_gradients_the_cache_is_filled(make: Callable[[], nn.Module]) -> None:
    with torch.no_grad():
        cache = cache_of(made(make, "full")(BATCH, use_cache=True))
    assert cache.get_seq_length() == BATCH.shape[1]


class OwnNames(nn.Module):
    """A block whose arguments have the names of ours, and of transformers' caches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(
        self, hidden: torch.Tensor, past_key_values: torch.Tensor, *, cache: dict[str, float], kind: int, block: str
    ) -> torch.Tensor:
        assert (kind, block) == (3, "a")
        return self.inner(hidden) * cache["scale"] + past_key_values


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_only_have_the_name_of_a_cache_arrive(kind: Any) -> None:
    plain, block = OwnNames(), OwnNames()
    block.load_state_dict(plain.state_dict())
    keep_less([block], kind)
    found = []
    for each in (plain, block):
        each(torch.ones(2, 4), torch.ones(4), cache={"scale": 2.0}, kind=3, block="a").sum().backward()
        found.append([parameter.grad for parameter in each.parameters()])
    assert all(map(torch.equal, *found))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_selective_half_computes_every_second_product_again() -> None:
    def in_backward(kind: Any) -> int:
        model = nn.Sequential(*[nn.Sequential(*[nn.Linear(4, 4), nn.GELU()] * 4) for _ in range(2)])
        keep_less(find_blocks(model), kind)
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        with Products() as products:
            loss.backward()
        return products.count

    none, half, full = (in_backward(kind) for kind in ("selective", "selective-half", "full"))
    assert full - none >= 6 and half - none == 4  # of four products in each of two blocks
