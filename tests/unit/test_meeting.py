from __future__ import annotations

from datetime import timedelta

import pytest

from nbdist.train.collective import meeting
from tests.support.group_of_one import group_of_one


def test_ranks_wait_for_each_other_as_long_as_a_collective_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBDIST_SAVE_LIMIT", raising=False)
    assert meeting.limit_of("save_state", None) == 1800
    with group_of_one(timeout=timedelta(seconds=20)):
        assert meeting.limit_of("save_state", None) == 20
        assert meeting.limit_of("save_state", 5) == 5
    monkeypatch.setenv("NBDIST_SAVE_LIMIT", "60")
    assert meeting.limit_of("save_state", None) == 60
