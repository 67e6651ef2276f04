"""Variables of the ranks for a page: all of them, the figures of one, and where it differs on two ranks."""

from __future__ import annotations

from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.requests.compared_variables import (
    Variable,
    difference,
    has_figures,
    look_at_statistics,
    look_at_variables,
    look_inside,
)
from nbdist.client.session.current import get_session
from nbdist.client.session.session import rank_set_of
from nbdist.errors import UsageError
from nbdist.panel.figures import finite
from nbdist.wire.pages.page_messages import FigureRow, VariableRow


def variable_rows(name: str) -> list[VariableRow]:
    """Return all variables; with a name only this one, compared however large it is."""
    rank_set = rank_set_of(get_session())
    return [_row(each) for each in look_at_variables(rank_set, rank_set.living(), [name] if name else [])]


def entry_rows(name: str) -> tuple[list[VariableRow], str]:
    """Return what differs in a variable, and what is left out."""
    rank_set = rank_set_of(get_session())
    (variable,) = look_at_variables(rank_set, rank_set.living(), [name])
    inside = look_inside(rank_set, variable)
    return [_row(each) for each in inside.differing], "; ".join(inside.notes)


def figure_rows(name: str) -> list[FigureRow]:
    """Return the figures of a tensor on each rank."""
    rank_set = rank_set_of(get_session())
    figures = look_at_statistics(rank_set, rank_set.living(), name)
    return [
        FigureRow(
            rank, finite(f.low), finite(f.mean), finite(f.high), finite(f.std), f.zeros, f.nans, f.infinite, f.bins
        )
        for rank, f in figures.items()
    ]


def gap(name: str, ranks: str) -> str:
    """Return in words where a tensor differs on two ranks."""
    rank_set = rank_set_of(get_session())
    one, other = _pair(rank_set, ranks)
    (variable,) = look_at_variables(rank_set, [one, other], [name])
    return difference(rank_set, variable, one, other)


def _pair(rank_set: RankSet, ranks: str) -> list[int]:
    chosen = rank_set.choose(ranks)
    if len(chosen) != 2:
        raise UsageError(f"two different ranks are compared, not {ranks!r}")
    return chosen


def _row(variable: Variable) -> VariableRow:
    return VariableRow(
        variable.name,
        variable.kind,
        variable.form,
        variable.device,
        variable.memory,
        variable.agreement,
        variable.odd,
        variable.agree,
        has_figures(variable),
        variable.inside,
    )
