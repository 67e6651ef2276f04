"""The variables of ranks side by side: which names they have, and whether their values agree to the bit.

In one that holds others (a dict, a model, an optimizer), which entries differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted, nearest, size, table
from nbdist.client.ranks.rank_set import RankSet
from nbdist.errors import UsageError
from nbdist.wire.questions.held_variables import (
    Entries,
    Figures,
    GetElements,
    GetEntries,
    GetFigures,
    GetGap,
    GetVariables,
    Held,
    Variables,
)
from nbdist.wire.questions.question import A, NoAnswer, Question

_LIMIT = 5.0  # seconds for all variables
NAMED_LIMIT = 120.0  # seconds for one, which may be large
_ELEMENTS = 1 << 20  # that are compared at once
_FORMS = 6  # that a row shows, of types, shapes and devices on different ranks
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Variable:
    """One name on all ranks that were asked.

    Attributes:
        name: The name.
        held: What ranks hold.
        groups: These ranks, those that hold the same together, the largest group first.
        missing: The ranks that have no such name.
        known: Whether it is known which ranks agree.
    """

    name: str
    held: Mapping[int, Held]
    groups: list[list[int]]
    missing: list[int] = field(default_factory=list)
    known: bool = True

    @property
    def most(self) -> Held:
        """What most ranks hold."""
        return self.held[self.groups[0][0]]

    @property
    def kind(self) -> str:
        """Its type; where ranks differ in it, each with its ranks: "int (rank 0), str (ranks 1-3)"."""
        return _by_ranks({rank: held.kind for rank, held in self.held.items()})

    @property
    def form(self) -> str:
        """Its shape and dtype, likewise."""
        return _by_ranks({rank: form_of(held) for rank, held in self.held.items()})

    @property
    def device(self) -> str:
        """Where its bytes are, likewise; GPUs that differ only in their number, as those of ranks do, are one."""
        devices = {rank: held.device for rank, held in self.held.items()}
        if len(set(devices.values())) > 1:
            devices = {rank: re.sub(r":\d+", "", device) for rank, device in devices.items()}
        return _by_ranks(devices)

    @property
    def memory(self) -> str:
        """How much its values take on a rank, or from how much to how much; "": not known."""
        sizes = [held.size for held in self.held.values() if held.size is not None]
        ends = [size(each) for each in (min(sizes), max(sizes))] if sizes else []
        return " to ".join(dict.fromkeys(ends))

    @property
    def agree(self) -> bool | None:
        """Whether the ranks that have it agree; None: not known, or they are not meant to."""
        return len(self.groups) == 1 if self.known and not self.most.part else None

    @property
    def inside(self) -> bool:
        """Whether there may be entries that differ."""
        return self.agree is not True and all(held.inside for held in self.held.values())

    @property
    def odd(self) -> list[int]:
        """The ranks that do not hold what most do; empty if ranks agree, or it is not known, or no group is larger."""
        if not self.known or self.most.part:
            return []
        sizes = [len(ranks) for ranks in self.groups]
        if len(sizes) > 1 and sizes[0] == sizes[1]:
            return []
        return sorted(rank for ranks in self.groups[1:] for rank in ranks)

    @property
    def agreement(self) -> str:
        """Whether ranks agree, for people."""
        absent = f"; not on {describe_ranks(self.missing)}" if self.missing else ""
        if self.most.part:
            return f"sharded{absent}"
        if not self.known:
            return f"not compared: {self.most.why}{absent}"
        if len(self.groups) == 1:
            ranks = self.groups[0]
            return f"only on {describe_ranks(ranks)}" if len(ranks) == 1 and self.missing else f"same{absent}"
        if odd := self.odd:
            return f"{describe_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'}{absent}"
        return f"{len(self.groups)} different values{absent}"


def describe_variables(rank_set: RankSet, ranks: Sequence[int], name: str = "", diff: str | None = None) -> str:
    """Return a table of all variables, or what there is to know of one.

    Args:
        rank_set: Whose ranks.
        ranks: The ranks.
        name: Of the one; empty: all.
        diff: Two ranks, between which this one is compared instead.

    Raises:
        UsageError: There is no such variable, or it is not two ranks.
    """
    found = look_at_variables(rank_set, ranks, [name] if name else [])
    inside = look_inside(rank_set, found[0]) if name and diff is None else Inside([], [])
    parts = [render_variables([*found, *inside.differing]), *inside.notes]
    if diff is not None:
        pair = rank_set.choose(diff)
        if len(pair) != 2:
            raise UsageError(f"--diff takes two ranks, not {diff!r}: `--diff 0,3`")
        parts.append(difference(rank_set, found[0], *pair))
    elif name and has_figures(found[0]):
        parts.append(render_statistics(look_at_statistics(rank_set, ranks, name)))
    return "\n".join(parts)


def look_at_variables(rank_set: RankSet, ranks: Sequence[int], names: Sequence[str] = ()) -> list[Variable]:
    """Return the variables of ranks.

    Args:
        rank_set: Whose ranks.
        ranks: The ranks.
        names: Only these, compared however large they are; empty: all.

    Raises:
        UsageError: No rank has one of the names, or no rank has answered.
    """
    answers = rank_set.traffic.ask(ranks, GetVariables(list(names)), timeout=NAMED_LIMIT if names else _LIMIT)
    found = {rank: answer for rank, answer in answers.items() if isinstance(answer, Variables)}
    if not found:
        raise UsageError(f"{describe_ranks(ranks)} did not answer; `%distributed stacks` shows where they are")
    by_name: dict[str, dict[int, Held]] = {}
    for rank, answer in sorted(found.items()):
        for held in answer.held:
            by_name.setdefault(held.name, {})[rank] = held
    for name in names:
        if name not in by_name:
            raise _no_such(name, rank_set)
    return [compared(name, by_name[name], list(found)) for name in sorted(by_name)]


def _no_such(name: str, rank_set: RankSet) -> UsageError:
    known = {each for names in rank_set.traffic.names.values() for each in names}
    root = re.split(r"\W", name.strip(), maxsplit=1)[0]
    if root != name and root in known:
        return UsageError(f"no rank has an entry {name}; `%distributed variables {root}` shows those that differ")
    close = nearest(root, known, 3)
    hint = f"; similar names: {', '.join(sorted(close))}" if close else ""
    return UsageError(f"no rank has a variable {name!r}{hint}. `%distributed variables` shows all")


def compared(name: str, held: Mapping[int, Held], asked: Sequence[int]) -> Variable:
    """Return what ranks hold under a name as one; `asked`: all ranks that might hold something."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, each in held.items():
        key = (each.kind, tuple(each.shape or ()), each.dtype, each.digest)
        groups.setdefault(key, []).append(rank)
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    missing = sorted(set(asked) - held.keys())
    forms = {key[:3] for key in groups}
    known = len(forms) > 1 or all(each.digest for each in held.values())
    return Variable(name, held, ordered, missing, known)


def render_variables(variables: Sequence[Variable]) -> str:
    """Return a table with a row for each variable."""
    if not variables:
        return "no variables: cells on these ranks have not set any"
    rows = [(each.name, each.kind, each.form, each.device, each.memory, each.agreement) for each in variables]
    return table(rows, ("name", "type", "shape", "device", "memory", "ranks"))


def form_of(held: Held) -> str:
    """Return shape and dtype: "float32 [1024, 512]"; for a container how many values it has."""
    if held.shape is None:
        return ""
    return f"{held.dtype} {held.shape}" if held.dtype else counted(held.shape[0], "value")


def _by_ranks(texts: Mapping[int, str]) -> str:
    """Return what is so on all ranks; else each text with its ranks, that of most ranks first."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1:
        return next(iter(ranks_of))
    ranks_of.pop("", None)
    ordered = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1]))
    shown = [f"{text} ({describe_ranks(ranks)})" for text, ranks in ordered[:_FORMS]]
    return ", ".join([*shown, f"and {len(ordered) - _FORMS:,} others"] if len(ordered) > _FORMS else shown)


# --- one variable


def has_figures(variable: Variable) -> bool:
    """Return whether it is a tensor or an array of real numbers, on all ranks that have it."""
    return all(held.dtype != "" and not held.dtype.startswith("complex") for held in variable.held.values())


def look_at_statistics(rank_set: RankSet, ranks: Sequence[int], name: str) -> dict[int, Figures]:
    """Return the figures of a tensor on each rank, with histograms over a common range.

    Raises:
        UsageError: It is not a tensor of numbers, or a cell is running.
    """
    first = _figures(rank_set, ranks, GetFigures(name))
    lows = [each.low for each in first.values() if each.low is not None]
    highs = [each.high for each in first.values() if each.high is not None]
    if not lows:
        return first
    return _figures(rank_set, ranks, GetFigures(name, min(lows), max(highs)))


def _figures(rank_set: RankSet, ranks: Sequence[int], question: GetFigures) -> dict[int, Figures]:
    answers = rank_set.traffic.ask(ranks, question, timeout=NAMED_LIMIT)
    found = {rank: each for rank, each in sorted(answers.items()) if isinstance(each, Figures)}
    if not found:
        why = next((each.why for each in answers.values() if isinstance(each, NoAnswer)), "no rank has answered")
        raise UsageError(f"no figures of {question.name!r}: {why}")
    return found


def render_statistics(figures: Mapping[int, Figures]) -> str:
    """Return a table with a row for each rank."""
    rows = [
        (
            rank,
            *map(_number, (each.low, each.mean, each.high, each.std)),
            each.zeros,
            each.nans,
            each.infinite,
            bars(each),
        )
        for rank, each in figures.items()
    ]
    return table(
        rows, ("rank", "min", "mean", "max", "std", "zeros", "NaN", "inf", "histogram, min to max of all ranks")
    )


def bars(figures: Figures) -> str:
    """Return a histogram as one line."""
    most = max(figures.bins, default=0)
    return "".join(_BARS[math.ceil(count / most * (len(_BARS) - 1)) if most else 0] for count in figures.bins)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.6g}"


def difference(rank_set: RankSet, variable: Variable, one: int, other: int) -> str:
    """Return in words where a tensor differs on two ranks.

    Raises:
        UsageError: It is not a tensor on one of them, or a cell is running.
    """
    forms = variable.held
    first, second = forms.get(one), forms.get(other)
    if first is None or second is None or (first.shape, first.dtype) != (second.shape, second.dtype):
        there = [
            f"rank {rank}: {form_of(forms[rank]) or forms[rank].kind if rank in forms else 'none'}"
            for rank in (one, other)
        ]
        raise UsageError(f"{variable.name} has different shapes or types: {'; '.join(there)}")
    if not first.dtype or first.shape is None:
        inside = f"; `%distributed variables {variable.name}` shows its entries that differ" if first.inside else ""
        raise UsageError(
            f"{variable.name} is a {first.kind}: only tensors and arrays are compared element by element{inside}"
        )
    if first.part:
        raise UsageError(f"{variable.name} is sharded: each rank has its own part of it")
    return _compared(rank_set, variable.name, math.prod(first.shape), one, other)


def _compared(rank_set: RankSet, name: str, total: int, one: int, other: int) -> str:
    count, first, most = 0, -1, 0.0
    for start in range(0, total, _ELEMENTS):
        theirs = _answer_of(rank_set, one, GetElements(name, start, _ELEMENTS))
        gap = _answer_of(rank_set, other, GetGap(name, start, theirs.data))
        first = gap.first if first < 0 else first
        count, most = count + gap.count, max(most, gap.most)
    if count == 0:
        return f"{name} is the same on ranks {one} and {other}"
    return (
        f"{name} differs on ranks {one} and {other}: {counted(count, 'element')} of {total:,}, by up to {most:.6g}; "
        f"the first at flat index {first}"
    )


def _answer_of(rank_set: RankSet, rank: int, question: Question[A]) -> A:
    answer = rank_set.traffic.ask([rank], question, timeout=NAMED_LIMIT).get(rank)
    if answer is None or isinstance(answer, NoAnswer):
        raise UsageError(f"rank {rank} could not be compared: {answer.why if answer is not None else 'no answer'}")
    return answer


_ROWS = 100  # entries that are shown
_SPEAKERS = 16  # ranks whose entries are compared


@dataclass(frozen=True)
class Inside:
    """What differs in a variable.

    Attributes:
        differing: Its entries that differ, at any depth, then those that could not be compared; at most `_ROWS`.
        notes: What is not among them, a sentence each.
    """

    differing: list[Variable]
    notes: list[str]


def look_inside(rank_set: RankSet, variable: Variable) -> Inside:
    """Return the entries that differ between ranks; of ranks that hold the same, one answers for all."""
    if not variable.inside:
        return Inside([], [])
    for_whom = _speakers(variable)
    answers = rank_set.traffic.ask(list(for_whom)[:_SPEAKERS], GetEntries(variable.name), timeout=NAMED_LIMIT)
    found = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, Entries)}
    silent = sorted(rank for speaker, ranks in for_whom.items() if speaker not in found for rank in ranks)
    cut = any(answer.more for answer in found.values())
    by_name = _by_name(found)
    if cut:  # what one rank lacks may come later there
        by_name = {name: held for name, held in by_name.items() if len(held) == len(found)}
    differing = [each for each in (compared(*item, list(found)) for item in by_name.items()) if _differs(each)]
    differing.sort(key=lambda each: each.agree is None)
    notes = []
    if len(differing) > _ROWS:
        notes.append(f"and {len(differing) - _ROWS:,} more")
    if cut:
        notes.append(f"of {variable.name} only the first {len(by_name):,} entries are compared")
    if silent:
        notes.append(f"entries of {describe_ranks(silent)} are not compared")
    if variable.agree is False and not (differing or notes):
        notes.append(f"{variable.name} has the same entries on these ranks, in another order")
    return Inside([_for_all(each, for_whom) for each in differing[:_ROWS]], notes)


def _speakers(variable: Variable) -> dict[int, list[int]]:
    """Return ranks that can answer for others, and for which: where it is not known who agrees, each for itself."""
    groups = [
        ranks
        for group in variable.groups
        for ranks in ([group] if variable.held[group[0]].digest else [[rank] for rank in group])
    ]
    return {ranks[0]: ranks for ranks in groups}


def _by_name(answers: Mapping[int, Entries]) -> dict[str, dict[int, Held]]:
    found: dict[str, dict[int, Held]] = {}
    for rank, answer in answers.items():
        for held in answer.held:
            found.setdefault(held.name, {})[rank] = held
    return found


def _differs(entry: Variable) -> bool:
    return bool(entry.missing) or not (entry.agree or entry.most.part)


def _for_all(entry: Variable, for_whom: Mapping[int, Sequence[int]]) -> Variable:
    """Return an entry of ranks that answered for others as one of all of these."""
    held = {rank: each for speaker, each in entry.held.items() for rank in for_whom[speaker]}
    missing = [rank for speaker in entry.missing for rank in for_whom[speaker]]
    return compared(entry.name, held, [*held, *missing])
