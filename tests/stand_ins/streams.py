"""A GPU's streams, and the memory that each of them has for itself. Without a GPU.

What it does, and where torch 2.13 does so (c10/cuda/CUDACachingAllocator.cpp, unless named):

- The CPU only queues work. Here nothing runs before `Gpu.run`, so the CPU is as far ahead as it can be, and the test
  chooses which stream is the fastest. CUDA promises no order between streams (CUDA C++ Programming Guide, "Streams").
- A freed block goes back at once, while work that uses it is still queued (`free`, `free_block`), and is given only to
  the stream that it was allocated on (`get_free_block` looks for blocks of that stream). So what is written there next
  comes after all that was queued on that stream, and overwrites what another stream has not read yet.
- `record_stream` delays that until the other stream has done all work that it has when the block is freed
  (`recordStream`, `insert_events`); allocations check whether it has (`process_events`, at the beginning of `malloc`).
  Recording the stream that the block was allocated on does nothing.
- `wait_stream` waits for what the other stream has at that time, and for nothing later (torch/cuda/streams.py).
- A copy from pinned memory reads it when it runs. The memory is kept until then (aten/src/ATen/native/cuda/Copy.cu:
  `CachingHostAllocator_recordEvent`).

Blocks are neither split nor rounded, and each size has a pool: the real allocator reuses a block for other sizes, too.
New memory is filled with 0xFF, which is NaN in floats; CUDA does not define what is in it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

_NEW = 0xFF


class Work:
    """What is queued on a stream, in this order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        self._queued = self._ended = 0

    def add(self, kernel: Callable[[], object], can_begin: Callable[[], bool] = lambda: True) -> None:
        self._waiting.append((can_begin, kernel))
        self._queued += 1

    def event(self) -> Callable[[], bool]:
        """Return what tells whether all that is queued by now has ended."""
        here = self._queued
        return lambda: self._ended >= here

    def run_next(self) -> bool:
        """Run the next kernel, if it can begin.

        Returns:
            Whether it has run.
        """
        if not self._waiting or not self._waiting[0][0]():
            return False
        self._waiting.popleft()[1]()
        self._ended += 1
        return True


class Stream:
    """What `torch.cuda.Stream` offers, as far as it is used."""

    def __init__(self) -> None:
        self.work = Work()

    def wait_stream(self, stream: Stream) -> None:
        self.work.add(lambda: None, stream.work.event())


@dataclass(eq=False)
class _Block:
    memory: torch.Tensor
    pool: list[_Block]
    stream: Stream
    uses: set[Stream] = field(default_factory=set)


class _Tensor(torch.Tensor):
    """A tensor on a GPU. Its one operation is the product with a number."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    is_cuda = True
    gpu: Gpu
    block: _Block

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        if stream is not self.block.stream:
            self.block.uses.add(stream)

    def __mul__(self, number: Any) -> _Tensor:
        return self.gpu.launch(lambda source, target: torch.mul(source, number, out=target), self)


class _HostTensor(torch.Tensor):
    """A tensor in memory of the host, that can be sent to a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    gpu: Gpu

    def pin_memory(self, *_: Any) -> _HostTensor:
        return self.gpu.on_host(_plain(self).clone())

    def to(self, device: torch.device, non_blocking: bool) -> _Tensor:  # type: ignore[override]
        assert device.type == "cuda" and non_blocking
        return self.gpu.launch(lambda source, target: target.copy_(source), self)


class Gpu:
    """A GPU whose kernels run when the test wants it.

    Attributes:
        streams: The default one, and others as they are made.
        cuda: What is read of `torch.cuda`, to be put in its place.
    """

    def __init__(self) -> None:
        self.streams = [Stream()]
        self._current = self.streams[0]
        self._pools: dict[tuple[Stream, int], list[_Block]] = {}
        self._still_used: list[tuple[_Block, list[Callable[[], bool]]]] = []
        self.cuda = SimpleNamespace(Stream=self._stream, stream=self._on, current_stream=lambda _=None: self._current)

    def on_host(self, tensor: torch.Tensor) -> _HostTensor:
        """Return a tensor of the host's that can be sent to this GPU."""
        found = tensor.as_subclass(_HostTensor)
        found.gpu = self
        return found

    def launch(self, kernel: Callable[[torch.Tensor, torch.Tensor], object], source: torch.Tensor) -> _Tensor:
        """Queue a kernel on the current stream.

        Args:
            kernel: Called with the source and the target when it runs.
            source: Only its memory is kept, not the tensor: it may be freed before the kernel runs.

        Returns:
            The target: new memory of this stream, as large as the source.
        """
        target = self._allocate(source)
        read, written = _plain(source), _plain(target)
        self._current.work.add(lambda: kernel(read, written))
        return target

    def run(self, fastest_first: Iterable[Stream]) -> None:
        """Run all that is queued, each time the next kernel of the first stream that has one that can begin."""
        streams = list(fastest_first)
        while any(stream.work.run_next() for stream in streams):
            pass

    def read(self, tensor: _Tensor) -> list[Any]:
        """Return what its memory holds now, waiting for nothing."""
        return list(_plain(tensor).tolist())

    def _allocate(self, like: torch.Tensor) -> _Tensor:
        self._give_back_unused()
        stream, size = self._current, like.nbytes
        pool = self._pools.setdefault((stream, size), [])
        block = pool.pop() if pool else _Block(torch.full((size,), _NEW, dtype=torch.uint8), pool, stream)
        tensor = block.memory.view(like.dtype).view(like.shape).as_subclass(_Tensor)
        tensor.gpu, tensor.block = self, block
        weakref.finalize(tensor, self._free, block).atexit = False
        return tensor

    def _free(self, block: _Block) -> None:
        if block.uses:
            self._still_used.append((block, [stream.work.event() for stream in block.uses]))
            block.uses = set()
        else:
            block.pool.append(block)

    def _give_back_unused(self) -> None:
        left = []
        for block, events in self._still_used:
            if all(ended() for ended in events):
                block.pool.append(block)
            else:
                left.append((block, events))
        self._still_used = left

    def _stream(self, device: torch.device | None = None) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor that keeps no block."""
    return tensor.as_subclass(torch.Tensor)
