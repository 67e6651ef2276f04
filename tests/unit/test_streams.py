"""Copies and computations on streams of their own: what a batch holds, whichever stream is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nbdist.plan import Plan
from nbdist.train import state
from nbdist.train.data import feed
from nbdist.train.data.loaders import prepare_loader
from tests.stand_ins.streams import Gpu, Stream

pytestmark = pytest.mark.filterwarnings("ignore:waiting for data")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A stand-in in the place of torch.cuda."""
    found = Gpu()
    for name, value in vars(found.cuda).items():
        monkeypatch.setattr(torch.cuda, name, value)
    feed.copy_stream.cache_clear()
    state.begin(Plan())
    yield found
    state.forget()
    feed.copy_stream.cache_clear()


@pytest.mark.parametrize("faster", ["what computes", "what copies"])
def test_batches_of_a_loader_are_whole_whichever_stream_is_faster(gpu: Gpu, faster: str) -> None:
    data: Any = [gpu.on_host(torch.full((4,), float(number))) for number in range(8)]
    loader = DataLoader(data, batch_size=None, collate_fn=lambda item: item)
    found = [batch * 2.0 for batch in prepare_loader(loader, plan=Plan(), device="cuda")]
    computes, copies = gpu.streams
    gpu.run([computes, copies] if faster == "what computes" else [copies, computes])
    assert [gpu.read(tensor) for tensor in found] == [[number * 2.0] * 4 for number in range(8)]


# --- what the stand-in does


def sent(gpu: Gpu, tensor: torch.Tensor) -> Any:
    return gpu.on_host(tensor).to(torch.device("cuda"), non_blocking=True)


def nothing(first: Any, here: Stream, other: Stream) -> None: ...


def recorded(first: Any, here: Stream, other: Stream) -> None:
    first.record_stream(other)


def recorded_where_it_was_made(first: Any, here: Stream, other: Stream) -> None:
    first.record_stream(here)


def waited_for(first: Any, here: Stream, other: Stream) -> None:
    here.wait_stream(other)


@pytest.mark.parametrize(
    ("before_it_is_freed", "seen"),
    [(nothing, 20.0), (recorded_where_it_was_made, 20.0), (recorded, 10.0), (waited_for, 10.0)],
)
def test_freed_memory_is_overwritten_unless_the_reader_is_recorded_or_waited_for(
    gpu: Gpu, before_it_is_freed: Callable[[Any, Stream, Stream], None], seen: float
) -> None:
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    first = sent(gpu, torch.ones(1))
    other.wait_stream(here)
    with torch.cuda.stream(other):
        product: Any = first * 10.0
    before_it_is_freed(first, here, other)  # type: ignore[arg-type]
    del first
    kept = sent(gpu, torch.full((1,), 2.0))
    gpu.run(gpu.streams)
    assert (gpu.read(product), gpu.read(kept)) == ([seen], [2.0])


def test_recorded_memory_is_used_again_once_the_reader_has_ended(gpu: Gpu) -> None:
    other = torch.cuda.Stream()

    def address(size: int) -> int:
        tensor = sent(gpu, torch.ones(size))
        with torch.cuda.stream(other):
            tensor * 10.0
        tensor.record_stream(other)
        return int(tensor.data_ptr())

    first, second = address(1), address(1)
    gpu.run(gpu.streams)
    assert first != second and address(1) in (first, second)
    assert address(2) not in (first, second)


def test_freed_memory_is_given_to_no_other_stream(gpu: Gpu) -> None:
    first = sent(gpu, torch.ones(1))
    address = first.data_ptr()
    del first
    with torch.cuda.stream(torch.cuda.Stream()):
        second = sent(gpu, torch.ones(1))
    third = sent(gpu, torch.ones(1))
    assert second.data_ptr() != address and third.data_ptr() == address
