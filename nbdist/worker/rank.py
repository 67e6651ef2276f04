"""The process of a rank, from the fork to its end: becomes itself, joins the group, runs what it is told.

Knows its lanes and its shell; independent of other ranks but through torch.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import zmq

from nbdist import shells, transfer
from nbdist.base import end_signals, limits
from nbdist.base.end_signals import EndSignal, EndSignals
from nbdist.base.processes import SAME_HASHES, adopt_orphans, die_with_parent, python_command
from nbdist.metrics import measuring
from nbdist.metrics.memory import MemoryMeter
from nbdist.metrics.node import active_meter
from nbdist.metrics.profile import profiled
from nbdist.train import active_training
from nbdist.train.collective import participants
from nbdist.wire.base.keys import Keys
from nbdist.wire.base.message import Message
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import RANK_CELL, RANK_CONTROL, RANK_DISPLAY, connect, lane
from nbdist.wire.messages.announcements import EndAnnounced
from nbdist.wire.messages.cells import Execute, Failure, InOrder, Outcome, Recover, Reply
from nbdist.wire.messages.healing import Adopt, Resize
from nbdist.wire.messages.life import SERIALS
from nbdist.wire.messages.output import END, PLAIN_END, WidgetMessage
from nbdist.wire.messages.rank_processes import Quit, RankSetup, Ready
from nbdist.wire.questions.knowing import GetFailure, Release
from nbdist.wire.questions.question import Done
from nbdist.wire.questions.stopping import Enter, GetFlight, Rest
from nbdist.worker.cell import debug_server, failures, keyboard, launched
from nbdist.worker.cell.interrupts import InterruptGate, cancel_alarm
from nbdist.worker.cell.shell import RankShell
from nbdist.worker.control.control_thread import ControlThread, Waker
from nbdist.worker.groups import join
from nbdist.worker.groups.default_group import DefaultGroup
from nbdist.worker.groups.flight_record import last_collectives
from nbdist.worker.groups.process_groups import Collectives
from nbdist.worker.lanes import streams
from nbdist.worker.lanes.display_lane import DisplayLane, WidgetRelay
from nbdist.worker.processes import spawning
from nbdist.worker.processes.orphans import Orphans
from nbdist.worker.rank_environment import take_on
from nbdist.worker.recovery.rank_recovery import RankRecovery
from nbdist.worker.recovery.rank_stop import RankStop
from nbdist.worker.recovery.resizing import take_post

_LOOKS = ("debug", "debugpy", "pull")  # what keeps the frames of the last failure when it begins
_REPORTS = 3  # how often to try to report: signal handlers of the user's may come between
_RESTORED = "nbdist: this cell left {} closed or redirected; it is restored for the next cell"
_CANCELLED = "nbdist: this cell left an alarm pending (SIGALRM); it is cancelled, since it would stop the next cell"
_AROUND = "This failed in nbdist itself, {}; the rank and its variables are kept."


def _enter(parent: int) -> None:
    """Do what a newly forked process must do first. `parent`: the process that forked it."""
    os.setsid()
    die_with_parent(parent)
    adopt_orphans()  # what its children leave behind stays below it, and so is found when it dies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.enable()


def enter_anew(parent: int, descriptors: list[int]) -> NoReturn:
    """Go on as a new Python, which imports everything itself, in the environment that ranks get. Runs `main`."""
    setup_file = descriptors[-1]
    with open(setup_file, "rb", closefd=False) as file:
        setup = msgspec.msgpack.decode(file.read(), type=RankSetup)
    os.lseek(setup_file, 0, os.SEEK_SET)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment = SAME_HASHES | setup.options.environment | join.environment(setup)
    command = python_command("nbdist.worker.rank", str(parent), *map(str, descriptors))
    os.execve(command[0], command, environment)


def main() -> None:
    """Run a rank that is its own Python. Arguments: its parent, then its descriptors."""
    parent, *descriptors = map(int, sys.argv[1:])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    code = 1
    try:
        become_rank(parent, *descriptors)
        code = 0
    except BaseException:  # `_exit` below would hide why the rank ends
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def become_store(parent: int, listener: int, stderr: int) -> None:
    """Serve the rendezvous store.

    Args:
        parent: The process id of the template, or of the notebook.
        listener: The descriptor of its listening socket.
        stderr: Where it prints.
    """
    _enter(parent)
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    os.close(stderr)
    end_signals.ignore()
    store = join.serve_store(socket.socket(fileno=listener))
    threading.Event().wait()
    del store


def become_rank(
    parent: int, stdout: int, stderr: int, setup_file: int, *, function: Callable[[], Any] | None = None
) -> None:
    """Be a rank; returns when its work is done.

    Args:
        parent: The process id of the template, or of the notebook.
        stdout: A descriptor.
        stderr: A descriptor.
        setup_file: The descriptor of a file that holds its RankSetup.
        function: What a launch calls that sends none: a rank that was forked from the notebook has it already.
    """
    shells.become_rank()
    _enter(parent)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    with open(setup_file, "rb") as file:
        setup = msgspec.msgpack.decode(file.read(), type=RankSetup)
    os.close(stdout)
    os.close(stderr)
    take_on(setup)
    streams.redirect_python()
    faulthandler.enable(file=2)
    RankProcess(setup, function).run()


class RankProcess:
    """One rank at work. `function`: what a launch calls that sends none."""

    def __init__(self, setup: RankSetup, function: Callable[[], Any] | None = None) -> None:
        self._setup = setup
        self._function = function
        self._pid = os.getpid()
        self._streams = streams.StandardStreams()
        self._orphans = Orphans()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._cells = self._connect(RANK_CELL)
        self._lane = DisplayLane(self._connect(RANK_DISPLAY), setup.rank, setup.token)
        waker = Waker()
        gate = InterruptGate(waker.wake)
        self._keyboard = keyboard.Keyboard(self._lane, lambda: bool(gate.running))
        self._collectives = Collectives(setup.incarnation, setup.store)
        self._group = DefaultGroup(setup, self._collectives.store)
        self._stop = RankStop(self._collectives, gate, self._keyboard, waker)
        self._recovery = RankRecovery(setup, self._collectives, self._group, self._stop)
        stale = limits.STALE + setup.options.slack
        self._control = ControlThread(self._connect(RANK_CONTROL), setup.rank, stale, self._stop, waker)
        self._control.answers |= self._recovery.answers
        self._control.answers |= dict([Release.by(self._release), Enter.by(self._keyboard.enter), Rest.by(self._rest)])
        self._control.questions.answers |= dict([GetFlight.by(lambda question: last_collectives(question.count))])
        self._parcels: dict[int, transfer.Packed] = {}
        self._names: list[str] = []
        self._company = 1  # ranks that run what runs now
        self._work: dict[str, Callable[[Execute], Reply]] = {
            "cell": self._run_cell,
            "call": self._call,
            "setup": self._call,
            "launch": self._launch,
            "push": self._push,
            "pull": self._pull,
            "free": self._free,
            "debug": self._debug,
            "debugpy": self._listen_for_debugger,
        }
        self._widgets = WidgetRelay(self._lane)

    def run(self) -> None:
        """Join the group, then run what comes until told to quit."""
        self._control.start()
        EndSignals(self._announce_end).spare(self._setup.options.end_grace)
        try:
            self._recovery.install()
            join.separate_rendezvous(self._number_of_cell, self._collectives.connecting)
            device = join.device(self._setup)
            self._control.questions.gpu = device.index or 0
            names = self._own_names(device)
            self._shell = RankShell.make(self._lane, names, self._collectives.explain, self._stop.undisturbed)
            self._keyboard.install()
            self._control.questions.shell = self._shell
            self._control.answers |= dict([GetFailure.by(lambda question: self._shell.known_failure)])
            self._names = self._current_names()
            own_meeting_point = functools.partial(join.own_meeting_point, join.meeting_point())
            spawning.install(self._shell.is_main, join.own_store, own_meeting_point, lambda: self._company)
            backend = self._group.make()
        except Exception as error:  # whatever it is, the start that waits for this rank reports it
            self._cells.send(encode(Ready(self._setup.rank, "", "", f"{type(error).__name__}: {error}")))
        else:
            self._cells.send(encode(Ready(self._setup.rank, str(device), backend)))
        self._serve()
        # What an orderly end of a Python process does that matters here; the rest would cost 0.2 s a rank.
        atexit._run_exitfuncs()
        streams.flush_c()

    def _announce_end(self, name: EndSignal, seconds: float | None) -> None:
        self._control.say(EndAnnounced(name, "rank", self._pid, self._setup.rank, seconds=seconds))

    def _connect(self, name: str) -> zmq.Socket[bytes]:
        setup = self._setup
        keys = Keys(setup.url, setup.server_key, setup.public_key, setup.secret_key)
        return connect(self._context, keys, lane(name, setup.incarnation, setup.slot, setup.life))

    def _number_of_cell(self) -> int:
        """Return the number of the running cell among those of these ranks: the same on all nodes of a launch."""
        return self._stop.running % SERIALS

    def _own_names(self, device: object) -> dict[str, Any]:
        setup = self._setup
        return {
            "nbdist": sys.modules["nbdist"],  # for the user: no module of a rank goes through the package
            "rank": setup.rank,
            "local_rank": setup.local_rank,
            "world_size": setup.world_size,
            "device": device,
        }

    def _serve(self) -> None:
        while True:
            try:
                message = decode(self._cells.recv())
                if isinstance(message, Quit):
                    return
                self._handle(message)
            except BaseException:  # from a handler, of a signal or a widget, that a cell has left
                streams.show_exception()
            self._end_if_forked()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Execute):
            self._execute(message)
        elif isinstance(message, WidgetMessage):
            self._widgets.deliver(message)
        elif isinstance(message, Recover):
            done = self._recover(message)
            self._end_if_forked()
            self._cells.send(encode(done))
        elif isinstance(message, Adopt):
            self._cells.send(encode(self._recovery.adopt(message)))
        elif isinstance(message, Resize):
            self._cells.send(encode(self._resize(message)))

    def _resize(self, order: Resize) -> InOrder:
        """Be one of another number of ranks from now on."""
        self._setup = take_post(self._setup, order, self._shell.user_ns)
        self._control.renumber(self._setup.rank)
        self._group.renumber(self._setup)
        return self._recovery.resize(self._setup, order)

    def _recover(self, task: Recover) -> InOrder:
        try:
            report = self._recovery.recover(task)
            return msgspec.structs.replace(report, grouped=not self._group.destroyed)
        except BaseException as error:  # the other ranks wait for the answer
            streams.show_exception()
            return InOrder(f"{type(error).__name__}: {error}".splitlines()[0])

    def _execute(self, task: Execute) -> None:
        """Run a task and report, whatever comes: a rank that does not report is busy forever."""
        reply: Reply | None = None
        try:
            if task.kind in _LOOKS:
                self._shell.keep_failure()
            else:
                self._shell.forget_failure()
            self._company = len(task.ranks)
            alone = self._collectives.stand_ins
            participants.begin(None if task.kind == "launch" or alone else task.ranks, alone=alone)
            self._recovery.begin(task.serial)
            self._switch_steps(task)
            if task.kind == "cell":
                debug_server.trace_cell(by_notebook=bool(task.file))
            with profiled(task.profile, self._setup.rank) as profiles:
                reply = self._metered(task, self._work[task.kind])
            if profiles:
                reply = msgspec.structs.replace(reply, payload=msgspec.msgpack.encode(profiles[0]))
            self._recovery.end(task.serial, reply.failure, self._shell.caught)
            lap = active_meter.end_lap()
            if task.metered.steps and lap is not None and (lap.steps or lap.passes or lap.impossible):
                reply = msgspec.structs.replace(reply, steps=lap)
            if reply.failure is None and active_training.training is not None:  # the models that what ran has replaced
                active_training.training.after_cell()  # can't wait for a larger collection
            self._put_in_order()
            if self._group.destroyed:
                reply = msgspec.structs.replace(reply, grouped=False)
            if self._collectives.broken():
                reply = msgspec.structs.replace(reply, broken=True)
        except BaseException as error:  # from what surrounds the task, or from a signal handler that ran then
            if reply is None or reply.failure is None:
                reply = self._failed_around(task, error, "before its end" if reply is None else "after its end")
            else:  # what it raised itself counts for more
                streams.show_exception()
        for _ in range(_REPORTS):
            try:
                self._report(reply)
                return
            except BaseException as error:  # from a signal handler, or from a reply that no message can hold
                streams.show_exception()  # the reply may have been sent
                reply = self._failed_around(task, error, "while its reply was sent")

    def _put_in_order(self) -> None:
        """Repair what the task did to the process, so that the next one is seen and survives."""
        keyboard.stop_tracing()
        debug_server.end_step()
        streams.flush_c()
        notes = [_RESTORED.format(what) for what in self._streams.restore()]
        if cancel_alarm():
            notes.append(_CANCELLED)
        for note in notes:
            print(note, file=sys.__stderr__)
        self._orphans.reap()

    def _report(self, reply: Reply) -> None:
        self._end_if_forked(reply.failure)
        if reply == Reply(reply.serial, self._setup.rank, "ok"):  # the mark alone says it, at half the cost
            self._lane.mark(reply.serial, PLAIN_END)
            return
        frame = encode(reply)
        self._lane.mark(reply.serial, END)
        self._cells.send(frame)

    def _failed_around(self, task: Execute, error: BaseException, when: str) -> Reply:
        """Return the reply when our own work before or after a task has failed."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        failure = failures.describe(error, text + _AROUND.format(when))
        return Reply(task.serial, self._setup.rank, "error", failure)

    def _metered(self, task: Execute, work: Callable[[Execute], Reply]) -> Reply:
        """Run the work; its reply tells what it cost in memory, if that was asked for."""
        if not task.metered.memory:
            return self._guarded(task, work)
        with MemoryMeter() as meter:
            reply = self._guarded(task, work)
        return msgspec.structs.replace(reply, memory=meter.usage)

    def _switch_steps(self, task: Execute) -> None:
        """Measure training steps if that was asked for, and no longer if not; what is nbdist's own changes nothing."""
        if task.metered.steps:
            measuring.start_steps()
        elif task.kind in ("cell", "call"):
            active_meter.stop()

    def _guarded(self, task: Execute, work: Callable[[Execute], Reply]) -> Reply:
        """Run the work so that whatever it raises, an interrupt at its very end too, becomes its reply."""
        try:
            # A launched function that catches the interrupt may save what it has; the next one ends it.
            with self._stop.open(task.serial, once=task.kind == "launch"):
                reply = work(task)
            failure = self._shell.failure  # what IPython has shown instead of raising it
            if failure is not None and reply.status == "ok":
                reply = self._failed(task, failure)
            elif self._stop.was_given(task.serial):
                reply = msgspec.structs.replace(reply, caught=True)
        except BaseException as error:  # the cell may raise anything, and that is its result
            reply = self._failed(task, self._shell.fail(error))
        self._end_if_forked(reply.failure)
        return reply

    def _end_if_forked(self, failure: Failure | None = None) -> None:
        """End a process that code on this rank has forked and that came back here, as it would end after a script."""
        if os.getpid() == self._pid:
            return
        try:
            if failure is not None:
                print(failure.traceback, file=sys.stderr)
            streams.flush_c()
        finally:
            os._exit(0 if failure is None else 1)

    def _run_cell(self, task: Execute) -> Reply:
        failure, result = self._shell.run(task.code, task.number, task.offset, task.file)
        if failure is not None:
            return self._failed(task, failure)
        return Reply(task.serial, self._setup.rank, "ok", result=result, names=self._changed_names())

    def _call(self, task: Execute) -> Reply:
        function, arguments, keywords = self._unpack_call(task)
        return self._with_value(task, function(*arguments, **keywords), "the return value")

    def _launch(self, task: Execute) -> Reply:
        if self._function is not None:
            value = launched.call(self._function)
        else:
            function, arguments, keywords = self._unpack_call(task)
            value = launched.call(function, *arguments, **keywords)
        return self._with_parcel(task, launched.pack(value, self._setup))

    def _unpack_call(self, task: Execute) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        function, arguments, keywords, sources = transfer.unpack(_parcel_of(task))
        for source in sources:
            self._shell.learn_source(*source)
        return function, arguments, keywords

    def _push(self, task: Execute) -> Reply:
        values = transfer.unpack(_parcel_of(task))
        self._shell.user_ns.update(values)
        return Reply(task.serial, self._setup.rank, "ok", names=self._changed_names())

    def _pull(self, task: Execute) -> Reply:
        return self._with_value(task, eval(task.code, self._shell.user_ns), task.code)

    def _free(self, task: Execute) -> Reply:
        before = self._control.questions.memory()
        self._shell.forget_failure()
        active_meter.release()
        device = shells.free_memory(self._shell)
        after = self._control.questions.memory()
        report = {
            "private": before.private - after.private,
            "device": device,
            "private_left": after.private,
            "device_left": after.reserved or 0,
        }
        return Reply(task.serial, self._setup.rank, "ok", payload=msgspec.msgpack.encode(report))

    def _debug(self, task: Execute) -> Reply:
        self._shell.look_into_failure()
        return Reply(task.serial, self._setup.rank, "ok", names=self._changed_names())

    def _listen_for_debugger(self, task: Execute) -> Reply:
        return Reply(task.serial, self._setup.rank, "ok", payload=msgspec.msgpack.encode(debug_server.listen()))

    def _with_value(self, task: Execute, value: object, name: str) -> Reply:
        return self._with_parcel(task, transfer.pack(value, name=name))

    def _with_parcel(self, task: Execute, packed: transfer.Packed) -> Reply:
        self._parcels[task.serial] = packed  # until the notebook has it
        return Reply(task.serial, self._setup.rank, "ok", parcel=packed.parcel, names=self._changed_names())

    def _release(self, order: Release) -> Done:
        packed = self._parcels.pop(order.serial, None)
        if packed is not None:
            packed.close()
        return Done()

    def _rest(self, order: Rest) -> Done:
        """Wait for other ranks without a limit, until the cell has ended. In the control thread."""
        self._collectives.timeouts.suspend(order.serial)
        return Done()

    def _failed(self, task: Execute, failure: Failure) -> Reply:
        if failure.kind == "lost" and self._stop.has_cut(task.serial):
            failure = msgspec.structs.replace(failure, name="KeyboardInterrupt", kind="interrupted")
        status: Outcome = "interrupted" if failure.kind in ("interrupted", "stopped") else "error"
        return Reply(task.serial, self._setup.rank, status, failure, names=self._changed_names())

    def _changed_names(self) -> list[str] | None:
        names = self._current_names()
        if names == self._names:
            return None
        self._names = names
        return names

    def _current_names(self) -> list[str]:
        names, hidden = self._shell.user_ns, self._shell.user_ns_hidden
        try:
            return [name for name in names if name[:1] != "_" and name not in hidden and isinstance(name, str)]
        except TypeError:  # `globals()` takes any key
            texts = [name for name in names if isinstance(name, str)]
            return [name for name in texts if name[:1] != "_" and name not in hidden]


def _parcel_of(task: Execute) -> transfer.Parcel:
    assert task.parcel is not None, task.kind
    return task.parcel
