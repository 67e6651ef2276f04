"""The output of N ranks as one plain text: equal lines once, each labeled with its ranks, nothing lost or split.

Owns the order in which lines, rich items and progress bars go out.
Independent of clocks, sockets, threads and the notebook: time is passed in, texts are returned.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from nbdist.base.ranks import ONE_NODE, RankNames
from nbdist.client.output.bars import Tail, settle, summary
from nbdist.client.output.page import OwnBars, Page, Shown, Stream, Text

_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")
_REDRAW = 0.1  # seconds between redraws of the progress line
_BATCH = 256  # lines released at once: bounds the cost of a difference near the start of long chunks

_Kind: TypeAlias = Literal["stdout", "stderr", "item", "bar"]
_Entry: TypeAlias = tuple[_Kind, Any]  # kind and key: must be equal for ranks to share a line
_Bar: TypeAlias = tuple[Stream, str]  # stream and signature: what makes bars of several ranks the same bar


class Merger:
    """Merges what ranks print into one text for the notebook.

    A line goes out at once when all ranks that still print have it, or when it precedes a line that all of them
    have; otherwise `window` seconds after it came, with all ranks for which it is next. Output is never taken
    back. Lines of one rank keep their order on each stream and around rich items; stdout and stderr are
    ordered by when their lines were completed.

    The same progress bar on several ranks is one line that shows the rank furthest behind; a rank whose bar
    has ended before the others' continues to print above it.

    Feed it, then `poll`; with no new input, poll again at `deadline`.

    Args:
        ranks: The ranks that may print.
        window: Seconds that a line waits for the same line from other ranks.
        names: How to name ranks.
    """

    def __init__(self, ranks: Iterable[int], *, window: float = 0.05, names: RankNames = ONE_NODE) -> None:
        self._active = set(ranks)
        self._queues: dict[int, deque[_Run]] = {rank: deque() for rank in sorted(self._active)}
        self._window = window if len(self._active) > 1 else 0.0
        self._tails: dict[tuple[int, Stream], Tail] = {}
        self._waiting = _Waiting()
        self._page = Page(names)
        self._bars_queued = 0
        # The last states, by rank, of bars that other ranks have not ended yet.
        self._ended: dict[_Bar, dict[int, str]] = {}
        self._drawn_at = float("-inf")

    def feed(self, rank: int, stream: Stream, text: str, now: float) -> None:
        """Take what a rank printed, cut anywhere.

        Args:
            rank: The rank that printed it.
            stream: Its stream.
            text: Any number of lines, possibly starting or ending within one.
            now: Seconds of a monotonic clock; the same clock for all calls.
        """
        lines = text.split("\n")
        rest = lines.pop()
        if lines:
            returned = "\r" in text
            if tail := self._tails.pop((rank, stream), None):
                lines[0] = tail.raw() + lines[0]
                returned = returned or tail.returned
            self._append_lines(rank, stream, lines, now, returned=returned)
        if rest:
            if (rank, stream) not in self._tails:
                self._tails[rank, stream] = Tail(now)
            self._tails[rank, stream].add(rest)

    def put(self, rank: int, key: Hashable, item: Any, now: float) -> None:
        """Take a rich item of a rank, which ends the rank's open line and goes out after it.

        Args:
            rank: The rank that made it.
            key: Items of several ranks with equal keys go out once, as the lowest rank's item.
            item: Returned in `Shown`, never inspected.
            now: Seconds of the caller's clock.
        """
        for stream in _STREAMS:
            tail = self._tails.get((rank, stream))
            if tail and tail.shape == "plain":
                self._end_tail(rank, stream, now)
        self._queues[rank].append(_Run("item", [key], now, payload=item))

    def finish(self, rank: int, now: float) -> None:
        """Note that a rank sends nothing more: its open line is complete, and no line waits for it."""
        for stream in _STREAMS:
            self._end_tail(rank, stream, now)
        self._active.discard(rank)

    def poll(self, now: float) -> list[Text | Shown]:
        """Return what may go out now, in order."""
        self._emit(now, everything=False)
        return self._page.take()

    def flush(self, now: float) -> list[Text | Shown]:
        """Return all that is left, in order; the cursor is at the start of a line afterwards."""
        for rank, stream in list(self._tails):
            self._end_tail(rank, stream, now)
        self._emit(now, everything=True)
        self._page.end_line()
        return self._page.take()

    @property
    def bars(self) -> OwnBars:
        """Each rank's own bars, by the lines that stand for them on the page now."""
        return self._page.bars

    def take_bars(self) -> list[str]:
        """Return the lines that have come to `bars` since the last call."""
        return self._page.take_bars()

    def deadline(self) -> float | None:
        """Return when the next `poll` returns something if nothing new comes, in seconds of the caller's clock.

        Call it after `poll`. None if nothing waits.
        """
        times = [queue[0].came + self._window for queue in self._queues.values() if queue]
        if not self._tails:
            return min(times, default=None)
        times += [tail.came + self._window for _, _, tail in self._visible_tails("plain")]
        if (due := self._next_drawing()[0]) is not None:
            times.append(due)
        return min(times, default=None)

    def _append_lines(self, rank: int, stream: Stream, lines: list[str], now: float, *, returned: bool) -> None:
        queue = self._queues[rank]
        if not returned:
            queue.append(_Run(stream, lines, now))
            return
        if "\r" in lines[0].rstrip("\r"):
            self._note_rewriting(rank, stream)
        plain: list[str] = []
        for line in lines:
            text, signature = settle(line)
            if signature is None:
                plain.append(text)
                continue
            if plain:
                queue.append(_Run(stream, plain, now))
                plain = []
            queue.append(_Run("bar", [(stream, signature)], now, payload=text))
            self._bars_queued += 1
        if plain:
            queue.append(_Run(stream, plain, now))

    def _note_rewriting(self, rank: int, stream: Stream) -> None:
        line = self._page.open
        if line and line.stream == stream and rank in line.ranks and self._is_next(rank, stream):
            line.rewritten = True

    def _end_tail(self, rank: int, stream: Stream, now: float) -> None:
        tail = self._tails.pop((rank, stream), None)
        if tail and tail.shape != "blank":
            self._append_lines(rank, stream, [tail.raw()], now, returned=tail.returned)

    def _is_next(self, rank: int, stream: Stream) -> bool:
        """Return whether nothing waits that must go out before the rank's incomplete line."""
        return not any(run.kind == "item" or run.stream == stream for run in self._queues[rank])

    def _visible_tails(self, shape: Literal["plain", "bar"]) -> Iterator[tuple[int, Stream, Tail]]:
        for (rank, stream), tail in self._tails.items():
            if tail.shape == shape and self._is_next(rank, stream):
                yield rank, stream, tail

    def _emit(self, now: float, *, everything: bool) -> None:
        self._continue_line()
        while self._step(now, everything=everything):
            pass
        self._end_abandoned_bars()
        self._show_tails(now)
        self._draw_bars(now)

    # Complete lines and rich items.

    def _step(self, now: float, *, everything: bool) -> bool:
        """Release what may go next; False if everything left has to wait."""
        if self._bars_queued:
            self._set_ended_bars_aside()
        groups: dict[_Entry, list[int]] = {}
        for rank, queue in self._queues.items():
            if queue:
                groups.setdefault((queue[0].kind, queue[0].key), []).append(rank)
        for entry, ranks in groups.items():
            if self._is_complete(entry, ranks) and (keys := self._keys_to_release(entry, ranks, groups)):
                self._release(ranks, keys)
                return True
        ready = self._ready(groups, now, everything=everything)
        if ready:
            self._release_some(ready, groups)
        return bool(ready)

    def _is_complete(self, entry: _Entry, ranks: Collection[int]) -> bool:
        if entry[0] == "bar":
            ranks = {*ranks, *self._ended.get(entry[1], ())}
        return 0 < len(self._active) <= len(ranks) and self._active.issubset(ranks)

    def _keys_to_release(self, entry: _Entry, ranks: list[int], groups: Mapping[_Entry, list[int]]) -> list[Any]:
        """Return what these ranks have in common, up to where a finished rank has the same after others."""
        keys = self._common_keys(ranks)
        if len(groups) == 1:
            return keys
        self._index()
        return self._waiting.only_with(len(ranks), entry[0], keys)

    def _ready(self, groups: Mapping[_Entry, list[int]], now: float, *, everything: bool) -> list[_Entry]:
        """Return the first entries that need not wait any longer."""
        if everything or not self._active:
            return list(groups)
        anchor = self._anchor(groups)
        return [
            entry
            for entry, ranks in groups.items()
            if any(now >= self._queues[rank][0].came + self._window for rank in ranks)
            or (anchor is not None and entry != anchor and self._waiting.any_has(ranks, anchor))
        ]

    def _anchor(self, groups: Mapping[_Entry, list[int]]) -> _Entry | None:
        """Return a first entry that all active ranks have: what some of them have before it waits for no other rank."""
        if not all(self._queues[rank] for rank in self._active):
            return None
        self._index()
        shared = [entry for entry in groups if self._waiting.all_have(self._active, entry)]
        return max(shared, key=lambda entry: len(groups[entry]), default=None)

    def _release_some(self, ready: Sequence[_Entry], groups: Mapping[_Entry, list[int]]) -> None:
        """Release first what no other rank will reach, so that the others' equal lines can still meet."""
        self._index()

        def age(entry: _Entry) -> float:
            return min(self._queues[rank][0].came for rank in groups[entry])

        alone = [entry for entry in ready if self._waiting.ranks_with(entry) == len(groups[entry])]
        for entry in sorted(alone, key=lambda entry: groups[entry][0]):
            ranks = groups[entry]
            self._release(ranks, self._waiting.only_with(len(ranks), entry[0], self._common_keys(ranks)))
        if not alone:
            entry = min(ready, key=lambda entry: (len(groups[entry]), age(entry)))
            self._release(groups[entry], [entry[1]])

    def _index(self) -> None:
        for rank, queue in self._queues.items():
            for run in reversed(queue):
                if run.indexed:
                    break
                self._waiting.add(rank, run.kind, run.keys[run.start :])
                run.indexed = True

    def _common_keys(self, ranks: Sequence[int]) -> list[Any]:
        """Return what the ranks have in common from their first entry on, at most `_BATCH` entries."""
        run, *others = (self._queues[rank][0] for rank in ranks)
        size = 8 if others else _BATCH  # grows while all are equal
        keys = run.keys[run.start : run.start + size]
        while others:
            equal = _equal_at_start(keys, [each.keys[each.start : each.start + size] for each in others])
            if equal < size or size >= _BATCH:
                return keys[:equal]
            size *= 4
            keys = run.keys[run.start : run.start + size]
        return keys

    def _release(self, ranks: Sequence[int], keys: list[Any]) -> None:
        """Write the first entries of these ranks, which are the same on all of them, and remove them."""
        runs = {rank: self._queues[rank][0] for rank in ranks}
        for rank in ranks:
            self._advance(rank, len(keys))
        run = runs[ranks[0]]
        if run.kind == "item":
            self._page.show(tuple(ranks), run.payload)
        elif run.kind == "bar":
            self._end_bar(keys[0], {rank: run.payload for rank, run in runs.items()})
        else:
            self._page.write_lines(run.stream, tuple(ranks), keys)

    def _advance(self, rank: int, count: int) -> None:
        queue = self._queues[rank]
        run = queue[0]
        end = run.start + count
        if run.indexed:
            self._waiting.remove(rank, run.kind, run.keys[run.start : end])
        run.start = end
        if end < len(run.keys):
            return
        queue.popleft()
        if run.kind == "bar":
            self._bars_queued -= 1

    # Incomplete lines.

    def _continue_line(self) -> None:
        """Continue the open line if all its ranks continue it in the same way."""
        line = self._page.open
        if line is None or not line.ranks:
            return
        if line.rewritten or any(self._rewrites(rank, line.stream) for rank in line.ranks):
            self._page.give_up_line()
        elif (keys := self._next_lines(line.ranks, line.stream)) is not None:
            for rank in line.ranks:
                self._advance(rank, 1)
            self._page.continue_line(keys)
            self._page.end_line()
        elif text := self._next_text(line.ranks, line.stream):
            self._page.continue_line(text)

    def _rewrites(self, rank: int, stream: Stream) -> bool:
        tail = self._tails.get((rank, stream))
        if tail is None or not tail.returned or not self._is_next(rank, stream):
            return False
        return "\r" in tail.raw().rstrip("\r")

    def _next_lines(self, ranks: Sequence[int], stream: Stream) -> str | None:
        """Return the rest of the open line, complete and equal on all its ranks."""
        queues = [self._queues[rank] for rank in ranks]
        if not all(queue and queue[0].kind == stream for queue in queues):
            return None
        line: str = queues[0][0].key
        return line if all(queue[0].key == line for queue in queues) else None

    def _next_text(self, ranks: Sequence[int], stream: Stream) -> str:
        """Return more of the open line, still incomplete and equal on all its ranks, taken from their tails."""
        tails = [self._tails.get((rank, stream)) for rank in ranks if self._is_next(rank, stream)]
        first = tails[0] if tails else None
        if first is None or len(tails) < len(ranks):
            return ""
        if not all(tail and tail.equals(first) for tail in tails):
            return ""
        text = first.raw().rstrip("\r")
        returns = first.raw()[len(text) :]  # held back: maybe of "\r\n", maybe of a bar to come
        for rank in ranks:
            tail = self._tails.pop((rank, stream))
            if returns:
                self._tails[rank, stream] = Tail(tail.came)
                self._tails[rank, stream].add(returns)
        return text

    def _show_tails(self, now: float) -> None:
        """Show incomplete lines that have waited long enough, equal ones as one."""
        plain = list(self._visible_tails("plain"))
        for rank, stream, tail in sorted(plain, key=lambda each: each[2].came):
            if (rank, stream) not in self._tails or now < tail.came + self._window:
                continue
            ranks = [other for other, where, theirs in plain if where == stream and theirs.equals(tail)]
            for other in ranks:
                del self._tails[other, stream]
            self._page.open_line(stream, tuple(sorted(ranks)), tail.text())

    # Progress bars.

    def _set_ended_bars_aside(self) -> None:
        """Let ranks whose bar has ended continue while the same bar still runs on other ranks."""
        for rank, queue in self._queues.items():
            while queue and queue[0].kind == "bar":
                bar: _Bar = queue[0].key
                if rank in self._ended.get(bar, ()) or not self._runs(bar, but=rank):
                    break
                self._ended.setdefault(bar, {})[rank] = queue[0].payload
                self._advance(rank, 1)

    def _runs(self, bar: _Bar, *, but: int | None = None) -> bool:
        """Return whether a rank shows this bar on its incomplete line, and has not just begun the next one."""
        ended = self._ended.get(bar, ())
        return any(
            tail.shape == "bar" and (stream, tail.signature) == bar and rank not in ended and rank != but
            for (rank, stream), tail in self._tails.items()
        )

    def _end_abandoned_bars(self) -> None:
        """End bars that are no longer shown by the ranks that have not ended them."""
        for bar in list(self._ended):
            runs = (run for queue in self._queues.values() for run in queue)
            if not self._runs(bar) and not any(run.kind == "bar" and run.key == bar for run in runs):
                self._end_bar(bar, {})

    def _end_bar(self, bar: _Bar, states: dict[int, str]) -> None:
        before = self._ended.pop(bar, {})
        if before.keys() & states.keys():  # the same ranks ended it twice: two bars, one after the other
            self._end_bar(bar, before)
            before = {}
        states = before | states
        self._page.end_bar(bar[0], summary(states), states)

    def _draw_bars(self, now: float) -> None:
        if not self._tails and self._page.open is None:
            return
        due, bars, line = self._next_drawing()
        if not line and not any(self._queues.values()):  # otherwise what waits there replaces the bar
            self._page.wipe()
        if due is not None and now >= due:
            self._page.draw(bars[0][0], line, self._own_bars())
            self._drawn_at = now

    def _own_bars(self) -> dict[int, str]:
        """Return what the bars of each rank show: one that it has ended only if it has begun no other on its stream."""
        own: dict[tuple[int, Stream], str] = {}
        for (stream, _), ended in self._ended.items():
            own.update({(rank, stream): state for rank, state in ended.items()})
        own.update({(rank, stream): tail.state for rank, stream, tail in self._visible_tails("bar")})
        by_rank: defaultdict[int, list[str]] = defaultdict(list)
        for rank, stream in sorted(own):
            by_rank[rank].append(own[rank, stream])
        return {rank: "  ".join(states) for rank, states in by_rank.items()}

    def _next_drawing(self) -> tuple[float | None, list[_Bar], str]:
        """Return when the progress line must be redrawn, if at all, its bars and its text."""
        states: defaultdict[_Bar, dict[int, str]] = defaultdict(dict)
        waited = float("inf")
        for rank, stream, tail in self._visible_tails("bar"):
            states[stream, tail.signature][rank] = tail.state
            waited = min(waited, tail.came + self._window)
        for bar in states.keys() & self._ended.keys():
            states[bar].update(self._ended[bar])
        bars = sorted(states, key=lambda bar: (min(states[bar]), bar))
        line = "  ".join(self._page.prefix(tuple(sorted(states[bar]))) + summary(states[bar]) for bar in bars)
        if not line or line == self._page.drawn:
            return None, bars, line
        return max(self._drawn_at + _REDRAW, waited), bars, line


@dataclass(slots=True)
class _Run:
    """What arrived together from one rank: lines of one stream, a rich item, or the last state of a bar."""

    kind: _Kind
    keys: list[Any]
    came: float
    payload: Any = None
    start: int = 0  # entries before it have gone out
    indexed: bool = False

    @property
    def key(self) -> Any:
        return self.keys[self.start]

    @property
    def stream(self) -> Stream:
        """The stream of the lines or the bar; not used for items."""
        stream: Stream = self.keys[0][0] if self.kind == "bar" else self.kind  # type: ignore[assignment]
        return stream


class _Waiting:
    """Which ranks have which entries waiting, anywhere in their queues."""

    def __init__(self) -> None:
        self._held: defaultdict[tuple[int, _Kind], Counter[Any]] = defaultdict(Counter)  # key -> how often
        self._ranks: defaultdict[_Kind, Counter[Any]] = defaultdict(Counter)  # key -> on how many ranks

    def add(self, rank: int, kind: _Kind, keys: list[Any]) -> None:
        held = self._held[rank, kind]
        self._ranks[kind].update([key for key in set(keys) if key not in held])
        held.update(keys)

    def remove(self, rank: int, kind: _Kind, keys: list[Any]) -> None:
        held = self._held[rank, kind]
        ranks = self._ranks[kind]
        for key in keys:
            left = held.pop(key) - 1
            if left:
                held[key] = left
                continue
            left = ranks.pop(key) - 1
            if left:
                ranks[key] = left

    def ranks_with(self, entry: _Entry) -> int:
        kind, key = entry
        return self._ranks[kind].get(key, 0)

    def only_with(self, count: int, kind: _Kind, keys: list[Any]) -> list[Any]:
        """Return the keys before the first one that a different number of ranks has."""
        ranks = self._ranks[kind]
        return keys[: next((i for i, key in enumerate(keys) if ranks[key] != count), len(keys))]

    def any_has(self, ranks: Iterable[int], entry: _Entry) -> bool:
        kind, key = entry
        return any(key in self._held[rank, kind] for rank in ranks)

    def all_have(self, ranks: Collection[int], entry: _Entry) -> bool:
        kind, key = entry
        return self.ranks_with(entry) >= len(ranks) and all(key in self._held[rank, kind] for rank in ranks)


def _equal_at_start(keys: list[Any], others: Iterable[list[Any]]) -> int:
    """Return how many items all these lists have in common at their start."""
    for other in others:
        if other != keys:
            pairs = zip(keys, other, strict=False)
            equal = next((i for i, (one, two) in enumerate(pairs) if one != two), min(len(keys), len(other)))
            keys = keys[:equal]
    return len(keys)
