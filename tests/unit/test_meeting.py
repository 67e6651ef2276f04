from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from nbdist.train.collective import meeting


def test_ranks_wait_for_each_other_as_long_as_a_collective_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBDIST_SAVE_LIMIT", raising=False)
    assert meeting.limit_of("save_state", None) == 1800
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        assert meeting.limit_of("save_state", None) == 20
        assert meeting.limit_of("save_state", 5) == 5
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("NBDIST_SAVE_LIMIT", "60")
    assert meeting.limit_of("save_state", None) == 60
