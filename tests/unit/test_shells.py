"""What an IPython shell keeps alive, and what is found when it lets go of a failure."""

from __future__ import annotations

import builtins
import pickle
import sys
from typing import Any

import pytest

from nbdist import shells
from nbdist.errors import RankError, RankFailure


def test_what_an_error_came_from_is_found() -> None:
    cause, context = ValueError("cause"), KeyError("context")
    error = RuntimeError("last")
    error.__cause__, cause.__context__ = cause, context
    assert set(shells.chain(error)) == {error, cause, context}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_the_members_of_a_group_are_found() -> None:
    members = [ValueError("one"), KeyError("two")]
    group: Any = vars(builtins)["ExceptionGroup"]("both", members)
    assert set(shells.chain(group)) == {group, *members}


def test_an_error_of_ranks_is_no_group_though_it_has_exceptions_by_rank() -> None:
    failure = RankFailure(0, "raised", "ValueError", "x", "", 0.0, pickle.dumps(ValueError("x")))
    error = RankError("rank 0 raised ValueError: x", {0: failure})
    assert shells.chain(error) == [error]
