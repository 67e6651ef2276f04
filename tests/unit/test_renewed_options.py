"""The options of an NCCL backend that takes the place of another, on a stand-in: only CUDA builds have them."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

from nbdist.worker.collectives import _nccl_options


class Options:
    """Those of ProcessGroupNCCL that matter here, with their defaults."""

    def __init__(self) -> None:
        self._timeout = timedelta(seconds=600)
        self.is_high_priority_stream = False
        self.group_name = ""
        self.split_from: object = None
        self.split_color = -2


def test_a_renewed_backend_has_all_options_of_the_old_one_but_for_the_group_it_was_split_from() -> None:
    old = Options()
    old._timeout, old.is_high_priority_stream, old.group_name = timedelta(seconds=42), True, "7"
    old.split_from, old.split_color = object(), 5
    new = _nccl_options(SimpleNamespace(options=old))
    assert (new._timeout, new.is_high_priority_stream, new.group_name) == (timedelta(seconds=42), True, "7")
    assert (new.split_from, new.split_color) == (None, -2)
    assert old.split_color == 5
