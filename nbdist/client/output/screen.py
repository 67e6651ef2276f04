"""What one cell shows: the ranks' text merged, their displays grouped and labeled, their last values in one output.

Handles what ranks send; independent of how cells end, of errors and of interrupts.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable

from nbdist.base.ranks import ONE_NODE, RankNames
from nbdist.client.output.area import Area
from nbdist.client.output.merge import Merger
from nbdist.client.output.page import OwnBars, Shown, Text
from nbdist.client.output.publisher import Kind, Publisher, can_update
from nbdist.wire.messages.output import STDERR, STDOUT, Display, Output

_RESULTS_WAIT = 0.2  # seconds that the first last value waits for the others


class Screen:
    """The output of a cell, made from what its ranks send.

    Used by one thread at a time.

    Args:
        ranks: The ranks that run the cell.
        publisher: Where to show the output.
        key: A name that is unique to this cell.
        names: How to name ranks.
        on_bars: Called before lines are shown that stand for the bars of several ranks, with what each of these bars
            shows, by all such lines of the page, and with the new lines.
    """

    def __init__(
        self,
        ranks: list[int],
        publisher: Publisher,
        key: str,
        names: RankNames = ONE_NODE,
        on_bars: Callable[[OwnBars, list[str]], None] = lambda bars, lines: None,
    ) -> None:
        self.silent = True  # nothing has been shown
        self._publisher = publisher
        self._names = names
        self._on_bars = on_bars
        self._merger = Merger(ranks, names=names)
        self._decoders = Decoders()
        self._area = Area(ranks, names)
        self._results_id = f"nbdist-results-{key}"
        self._results: dict[int, Display] = {}  # last values that are plain text, by rank
        self._rich_results: dict[int, Display] = {}  # other last values, not shown yet
        self._results_due: float | None = None
        self._results_shown = False
        self._key = key
        self._topics: set[str] = set()  # topics that have a line on the page

    def print(self, event: Output, now: float) -> None:
        """Take bytes that a rank printed."""
        self._feed(event.rank, event.stream, event.data, now)

    def display(self, event: Display, now: float) -> None:
        """Take a rich item."""
        if event.kind == "result":
            results = self._results if _is_text(event) else self._rich_results
            results[event.rank] = event
            if self._results_due is None:
                self._results_due = now + _RESULTS_WAIT
            return
        key: object = (event.kind, repr(event.data), repr(event.metadata), event.wait)
        if event.display_id:  # each rank's display has its own place on the page
            key = (event.rank, event.sequence)
        self._merger.put(event.rank, key, event, now)

    def end_rank(self, rank: int, now: float) -> None:
        """Note that the rank has ended its part of the cell."""
        for stream in (STDOUT, STDERR):
            self._feed(rank, stream, b"", now, final=True)
        self._merger.finish(rank, now)

    def poll(self, now: float) -> None:
        """Show what may be shown now."""
        self._emit(self._merger.poll(now))
        if self._results_due is not None and now >= self._results_due:
            self._show_results()
        self._publisher.pump()

    @property
    def crowded(self) -> bool:
        """Whether the page can't keep up with the displays."""
        return self._publisher.crowded

    def due(self, now: float) -> float | None:
        """Return the seconds until `poll` has something to do even if nothing new comes. Call it after `poll`."""
        times = [at - now for at in (self._merger.deadline(), self._results_due) if at is not None]
        if (due := self._publisher.due()) is not None:
            times.append(due)
        return max(0.0, min(times)) if times else None

    def say(self, text: str) -> None:
        """Show a line of nbdist's own, among the output."""
        self._emit(self._merger.flush(time.monotonic()))
        self._emit([Text("stderr", f"nbdist: {text}\n")])
        self._publisher.pump()

    def remark(self, text: str, topic: str, *, same: bool = False) -> None:
        """Show a line of nbdist's own that replaces the last one of its topic.

        Args:
            text: The line.
            topic: A name for all lines of which only the last counts.
            same: Whether it repeats the last line with newer figures, and so isn't shown where lines can't be replaced.
        """
        if not can_update():
            if not same:
                self.say(text)
            return
        kind: Kind = "update" if topic in self._topics else "display"
        if kind == "display":
            self._emit(self._merger.flush(time.monotonic()))
            self._clear(wait=True)
        self.silent = False
        self._topics.add(topic)
        self._publisher.item(kind, {"text/plain": f"nbdist: {text}"}, {}, f"nbdist-{topic}-{self._key}")
        self._publisher.pump()

    def settle(self, now: float) -> None:
        """Show what still waits for other ranks, as the user is to read it now."""
        self._emit(self._merger.flush(now))
        self._publisher.complete()

    def finish(self, now: float) -> None:
        """Show what still waits for other ranks, or was folded: the cell is over."""
        self._emit(self._merger.flush(now))
        if self._results_due is not None:
            self._show_results()
        self._publisher.finish()
        self._publisher.pump()

    def hurry(self) -> None:
        """Fold what waits if the page is slower than the ranks: the user has interrupted."""
        self._publisher.hurry()

    def abandon(self) -> None:
        """Show no more of what waits: the user has interrupted again."""
        self._publisher.abandon()

    def _feed(self, rank: int, stream: int, data: bytes, now: float, *, final: bool = False) -> None:
        if text := self._decoders.decode(rank, stream, data, final):
            self._merger.feed(rank, "stdout" if stream == STDOUT else "stderr", text, now)

    def _emit(self, emissions: Iterable[Text | Shown]) -> None:
        if lines := self._merger.take_bars():
            self._on_bars(self._merger.bars, lines)
        for emission in emissions:
            kind = emission.item.kind if isinstance(emission, Shown) else "text"
            if kind == "clear":
                assert isinstance(emission, Shown)
                self._area.ask_clear(emission.ranks)
                if not emission.item.wait:
                    self._clear(wait=False)
                continue
            if kind != "update":  # as in a local cell, an update does not count as new output
                self._clear(wait=True)
            self._area.add(emission)
            self._publish(emission)

    def _clear(self, *, wait: bool) -> None:
        """Remove the output that ranks asked to clear with `clear_output`."""
        kept = self._area.clear()
        if kept is None:
            return
        self._publisher.clear(wait=wait or bool(kept))
        self._topics.clear()
        for emission in kept:
            self._publish(emission)
        if self._results_shown:
            self._results_shown = False
            self._show_results()

    def _publish(self, emission: Text | Shown) -> None:
        self.silent = False
        if isinstance(emission, Text):
            self._publisher.text(emission.stream, emission.text)
        else:
            self._publish_item(emission.ranks, emission.item)

    def _publish_item(self, ranks: tuple[int, ...], item: Display) -> None:
        display_id = f"{item.display_id}-rank{item.rank}" if item.display_id else ""
        if _is_text(item):
            data = {"text/plain": _labeled(self._names.label(ranks), str(item.data["text/plain"]))}
            self._publisher.item("update" if item.kind == "update" else "display", data, item.metadata, display_id)
            return
        if item.kind == "update":
            self._publisher.item("update", item.data, item.metadata, display_id)
            return
        label = self._names.label(ranks).rstrip()  # the bundle itself stays as the rank made it
        html = f'<span style="opacity:0.6;font-family:monospace">{label}</span>'
        self._publisher.item("display", {"text/plain": label, "text/html": html}, {})
        self._publisher.item("display", item.data, item.metadata, display_id)

    def _show_results(self) -> None:
        """Show the last values of all ranks as one output; late ones are added to it."""
        self._results_due = None
        self._clear(wait=True)
        if self._results:
            self.silent = False
            lines = "\n".join(
                _labeled(self._names.label(ranks), str(item.data["text/plain"]))
                for ranks, item in _grouped(self._results)
            )
            kind: Kind = "update" if self._results_shown else "display"
            self._results_shown = True
            self._publisher.item(kind, {"text/plain": lines}, {}, self._results_id)
        rich, self._rich_results = self._rich_results, {}
        self._emit([Shown(ranks, item) for ranks, item in _grouped(rich)])


def _grouped(items: dict[int, Display]) -> list[tuple[tuple[int, ...], Display]]:
    """Return equal items once, with the ranks that have them."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(items):
        groups.setdefault(repr(items[rank].data), []).append(rank)
    return [(tuple(ranks), items[ranks[0]]) for ranks in groups.values()]


def _is_text(item: Display) -> bool:
    return set(item.data) == {"text/plain"}


def _labeled(label: str, text: str) -> str:
    return "\n".join(label + line for line in str(text).split("\n"))


class Decoders:
    """Turns each rank's bytes into text, however they are cut."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def decode(self, rank: int, stream: int, data: bytes, final: bool = False) -> str:
        """Return the text in these bytes, up to the last complete character."""
        decoder = self._decoders.get((rank, stream))
        if decoder is None:
            if not data:
                return ""
            decoder = self._decoders[rank, stream] = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(data, final)
