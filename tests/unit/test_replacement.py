"""Ranks are replaced: what the notebook hears of it, and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbdist.controller.base.rank_order import Rank
from nbdist.controller.cells.cell_history import CellHistory
from nbdist.controller.cells.recovery import Recovery
from nbdist.controller.ranks.replacement import Healing, MembershipChange
from nbdist.wire.base.message import Message
from nbdist.wire.messages.healing import EndRanks, HealFailed, Post, Respawn
from nbdist.wire.messages.life import Place, RankInfo


class Places:
    """Three idle ranks, of which the last one has died. It records what is sent."""

    incarnation = 1

    def __init__(self) -> None:
        self.told: list[Message] = []
        self.agent: list[Message] = []
        self.working: set[int] = set()

    def to_rank(self, lane: str, rank: int, message: Message) -> None: ...

    def to_notebook(self, message: Message) -> None:
        self.told.append(message)

    def respawn(self, rank: Rank) -> None:
        self.agent.append(Respawn(1, rank.slot, rank.life, Post(rank.rank, 3, Place(), rank.slot)))

    def end_rank(self, rank: int) -> None:
        self.agent.append(EndRanks(1, [rank]))

    def dismiss(self, ranks: Sequence[int]) -> None: ...

    def resize(self, numbers: Mapping[int, int], group: str) -> None: ...

    def idle(self) -> list[int]:
        return [0, 1]

    def newcomer(self, rank: int) -> Rank:
        return Rank(rank, self.told.append, lambda *_: None, lambda _: None, rank, 1)

    def settle(self, newcomers: Sequence[Rank]) -> list[RankInfo]:
        return [RankInfo(rank.rank, 7, "cpu") for rank in newcomers]

    def ask(self) -> Any:
        return lambda ranks, question, handler=None: None

    def admit(self, newcomers: Sequence[int], over: Callable[[Recovery], None], now: float) -> None: ...

    def quiet(self) -> bool:
        return self.working == set()

    def busy(self) -> set[int]:
        return self.working


def begun() -> tuple[Places, Healing]:
    """A replacement whose newcomer is being forked."""
    places = Places()
    healing = Healing(places, MembershipChange([2], []), 10.0, CellHistory(), 100.0)
    healing.go_on(100.0)
    assert places.agent == [Respawn(1, 2, 1, Post(2, 3, Place(), 2))]
    return places, healing


def test_a_newcomer_that_dies_is_one_failure() -> None:
    places, healing = begun()
    healing.ended(2, "exit code 3")
    assert healing.over and [type(message) for message in places.told] == [HealFailed]


def test_a_failure_is_told_once_the_newcomer_has_ended() -> None:
    places, healing = begun()
    healing.fail("it was interrupted")
    assert places.agent[1:] == [EndRanks(1, [2])] and not healing.over and places.told == []
    healing.ended(2, "SIGKILL")
    assert healing.over and places.told == [HealFailed("it was interrupted")]


def test_a_rank_that_stays_in_its_cell_is_named_with_what_replaces_it() -> None:
    places = Places()
    places.working = {0, 2}
    healing = Healing(places, MembershipChange([2], []), 10.0, CellHistory(), 100.0)
    healing.go_on(100.0)
    assert places.told == [] and healing.due is not None
    healing.go_on(healing.due)
    assert isinstance(places.told[0], HealFailed)
    assert places.told[0].text.startswith("rank 0 still runs a cell")
    assert "`%distributed heal -r 0,2 --kill` replaces it, too" in places.told[0].text


def test_a_newcomer_that_does_not_come_up_is_given_up() -> None:
    places, healing = begun()
    healing.go_on(110.0)
    assert places.agent[1:] == [EndRanks(1, [2])] and not healing.over
