"""Puts text and rich items into the notebook: in order, no faster than its server accepts them, and never too much.

Uses IPython's publishing; independent of ranks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from nbdist import shells
from nbdist.base.text import size

FOLD_LIMIT = 8_000_000  # characters of a cell that are shown in full
FOLD_TAIL = 1_000_000
_HURRIED_TAIL = 200_000

# Jupyter's server drops output above 1 MB/s of streams or 1,000 messages/s, measured over 3 s: stay below both.
_RATE_WINDOW = 3.2
_RATE_BYTES = 2_400_000
_RATE_BYTES_HURRIED = 2_800_000
_RATE_MESSAGES = 1_500
# A kernel drops what comes while 1,000 messages wait for a front end to read, the end of the cell among them. Where no
# server is between the two, the front end is as fast as the machine lets it be.
_RATE_ITEM_BYTES = 64_000_000
_TEXT_GAP = 0.02
_CHUNK = 200_000
_ENVELOPE = 1_000  # bytes of a message besides its text
_CROWD = 200  # waiting items
_BULK = 100  # waiting texts: stdout and stderr then go out in larger pieces, each in its own order

Kind: TypeAlias = Literal["display", "update", "clear"]


class Pace:
    """How fast all cells of one kernel together may publish.

    Args:
        clock: A monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, int, int]] = deque()  # when, bytes of text, bytes of items
        self._bytes = self._item_bytes = 0
        self._last_text = float("-inf")

    def wait(self, text: bool, hurried: bool) -> float:
        """Return the seconds until the next message may go out."""
        with self._lock:
            now = self._clock()
            while self._recent and now - self._recent[0][0] > _RATE_WINDOW:
                _, size, item_size = self._recent.popleft()
                self._bytes -= size
                self._item_bytes -= item_size
            wait = self._last_text + _TEXT_GAP - now if text else 0.0
            limit = _RATE_BYTES_HURRIED if hurried else _RATE_BYTES
            full = self._bytes + _CHUNK > limit if text else self._item_bytes >= _RATE_ITEM_BYTES
            if self._recent and (full or len(self._recent) >= _RATE_MESSAGES):
                wait = max(wait, self._recent[0][0] + _RATE_WINDOW - now)
            return max(0.0, wait)

    def note(self, text: bool, length: int) -> None:
        """Count a message that goes out. The server's limit counts only the bytes of text."""
        with self._lock:
            now = self._clock()
            if text:
                self._last_text = now
                self._bytes += length
            else:
                self._item_bytes += length
            self._recent.append((now, length, 0) if text else (now, 0, length))


_pace = Pace()


def _pace_of_server() -> Pace | None:
    """Return the pace to keep if a Jupyter server is between this kernel and the page."""
    return _pace if "JPY_SESSION_NAME" in os.environ else None


class Publisher:
    """The output area of one cell.

    Args:
        cell: The cell's number, for the line shown where text was folded.
        pace: How fast it may publish; None: as its server allows, or without one as a kernel can.
    """

    def __init__(self, cell: int, pace: Pace | None = None) -> None:
        self._cell = cell
        self._pace = pace or _pace_of_server()
        self._item_pace = self._pace or (_pace if shells.in_kernel() else None)
        # As they are when the cell starts: another cell may have redirected them by the time this one prints late.
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._queue: deque[tuple[str, Any]] = deque()
        self._size = 0
        self._tail: deque[tuple[str, str]] = deque()
        self._tail_limit = FOLD_TAIL
        self._tail_size = 0
        self._folded = 0
        self._open = False  # whether the last text ends within a line
        self._hurried = False
        self._finished = False

    def text(self, stream: str, text: str) -> None:
        """Add text for "stdout" or "stderr"."""
        room = max(0, FOLD_LIMIT - self._size)
        if self._folded or len(text) > room:
            end = 0 if self._folded else text.rfind("\n", 0, room) + 1 or room
            self._enqueue(stream, text[:end])
            self._fold(stream, text[end:])
        else:
            self._enqueue(stream, text)

    def item(self, kind: Kind, data: dict[str, Any], metadata: dict[str, Any], display_id: str = "") -> None:
        """Add a rich item."""
        self._queue.append(("item", (kind, data, metadata, display_id)))

    def clear(self, wait: bool) -> None:
        """Empty the output area: now, or when the next item or text comes."""
        # Waiting output would be cleared at once; updates may be meant for another cell's output.
        self._queue = deque(each for each in self._queue if each[0] == "item" and each[1][0] == "update")
        self._tail.clear()
        self._size = self._folded = self._tail_size = 0
        self._open = False
        self._queue.append(("item", ("clear", {"wait": wait}, {}, "")))

    def pump(self) -> None:
        """Publish what may go out now."""
        while self._queue and self._wait() <= 0:
            self._publish_next()

    @property
    def crowded(self) -> bool:
        """Whether more items wait than is good."""
        return len(self._queue) > _CROWD and self._queue[0][0] == "item"

    def due(self) -> float | None:
        """Return the seconds until `pump` has something to do."""
        return self._wait() if self._queue else None

    def complete(self) -> None:
        """Publish everything that waits, however long the page takes. Call it in a thread that may sleep."""
        while (due := self.due()) is not None:
            time.sleep(due)
            self.pump()

    def finish(self) -> None:
        """End the cell: unfold its last part. What comes after that is shown as long as there is room."""
        if self._hurried:
            self.hurry()
        self._finished = True
        if not self._folded:
            return
        if self._folded > self._tail_size:
            self._begin_tail_with_a_line()
            self._say(self._note(self._folded - self._tail_size))
        for stream, text in self._tail:
            self._enqueue(stream, text)
        self._tail.clear()
        self._folded = self._tail_size = 0

    def hurry(self) -> None:
        """Fold what waits, now and at the end, if the page would take long for it: the user wants the notebook back."""
        self._hurried = True
        if self._pace is None or self._waiting() + self._tail_size <= _HURRIED_TAIL:
            return
        self._tail_limit = _HURRIED_TAIL
        texts = [each for each in self._queue if each[0] != "item"]
        self._queue = deque(each for each in self._queue if each[0] == "item")
        self._size -= sum(len(text) for _, text in texts)
        self._folded -= self._tail_size
        texts += self._tail
        self._tail.clear()
        self._tail_size = 0
        for stream, text in texts:
            self._fold(stream, text)

    def abandon(self) -> None:
        """Stop showing the text that waits."""
        hidden = self._waiting()
        self._queue = deque(each for each in self._queue if each[0] == "item")
        self._hurried = True
        if hidden:
            self._say(self._note(hidden))

    def _enqueue(self, stream: str, text: str) -> None:
        if text:
            self._size += len(text)
            self._open = not text.endswith("\n")
            self._queue.append((stream, text))

    def _say(self, line: str) -> None:
        self._enqueue("stdout", "\n" * self._open + f"… {line} …\n")

    def _note(self, hidden: int) -> str:
        return f"{size(hidden)} not shown here; `%distributed logs --cell {self._cell}` has everything"

    def _waiting(self) -> int:
        return sum(len(content) for kind, content in self._queue if kind != "item")

    def _fold(self, stream: str, text: str) -> None:
        if self._finished:
            if not self._folded:
                self._say(f"`%distributed logs --cell {self._cell}` has the rest of this cell's output")
            self._folded += len(text)
            return
        self._folded += len(text)
        self._tail.append((stream, text[-self._tail_limit :]))
        self._tail_size += len(self._tail[-1][1])
        while self._tail_size > self._tail_limit:
            self._shorten_tail(self._tail_size - self._tail_limit)

    def _shorten_tail(self, excess: int) -> None:
        stream, oldest = self._tail.popleft()
        if len(oldest) > excess:
            self._tail.appendleft((stream, oldest[excess:]))
        self._tail_size -= min(len(oldest), excess)

    def _begin_tail_with_a_line(self) -> None:
        end = self._tail[0][1].find("\n") + 1
        if 0 < end < len(self._tail[0][1]):
            self._shorten_tail(end)

    def _wait(self) -> float:
        """Return the seconds until the first in the queue may go out."""
        is_text = self._queue[0][0] != "item"
        pace = self._pace if is_text else self._item_pace
        return 0.0 if pace is None else pace.wait(is_text, self._hurried)

    def _publish_next(self) -> None:
        kind, content = self._queue.popleft()
        if kind == "item":
            if self._item_pace is not None:
                self._item_pace.note(False, _item_size(content[1]))
            _publish_item(*content)
            return
        text = self._gather(kind, content)
        if self._pace is not None:
            self._pace.note(True, _encoded_size(text))
        self._streams[kind].write(text)
        self._streams[kind].flush()

    def _gather(self, stream: str, text: str) -> str:
        """Return one message's worth of text."""
        texts, length = [text], len(text)
        others: list[tuple[str, Any]] = []
        wanted = {"stdout", "stderr"} if len(self._queue) > _BULK else {stream}
        while length < _CHUNK and self._queue and self._queue[0][0] in wanted:
            entry = self._queue.popleft()
            if entry[0] == stream:
                texts.append(entry[1])
                length += len(entry[1])
            else:
                others.append(entry)
        self._queue.extendleft(reversed(others))
        text = "".join(texts)
        if self._pace is None:
            return text
        end = _CHUNK
        while (encoded := _encoded_size(text[:end])) > _CHUNK:
            end = min(end, len(text)) * _CHUNK // encoded - 1
        if end < len(text):
            self._queue.appendleft((stream, text[end:]))
        return text[:end]


def _encoded_size(text: str) -> int:
    """Return the size in bytes of the message that carries the text."""
    return len(json.dumps(text, ensure_ascii=False).encode(errors="replace")) + _ENVELOPE


def _item_size(data: dict[str, Any]) -> int:
    return sum(len(value) for value in data.values() if isinstance(value, (str, bytes)))


def can_update() -> bool:
    """Return whether shown output can be replaced: in a notebook yes, in a terminal no."""
    return shells.in_kernel()


def _publish_item(kind: Kind, data: dict[str, Any], metadata: dict[str, Any], display_id: str) -> None:
    shell = shells.current()
    if shell is None:
        if "text/plain" in data:
            print(data["text/plain"])
    elif kind == "clear":
        shell.display_pub.clear_output(wait=data["wait"])
    else:
        from IPython.display import publish_display_data

        transient = {"display_id": display_id} if display_id else None
        publish_display_data(data=data, metadata=metadata, transient=transient, update=kind == "update")
