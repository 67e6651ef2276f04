"""`%distributed advise`: which sizes are looked at, what is measured of them, and what a DataLoader needs."""

from __future__ import annotations

import gc
import multiprocessing
import random
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nbdist.client.costs.advice import loaders_in_words, shapes_in_words
from nbdist.metrics import steps
from nbdist.metrics.advice import loader_advice, sizes, trials
from nbdist.metrics.advice.item_times import ItemTimes, measure_items
from nbdist.metrics.advice.loader_advice import LoaderAdvice, advise_on_loaders
from nbdist.metrics.advice.named_weights import Weight, weights
from nbdist.metrics.advice.roles import HEAD, ROWS, WIDTH, Role, placed, with_size
from nbdist.metrics.advice.shapes import Change, ProductCost, ShapeAdvice, advise_on_shapes
from nbdist.metrics.compute.products import Attention, Product
from nbdist.metrics.events import loader_source, loading
from nbdist.metrics.node import active_meter

pytestmark = [pytest.mark.torch_private, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
WIDE, ROWS_OF_A_BATCH = 250, 96
H100 = 132  # SMs


def linear(rows: int, inner: int, columns: int, dtype: str = "bfloat16") -> Product:
    """The forward pass of a layer."""
    return Product(1, rows, inner, columns, False, True, dtype)


@pytest.fixture
def measured() -> Iterator[None]:
    """This process's steps, as in a notebook after `%distributed tflops on`."""
    steps.start()
    yield
    active_meter.stop()


def test_tiles_waves_and_alignment_are_those_of_the_definition() -> None:
    odd, even = linear(4096, 768, 50257), linear(4096, 768, 50304)
    assert sizes.tile_efficiency(odd) == pytest.approx(50257 / (197 * 256))
    assert sizes.wave_efficiency(odd, H100) == pytest.approx(32 * 197 / (48 * H100))
    assert (sizes.alignment(odd), sizes.alignment(even)) == (2, 128)  # bytes: 50257 is odd, 50304 is 393 x 128
    assert sizes.wave_efficiency(linear(128 * 133, 64, 256), H100) == pytest.approx(133 / 264)


def test_sizes_to_try_are_near_and_none_is_tried_for_a_good_one() -> None:
    assert sizes.next_sizes(50257) == [50304]  # a multiple of 128 as well
    assert sizes.next_sizes(250) == [256]
    assert sizes.next_sizes(4096) == []
    assert sizes.next_sizes(10) == []  # 64 classes would be another model
    assert sizes.other_heads(12, 80) == [(15, 64)]
    assert sizes.other_heads(16, 64) == []
    assert sizes.other_heads(7, 50) == [(7, 56)]
    assert sizes.next_rows(linear(128 * 133, 64, 256), H100) == [128 * 132]


def test_sizes_of_a_product_are_told_apart_by_the_weight_in_it() -> None:
    head = Weight("model.head", (50257, 768), 1, False)
    forward = placed(linear(4096, 768, 50257), [head])
    assert forward.roles == (Role(ROWS, 4096), Role(WIDTH, 768), Role(WIDTH, 50257))
    gradient = placed(Product(1, 50257, 4096, 768, True, False, "bfloat16"), [head])
    assert gradient.roles == (Role(WIDTH, 50257), Role(ROWS, 4096), Role(WIDTH, 768))
    other = with_size(gradient, Role(WIDTH, 50257), 50304)
    assert isinstance(other, Product) and other.sizes == (50304, 4096, 768)
    scores = placed(Product(48, 512, 80, 512, False, True, "float32"), [head])
    assert scores.roles == (None, Role(HEAD, 80), None)
    narrower = with_size(scores, Role(HEAD, 80), 64)
    assert isinstance(narrower, Product) and (narrower.batch, narrower.inner) == (60, 64)
    assert placed(linear(4096, 768, 3072), []).roles[0] == Role(ROWS, 4096)  # of a model that no longer exists
    assert placed(linear(4096, 768, 3072), [head]).roles == (None, None, None)


def test_the_products_of_a_step_are_those_of_its_layers_by_their_names(measured: None) -> None:
    train(model := Net(), measured_steps=6)
    meter = steps.running()
    assert meter is not None
    meter.lap()
    work = meter.last_work()
    assert work is not None
    forward = Product(1, ROWS_OF_A_BATCH, WIDE, WIDE, False, True, "float32")
    weight_gradient = Product(1, WIDE, ROWS_OF_A_BATCH, WIDE, True, False, "float32")
    assert work.products[forward] == 3  # of three layers
    assert work.products[weight_gradient] == 3
    assert work.products[Product(1, ROWS_OF_A_BATCH, WIDE, WIDE, False, False, "float32")] == 2  # the first needs none
    assert [product for product in work.products if isinstance(product, Attention)] == []
    assert work.parameters == []  # the optimizer was the function's
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    listed = weights(optimizer.param_groups[0]["params"], {"model": model})
    assert listed == [Weight("model.layers.0, model.layers.1, model.layers.2", (WIDE, WIDE), 3, False)]


def test_advice_draws_no_random_numbers_and_says_what_it_has_tried(measured: None) -> None:
    assert "no training steps" in advise_on_shapes(1).why
    train(_ := Net(), measured_steps=6)
    meter = steps.running()
    assert meter is not None
    meter.lap()
    before, python = torch.get_rng_state(), random.getstate()
    found = advise_on_shapes(5)
    assert torch.equal(before, torch.get_rng_state()) and python == random.getstate()
    assert found.tried == (f"width {WIDE} -> 256",)  # 96 rows are further than a quarter from 128
    assert meter.lap().steps == 0
    assert advise_on_shapes(5).step == found.step  # the same steps, also after a cell without any


def test_a_gain_is_what_was_measured() -> None:
    small, large = linear(64, 64, 64, "float32"), linear(1024, 1024, 1024, "float32")
    gain = trials.compare([(large, small, 2)], 1.0, CPU, 1)
    assert gain is not None and 0 < gain.surely <= gain.now and gain.then < gain.now
    loss = trials.compare([(small, large, 2)], 1.0, CPU, 1)
    assert loss is not None and loss.surely < 0
    assert trials.compare([(small, linear(2**20, 2**10, 2**24), 1)], 1.0, CPU, 1) is None  # no room


def test_what_was_found_is_said_with_its_gain_and_otherwise_what_was_tried() -> None:
    line = ProductCost("head", "(8 x 4) @ (4 x 50257)", 1, 5e9, 0.010, 0.99, 0.5, 2)
    change = Change("head", "width", 50257, 50304, seconds=0.030, saved=0.005)
    found = ShapeAdvice("a GPU", 0.1, (line,), (change,), ("width 50257 -> 50304",))
    words = shapes_in_words(found, "on rank 0").splitlines()
    assert words[0] == "products that take 3 % or more of a step of 100 ms, measured on rank 0 (a GPU)"
    assert " ".join(words[2].split()) == "head (8 x 4) @ (4 x 50257) 1 10 % 500 GFLOPS 99 % 50 % 2 B"
    assert words[3:] == ["head: width 50257 -> 50304: 1.20 x as fast, about 5 % of the step"]
    nothing = shapes_in_words(ShapeAdvice("the CPU", 0.1, (), (), ("width 250 -> 256",)), "here")
    assert nothing.endswith("no other size near these saves 3 % of the step; measured: width 250 -> 256")


def test_batches_with_equal_values_are_told_from_others() -> None:
    first, second = torch.arange(100_000.0), torch.arange(100_000.0)
    assert loading.fingerprint([first, {"y": first}]) == loading.fingerprint([second, {"y": second}]) != ""
    second[50_000:] += 1
    assert loading.fingerprint(first) != loading.fingerprint(second)
    assert loading.fingerprint(first.bfloat16()) != loading.fingerprint(first.half())
    assert loading.fingerprint(torch.empty(3, device="meta")) == loading.fingerprint("text") == ""


class Slow(Dataset[Any]):
    """Items that wait, and change what a process has of its own when they are read."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.reads = seconds, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> Tensor:
        self.reads += 1
        time.sleep(self.seconds)
        return torch.rand(WIDE)


def test_reading_items_changes_nothing_in_this_process() -> None:
    data = Slow(0.002)
    loader = DataLoader(data, batch_size=4)
    iterator = iter(loader)
    next(iterator)
    before, reads = torch.get_rng_state(), data.reads
    times = measure_items(loader, 4, 0.2)
    assert torch.equal(before, torch.get_rng_state()) and data.reads == reads
    assert times.why == "" and times.items >= 3 and times.item >= 0.002
    assert times.batch == 4 * WIDE * 4  # bytes
    assert times.computing < 1
    failing: DataLoader[Any] = DataLoader(data, batch_size=2, collate_fn=lambda items: items[7])
    assert "IndexError" in measure_items(failing, 2, 0.2).why


def test_workers_are_those_that_keep_up_with_the_step() -> None:
    """38 ms an item, 8 items and 6 ms for a batch, in a step of 400 ms of which 85 % are waiting: 310 ms in 60."""
    has = {"persistent_workers": False, "prefetch_factor": None, "pin_memory": False}
    times = ItemTimes(items=20, item=0.038, slowest=0.2, typical=0.03, collate=0.006, batch=1 << 20)
    found = LoaderAdvice(
        "loader", waiting=0.85, step=0.4, batches=1, cores=15, times=times, copy=0.03, pinned_copy=0.01
    )
    advice = loader_advice.with_options(found, 8, has)
    assert advice.needed == 6
    assert dict(advice.options) == {
        "num_workers": 6,
        "persistent_workers": True,
        "prefetch_factor": 4,
        "pin_memory": True,
    }
    crowded = loader_advice.with_options(LoaderAdvice("", 0.85, 0.4, 1, cores=4, times=times), 8, has)
    assert (crowded.needed, dict(crowded.options)["num_workers"]) == (6, 4)
    assert [loader_advice.workers_that_fit(cores, 0.1) for cores in (1, 0)] == [10, 2]  # that wait for a disk
    words = loaders_in_words([crowded])
    assert "6 workers would end the waiting, but 4 cores left for workers" in words
    assert "give the DataLoader num_workers=4, persistent_workers=True, prefetch_factor=4" in words
    assert [loader_advice.cores_for_workers(16, 8, bound) for bound in (False, True)] == [1, 15]


def test_a_loader_that_is_waited_for_is_found_and_one_that_is_iterable_left_alone(measured: None) -> None:
    meter = steps.running()
    assert meter is not None
    loader = DataLoader(Slow(0.01), batch_size=8)
    train(Net(), loader=loader)
    meter.lap()
    (found,) = advise_on_loaders(0.5)
    assert found.why == "" and found.batches == 1 and found.needed is not None and found.needed > 1
    stream = DataLoader(Stream(), batch_size=8)
    train(Net(), loader=stream)
    meter.lap()
    (other,) = advise_on_loaders(0.5)
    assert "iterable" in other.why and other.times is None
    del loader, stream


def test_a_loader_that_the_loop_has_made_is_measured_though_it_is_gone(measured: None) -> None:
    meter = steps.running()
    assert meter is not None
    train(Net(), loader=DataLoader(Slow(0.01), batch_size=8))
    meter.lap()
    (found,) = advise_on_loaders(0.5)
    assert (found.name, found.why) == ("DataLoader of Slow", "") and found.needed is not None and found.needed > 1
    assert "num_workers" in dict(found.options)


def test_its_dataset_is_kept_until_the_next_steps_or_until_memory_is_freed(measured: None) -> None:
    meter = steps.running()
    assert meter is not None
    datasets: list[weakref.ref[Any]] = []
    for _ in range(2):
        dataset = Slow(0.01)
        datasets.append(weakref.ref(dataset))
        train(Net(), loader=DataLoader(dataset, batch_size=8))
        del dataset
        meter.lap()
    assert [reference() is not None for reference in datasets] == [False, True]
    active_meter.release()
    assert datasets[1]() is None


def test_workers_of_a_loader_that_the_loop_has_made_end_with_the_loop(measured: None) -> None:
    train(Net(), loader=DataLoader(Slow(0.01), batch_size=8, num_workers=1, persistent_workers=True))
    assert multiprocessing.active_children() == []


class Holding(Slow):
    """The same items, beside something else."""

    def __init__(self, held: Any) -> None:
        super().__init__(0.01)
        self.held = held


@pytest.mark.parametrize("held", ["large", "file", "folder"])
def test_a_dataset_that_should_end_with_its_loop_is_not_kept(measured: None, held: str) -> None:
    meter = steps.running()
    assert meter is not None
    makers: dict[str, Callable[[], Any]] = {
        "large": lambda: torch.empty(loader_source.LIMIT + 1, dtype=torch.uint8),
        "file": lambda: open(__file__, "rb"),  # noqa: SIM115 - ends with the dataset
        "folder": tempfile.TemporaryDirectory,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        train(Net(), loader=DataLoader(Holding(makers[held]()), batch_size=8))
        assert not any(type(found) is Holding for found in gc.get_objects())
    meter.lap()
    (found,) = advise_on_loaders(0.5)
    assert "keep it in a variable" in found.why


def test_only_what_is_in_the_hosts_memory_is_kept() -> None:
    weights = torch.ones(8, requires_grad=True)
    assert loader_source.weight_of([torch.ones(256)], 1 << 20) is not None
    assert loader_source.weight_of([torch.ones(256, device="meta")], 1 << 20) is None
    assert loader_source.weight_of([weights * 2], 1 << 20) is None  # with what autograd has saved
    assert loader_source.weight_of([object() for _ in range(20_000)], 1 << 30) is None


class Stream(torch.utils.data.IterableDataset[Tensor]):
    """The same items without numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        slow = Slow(0.01)
        return (slow[number] for number in range(len(slow)))


class Net(nn.Module):
    """Layers of one width, which is no multiple of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def train(model: nn.Module, measured_steps: int = 0, loader: DataLoader[Any] | None = None) -> None:
    """Steps with batches of a loader, or of random numbers."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    made = (torch.rand(ROWS_OF_A_BATCH, WIDE) for _ in range(measured_steps))
    for batch in made if loader is None else loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
