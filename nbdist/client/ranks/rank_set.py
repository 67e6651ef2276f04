"""A set of ranks, from the notebook's side: how it starts, takes work and ends.

The part that sessions and launches share. Owns the controller that is kept warm for the next of them. Independent of
processes and sockets; `traffic` tracks which rank runs what.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from nbdist.base import limits
from nbdist.base.checks import check_seconds
from nbdist.base.ranks import describe_ranks, format_ranks, parse_ranks
from nbdist.client.base import calls, interruption
from nbdist.client.ranks import observers
from nbdist.client.ranks.task import Task
from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.ranks.traffic import Traffic
from nbdist.client.reports import death_report
from nbdist.client.reports.announced_end import describe_end
from nbdist.client.reports.report import describe_death
from nbdist.client.reports.stack_report import line_of
from nbdist.client.start import farewell
from nbdist.client.start.connection import Connection, close_idle, keep_idle, take_idle
from nbdist.client.start.controller_talk import ControllerTalk, interrupt_start, taken_by
from nbdist.client.start.starting import PortTaken, StartLine, remark_on_devices, remark_on_tunnel, removed_afterwards
from nbdist.errors import SessionBroken, SessionBusy, SessionClosed, SessionError, UsageError
from nbdist.wire.base.message import Message
from nbdist.wire.base.parcel import Parcel
from nbdist.wire.messages.announcements import EndAnnounced
from nbdist.wire.messages.cells import Execute, Kind, Reply
from nbdist.wire.messages.errands import Errand, ErrandDone
from nbdist.wire.messages.handover import Attach, Attached, AttachRefused, Displaced, Ending, Leave
from nbdist.wire.messages.healing import Renumbered
from nbdist.wire.messages.life import Broken, RankInfo, Start, Started, StartFailed, StartOptions, Stop, Stopped
from nbdist.wire.messages.output import Notice
from nbdist.wire.processes.nodes import NodesWanted
from nbdist.wire.questions.knowing import Release
from nbdist.wire.questions.questions import Ask
from nbdist.wire.questions.stopping import GetStack

_STOP_LIMIT = 10.0
_SURVIVORS_LIMIT = 2.0
_UNSAID = 1.0  # seconds of waiting that need no explanation
_SHOWN = CellOptions(show=True)

Ranks = Iterable[int] | int | str | None  # some, one, "0,2-3"; None for all


@atexit.register
def _close_all() -> None:
    for rank_set in list(RankSet.instances.values()):
        rank_set._forget()
    close_idle()


@farewell.before_end
def _announce_end() -> None:
    for rank_set in list(RankSet.instances.values()):
        rank_set._announce_end()


class RankSet:
    """Ranks that take work.

    Args:
        linger: Seconds that the ranks outlive a kernel that was killed.
        keep: Whether they outlive an orderly end, too.

    Attributes:
        ranks: Each rank's number, process and device.
        backend: Backend of the process group; "none" without one.
        closed: Whether it has no ranks.
        broken: Why it is closed, if nobody closed it.
        stopped: Whether that is because somebody ended it from outside.
        left: Why it is closed, if nobody closed it and nothing broke: another client has its ranks, they were left
            alone, or they have been idle for too long.
        linger: Seconds that the ranks outlive a crash.
        started_in: Seconds that the last start took.
        ends_at: When the first job of another machine ends, by `time.time`.
        last_used: When it was last given something to run, by `time.monotonic`.
        sets_started: How many times ranks have been started, or taken over.
        traffic: Which rank runs what; for other parts of the client.
        instances: Those of this process that have started, by the keys of their traffic.
        talk: With the controller, about the life of the ranks.
        on_end: Called when an end is announced, in the listening thread.
        does_errands: Does what visitors of any of these sets want, called in the listening thread; None: nobody does.
    """

    instances: ClassVar[weakref.WeakValueDictionary[str, RankSet]] = weakref.WeakValueDictionary()
    does_errands: ClassVar[Callable[[RankSet, Errand], None] | None] = None

    def __init__(self, linger: float = 0.0, keep: bool = False) -> None:
        self.ranks: list[RankInfo] = []
        self.backend = ""
        self.closed = True
        self.broken = self.left = ""
        self.stopped = False
        self.started_in = 0.0
        self.ends_at: float | None = None
        self.last_used = 0.0
        self.sets_started = 0
        self.traffic = Traffic(_weakly(self._on_life))
        self.linger = linger
        self._keep = keep
        self._adopted = False  # another client has started the ranks
        self._parked = False  # the controller is no longer ours, but kept for any start
        self.talk = ControllerTalk(self.traffic.send)
        self.on_end: Callable[[EndAnnounced], None] = lambda message: self.traffic.notify(Notice(describe_end(message)))

    # --- life

    def start(
        self,
        options: StartOptions,
        progress: Callable[[StartLine], None] = lambda line: None,
        nodes: NodesWanted | None = None,
    ) -> None:
        """Bring up ranks, for the first time or in place of those that there were.

        Args:
            options: What to start; on several nodes, what on each.
            nodes: On which; None: this machine.
            progress: Called with a line of text while the ranks start.

        Raises:
            SessionBroken: They could not be started; none is left.
            PortTaken: The port of their rendezvous store is taken.
        """
        if self.broken and not self._parked:
            self._connection.close()
        idle = False
        if self.broken or not self.ranks:
            idle = self._connect()
        else:
            self.check_open()
        if not self._bring_up(options, progress, nodes, again=idle):
            self._connect()
            self._bring_up(options, progress, nodes)
        RankSet.instances[self.traffic.key] = self

    def close(self, grace: float = 1.0) -> None:
        """Stop the ranks. Their memory is free when this returns; an idle template stays for the next start.

        Args:
            grace: Seconds for ranks that are still working to end by themselves.
        """
        if self.closed:
            return
        self.closed = self.traffic.is_stopping = True
        death_report.finish(death_report.HURRY)  # while there are ranks to ask
        with interruption.deferred():
            self._stop(grace)

    def _stop(self, grace: float) -> None:
        self._connection.send(Stop(grace))
        try:
            self.talk.wait((Stopped,), _STOP_LIMIT)
        except SessionError:
            self._connection.close()
            return
        self.traffic.release("the session was stopped")
        self.traffic.end_late()
        self._park()

    def __del__(self) -> None:
        """End the ranks, which can't be given work any more. Called in any thread, at any moment."""
        if not self.closed and self.owned:
            if self._keep or self._adopted:
                left = Leave(self.linger or farewell.LINGER, "detached")
                threading.Thread(target=self._connection.leave, args=(left,)).start()
            else:
                self._connection.let_go()

    @property
    def owned(self) -> bool:
        """Whether they belong to this process, and not to one that it was forked from."""
        return self._connection.pid == os.getpid()

    @property
    def key_file(self) -> Path:
        """The file with which others reach their controller."""
        return self._connection.key_file

    @property
    def generation(self) -> int:
        """One more than the number of times the process groups have been renewed since the start."""
        return self.traffic.generation

    def _announce_end(self) -> None:
        """Have the controller know what this process's end will mean, however that comes about."""
        if not self.closed:
            self._connection.send(Ending(*farewell.after_end(self.linger, self._keep)))

    def _forget(self) -> None:
        """Forget the ranks: the kernel is ending, or restarting."""
        seconds, how = farewell.after_end(self.linger, self._keep)
        seconds, self.closed = 0.0 if self.closed else seconds, True
        if seconds:
            self._connection.leave(Leave(seconds, how))
        else:
            self._connection.close()

    # --- from and to other clients

    def request_attach(self, connection: Connection, request: Attach) -> Attached | AttachRefused:
        """Ask a session's controller for its ranks, and return the answer.

        Raises:
            SessionBroken: It does not answer.
        """
        self._connection, self._parked = connection, False
        self.talk.begin()
        self.traffic.attach(connection)
        self.traffic.hold()
        connection.open(lambda: None)
        connection.send(request)
        try:
            answer = self.talk.wait((Attached, AttachRefused), _STOP_LIMIT)
        except SessionError:
            connection.leave(Leave(self.linger, "detached"))
            raise
        assert isinstance(answer, Attached | AttachRefused)
        return answer

    def adopt(self, attached: Attached, tasks: Sequence[Task]) -> None:
        """Go on with ranks that another client had.

        Args:
            attached: What the controller has told.
            tasks: In the order of its cells.
        """
        self.ranks, self.backend, self.linger = attached.ranks, attached.backend, attached.started.linger
        self._adopted, self.last_used = True, time.monotonic()
        self.sets_started += 1
        if self._keep and not self.linger:
            self.linger = farewell.LINGER
        self._serials = itertools.count(attached.first_serial)
        self.closed = False
        self.traffic.begin(attached)
        self.traffic.take_up(attached, tasks)
        RankSet.instances[self.traffic.key] = self

    def leave(self, seconds: float, text: str) -> None:
        """Leave the ranks to whoever attaches within some seconds; `text` is what is said of it from now on."""
        self.check_open()
        self._let_others(text)
        with interruption.deferred():
            self._connection.leave(Leave(seconds, "detached"))
        self.traffic.end_late()

    def _let_others(self, text: str) -> None:
        """Have no ranks any more, although they live."""
        self.closed, self.left = True, text
        observers.ranks_left(self.traffic.key)
        self.traffic.release(text)

    def _connect(self) -> bool:
        """Use the idle controller if there is one, else start one. Returns whether there was one."""
        taken = take_idle()
        self._connection, self._parked = taken or Connection(), False
        self.traffic.attach(self._connection)
        return taken is not None

    def _park(self) -> None:
        """Keep the controller, with its agent and template, for the next start."""
        self._connection.on_message = lambda message: None
        self._parked = True
        keep_idle(self._connection)

    def _bring_up(
        self,
        options: StartOptions,
        progress: Callable[[StartLine], None],
        nodes: NodesWanted | None,
        *,
        again: bool = False,
    ) -> bool:
        """Start ranks, and return whether they are up: False only with `again`, if a process that they need has ended.

        A controller that was idle may have lost one before anybody looked; a new one has not.
        """
        began = time.monotonic()
        death_report.finish(death_report.HURRY)  # while it is the earlier ranks that answer
        kinds = (Started, StartFailed, Broken) if again else (Started, StartFailed)
        self.closed, self.broken, self.left, self.stopped = True, "", "", False
        self.talk.begin()
        self.traffic.release("the ranks were restarted")
        with self.talk.interrupts():
            try:
                self._connection.open(self.talk.heed_interrupt)
                self._connection.send(Start(options, self.linger, nodes))
                token_file = nodes.token_file if nodes is not None else ""
                with removed_afterwards(token_file):
                    started = self.talk.wait(kinds, None, progress, token_file, interrupt_start)
            except BaseException as error:  # a Ctrl-C, too: nothing that has started may stay
                interrupted = isinstance(error, KeyboardInterrupt)
                why = "the start was interrupted; `%distributed start` starts a new session"
                self.broken = why if interrupted else str(error) or type(error).__name__
                self._connection.close()  # and with it whatever has started
                raise
        if isinstance(started, Broken):
            self._connection.close()
            return False
        if isinstance(started, StartFailed):
            self.broken = started.text
            self._park()
            raise (PortTaken if started.obstacle == "port taken" else SessionBroken)(started.text)
        assert isinstance(started, Started)
        self.ranks, self.backend, self.ends_at = started.ranks, started.backend, started.ends_at
        self._serials = itertools.count(started.first_serial)
        self.traffic.begin(started)
        self.closed = False
        self.last_used = time.monotonic()
        self.started_in = self.last_used - began
        self.sets_started += 1
        remarks = remark_on_devices(options, self.ranks, self.backend), remark_on_tunnel(nodes)
        for note in filter(None, (*started.notes, *remarks)):
            progress(StartLine(note))
        return True

    def replaced(self, newcomers: Sequence[RankInfo]) -> None:
        """Note that ranks have been replaced, or added."""
        known = {info.rank: info for info in [*self.ranks, *newcomers]}
        self.ranks = [known[rank] for rank in sorted(known)]
        self.traffic.place(self.ranks)
        self.traffic.revive(info.rank for info in newcomers)

    def _on_life(self, message: Message) -> None:
        """Handle a message about the session as a whole, in the listening thread."""
        if isinstance(message, EndAnnounced):
            self.on_end(message)
            return
        if isinstance(message, Errand):
            self._do_errand(message)
            return
        if isinstance(message, Renumbered):
            self.ranks = message.ranks
        if isinstance(message, Displaced):
            self._let_others(taken_by(message.text))
        if isinstance(message, Broken) and not self.broken:
            if not self.closed and not self.traffic.running(info.rank for info in self.ranks):
                self.traffic.notify(Notice(message.text))
            self.stopped = message.wanted  # before the rest, by which other threads see the end
            self.closed, self.broken = True, message.text
            self.traffic.release(message.text)
        self.talk.put(message)

    def _do_errand(self, errand: Errand) -> None:
        if RankSet.does_errands is not None:
            RankSet.does_errands(self, errand)
            return
        text = f"this session is driven by a script (pid {os.getpid()}), which runs no cells of others"
        self.traffic.send(ErrandDone(errand.number, errand.visitor, text))

    def check_open(self) -> None:
        """Raise an error if the ranks can't take any work.

        Raises:
            SessionBroken: A process that they need has ended.
            SessionClosed: They were stopped.
        """
        if self.broken:
            raise SessionBroken(self.broken)
        if self.left:
            raise SessionClosed(self.left)
        if self.closed:
            raise SessionClosed(
                "this session is closed: type `%distributed start -n 2` (or `nbdist.Session(2)`) for a new one"
            )

    # --- work

    def living(self) -> list[int]:
        """Return the ranks that have not died."""
        return [info.rank for info in self.ranks if info.rank not in self.traffic.dead]

    def submit(
        self,
        kind: Kind,
        code: str,
        ranks: Ranks,
        options: CellOptions = _SHOWN,
        parcel: Parcel | None = None,
    ) -> Task:
        """Send an Execute, after checking that the ranks can take it.

        Args:
            kind: The kind of Execute.
            code: What to run, or a name for it.
            ranks: Where; None: on all.
            options: How.
            parcel: What goes along.

        Raises:
            UsageError: An argument is invalid.
            SessionBusy: One of these ranks runs something else.
        """
        if not isinstance(code, str):
            raise UsageError(f"code must be a str, not {type(code).__name__}: `session.run('print(rank)')`")
        check_seconds("grace", options.grace, optional=False)
        chosen = self.choose(ranks)
        self.last_used = time.monotonic()
        if kind in ("cell", "call"):
            observers.cell_comes(self.traffic.key, chosen)
        task = Task(self.traffic, next(self._serials), chosen, code, options, kind)
        if others := self._assign(task):
            raise self.busy(others)
        try:
            observers.cell_began(task)
            how = options.grace, options.profile, task.metered, options.setup, options.file
            self.traffic.send(Execute(task.serial, chosen, kind, code, task.number, options.offset, parcel, *how))
        except BaseException:  # a Ctrl-C, too: its ranks would stay busy with what they never got
            self.traffic.withdraw(task)
            raise
        return task

    def _assign(self, task: Task) -> dict[int, Task]:
        """Assign a task its ranks. Survivors of a death get a moment to end what they were running.

        What another thread of nbdist's does on the ranks, such as a save, is waited for.
        """
        while (others := self.traffic.assign(task)) and all(other.kind == "setup" for other in others.values()):
            self._await_own_work(task, others)
        if not others or not all(other.bereaved for other in others.values()):
            return others
        self.traffic.wait_free(task.ranks, _SURVIVORS_LIMIT)
        return self.traffic.assign(task)

    def _await_own_work(self, task: Task, others: Mapping[int, Task]) -> None:
        self.traffic.wait_free(task.ranks, _UNSAID)
        if self.traffic.running(task.ranks):
            what = ", ".join(sorted({other.code for other in others.values()}))
            self.traffic.notify(Notice(f"nbdist itself uses these ranks ({what}): this begins when that is done"))
            self.traffic.wait_free(task.ranks, threading.TIMEOUT_MAX)

    def choose(self, ranks: Ranks, living: bool = True) -> list[int]:
        """Return the requested ranks, checked.

        Raises:
            UsageError: One of them does not exist, or is dead.
        """
        self.check_open()
        everyone = [info.rank for info in self.ranks]
        if isinstance(ranks, str):
            ranks = self.among(ranks)
        elif isinstance(ranks, int):
            ranks = [ranks]
        chosen = everyone if ranks is None else sorted(set(ranks))
        unknown = sorted(set(chosen).difference(everyone))
        if unknown or not chosen:
            who = describe_ranks(unknown) if unknown else "an empty set"
            raise UsageError(f"{who} isn't in this session: it has ranks {format_ranks(everyone)}")
        dead = [rank for rank in chosen if rank in self.traffic.dead]
        if dead and living:
            alive = format_ranks(self.living())
            ways = "`%distributed heal` replaces dead ranks, `%distributed shrink` continues without them"
            way_out = f"`-r {alive}` uses the others, {ways}"
            raise UsageError(
                f"{self.traffic.places.describe(dead)} died "
                f"({'; '.join(sorted({describe_death(self.traffic.dead[rank]) for rank in dead}))}): "
                f"{way_out if alive else '`%distributed restart` starts fresh ranks'}"
            )
        return chosen

    def among(self, text: str | None) -> list[int] | None:
        """Return the ranks that "0,2-3" or "@node-b" names; None if none were named.

        Raises:
            UsageError: One of them does not exist.
        """
        return None if text is None else list(parse_ranks(text, len(self.ranks), self.traffic.places.nodes))

    def busy(self, others: Mapping[int, Task]) -> SessionBusy:
        """Return an error that names what these ranks run, and where they are."""
        ranks = sorted(others)
        lines = self.traffic.ask(ranks, GetStack(), timeout=limits.STACK_ANSWER)
        where = [f"\n  rank {rank}: {line_of(lines.get(rank)) or 'in a call that blocks Python'}" for rank in ranks]
        return SessionBusy(
            f"{self.traffic.places.describe(ranks)} {'is' if len(ranks) == 1 else 'are'} still running "
            f"{others[ranks[0]].describe()}{''.join(where[:8])}\n"
            "Wait for it, or use `%distributed interrupt` or, as a last resort, `%distributed restart`."
        )

    def call(
        self, kind: Kind, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], ranks: Ranks
    ) -> list[Any]:
        """Call a function, sent by value, on ranks and return its values in the order of the ranks.

        Raises:
            TransferError: Something can't be sent; the text names it.
            RankError: A rank raised.
        """
        if not callable(function):
            raise UsageError(f"call takes a function, not {function!r}: `session.call(function, *args)`")
        name = getattr(function, "__name__", "function")
        with calls.pack(function, args, kwargs, name=name) as packed, interruption.deferred():
            return self.fetch(self.submit(kind, name, ranks, parcel=packed.parcel))

    def set_up(self, function: Callable[..., Any], *args: Any, ranks: Ranks = None) -> list[Any]:
        """Call a function on nbdist's own account, like `call`: not counted in the user's costs or history."""
        return self.call("setup", function, args, {}, ranks)

    def collect(self, task: Task, read: Callable[[Reply], Any] = calls.value) -> list[Any]:
        """Return the values that ranks have sent, in the order of the ranks, as `read` finds them in the replies."""
        try:
            return [read(task.replies[rank]) for rank in task.ranks]
        finally:
            self._release(task)

    def fetch(self, task: Task) -> list[Any]:
        """Wait for a task, and return the values that its ranks send, in their order."""
        try:
            task.wait()
        except BaseException:  # a Ctrl-C, too: ranks would keep the memory of what nobody fetches
            self._release(task)
            raise
        return self.collect(task)

    def _release(self, task: Task) -> None:
        """Have ranks free what they have packed for a task."""
        self.traffic.send(Ask(0, task.ranks, Release(task.serial)))


def _weakly(method: Callable[[Message], None]) -> Callable[[Message], None]:
    """Return the method, bound only as long as someone else holds its object."""
    held = weakref.WeakMethod(method)

    def call(message: Message) -> None:
        if (found := held()) is not None:
            found(message)

    return call
