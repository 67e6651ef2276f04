"""Has this process do what visitors want from its sessions. The rest of this room is loaded with the first errand."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.session.session import Session, known_sessions, rank_set_of
from nbdist.errors import NbdistError
from nbdist.wire.messages.errands import AnyErrand, Errand, ErrandDone

if TYPE_CHECKING:
    from nbdist.errands.errand_desk import DeskVerbs, ErrandDesk

_log = logging.getLogger(__name__)


class ErrandOffer:
    """The desks of this process's sessions.

    Args:
        verbs: The magics, as far as a desk needs them.
    """

    def __init__(self, verbs: DeskVerbs) -> None:
        self._verbs = verbs
        self._desks: weakref.WeakKeyDictionary[Session, ErrandDesk] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def take(self, rank_set: RankSet, errand: Errand) -> None:
        """Take an errand of somebody elsewhere. In the listening thread, which must not wait."""
        threading.Thread(target=self._answer, args=(rank_set, errand), name="nbdist-errand", daemon=True).start()

    def do(
        self,
        session: Session,
        request: AnyErrand,
        who: str,
        later: Callable[[Callable[[], object]], object] = lambda work: work(),
    ) -> ErrandDone:
        """Do an errand, of this process itself too. The arguments are those of `ErrandDesk.do`."""
        from nbdist.errands.errand_desk import ErrandDesk

        with self._lock:
            desk = self._desks.get(session)
            if desk is None:
                try:
                    desk = self._desks[session] = ErrandDesk(session, self._verbs)
                except NbdistError as error:  # it has just ended
                    return ErrandDone(0, error=str(error))
        return desk.do(request, who, later)

    def _answer(self, rank_set: RankSet, errand: Errand) -> None:
        session = next((known for known in known_sessions() if rank_set_of(known) is rank_set), None)
        later: list[Callable[[], object]] = []
        if session is None:
            done = ErrandDone(0, error="the ranks of this session belong to a function that a notebook has launched")
        else:
            try:
                done = self.do(session, errand.request, errand.who, later.append)
            except Exception as error:  # a mistake of ours: who asks must not wait
                _log.exception("nbdist could not do an errand")
                done = ErrandDone(0, error=f"{type(error).__name__}: {error}")
        rank_set.traffic.send(msgspec.structs.replace(done, number=errand.number, visitor=errand.visitor))
        for work in later:
            work()


def offer(verbs: DeskVerbs) -> ErrandOffer:
    """Have this process do errands from now on."""
    made = ErrandOffer(verbs)
    RankSet.does_errands = made.take
    return made
