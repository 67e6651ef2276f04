"""What differs in a variable that holds others: a dict or a list, a model by its weights, an optimizer by its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist.base.ranks import describe_ranks
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.requests.compared_variables import NAMED_LIMIT, Variable, compared
from nbdist.wire.questions.held_variables import Entries, GetEntries, Held

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
