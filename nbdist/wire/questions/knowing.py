"""Questions about what a rank costs, and about the names in its shell."""

from __future__ import annotations

import msgspec

from nbdist.metrics.node.sample import RankSample
from nbdist.wire.base.message import MimeBundle
from nbdist.wire.questions.question import AnswerBody, Done, Question


class ProcessMemory(AnswerBody, frozen=True):
    """Bytes that a rank holds.

    Attributes:
        private: CPU memory that it shares with no other process.
        allocated: GPU memory in tensors; None: it uses no GPU, or torch can't be asked now.
        reserved: GPU memory that torch holds; None likewise.
        by_driver: GPU memory as the driver reports it for the process, where torch can't be asked.
    """

    private: int
    allocated: int | None = None
    reserved: int | None = None
    by_driver: int | None = None

    @property
    def on_gpu(self) -> int | None:
        """What the rank holds of GPUs, by whoever reports it."""
        return self.by_driver if self.reserved is None else self.reserved


class GetMemory(Question[ProcessMemory], frozen=True):
    """How much memory does this rank hold?"""


class GetMemoryFromOutside(Question[ProcessMemory], frozen=True):
    """How much memory does the process hold? Answered by the rank's agent: one in a call that blocks Python can't."""


class Metrics(AnswerBody, frozen=True):
    """A rank's data for the panel."""

    sample: RankSample


class GetMetrics(Question[Metrics], frozen=True):
    """What should the panel show of this rank?"""


class CompletionItem(msgspec.Struct, array_like=True, frozen=True):
    """A text that fits from `start` to `end` of the code, and its type: "function", "module", ..."""

    text: str
    kind: str | None
    start: int
    end: int


class Completions(AnswerBody, frozen=True):
    """The completions."""

    matches: list[CompletionItem]


class Complete(Question[Completions], frozen=True):
    """Which completions fit at this position of this code?"""

    code: str
    position: int


class Inspection(AnswerBody, frozen=True):
    """The documentation of a name as a MIME bundle; None if there is no such name."""

    bundle: MimeBundle | None


class Inspect(Question[Inspection], frozen=True):
    """What is this name? `detail`: 1 for its source."""

    name: str
    detail: int


class KnownFailure(AnswerBody, frozen=True):
    """What has failed last on a rank; without a name: nothing has. The fields are those of a Failure.

    gone: whether its frames are, so that they can't be debugged.
    """

    name: str = ""
    text: str = ""
    kind: str = ""
    when: float = 0.0
    gone: bool = False


class GetFailure(Question[KnownFailure], frozen=True):
    """What has failed last?"""


class Release(Question[Done], frozen=True):
    """Free what was packed for the cell `serial`: the notebook has it, or does not want it."""

    serial: int
