"""Ranks are replaced: what the notebook hears of it, and how often."""

from __future__ import annotations

from nbdist.controller.cells.running_cells import Cells
from nbdist.controller.cells.waiting_cells import WaitingCells
from nbdist.controller.ranks.membership import Membership
from nbdist.controller.ranks.replacement import MembershipChange, Replacement
from nbdist.wire.messages.healing import EndRanks, HealFailed, Post, Respawn
from nbdist.wire.messages.life import Place
from tests.support.controller_parts import Sent, keep_busy, kill, roster_of


class Ranks:
    """Three idle ranks, of which the last one has died."""

    def __init__(self) -> None:
        self.sent = Sent()
        self.roster = roster_of(3, self.sent)
        kill(self.roster, 2)
        cells = Cells(self.roster, self.sent, WaitingCells(), lambda: None)
        self.membership = Membership(self.roster, self.sent, cells, lambda node, share: None, lambda rank: None)

    def replace(self) -> Replacement:
        return Replacement(self.membership, MembershipChange([2], []), 10.0, 100.0)


def begun() -> tuple[Sent, Replacement]:
    """A replacement whose newcomer is being forked."""
    ranks = Ranks()
    replacement = ranks.replace()
    replacement.go_on(100.0)
    assert ranks.sent.to_agents == [Respawn(1, 2, 1, Post(2, 3, Place(world_size=3), 2))]
    return ranks.sent, replacement


def test_a_newcomer_that_dies_is_one_failure() -> None:
    sent, replacement = begun()
    replacement.ended(2, "exit code 3")
    assert replacement.over and [type(message) for message in sent.told] == [HealFailed]


def test_a_failure_is_told_once_the_newcomer_has_ended() -> None:
    sent, replacement = begun()
    replacement.fail("it was interrupted")
    assert sent.to_agents[1:] == [EndRanks(1, [2])] and not replacement.over and sent.told == []
    replacement.ended(2, "SIGKILL")
    assert replacement.over and sent.told == [HealFailed("it was interrupted")]


def test_a_rank_that_stays_in_its_cell_is_named_with_what_replaces_it() -> None:
    ranks = Ranks()
    replacement = ranks.replace()
    keep_busy(ranks.roster, 0)
    assert replacement.due is not None
    replacement.go_on(replacement.due)
    (failed,) = ranks.sent.told
    assert isinstance(failed, HealFailed) and failed.text.startswith("rank 0 still runs a cell")
    assert "`%distributed heal -r 0,2 --kill` replaces it, too" in failed.text


def test_a_newcomer_that_does_not_come_up_is_given_up() -> None:
    sent, replacement = begun()
    replacement.go_on(110.0)
    assert sent.to_agents[1:] == [EndRanks(1, [2])] and not replacement.over
