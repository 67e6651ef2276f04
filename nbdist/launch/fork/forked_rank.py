"""A rank that was forked from the notebook: sheds what is the notebook's, runs the function, says what came of it.

Knows the notebook's end of its connections as `forked` does; knows nothing of how ranks are shown or ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, Protocol

import msgspec

from nbdist import shells, transfer
from nbdist.processes import adopt_orphans, die_with_parent
from nbdist.wire.cells import Execute, Failure, Interrupted, Outcome, Reply
from nbdist.wire.frames import decode, encode
from nbdist.wire.message import Message
from nbdist.wire.output import END
from nbdist.wire.processes import Quit, RankSetup
from nbdist.wire.question import Done, NoAnswer
from nbdist.wire.questions import Answer, AnyQuestion, Ask
from nbdist.wire.stopping import GetPosition, GetStack, Position, Strand, ThreadStack
from nbdist.worker.cell import failures, launched
from nbdist.worker.cell.shell import RankDisplayPublisher, refuse_keyboard
from nbdist.worker.groups import accelerate_state, join
from nbdist.worker.groups.process_groups import Collectives
from nbdist.worker.lanes import streams
from nbdist.worker.lanes.display_lane import DisplayLane
from nbdist.worker.lanes.widget_relay import WidgetRelay
from nbdist.worker.processes import forks
from nbdist.worker.recovery import reset_models
from nbdist.worker.recovery.position import Progress


@dataclass
class Ends:
    """One side's ends of what connects a rank with the notebook.

    Attributes:
        stdout: Descriptor of a pipe; -1 when somebody else has taken it over.
        stderr: The same.
        control: Questions and their answers, the call and its reply.
        display: Rich items, and credits for them.
    """

    stdout: int
    stderr: int
    control: Connection
    display: Connection

    def close(self) -> None:
        """Let go of them."""
        for descriptor in (self.stdout, self.stderr):
            if descriptor >= 0:
                os.close(descriptor)
        self.control.close()
        self.display.close()


def connect() -> tuple[Ends, Ends]:
    """The notebook's ends and the rank's."""
    stdout, stderr = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    control, display = Pipe(), Pipe()
    return Ends(stdout[0], stderr[0], control[0], display[0]), Ends(stdout[1], stderr[1], control[1], display[1])


class Closable(Protocol):
    """What can be let go of."""

    def close(self) -> None:
        """Let go of it."""


@dataclass(frozen=True)
class ForkStart:
    """What a rank begins with.

    Attributes:
        setup: What it is.
        function: What it runs.
        args: With which arguments.
        ends: Its ends.
        others: What is not its own, but has come along.
        parent: The notebook's process id.
    """

    setup: RankSetup
    function: Callable[..., Any]
    args: Sequence[Any]
    ends: Ends
    others: Sequence[Closable]
    parent: int


def main(start: ForkStart) -> None:
    """What the rank's process does."""
    shells.become_rank()
    os.setsid()
    die_with_parent(start.parent)
    forks.mend()
    adopt_orphans()  # what its children leave behind stays below it, and so is found when it ends
    gc.freeze()  # the notebook's objects are the notebook's: nothing of them is to be finalized here
    for other in start.others:
        other.close()
    _take_signals()
    _take_streams(start.ends)
    lane = DisplayLane(_Socket(start.ends.display), start.setup.rank, start.setup.token)  # type: ignore[arg-type]
    shown = _take_shell(lane)
    os.environ.update(start.setup.options.environment)
    os.environ.update(join.environment(start.setup))
    ForkedRank(start, lane, shown).run()


def _take_signals() -> None:
    """The notebook's handlers, and the descriptor that wakes up its event loop, are not for this process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the function runs
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _take_streams(ends: Ends) -> None:
    notebooks = sys.stdout, sys.stderr
    os.dup2(ends.stdout, 1)
    os.dup2(ends.stderr, 2)
    streams.redirect_python()
    faulthandler.enable(file=2)
    # Loggers of the notebook hold the streams that it had.
    for old, new in zip(notebooks, (sys.stdout, sys.stderr), strict=True):
        with contextlib.suppress(AttributeError):
            old.write, old.flush = new.write, new.flush  # type: ignore[method-assign]


def _take_shell(lane: DisplayLane) -> list[BaseException]:
    """Have IPython's shell, where there is one, show things by the rank's lane, and ask nobody for input.

    Returns:
        To be filled with the errors that it will show instead of raising them.
    """
    refuse_keyboard()
    shown: list[BaseException] = []
    shell = shells.current()
    if shell is None:
        return shown
    shell.lane = lane
    WidgetRelay(lane)
    shell.display_pub = RankDisplayPublisher(shell=shell)  # type: ignore[no-untyped-call]

    def show(exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if error is None or failures.is_users_code(sys._getframe(1).f_code):
            print(_describe(error).traceback if error else "No traceback available to show.", file=sys.stderr)
        elif not launched.is_plain_exit(error):
            shown.append(error)

    shell.showtraceback, shell.showsyntaxerror = show, lambda *_, **__: show()
    return shown


class _Socket:
    """A connection with the names that a lane's socket has."""

    def __init__(self, connection: Connection) -> None:
        self.poll, self.send, self.recv = connection.poll, connection.send_bytes, connection.recv_bytes


class _Gate:
    """What `Progress` wants to know of what runs."""

    running = 0


class ForkedRank:
    """One forked rank at work."""

    def __init__(self, start: ForkStart, lane: DisplayLane, shown: Sequence[BaseException]) -> None:
        self._setup = start.setup
        self._shown = shown
        self._function, self._args = start.function, start.args
        self._control = start.ends.control
        self._lane = lane
        self._stdout = os.dup(1)
        self._gate = _Gate()
        self._collectives = Collectives(start.setup.epoch, start.setup.store_port)
        self._progress = Progress(self._collectives, self._gate)  # type: ignore[arg-type]
        self._sending = threading.Lock()
        self._released = threading.Event()

    def run(self) -> None:
        """Wait for the word, call the function, and stay until the notebook has taken its value."""
        call = decode(self._control.recv_bytes())
        assert isinstance(call, Execute)
        self._gate.running = call.serial
        threading.Thread(target=self._answer, name="nbdist-control", daemon=True).start()
        reply, packed = self._call(call.serial)
        self._gate.running = 0
        _flush()
        os.dup2(self._stdout, 1)  # whatever the function has done to it
        self._lane.mark(call.serial, END)
        self._send(reply)
        if packed is not None:
            self._released.wait()
            packed.close()

    def _call(self, serial: int) -> tuple[Reply, transfer.Packed | None]:
        """The reply, and what it refers to."""
        rank = self._setup.rank
        try:
            value = self._value()
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            failure = _describe(error, self._collectives.explain(error))
            status: Outcome = "interrupted" if failure.kind == "interrupted" else "error"
            return Reply(serial, rank, status, failure), None
        packed = launched.pack(value, self._setup)
        return Reply(serial, rank, "ok", payload=msgspec.msgpack.encode(packed.parcel)), packed

    def _value(self) -> Any:
        self._prepare()
        try:
            signal.signal(signal.SIGINT, self._interrupt)
            value = launched.call(self._function, *self._args)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._shown:
            raise self._shown[0]
        return value

    def _interrupt(self, *_: Any) -> NoReturn:
        """Who is stuck in a call into C never gets here, and is ended; who does has the time to save what it has."""
        with contextlib.suppress(OSError):
            self._send(Interrupted(self._setup.rank))
        raise KeyboardInterrupt

    def _prepare(self) -> None:
        import torch

        torch.set_num_threads(1)  # the notebook's pool of threads is not here, and torch would wait for it
        read_debug_level = getattr(torch.distributed, "set_debug_level_from_env", None)
        if read_debug_level is not None:
            read_debug_level()
        accelerate_state.install()
        join.separate_rendezvous(lambda: self._setup.epoch, self._collectives.connecting)
        self._collectives.watch()
        reset_models.let_groups_outlive_ddp()
        state = sys.modules.get("accelerate.state")
        reset = getattr(getattr(state, "PartialState", None), "_reset_state", None)
        if reset is not None:  # the notebook's says that there is one process
            reset()
        join.device(self._setup)

    def _answer(self) -> None:
        """In a thread: answer what the notebook asks, until it has no more use for this rank."""
        with contextlib.suppress(EOFError, OSError):
            while not isinstance(message := decode(self._control.recv_bytes()), Quit):
                if isinstance(message, Ask):
                    body = self._answer_to(message.question)
                    self._send(Answer(message.request, self._setup.rank, body, message.asker))
        self._released.set()

    def _answer_to(self, question: AnyQuestion) -> Position | ThreadStack | Done | NoAnswer:
        try:
            if isinstance(question, GetPosition):
                return self._progress.look(question)
            if isinstance(question, GetStack):
                return self._progress.stack(question)
            if isinstance(question, Strand):
                self._collectives.stranded = question.why
                self._collectives.cut()
                return Done()
            return NoAnswer("forked ranks do not answer this")
        except Exception as error:  # the thread must outlive any question
            return NoAnswer(f"{type(error).__name__}: {error}")

    def _send(self, message: Message) -> None:
        with self._sending:
            self._control.send_bytes(encode(message))


def _describe(error: BaseException, better: BaseException | None = None) -> Failure:
    """The failure to send, with its traceback as the notebook's ranks show it; `better` is shown in its place."""
    traceback = failures.trim(error.__traceback__, innermost=not isinstance(error, KeyboardInterrupt))
    renderer = getattr(shells.current(), "InteractiveTB", None)
    shown = better or error
    return failures.describe(shown, failures.render(type(shown), shown, traceback, renderer))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have put anything there
            stream.flush()
    streams.flush_c()
