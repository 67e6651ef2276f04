from __future__ import annotations

from typing import Any

import pytest

from nbdist.client.ranks import observers
from nbdist.metrics.node.sample import Sample

LOOK = Sample(at=1.0)


class Noting(observers.Observer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def ranks_looked_at(self, sample: Sample) -> None:
        self.seen.append(sample)


class Failing(observers.Observer):
    def ranks_looked_at(self, sample: Sample) -> None:
        raise LookupError("no such rank")


def test_all_observers_are_called_until_they_have_had_enough() -> None:
    first, second = Noting(), Noting()
    stop_first, stop_second = observers.subscribe(first), observers.subscribe(second)
    observers.ranks_looked_at(LOOK)
    stop_first()
    stop_first()
    observers.ranks_looked_at(LOOK)
    stop_second()
    observers.ranks_looked_at(LOOK)
    assert (len(first.seen), len(second.seen)) == (1, 2)


def test_one_that_raises_has_its_traceback_shown_and_keeps_nothing_from_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    noting = Noting()
    stops = [observers.subscribe(Failing()), observers.subscribe(noting)]
    observers.ranks_looked_at(LOOK)
    for stop in stops:
        stop()
    assert noting.seen == [LOOK]
    assert "LookupError: no such rank" in capsys.readouterr().err
