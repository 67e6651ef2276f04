"""`%distributed variables`: what ranks hold, and whether they agree."""

from __future__ import annotations

import argparse

from nbdist.client.requests.compared_variables import (
    Inside,
    difference,
    has_figures,
    look_at_statistics,
    look_at_variables,
    look_inside,
    render_statistics,
    render_variables,
)
from nbdist.client.session.current import get_session
from nbdist.client.session.session import rank_set_of
from nbdist.errors import UsageError


def show_variables(arguments: argparse.Namespace) -> None:
    """Print a table of all variables, or what there is to know of one."""
    rank_set = rank_set_of(get_session())
    ranks = rank_set.choose(rank_set.living() if arguments.ranks is None else arguments.ranks)
    if arguments.diff is not None and arguments.name is None:
        raise UsageError("--diff takes a variable: `%distributed variables w --diff 0,3`")
    found = look_at_variables(rank_set, ranks, [arguments.name] if arguments.name else [])
    inside = look_inside(rank_set, found[0]) if arguments.name and arguments.diff is None else Inside([], [])
    print("\n".join([render_variables([*found, *inside.differing]), *inside.notes]))
    if arguments.diff is not None:
        pair = rank_set.choose(arguments.diff)
        if len(pair) != 2:
            raise UsageError(f"--diff takes two ranks, not {arguments.diff!r}: `--diff 0,3`")
        print(difference(rank_set, found[0], *pair))
    elif arguments.name and has_figures(found[0]):
        print(render_statistics(look_at_statistics(rank_set, ranks, arguments.name)))
