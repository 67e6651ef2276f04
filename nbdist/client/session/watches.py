"""What watches a session from its start: for the end of its allocation, for idle ranks, and for the next save."""

from __future__ import annotations

import math
import weakref

from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.session.allocation_end import AllocationEnd
from nbdist.client.session.idle_end import watch_idle
from nbdist.client.session.regular_saves import RegularSaves
from nbdist.client.session.save_at_end import Savable
from nbdist.client.start.expected_end import ExpectedEnd, end_of_job
from nbdist.client.start.start_settings import StartSettings


class Watches:
    """Those of one session.

    Args:
        session: The session; referred to weakly, like its ranks.
        rank_set: Its ranks.
        settings: Those of its start.
        expected: The end that the user has named; None: that of the first job.

    Attributes:
        end: What is known of the end of the allocation.
        saves: The regular saves of the present ranks; None: there are none.
    """

    def __init__(
        self, session: Savable, rank_set: RankSet, settings: StartSettings, expected: ExpectedEnd | None
    ) -> None:
        self._session, self._rank_set = weakref.ref(session), weakref.ref(rank_set)
        self._settings, self._expected = settings, expected
        self.end = AllocationEnd(session, self._rank_set)
        self.saves: RegularSaves | None = None
        rank_set.on_end = self.end.hear

    def begin(self) -> None:
        """Begin with new ranks."""
        session, rank_set = self._session(), self._rank_set()
        assert session is not None and rank_set is not None
        of_nodes = end_of_job(rank_set.ends_at)
        if of_nodes is not None and (self._expected is None or self._expected.is_later_job(of_nodes)):
            self._expected = of_nodes
        self.end.expect(self._expected, self._settings.warn)
        if self._settings.idle is not None:
            watch_idle(rank_set, self.end, self._settings.idle)
        if self._settings.every is not None:
            self.saves = RegularSaves(session, rank_set, self._settings.every)
            self.saves.start()

    @property
    def ends(self) -> tuple[float | None, str]:
        """When the allocation ends, by `time.time`, None: that is not known; and what says so."""
        known = self._expected
        return (known.at, known.source) if known is not None and known.at < math.inf else (None, "")

    @property
    def words(self) -> list[str]:
        """Lines for `status`."""
        found = (self.end.words, self.saves.words if self.saves is not None else "")
        return [line for line in found if line]
