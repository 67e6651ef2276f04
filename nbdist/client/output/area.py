"""The output below a cell, by rank, so that one rank's `clear_output` removes only its own output.

Handles the merger's emissions; independent of how they are published.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from nbdist.base.ranks import ONE_NODE, RankNames, parse_ranks
from nbdist.client.output.page import Shown, Text
from nbdist.wire.messages.output import Display

_LIMIT = 1_000_000  # maximum characters kept; older ones go with the next clear_output of any rank
_PREFIX = re.compile(r"\[([0-9,-]+)\] ")


class Area:
    """The output of one cell since it was last cleared.

    Args:
        ranks: The ranks that print there.
        names: How to name ranks.
    """

    def __init__(self, ranks: Iterable[int], names: RankNames = ONE_NODE) -> None:
        self._names = names
        self._ranks = set(ranks)
        self._world = max(self._ranks, default=0) + 1
        self._entries: deque[Text | Shown] = deque()
        self._size = 0
        self._clearing: set[int] = set()

    def add(self, emission: Text | Shown) -> None:
        """Record something that was shown."""
        if isinstance(emission, Shown) and emission.item.kind == "update":
            self._update(emission.item)
            return
        self._entries.append(emission)
        self._size += _size(emission)
        while self._size > _LIMIT:
            self._size -= _size(self._entries.popleft())

    def ask_clear(self, ranks: Iterable[int]) -> None:
        """Clear the output of these ranks when the next output comes, like `clear_output(wait=True)`."""
        self._clearing.update(ranks)

    def clear(self) -> list[Text | Shown] | None:
        """Carry out the requested clearing.

        Returns:
            Output of the other ranks to show again once the page is empty; None if nothing was to be cleared.
        """
        if not self._clearing:
            return None
        kept = list(self._kept(self._ranks - self._clearing))
        self._clearing.clear()
        self._entries.clear()
        self._size = 0
        for emission in kept:
            self.add(emission)
        return kept

    def _kept(self, ranks: set[int]) -> Iterable[Text | Shown]:
        if not ranks:
            return
        texts: list[Text] = []
        for entry in [*self._entries, None]:
            if isinstance(entry, Text) and (not texts or texts[0].stream == entry.stream):
                texts.append(entry)
                continue
            if texts and (text := self._lines_of(ranks, "".join(each.text for each in texts))):
                yield Text(texts[0].stream, text)
            texts = [entry] if isinstance(entry, Text) else []
            if isinstance(entry, Shown) and (left := ranks.intersection(entry.ranks)):
                yield Shown(tuple(sorted(left)), entry.item)

    def _lines_of(self, ranks: set[int], text: str) -> str:
        lines = []
        for line in text.splitlines(keepends=True) if "\r" not in text else _settled(text):
            match = _PREFIX.match(line)
            those = parse_ranks(match[1], self._world) if match else ()
            if left := sorted(ranks.intersection(those)):
                lines.append(f"{self._names.label(left)}{line[len(self._names.label(those)) :]}")
        return "".join(lines)

    def _update(self, item: Display) -> None:
        for index, entry in enumerate(self._entries):
            if isinstance(entry, Shown) and (entry.item.rank, entry.item.display_id) == (item.rank, item.display_id):
                new = replace(entry.item, data=item.data, metadata=item.metadata)
                self._entries[index] = Shown(entry.ranks, new)


def _settled(text: str) -> list[str]:
    """Return the lines as they look after their carriage returns."""
    return [line.rstrip("\r").rpartition("\r")[2] + "\n" for line in text.split("\n")]


def _size(emission: Text | Shown) -> int:
    if isinstance(emission, Text):
        return len(emission.text)
    return sum(len(value) for value in emission.item.data.values() if isinstance(value, str)) + 100
