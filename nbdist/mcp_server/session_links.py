"""The sessions that an agent may mean: this process's own, and those of others, who are asked to do the work."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nbdist import visits
from nbdist.base.text import counted
from nbdist.client.costs.cell_steps import LastSteps
from nbdist.client.magics.memory_parts import held_table
from nbdist.client.session.session import Session, rank_set_of
from nbdist.client.start.farewell import LINGER, LINGER_VARIABLE
from nbdist.client.start.starting import StartLine
from nbdist.errands.errand_offer import offer
from nbdist.errors import SessionBroken, SessionClosed, SessionError, UsageError
from nbdist.wire.messages.errands import AnyErrand, Errand, ErrandDone, HealRanks, LookAtCell, SaveRanks

_LIMIT = 10.0  # seconds for an answer, besides those that a request wants to wait
_LONG_LIMIT = 600.0  # of what ranks may take long for
_IDLE_LINES = 4  # connections to a session that are kept


class _Verbs:
    """What the notebook's magics are to a notebook's desk."""

    def __init__(self) -> None:
        self._steps = LastSteps()

    def why(self) -> str:
        return self._steps.why()

    def held_memory(self, session: Session, ranks: str | None) -> str:
        return held_table(session, ranks)


class _Line:
    """Connections to a session that another process drives. Each serves one request at a time.

    Args:
        key_file: What reaches it.
    """

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file
        self._idle: list[visits.Visitor] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def ask(self, request: AnyErrand, who: str, limit: float) -> ErrandDone | None:
        """Return the answer; None: there was none in time.

        Raises:
            SessionGone: The session has ended.
        """
        number, deadline = next(self._numbers), time.monotonic() + limit
        with self._visitor() as visitor:
            answer = visitor.ask(Errand(number, who, request))
            while not isinstance(answer, ErrandDone) or answer.number != number:
                if time.monotonic() >= deadline:
                    return None
                answer = visitor.wait()
            return answer

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for visitor in idle:
            visitor.close()

    @contextmanager
    def _visitor(self) -> Iterator[visits.Visitor]:
        with self._lock:
            visitor = self._idle.pop() if self._idle else None
        visitor = visitor or visits.Visitor(self._key_file)
        try:
            yield visitor
        except BaseException:  # whatever it was: an answer that comes later is none to another question
            visitor.close()
            raise
        with self._lock:
            if len(self._idle) < _IDLE_LINES:
                self._idle.append(visitor)
                return
        visitor.close()


class SessionLinks:
    """Finds sessions and asks them.

    Args:
        keep: Whether the sessions that this process starts outlive it.
        read_only: Whether it starts and takes over none.
    """

    def __init__(self, *, keep: bool = False, read_only: bool = False) -> None:
        self._keep = keep
        self._read_only = read_only
        self._offer = offer(_Verbs())
        self._own: Session | None = None
        self._started = False  # here, and not attached
        self._lines: dict[str, _Line] = {}
        self._full_names: dict[str, str] = {}  # by what agents call sessions
        self._only: tuple[frozenset[str], str] | None = None  # what was there, and the only one with ranks
        self._lock = threading.Lock()
        self._starting = threading.Lock()

    def own(self) -> Session | None:
        """Return the session that this process drives; None: it drives none."""
        own = self._own
        return own if own is not None and not own.closed else None

    def ask(self, name: str | None, request: AnyErrand, who: str) -> ErrandDone:
        """Have a request done by whoever drives the session.

        Args:
            name: The session's, or its beginning; None: the only one.
            request: What is asked.
            who: Who asks, for people.

        Raises:
            UsageError: There is no such session, or nobody drives it.
            SessionError: It has ended, or does not answer, or can't do this; the text says why.
        """
        own = self.own()
        if own is not None and own.name.startswith(name or ""):
            return _checked(self._offer.do(own, request, who))
        if name is None and self._own is not None and (self._own.broken or not self._others()):
            raise SessionClosed(self._own.broken or "the session of this server has ended: `start` starts another")
        full, line = self._line(name)
        try:
            answer = line.ask(request, who, _limit_of(request))
        except visits.SessionGone:
            self._forget(full)
            raise SessionClosed(f"session {full} has ended. `sessions` shows those that there are") from None
        if answer is None:
            raise SessionBroken(
                f"session {full} did not answer within {_limit_of(request):g} s: its notebook may hang. "
                f"`nbdist stop {full}` in a terminal ends it"
            )
        if answer.alone:
            way_out = f"`attach` with session={full!r} makes this server its client"
            if self._read_only:
                way_out = "this server only looks, and nobody else can be asked. `%distributed attach` takes it over"
            raise UsageError(f"no notebook drives session {full}: {way_out}")
        if answer.error:
            self._only = None  # it may have lost its ranks, and another may have some
        return _checked(answer)

    # --- this process's own

    def start(self, ranks: int | None, gpus: str | None, progress: Callable[[StartLine], None]) -> Session:
        """Start a session.

        Args:
            ranks: How many; None: one for each GPU.
            gpus: Which GPUs; None: all that are needed.
            progress: Called with a line while they start.

        Raises:
            UsageError: There is one already.
        """
        linger = LINGER if self._keep and LINGER_VARIABLE not in os.environ else None
        with self._starting:
            self._refuse_second("start")
            self._own = Session(ranks, gpus=gpus, keep=self._keep, linger=linger, replace=False, progress=progress)
            self._started = True
            return self._own

    def attach(self, name: str | None, show: Callable[[str], None]) -> Session:
        """Become the client of a session that has none.

        Raises:
            UsageError: There is no such session, or it has a client.
        """
        with self._starting:
            self._refuse_second("attach")
            found = self._others() if name is None else [visits.reach(name)]
            if found and all(each.left is None for each in found):
                holders = "; ".join(f"{each.name} is driven by {each.holder}" for each in found)
                raise UsageError(f"session {holders}: use it as it is, without `attach`")
            self._own, self._started = Session.attach(name, keep=True, show=show), False
            return self._own

    def detach(self) -> str:
        """Leave an attached session, or a started one, to others. Returns what to say."""
        own = self.own()
        if own is None:
            raise UsageError("this server drives no session, so there is nothing to detach from")
        seconds = own.detach(own_linger(own))
        return f"session {own.name} goes on for {seconds:g} s until somebody attaches to it"

    def _refuse_second(self, verb: str) -> None:
        if (own := self.own()) is not None:
            raise UsageError(
                f"this server drives session {own.name} with {counted(len(own.ranks), 'rank')} already, and drives one "
                f"at a time: call `stop` or `detach` before `{verb}`"
            )

    def close(self) -> None:
        """End what has started here, and leave what was attached. Called once, at the end."""
        with self._lock:
            lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()
        own = self.own()
        if own is None:
            return
        if self._started and not self._keep:
            own.close()
        else:
            own.detach(own_linger(own))

    # --- others'

    def _line(self, name: str | None) -> tuple[str, _Line]:
        full = self._full_names.get(name) if name is not None else self._only_one()
        with self._lock:
            if full is not None and full in self._lines:
                return full, self._lines[full]
        found = visits.reach(full or name or "")
        with self._lock:
            if name is not None:
                self._full_names[name] = found.name
            return found.name, self._lines.setdefault(found.name, _Line(found.key_file))

    def _only_one(self) -> str:
        """Return the name of the only session of others."""
        present = visits.names()
        if self._only is not None and self._only[0] == present:
            return self._only[1]
        others = self._others()
        if len(others) != 1:
            raise self._not_one(others)
        self._only = present, others[0].name
        return others[0].name

    def _not_one(self, others: list[visits.Found]) -> UsageError:
        if others:
            names = ", ".join(found.name for found in others)
            count = counted(len(others), "session")
            return UsageError(f"there are {count} ({names}): pass the `session` that you mean")
        by_user = "have the user run `%distributed start` in a notebook"
        return UsageError(
            f"there is no session on this machine: {by_user if self._read_only else f'call `start`, or {by_user}'}"
        )

    @staticmethod
    def _others() -> list[visits.Found]:
        return [found for found in visits.of_this_machine() if not found.is_own]

    def _forget(self, name: str) -> None:
        self._only = None
        with self._lock:
            self._full_names = {short: full for short, full in self._full_names.items() if full != name}
            line = self._lines.pop(name, None)
        if line is not None:
            line.close()


def own_linger(session: Session) -> float:
    """Return the seconds that a session goes on without a client."""
    return rank_set_of(session).linger or LINGER


def _checked(answer: ErrandDone) -> ErrandDone:
    if answer.error:
        raise SessionError(answer.error)
    return answer


def _limit_of(request: AnyErrand) -> float:
    if isinstance(request, SaveRanks | HealRanks):
        return _LONG_LIMIT
    return _LIMIT + (request.wait if isinstance(request, LookAtCell) else 0.0)
