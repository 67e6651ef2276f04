"""What the ranks of this kernel's session have needed so far, for `nbdist run` with a notebook. Runs in its kernel."""

from __future__ import annotations

import dataclasses
import json
import sys

from nbdist.errors import NbdistError
from nbdist.program.costs import ProgramCosts, costs_so_far


def costs() -> str:
    """Return what each rank has needed, as JSON; an empty list if there are no ranks, or if they are at work."""
    return json.dumps([dataclasses.astuple(each) for each in _of_ranks()])


def _of_ranks() -> list[ProgramCosts]:
    if "nbdist.client.session.current" not in sys.modules:
        return []
    from nbdist.client.session.current import living_session
    from nbdist.client.session.session import rank_set_of

    session = living_session()
    try:
        return [] if session is None else rank_set_of(session).set_up(costs_so_far)
    except NbdistError:
        return []
