"""A sharded model called from outside its forward: by other methods, by its submodules, as `model.forward(x)`."""

from __future__ import annotations

import pytest

from testbed.kernel import Kernel
from tests.support.cells import TRAINING, on_ranks, refused, value

pytestmark = pytest.mark.torch_private

MODEL = """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
    def logits(self, x): return self.head(self.norm(x))
    def describe(self): return len(list(self.parameters())), len(list(self.head.named_parameters()))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def project(self, x): return self.linear(x)
    def forward(self, x): return self.project(x).relu()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.decoder, self.scale = nn.Linear(4, 8), Decoder(), nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList([Block(), Block()])
    def encode(self, x):
        x = self.embed(x) * self.scale
        for block in self.blocks: x = block(x)
        return x
    def hidden(self, x): return self.below(x)
    def below(self, x): return self.embed(x)
    def looked_up(self, x): return getattr(self, "embed")(x)
    def scaled(self, x): return x * self.scale
    def size(self): return sum(p.numel() for p in self.parameters()), self.scale.shape
    def forward(self, x): return self.decoder.logits(self.encode(x))
torch.manual_seed(0)
net = Model()
whole = copy.deepcopy(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
model, optimizer = nbdist.prepare(net, optimizer, plan=Plan("fsdp", methods="looked_up"))
torch.manual_seed(rank)
x, wide = torch.randn(6, 4), torch.randn(6, 8)

def is_right(call):
    optimizer.zero_grad(); whole.zero_grad()
    output, expected = call(model), call(whole)
    output.square().sum().backward(); expected.square().sum().backward()
    right = torch.allclose(output, expected, atol=1e-6)
    for ours, theirs in zip(model.parameters(), whole.parameters()):
        grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        dist.all_reduce(grad)
        found = torch.zeros_like(theirs) if ours.grad is None else ours.grad.full_tensor()
        right &= torch.allclose(found, grad / world_size, atol=1e-5)
    return right
"""


@pytest.fixture(autouse=True)
def _model(ranks: Kernel) -> None:
    on_ranks(ranks, TRAINING + MODEL)


@pytest.mark.parametrize(
    "call",
    [
        "m(x)",
        "m.forward(x)",
        "m.encode(x)",
        "m.hidden(x)",
        "m.looked_up(x)",
        "m.scaled(wide)",
        "m.embed(x)",
        "m.decoder.logits(wide)",
        "m.decoder.head(wide)",
        "m.blocks[1].project(wide)",
        "m.decoder.logits(m.encode(x))",
        "m(x) + m.decoder.logits(m.encode(x))",
    ],
)
def test_outputs_and_gradients_are_those_of_the_whole_model(ranks: Kernel, call: str) -> None:
    """Also after a forward that no backward has followed, and after one that was broken off."""
    code = f"""
first = is_right(lambda m: {call})
model.encode(x)
hook = model.decoder.register_forward_pre_hook(lambda *_: 1 / 0)
try: model(x)
except ZeroDivisionError: hook.remove()
hook.remove()
first, is_right(lambda m: {call}), is_right(lambda m: m(x))"""
    assert value(ranks, code) == "(True, True, True)"


def test_methods_that_only_ask_about_parameters_may_be_called_on_one_rank(ranks: Kernel) -> None:
    assert value(ranks, "asked = rank or (model.size(), model.decoder.describe()); 'done'") == "'done'"


def test_a_step_after_calls_from_outside_is_that_of_one_process(ranks: Kernel) -> None:
    code = """
theirs = torch.optim.SGD(whole.parameters(), 0.1)
for _ in range(3):
    is_right(lambda m: m.decoder.logits(m.encode(x)))
    for parameter in whole.parameters(): parameter.grad /= world_size  # summed over ranks by is_right
    optimizer.step(); theirs.step()
all(torch.allclose(a.full_tensor(), b, atol=1e-6) for a, b in zip(model.parameters(), whole.parameters()))"""
    assert value(ranks, code) == "True"


def test_a_method_that_the_model_does_not_have_is_refused(ranks: Kernel) -> None:
    error = refused(ranks, "nbdist.prepare(Model(), plan=Plan('fsdp', methods=('decoder.logit',)))")
    assert "methods: Model has no method 'decoder.logit'" in error and "did you mean 'decoder.logits'?" in error


def test_the_error_of_a_use_that_was_not_found_says_what_to_type(ranks: Kernel) -> None:
    failed = ranks.fails("%%distributed\nnn.functional.linear(x, model.embed.weight)", "RankError")
    assert "nbdist: a parameter of a sharded model was used where it is not gathered" in failed.traceback
    assert "`%distributed plan fsdp --methods encode`" in failed.traceback
