"""What a line with carriage returns shows, and how one progress bar on several ranks becomes one.

Independent of queues, of the notebook, and of time except for the moment stored in a `Tail`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

_Shape: TypeAlias = Literal["plain", "bar", "blank"]

_LONGEST_BAR = 4096  # characters; longer text is data that happens to contain a carriage return

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# How tqdm's bars end: [00:03<00:06, 10.01it/s, loss=0.5]
_TIMES = re.compile(r"\[\d+(?::\d\d)+(?=[<,\]])")
_TIMES_TO_END = re.compile(_TIMES.pattern + r".*\]\s*$")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s?%")
_FRACTION = re.compile(r"(\d+(?:\.\d+)?)[kMGT]?\s?/\s?(\d+(?:\.\d+)?)[kMGT]?")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
# What differs between the states of one bar: numbers with exponents and unit prefixes, and the drawn bar.
_CHANGING = re.compile(
    r"\d[\d.,:]*(?:e[-+]?\d+)?(?:[kMGT]i?(?=B?\b))?|-(?::--)+|[\s#=>.+\-?\u2500-\u259f\u2800-\u28ff]|\b(?:nan|inf)\b"
)


class Tail:
    """The start of a line whose newline has not arrived yet, in linear time however it is cut.

    Attributes:
        came: When its first character arrived, in seconds of the caller's clock.
        size: Characters kept.
        returned: Whether it contains a carriage return.
    """

    __slots__ = ("_look", "_pieces", "came", "returned", "size")

    def __init__(self, came: float) -> None:
        self.came = came
        self.size = 0
        self.returned = False
        self._pieces: list[str] = []
        self._look: tuple[_Shape, str, str] | None = None

    def add(self, text: str) -> None:
        """Append what came next."""
        self._look = None
        self._pieces.append(text)
        self.size += len(text)
        if "\r" in text:
            self._pieces = [_last_two_states("".join(self._pieces))]
            self.size = len(self._pieces[0])
            self.returned = True

    def raw(self) -> str:
        """Return the text as printed, without states of a bar that no longer matter."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def text(self) -> str:
        """Return the text that is visible now."""
        return last_state(self.raw())[0] if self.returned else self.raw()

    def equals(self, other: Tail) -> bool:
        """Return whether the same was printed."""
        return self is other or (self.size == other.size and self.raw() == other.raw())

    @property
    def shape(self) -> _Shape:
        """Return the kind of text: plain, a line that rewrites itself, or one that has wiped itself out."""
        return self._seen()[0]

    @property
    def state(self) -> str:
        """Return what a bar shows now."""
        return self._seen()[1]

    @property
    def signature(self) -> str:
        """Return what all states of a bar, on all ranks, have in common."""
        return self._seen()[2]

    def _seen(self) -> tuple[_Shape, str, str]:
        if not self.returned or self.size > _LONGEST_BAR:
            return "plain", "", ""
        if self._look is None:
            self._look = _look_at(self.raw())
        return self._look


def _look_at(raw: str) -> tuple[_Shape, str, str]:
    state, rewritten = last_state(raw)
    if not state.strip():
        return "blank", "", ""
    if rewritten or raw.endswith("\r"):
        return "bar", state.rstrip(), signature(state)
    return "plain", "", ""


def _last_two_states(raw: str) -> str:
    body = raw.rstrip("\r")
    last = body.rfind("\r")
    if last < 0:
        return raw
    return raw[body.rfind("\r", 0, last) + 1 :]


def last_state(raw: str) -> tuple[str, bool]:
    """Return what is visible on a line after its carriage returns.

    Returns:
        The text after the last carriage return that is followed by something, and whether it rewrote the text before.
        After blanks it did not: a bar was wiped out, and this is a new text.
    """
    before, returned, state = raw.rstrip("\r").rpartition("\r")
    if not returned:
        return state, False
    wiped = before.rpartition("\r")[2]
    return state, not wiped.isspace()


def settle(line: str) -> tuple[str, str | None]:
    r"""Return what remains of a complete line (given without its newline) that may contain carriage returns.

    Returns:
        The text; and its signature when it is the last state of a bar, to be merged with other ranks'.
        A line that ends in "\r\n" keeps its "\r".
    """
    body = line.rstrip("\r")
    if "\r" not in body:
        return line, None
    state, rewritten = last_state(body)
    if rewritten and len(state) <= _LONGEST_BAR and _is_bar(state):
        return state, signature(state)
    return state + line[len(body) :], None


def _is_bar(state: str) -> bool:
    """Return whether this is only a bar, so that one rank's may represent those of others."""
    text = _CODES.sub("", state)
    if _TIMES.search(text):
        return _TIMES_TO_END.search(text) is not None
    return _PERCENT.search(text) is not None


def signature(state: str) -> str:
    """Return a bar without its numbers, its blocks and tqdm's bracket of times and values."""
    text = _TIMES_TO_END.sub("", _CODES.sub("", state))
    return _CHANGING.sub("", text)


def summary(states: Mapping[int, str]) -> str:
    """Return one line for the same bar on several ranks.

    Args:
        states: What the bar shows, by rank; at least one.

    Returns:
        The state of the rank that is furthest behind, and "(31-45 %)" when their percentages differ.
    """
    text = states[min(states, key=lambda rank: (_progress(states[rank]), rank))].rstrip()
    percents = [float(match[1]) for state in states.values() if (match := _PERCENT.search(state))]
    if not percents or min(percents) == max(percents):
        return text
    return f"{text} ({min(percents):g}-{max(percents):g} %)"


def _progress(state: str) -> tuple[float, float]:
    percent = _PERCENT.search(state)
    if fraction := _FRACTION.search(state):
        done, total = float(fraction[1]), float(fraction[2])
        return (float(percent[1]) if percent else 100 * done / total if total else 0.0), done
    if percent:
        return float(percent[1]), 0.0
    number = _NUMBER.search(state)
    return (float(number[0]) if number else 0.0), 0.0
