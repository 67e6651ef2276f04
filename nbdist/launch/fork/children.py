"""Ranks that are children of this process: forks them, reads what they print and send, signals and reaps them.

The notebook's process is controller and agent here, in one thread of its own. To the ranks' task this is what the
traffic is for that of a session. Knows nothing of why somebody forks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import queue
import secrets
import selectors
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import msgspec

from nbdist.agent.pipes import PipeReader
from nbdist.client.session import interruption
from nbdist.client.session.answers import gather
from nbdist.client.session.cell_options import CellOptions
from nbdist.client.session.task import Task
from nbdist.client.session.widget_proxies import WidgetProxies
from nbdist.controller.inquiries import Inquiries
from nbdist.controller.watch import Watch
from nbdist.errors import UsageError
from nbdist.launch import on_ranks
from nbdist.launch.fork import forked_rank
from nbdist.launch.fork.forked_rank import Ends
from nbdist.launch.request import Request
from nbdist.wire.cells import Execute, Failure, Interrupt, Interrupted, Remark, Reply
from nbdist.wire.frames import decode, encode
from nbdist.wire.life import Broken, Died, Place, RankInfo, Stop
from nbdist.wire.message import Message
from nbdist.wire.output import END, STDERR, STDOUT, Credit, Display, Output, WidgetMessage
from nbdist.wire.processes import Quit, RankSetup
from nbdist.wire.question import A, NoAnswer, Question
from nbdist.wire.questions import Answer, Ask, ask
from nbdist.wire.stopping import Strand
from nbdist.worker.groups import join

_KILL_AFTER = 0.8  # seconds after an interrupt that has not reached Python: Ctrl-C leaves nothing after 1 s
_FAILED_GRACE = 0.5  # seconds until ranks are interrupted when another has raised: theirs may be the same error
_DEATH_GRACE = 0.1  # ... when it has died

_epochs = itertools.count(1)


@dataclass
class _Rank:
    """A rank as this process knows it.

    Attributes:
        ended: A descriptor that can be read when its process has ended, and by which it is signalled.
        items: Rich items whose place in stdout has not been read yet, by number.
        reply: What it has sent.
        printed: Whether all that it printed before its reply has been read.
        told: Whether the task knows of its end.
        interrupted: Whether the user has asked it to stop.
        stranded: What it waited in and for whom, when that could not happen any more; "" as long as it could.
        kill_at: When it is to be ended by force.
    """

    number: int
    pid: int
    process: ForkProcess
    ended: int
    ends: Ends
    items: dict[int, Display] = field(default_factory=dict)
    reply: Reply | None = None
    printed: bool = False
    told: bool = False
    interrupted: bool = False
    stranded: str = ""
    kill_at: float | None = None

    def signal(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.ended, number)

    def reap(self) -> int:
        """Wait for its end, end what is left of its process group, and return the exit code as subprocess has it."""
        with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # so that the group's number is still its own
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()
        code = self.process.exitcode
        self.process.close()
        os.close(self.ended)
        return 0 if code is None else code

    def send(self, message: Message) -> None:
        """Tell its control thread."""
        with contextlib.suppress(OSError):
            self.ends.control.send_bytes(encode(message))


class Children:
    """A set of forked ranks, which wait for the word to call their function.

    Args:
        request: What they are to run.
        listener: The listening socket for their rendezvous store. It is taken over.
        restart: How often they have started again.

    Attributes:
        ranks: What each rank is.

    Raises:
        UsageError: This system does not let them be forked.
    """

    def __init__(self, request: Request, listener: socket.socket, restart: int = 0) -> None:
        self.key = secrets.token_hex(4)
        self.widgets = WidgetProxies(self.send)
        self.ranks: list[RankInfo] = []
        self._token = b"\x1b]nbdist;%s;" % secrets.token_hex(8).encode()
        self._reader = PipeReader(self._token)
        self._selector = selectors.DefaultSelector()
        self._living: dict[int, _Rank] = {}
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._requests = itertools.count(1)
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._inquiries = Inquiries(lambda rank, question: self._tell([rank], question), lambda: ())
        self._late: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._task: Task | None = None
        self._watch: Watch | None = None
        self._ending = False
        self._interrupt_at: float | None = None  # when one has failed: when the others are interrupted
        self._thread = threading.Thread(target=self._run, name="nbdist-children", daemon=True)
        try:
            with interruption.deferred():  # it would strike in the children too
                self._fork(request, listener, restart)
        except BaseException:
            self._abandon()
            raise
        finally:
            listener.close()

    # --- life

    def submit(self, name: str) -> Task:
        """Let the ranks call their function.

        Args:
            name: What messages call it.
        """
        ranks = sorted(self._living)
        task = self._task = Task(self, 1, ranks, name, CellOptions(show=True), "launch")
        self._watch = Watch(
            task.serial,
            ranks,
            _FAILED_GRACE,
            self._inquiries.ask,
            lambda text, same, stuck: self._put(Remark(task.serial, text, "watch", same, stuck)),
            lambda who: None,  # no rank can be freed but by its end
            time.monotonic(),
            launch=True,
            strand=self._strand,
        )
        for rank in self._living.values():
            self._listen_to(rank)
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ, lambda: self._alarm.recv(4096))
        self._tell(ranks, Execute(task.serial, ranks, "launch", name))
        self._thread.start()
        return task

    def close(self, grace: float = 1.0) -> None:
        """End them. Those that are done may end by themselves, others have `grace` seconds. Nothing is left then."""
        if self._thread.ident is None:
            self._abandon()
            return
        with interruption.deferred():
            self.send(Stop(grace))
            self._thread.join()
            self._show_late()
            self.widgets.close()

    def collect(self, task: Task, read: Callable[[Reply], Any]) -> list[Any]:
        """The values that they have sent, in the order of the ranks, as `read` finds them in the replies."""
        return [read(task.replies[rank]) for rank in task.ranks]

    # --- what a task wants of its traffic, from any thread

    def send(self, message: Message) -> None:
        """Have the thread do what a message says. What the page says to widgets reaches no rank while it is at work."""
        self._orders.put(message)
        with contextlib.suppress(BlockingIOError, OSError):  # woken already; or all is over
            self._bell.send(b".")

    def ask(self, ranks: Sequence[int], question: Question[A], *, timeout: float) -> dict[int, A | NoAnswer]:
        """What the ranks' control threads answer within `timeout` seconds."""
        request = next(self._requests)
        self.send(ask(request, ranks, question))
        return gather(self._answers, request, question, len(ranks), timeout)

    def pay(self, rank: int, size: int) -> None:
        """Output of a rank has been taken."""
        self.send(Credit(rank, size))

    def pay_item(self, item: Display | WidgetMessage) -> None:
        """A rich item of a rank has been taken."""
        self.send(Credit(item.rank, item.size, items=True))

    def put_late(self, task: Task | None, message: Message) -> None:
        """Keep what has come after the end of the task until all of it has."""
        self._late.put(message)

    # --- forking

    def _fork(self, request: Request, listener: socket.socket, restart: int) -> None:
        import torch

        place = Place(world_size=request.count, restart=restart, max_restarts=request.max_restarts)
        options = on_ranks.options(request, place)
        # None but one: a pool of threads does not survive a fork, and torch would wait for it.
        options = msgspec.structs.replace(options, environment=options.environment | {"OMP_NUM_THREADS": "1"})
        gpus = len(options.gpus or []) if torch.backends.cuda.is_built() else 0
        epoch, port = next(_epochs), listener.getsockname()[1]
        ends: list[tuple[Ends, Ends]] = []
        try:
            ends += (forked_rank.connect() for _ in options.ranks)
            for rank, (ours, theirs) in zip(options.ranks, ends, strict=True):
                setup = RankSetup(epoch, rank, "", b"", b"", b"", self._token, port, gpus, 1, options)
                others: list[forked_rank.Closable] = [
                    listener,
                    *(end for pair in ends for end in pair if end is not theirs),
                ]
                start = forked_rank.ForkStart(setup, request.function, request.args, theirs, others, os.getpid())
                self._living[rank] = _forked(start, ours)
                self.ranks.append(RankInfo(rank, self._living[rank].pid, f"cuda:{rank % gpus}" if gpus else "cpu"))
        except OSError as error:
            raise UsageError(f"this system does not let the notebook fork {request.count} ranks: {error}") from None
        finally:
            for number, (ours, theirs) in enumerate(ends):
                theirs.close()
                if number not in self._living:
                    ours.close()
        self._store = join.serve_store(listener)

    def _abandon(self) -> None:
        """End them by force."""
        for rank in self._living.values():
            rank.signal(signal.SIGKILL)
            rank.reap()
            rank.ends.close()
        self._living.clear()
        self._release()

    def _release(self) -> None:
        self._reader.close()
        self._selector.close()
        self._alarm.close()
        self._bell.close()
        self._store = None

    # --- the thread

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # a defect of ours; the task would wait for ever
            self._put(Broken(f"nbdist's listening to its ranks has failed ({type(error).__name__}: {error})"))
            self._abandon()

    def _listen(self) -> None:
        while self._living:
            for key, _ in self._selector.select(self._patience()):
                if key.data is not None:
                    key.data()
            for output in self._reader.read():
                self._print(output)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._obey(self._orders.get_nowait())
            self._tick(time.monotonic())
        self._release()

    def _patience(self) -> float | None:
        """Seconds until there is something to do even if nothing comes."""
        now = time.monotonic()
        dues = [rank.kill_at for rank in self._living.values()]
        dues += [self._interrupt_at, self._the_watch.due if self._untold() else None]
        waits = [max(0.0, due - now) for due in dues if due is not None]
        if (due := self._reader.due()) is not None:
            waits.append(due)
        return min(waits, default=None)

    def _tick(self, now: float) -> None:
        if self._untold():
            self._the_watch.tick(now)
        if self._interrupt_at is not None and now >= self._interrupt_at:
            self._interrupt_at = None
            for rank in self._untold():
                rank.signal(signal.SIGINT)
        for rank in self._living.values():
            if rank.kill_at is not None and now >= rank.kill_at:
                rank.kill_at = None
                rank.signal(signal.SIGKILL)

    def _untold(self) -> list[_Rank]:
        """Ranks that are still at work, as far as the task knows."""
        return [rank for rank in self._living.values() if not rank.told]

    def _obey(self, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, Interrupt):
            self._interrupt(message, now)
        elif isinstance(message, Ask):
            self._tell(message.ranks, message)
        elif isinstance(message, Credit):
            self._credit(message)
        elif isinstance(message, Stop):
            self._ending = True
            self._tell(list(self._living), Quit())
            for rank in self._living.values():
                rank.kill_at = now + message.grace

    def _interrupt(self, message: Interrupt, now: float) -> None:
        for rank in self._untold():
            if rank.number in message.ranks:
                rank.interrupted = True
                rank.signal(signal.SIGINT)
                rank.kill_at = now if message.now else rank.kill_at or now + _KILL_AFTER

    def _strand(self, number: int, why: str) -> None:
        """A rank waits for one that has returned: free it, or end it if that does not help."""
        rank = self._living[number]
        rank.stranded = why
        self._inquiries.ask([number], Strand(self._the_watch.serial, why))  # the answer is its end
        rank.signal(signal.SIGINT)
        rank.kill_at = time.monotonic() + _KILL_AFTER

    def _credit(self, message: Credit) -> None:
        if not message.items:
            self._reader.credit(message.rank, message.size)
        elif (rank := self._living.get(message.rank)) is not None:
            with contextlib.suppress(OSError):
                rank.ends.display.send_bytes(encode(message))

    def _tell(self, ranks: Sequence[int], message: Message) -> None:
        for number in ranks:
            if (rank := self._living.get(number)) is not None:
                rank.send(message)

    # --- from the ranks

    def _listen_to(self, rank: _Rank) -> None:
        self._reader.add(rank.number, STDOUT, rank.ends.stdout)
        self._reader.add(rank.number, STDERR, rank.ends.stderr)
        rank.ends.stdout = rank.ends.stderr = -1
        for source, heard in (
            (rank.ends.control, self._hear),
            (rank.ends.display, self._show),
            (rank.ended, self._bury),
        ):
            self._selector.register(source, selectors.EVENT_READ, functools.partial(heard, rank))

    def _hear(self, rank: _Rank) -> None:
        message = self._receive(rank.ends.control)
        if isinstance(message, Reply):
            rank.reply = message
            self._check_done(rank)
        elif isinstance(message, Interrupted):
            if not self._ending:
                rank.kill_at = None  # its function may save what it has, until the next Ctrl-C
        elif isinstance(message, Answer) and message.asker == "controller":
            self._inquiries.answered(message, time.monotonic())
        elif isinstance(message, Answer):
            self._answers.put(message)

    def _show(self, rank: _Rank) -> None:
        item = self._receive(rank.ends.display)
        if isinstance(item, Display):
            rank.items[item.sequence] = item
        elif isinstance(item, WidgetMessage):
            self._put(item)

    def _receive(self, connection: Connection) -> Message | None:
        """The next message; None at the end, after which nobody listens any more."""
        try:
            return decode(connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            return None

    def _print(self, output: Output) -> None:
        """Pass on text, and what stands behind it: an item, or the end of the function."""
        if output.data:
            self._put(Output(output.rank, output.stream, output.data))
        rank = self._living.get(output.rank)
        if rank is None or output.mark is None:
            return
        sequence = output.mark[1]
        if sequence == END:
            rank.printed = True
            self._check_done(rank)
            return
        while sequence not in rank.items and rank.ends.display.poll(0):  # it was sent before its mark
            self._show(rank)
        if (item := rank.items.pop(sequence, None)) is not None:
            self._put(item)

    def _check_done(self, rank: _Rank) -> None:
        if rank.reply is not None and rank.printed:
            self._end(rank, rank.reply, failed=rank.reply.failure is not None)

    def _end(self, rank: _Rank, message: Reply | Died, *, failed: bool) -> None:
        """Tell the task, once, that a rank has ended, and after a failure the others to end."""
        if rank.told:
            return
        rank.told = True
        for sequence in sorted(rank.items):  # an interrupt fell between the payload and its mark
            self._put(rank.items.pop(sequence))
        self._put(message)
        now = time.monotonic()
        if isinstance(message, Died):
            self._the_watch.forget(rank.number)
        self._the_watch.ended(rank.number, failed, now)
        if failed and self._interrupt_at is None:
            self._interrupt_at = now + (_DEATH_GRACE if isinstance(message, Died) else _FAILED_GRACE)

    def _bury(self, rank: _Rank) -> None:
        """Its process has ended: take what it left behind."""
        while rank.ends.control.poll(0) and rank.ends.control.fileno() in self._selector.get_map():
            self._hear(rank)
        code = rank.reap()
        for output in self._reader.drain(rank.number):
            self._print(output)
        for source in (rank.ends.control, rank.ends.display, rank.ended):
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)
        self._end(rank, self._last_message(rank, code), failed=True)
        rank.ends.close()
        del self._living[rank.number]

    def _last_message(self, rank: _Rank, code: int) -> Reply | Died:
        now = time.monotonic()
        if rank.reply is not None:
            return rank.reply
        if rank.stranded:  # it could not be freed
            return Reply(1, rank.number, "error", Failure("StaleGroupError", rank.stranded, "", now))
        if rank.interrupted:  # it took too long, and was killed for it
            return Reply(1, rank.number, "interrupted", Failure("KeyboardInterrupt", "", "", now, kind="interrupted"))
        return Died(rank.number, rank.pid, code, self._reader.stderr_tail(rank.number), 1, now)

    def _put(self, message: Message) -> None:
        assert self._task is not None
        if not self._task.put(message):
            self._late.put(message)

    @property
    def _the_watch(self) -> Watch:
        assert self._watch is not None
        return self._watch

    def _show_late(self) -> None:
        """Show what has come after the end of the task."""
        assert self._task is not None
        with contextlib.suppress(queue.Empty):
            while True:
                self._task.show_late(self._late.get_nowait(), time.monotonic())
        self._task.show_late(None, time.monotonic() + 1)


def _forked(start: forked_rank.ForkStart, ends: Ends) -> _Rank:
    rank = start.setup.rank
    process = multiprocessing.get_context("fork").Process(
        target=forked_rank.main, args=(start,), name=f"nbdist-rank-{rank}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the user is told of those that matter
        process.start()
    assert process.pid is not None
    return _Rank(rank, process.pid, process, os.pidfd_open(process.pid), ends)
