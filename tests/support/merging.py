"""What the tests of merged output share: what text looks like on a page, and whose each line is."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from nbdist.base.ranks import parse_ranks
from nbdist.client.output.merge import Merger
from nbdist.client.output.page import Shown, Text

WINDOW = 0.05
PREFIX = re.compile(r"\[([0-9,-]+)\] ")

Emitted = list[Text | Shown]


def text_of(emitted: Emitted) -> str:
    return "".join(each.text for each in emitted if isinstance(each, Text))


def merged(chunks: dict[int, str], ranks: int, at: float = 0.0) -> str:
    """What goes out at once when each rank has printed its chunk."""
    merger = Merger(range(ranks))
    for rank, text in chunks.items():
        merger.feed(rank, "stdout", text, at)
    return text_of(merger.poll(at))


class Page:
    """A cell's output area that shows text as front ends do: what follows a carriage return overwrites."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = [[]]
        self.column = 0

    def show(self, emitted: Emitted) -> Page:
        for each in emitted:
            if isinstance(each, Shown):
                assert self.column == 0, "a rich item in the middle of a line"
                continue
            for character in each.text:
                self._put(character)
        return self

    def _put(self, character: str) -> None:
        if character == "\n":
            self.lines.append([])
            self.column = 0
        elif character == "\r":
            self.column = 0
        elif character == "\b":
            self.column -= 1
            del self.lines[-1][self.column]
        else:
            self.lines[-1][self.column : self.column + 1] = [character]
            self.column += 1

    @property
    def text(self) -> list[str]:
        lines = ["".join(line).rstrip() for line in self.lines]
        return lines if lines[-1] else lines[:-1]


def by_rank(emitted: Emitted) -> dict[int, list[tuple[str, Any]]]:
    """What each rank printed, in order: (stream, line) and ("item", item). For texts that rewrite nothing."""
    printed: dict[int, list[tuple[str, Any]]] = defaultdict(list)
    opened: tuple[tuple[int, ...], str, str] | None = None
    for each in emitted:
        if isinstance(each, Shown):
            assert opened is None, "a rich item in the middle of a line"
            for rank in each.ranks:
                printed[rank].append(("item", each.item))
            continue
        rest = each.text
        while rest:
            part, newline, rest = rest.partition("\n")
            if opened is None:
                prefix = PREFIX.match(part)
                assert prefix, f"a line without ranks: {part!r}"
                opened = parse_ranks(prefix[1], 100), each.stream, ""
                part = part[prefix.end() :]
            assert opened[1] == each.stream or not part, "a line of two streams"
            opened = opened[0], opened[1], opened[2] + part
            if newline:
                for rank in opened[0]:
                    printed[rank].append(opened[1:])
                opened = None
    assert opened is None, "the last line is open"
    return printed


def bar(percent: int, rate: float = 10.0) -> str:
    filled = "█" * (percent // 10)
    return f"Train: {percent:3d}%|{filled:10}| {percent}/100 [00:03<00:06, {rate:.2f}it/s]"
