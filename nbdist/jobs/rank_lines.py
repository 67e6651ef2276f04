"""Texts of ranks as one: equal lines once, each labeled with its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbdist.client.output.merge import Merger
from nbdist.client.output.page import Text
from nbdist.serving.control_messages import PrintedText


def merged_texts(texts: Mapping[int, Sequence[PrintedText]]) -> str:
    """Return what ranks have printed, by rank and in order, as one text."""
    merger = Merger(texts)
    for rank, printed in texts.items():
        for stream, text in printed:
            merger.feed(rank, stream, text, 0.0)
        merger.finish(rank, 0.0)
    return "".join(each.text for each in merger.flush(0.0) if isinstance(each, Text))


def merged_lines(lines: Mapping[int, Sequence[str]]) -> str:
    """Return lines of ranks as one text, without the last line's end."""
    return merged_texts({rank: [("stdout", f"{line}\n") for line in each] for rank, each in lines.items()}).rstrip("\n")
