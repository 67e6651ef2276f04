"""How values travel between two processes of one machine: an object becomes a `Parcel`, and an object again.

Owns pickling (functions and classes of a notebook go by value), the memory that large buffers travel in, and
the words for what can't travel. Independent of sockets, sessions or ranks: whoever calls it carries the
parcel, which is small. Imports neither torch nor numpy until a value holds something of theirs.

A payload below 1 MiB lies inside the parcel. A larger one is written straight from its owners' memory into
memfd segments; receivers map them copy-on-write and their tensors and arrays live in the mapping. So the
sender's memory does not grow, receivers share the pages that none of them writes to, and none sees another's
writes. Two consequences: a tensor that has arrived can't be resized beyond its size, and the segments stay in
memory as long as one tensor or array of 64 KiB or more lives in them (`clone()` or `copy()` what is to
outlive the rest).

What a parcel holds of a tensor's storage: the span from the first to the last byte that its tensors use;
bytes in between that none of them uses are neither copied nor take memory in a segment. Tensors that share a
storage share it on arrival, with their strides and relative offsets. A tensor alone on its storage whose span
(1 MiB or more) is at least twice its own bytes, as `logits[:, -1]`, is sent dense. Gradients and autograd
graphs stay behind, as with `torch.save`; CUDA tensors arrive on the CPU.
"""

from nbdist.transfer.explain import find_on_gpu
from nbdist.transfer.parcels import Packed
from nbdist.transfer.pickling import INLINE_LIMIT, Unsent, check, pack, unpack
from nbdist.wire.base.parcel import Parcel, Segment, Span

__all__ = ["INLINE_LIMIT", "Packed", "Parcel", "Segment", "Span", "Unsent", "check", "find_on_gpu", "pack", "unpack"]
