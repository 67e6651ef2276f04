"""The controller: routes between the notebook, the agent and the ranks, and knows which ranks are alive.

Owns membership (start, stop, death) and the output log. `rank_order` orders what one rank sends; `cells` tracks what
runs. It imports no torch and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from nbdist.controller.credit import Ledger
from nbdist.controller.logwriter import LogWriter
from nbdist.controller.outputlog import OutputLog, Part
from nbdist.controller.rank_order import Rank
from nbdist.controller.running_cells import Cells
from nbdist.controller.switchboard import Switchboard
from nbdist.processes import describe_exit, end_descendants
from nbdist.ranks import describe_ranks
from nbdist.wire.cells import Execute, InOrder, Interrupt, Reply, Returned
from nbdist.wire.frames import decode, encode, sequence_of
from nbdist.wire.lanes import (
    AGENT_CONTROL,
    CLIENT_EVENTS,
    LANES,
    RANK_CELL,
    RANK_CONTROL,
    RANK_DISPLAY,
    lane,
    parse_lane,
    whole,
)
from nbdist.wire.life import (
    PATIENCE_VARIABLE,
    SERIALS,
    Broken,
    Died,
    Obstacle,
    Progress,
    RankInfo,
    Shutdown,
    Start,
    Started,
    StartFailed,
    StartOptions,
    Stop,
    Stopped,
)
from nbdist.wire.message import VERSION, Hello, Message
from nbdist.wire.output import Credit, Display, LogPart, Notice, Output, ReadLog, WidgetMessage
from nbdist.wire.question import NoAnswer
from nbdist.wire.questions import Answer, Ask, GetStatus, Look, RankStatus, Status, WatchNodes
from nbdist.wire.rank_processes import Exited, Gone, Kill, Quit, Ready, Spawn, Spawned, SpawnFailed, Spawning
from nbdist.wire.setup import AgentSetup, ControllerFailed, ControllerReady, ControllerSetup, encode_line

_QUIT_GRACE = 1.0
_TICK_PAUSE = 1.0  # seconds, after an error
_HELLO_GRACE = 0.2  # seconds to wait for a notebook that is just connecting, if there is bad news for it


def run(agent: subprocess.Popen[bytes]) -> None:
    """Run a controller.

    Args:
        agent: The agent process, just started and waiting for its setup on standard input.
    """
    try:
        controller = _make(agent)
        if controller is not None:
            with contextlib.closing(controller):
                controller.run()
    finally:
        end_descendants()


def _make(agent: subprocess.Popen[bytes]) -> Controller | None:
    """Return the controller; None if it is no longer wanted or can't start, which was then reported on stdout."""
    try:
        setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=ControllerSetup)
        kernel = os.pidfd_open(setup.kernel)
        if os.getppid() == setup.kernel:  # else the notebook is gone, and its pid may belong to another process
            return Controller(setup, kernel, agent)
    except (msgspec.DecodeError, ProcessLookupError):
        pass  # the notebook is gone before it sent its setup
    except (OSError, zmq.ZMQError) as error:
        where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        what = f"the session's controller did not start: {error.strerror}{where}."
        text = f"{what} Fix that, then type `%distributed start` again."
        with contextlib.suppress(BrokenPipeError):
            _say_first(ControllerFailed(text))
    return None


def _say_first(line: ControllerReady | ControllerFailed) -> None:
    sys.stdout.buffer.write(encode_line(line))
    sys.stdout.buffer.flush()


@dataclass
class _Set:
    """The ranks of one epoch."""

    epoch: int
    options: StartOptions
    ranks: dict[int, Rank]
    moved: float  # when it last made progress
    progress: Progress | None = None  # what it did last
    up: bool = False
    ending: bool = False
    backend: str = ""
    notes: list[str] | None = None
    ticks_from: float = 0.0  # earliest time to tick the cells again
    cells: Cells = field(init=False)
    late: set[int] = field(default_factory=set)  # ranks whose displays had not arrived when their cell ended


class Controller:
    """The controller's single loop and its state."""

    def __init__(self, setup: ControllerSetup, kernel: int, agent: subprocess.Popen[bytes]) -> None:
        self._setup = setup
        self._kernel = kernel
        self._agent = agent
        self._agent_end = os.pidfd_open(agent.pid)
        self._set: _Set | None = None
        self._epoch = 0
        self._serials = itertools.count(1)  # handed out in blocks, so that no two clients use the same number
        self._pending: Start | None = None
        self._news: list[bytes] = []  # for the notebook
        self._alone = False  # the notebook is gone
        self._ledger = Ledger()
        self._unreadable: set[bytes] = set()  # lanes for which the notebook was already told of a lost message
        log = OutputLog()
        self._log = LogWriter(log, lambda text: self.to_notebook(Notice(text)))
        self._leave_at: float | None = None
        self._shut_down = False  # the notebook asked to end everything
        self._linger = 0.0
        with contextlib.ExitStack() as undo:
            undo.callback(self._log.close)
            self._switchboard = Switchboard(Path(setup.runtime_folder))
            undo.callback(self._switchboard.remove_files)
            self._introduce(log.folder)
            undo.pop_all()

    def _introduce(self, log_folder: Path | None) -> None:
        """Send the agent and the notebook the address to connect to."""
        files = [*self._switchboard.files, *([log_folder] if log_folder is not None else [])]
        setup = AgentSetup(
            keys=self._switchboard.node_keys,
            token=b"\x1b]nbdist;%s;" % secrets.token_hex(8).encode(),
            leftovers=[str(path) for path in files],
            folder=str(log_folder or ""),
        )
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # we are about to notice that it ended
            self._agent.stdin.write(encode_line(setup))
            self._agent.stdin.close()
        _say_first(ControllerReady(str(self._switchboard.key_file)))

    def run(self) -> None:
        """Serve until the notebook is gone or asks to stop."""
        poller = zmq.Poller()
        for source in (self._switchboard.socket, self._kernel, self._agent_end, self._log.fileno()):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._patience()))
            if self._agent_end in ready:
                self._agent_died()
                return
            if self._kernel in ready:
                poller.unregister(self._kernel)
                self._notebook_left()
            if self._leave_at is not None and time.monotonic() >= self._leave_at:
                return
            if self._switchboard.socket in ready and not self._receive_all():
                return
            if self._log.fileno() in ready:
                self._log.finish()
            self._check_start()
            self._check_cells()
            self._check_displays()
            self._deliver_news()

    def close(self) -> None:
        """End everything this controller started, and leave nothing behind."""
        self._switchboard.send(AGENT_CONTROL, Shutdown())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(1)
        end_descendants()
        self._deliver_news()
        self._log.close()
        self._switchboard.remove_files()
        self._switchboard.close()

    def _patience(self) -> int | None:
        dues = []
        if self._leave_at is not None:
            dues.append(self._leave_at - time.monotonic())
        if self._set is not None and not self._set.up and not self._set.ending:
            dues.append(self._set.moved + self._set.options.patience - time.monotonic())
        if self._set is not None and self._set.up and (due := self._cells_due(self._set)) is not None:
            dues.append(due - time.monotonic())
        if self._set is not None:
            late = (self._set.ranks[number].due for number in self._set.late)
            dues += [due - time.monotonic() for due in late if due is not None]
        return max(0, int(min(dues) * 1000) + 1) if dues else None

    # --- messages

    def _receive_all(self) -> bool:
        """Handle the messages that have arrived. False if the notebook asked to end everything."""
        for identity, frames in self._switchboard.received(256):  # then look at the other sources again
            for frame in whole(frames):
                try:
                    self._handle(identity, decode(frame))
                except Exception as error:  # one bad message must not cost the user all ranks
                    with contextlib.suppress(OSError):  # the notebook may be gone
                        traceback.print_exc()
                    self._report_unreadable(identity, frame, error)
            if self._shut_down:
                return False
        return True

    def _report_unreadable(self, identity: bytes, frame: bytes, error: Exception) -> None:
        """Report once per lane that a message from one of our own processes is lost."""
        try:
            name, epoch, number = parse_lane(identity)
        except ValueError:  # from a stranger
            return
        rank = self._set.ranks.get(number) if self._set is not None and self._set.epoch == epoch else None
        sequence = sequence_of(frame) if name == RANK_DISPLAY else None
        if rank is not None and sequence is not None:
            rank.miss_display(sequence, str(error))
        elif (rank is not None or epoch < 0) and name in LANES and identity not in self._unreadable:
            self._unreadable.add(identity)
            sender = f"rank {number}" if rank is not None else f"the {name.partition('.')[0]}"
            what = f"{type(error).__name__}: {error}"
            self.to_notebook(Notice(f"a message from {sender} could not be handled and is lost ({what})"))

    def _handle(self, identity: bytes, message: Message) -> None:
        name, epoch, rank = parse_lane(identity)
        if name not in LANES:
            raise ValueError(f"{identity!r} is not a lane")
        if isinstance(message, Hello):
            self._hello(identity, message)
        elif name.startswith("rank"):
            if self._set is not None and self._set.epoch == epoch:
                self._handle_rank(self._set, self._set.ranks[rank], message)
        elif name.startswith("agent"):
            self._handle_agent(message)
        else:
            self._handle_client(message)

    def _hello(self, identity: bytes, message: Hello) -> None:
        if message.version != VERSION:
            raise ValueError(f"{identity!r} speaks version {message.version}, this controller {VERSION}")
        if identity == CLIENT_EVENTS:
            self._alone = False
        self._switchboard.connect(identity)

    def _notebook_left(self) -> None:
        """Handle a notebook that is gone: the ranks go on for as long as it asked."""
        self._alone = True
        self._switchboard.disconnect(CLIENT_EVENTS)
        self._news.clear()
        for credit in self._ledger.settle():
            self._pay(credit)
        self._switchboard.send(AGENT_CONTROL, WatchNodes(0.0))
        self._leave_at = time.monotonic() + (self._linger if self._set is not None else 0.0)

    def _deliver_news(self) -> None:
        if self._news and self._switchboard.is_connected(CLIENT_EVENTS):
            self._switchboard.send_together(CLIENT_EVENTS, self._news)
            self._news.clear()

    # --- from the notebook

    def _handle_client(self, message: Message) -> None:
        if isinstance(message, Execute):
            self._execute(message)
        elif isinstance(message, Credit):
            if not self._alone:  # else everything is already paid
                self._ledger.paid(message)
                self._pay(message)
        elif isinstance(message, Interrupt):
            if self._set is not None:
                self._set.cells.stop(message, time.monotonic())
        elif isinstance(message, Returned):
            if self._set is not None:
                self._set.cells.returned_elsewhere(message, time.monotonic())
        elif isinstance(message, Ask):
            self._ask(message)
        elif isinstance(message, GetStatus):
            self.to_notebook(Status(message.request, self._status()))
        elif isinstance(message, ReadLog):
            self._read_log(message)
        elif isinstance(message, WidgetMessage):
            self.to_rank(RANK_CELL, message.rank, message)
        elif isinstance(message, WatchNodes):
            self._switchboard.send(AGENT_CONTROL, message)
        elif isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Shutdown):
            self._shut_down = True
        elif isinstance(message, Stop):
            self._pending = None
            self._switchboard.send(AGENT_CONTROL, WatchNodes(0.0))  # the agent is asked again for the next session
            self._end_set(message.grace)

    def _execute(self, message: Execute) -> None:
        group = self._set
        if group is None or not group.up:
            return
        if not message.ranks or not group.ranks.keys() >= set(message.ranks):
            raise ValueError(f"there are no ranks {message.ranks}")
        now = time.monotonic()
        if not group.cells.begin(message, now):
            return
        frame = encode(message)
        for number in message.ranks:
            rank = group.ranks[number]
            if rank.dead:  # the notebook did not know yet
                group.cells.died(msgspec.structs.replace(rank.dead, serial=message.serial), now)
                continue
            rank.begin(message.serial, message.number)
            self._switchboard.forward(lane(RANK_CELL, group.epoch, number), frame)

    def _ask(self, message: Ask) -> None:
        if message.asker != "notebook":
            raise ValueError("only the controller asks in its own name")
        for number in message.ranks:
            if self._set is None or number not in self._set.ranks or self._set.ranks[number].dead:
                self.to_notebook(Answer(message.request, number, NoAnswer("it has died")))
            else:
                self.to_rank(RANK_CONTROL, number, message)

    # --- services for cells

    def to_rank(self, name: str, rank: int, message: Message) -> None:
        """Send to a rank, if it is alive."""
        if self._set is not None and rank in self._set.ranks and not self._set.ranks[rank].dead:
            self._switchboard.send(lane(name, self._set.epoch, rank), message)

    def to_notebook(self, message: Message) -> None:
        """Send to the notebook, together with the rest of this round. Without one, output goes only to the log."""
        if not self._alone:
            self._ledger.passed_on(message)
            self._news.append(encode(message))
        elif isinstance(message, (Display, WidgetMessage)):
            self._pay(Credit(message.rank, message.size, items=True))

    def _keep(self, serial: int, number: int, rank: int, stream: int, data: bytes) -> None:
        """Log what a rank printed. Without a notebook, the log consumes the output and so pays for it."""
        pay = functools.partial(self._pay, Credit(rank, len(data))) if self._alone else None
        self._log.write(serial, number, rank, stream, data, pay)

    def _pay(self, credit: Credit) -> None:
        """Allow a rank to print or show as much more."""
        if credit.items:
            self.to_rank(RANK_DISPLAY, credit.rank, credit)
        else:
            self._switchboard.send(AGENT_CONTROL, credit)

    def idle(self) -> list[int]:
        """Return the living ranks that run nothing."""
        ranks = self._set.ranks.values() if self._set is not None else ()
        return [rank.rank for rank in ranks if not rank.dead and not rank.serial]

    def dead(self) -> list[int]:
        """Return the ranks that have died."""
        return [rank.rank for rank in self._set.ranks.values() if rank.dead] if self._set is not None else []

    def everyone(self) -> list[int]:
        """Return all ranks, including dead ones."""
        return list(self._set.ranks) if self._set is not None else []

    def _read_log(self, message: ReadLog) -> None:
        def answer(part: Part | None) -> None:
            self.to_notebook(LogPart(message.request, **(vars(part) if part is not None else {})))

        self._log.read(
            answer, serials=message.serials, number=message.cell, ranks=message.ranks, position=message.position
        )

    def _status(self) -> list[RankStatus]:
        ranks = self._set.ranks.values() if self._set is not None else ()
        return [
            RankStatus(r.rank, r.pid, r.device, r.serial, describe_exit(r.dead.code) if r.dead is not None else "")
            for r in ranks
        ]

    # --- start and end of a set

    def _start(self, message: Start) -> None:
        if self._set is not None:
            self._pending = message
            self._end_set()
            return
        self._linger = message.linger
        self._epoch += 1
        self._ledger = Ledger()
        ranks = {n: Rank(n, self.to_notebook, self._keep, self._part_ended) for n in message.options.ranks}
        self._set = _Set(self._epoch, message.options, ranks, time.monotonic())
        self._set.cells = Cells(self, self._execute)
        self._switchboard.send(AGENT_CONTROL, Spawn(self._epoch, message.options))

    def _end_set(self, grace: float = _QUIT_GRACE) -> None:
        group = self._set
        if group is None:
            self.to_notebook(Stopped())
            return
        if group.ending:
            return
        group.ending = True
        for rank in group.ranks.values():
            if rank.serial:
                self.to_rank(RANK_CONTROL, rank.rank, Interrupt(rank.serial, [rank.rank]))
            if rank.ready:
                self.to_rank(RANK_CELL, rank.rank, Quit())
        self._switchboard.send(AGENT_CONTROL, Kill(group.epoch, grace if group.up else 0.0))

    def _start_failed(self, text: str, obstacle: Obstacle = "other") -> None:
        group = self._set
        if group is None or group.ending:
            return
        self.to_notebook(StartFailed(text, obstacle))
        self._end_set()

    def _check_start(self) -> None:
        group = self._set
        if group is None or group.up or group.ending:
            return
        missing = [rank.rank for rank in group.ranks.values() if not rank.ready]
        if not missing and group.notes is not None:
            group.up = True
            infos = [RankInfo(rank.rank, rank.pid, rank.device) for rank in group.ranks.values()]
            serials = next(self._serials) * SERIALS
            self.to_notebook(Started(group.epoch, infos, group.backend, group.notes, serials))
        elif time.monotonic() > group.moved + group.options.patience:
            said = group.progress.text if group.progress is not None else ""
            where = f"{describe_ranks(missing)} not ready" if group.notes is not None else said
            self._start_failed(
                f"the start made no progress for {group.options.patience:g} s ({where or 'no process came up'}). "
                f"Type `%distributed start` to try again; what has been imported is kept. Set {PATIENCE_VARIABLE} in "
                "the environment to wait longer."
            )

    def _got_on(self, group: _Set, progress: Progress) -> None:
        """Note that a start made progress. `progress` is what it does now."""
        group.moved = time.monotonic()
        if progress != group.progress:
            group.progress = progress
            self.to_notebook(progress)

    def _check_cells(self) -> None:
        group = self._set
        if group is None or not group.up:
            return
        due, now = self._cells_due(group), time.monotonic()
        if due is None or now < due:
            return
        try:
            group.cells.tick(now)
        except Exception:  # a rank sent an answer that makes no sense; other cells go on
            traceback.print_exc()
            group.ticks_from = now + _TICK_PAUSE

    def _cells_due(self, group: _Set) -> float | None:
        due = group.cells.due()
        return None if due is None else max(due, group.ticks_from)

    def _check_displays(self) -> None:
        group = self._set
        if group is None:
            return
        for number in list(group.late):
            rank = group.ranks[number]
            if rank.due is not None and time.monotonic() >= rank.due:
                rank.give_up()
            if rank.due is None:
                group.late.discard(number)

    # --- from the agent

    def _handle_agent(self, message: Message) -> None:
        group = self._set
        if isinstance(message, Look):
            self.to_notebook(message)
            return
        if group is None or getattr(message, "epoch", group.epoch) != group.epoch:
            return
        if isinstance(message, Output):
            rank = group.ranks[message.rank]
            rank.print(message)
            if rank.due is not None:
                group.late.add(rank.rank)
        elif isinstance(message, Progress):
            self._got_on(group, message)
        elif isinstance(message, Spawned):
            group.ranks[message.rank].pid = message.pid
            group.moved = time.monotonic()
        elif isinstance(message, Spawning):
            group.notes = message.notes
            self._got_on(group, Progress("join", "ranks join their group"))
        elif isinstance(message, SpawnFailed):
            self._start_failed(message.text, message.obstacle)
        elif isinstance(message, Exited):
            self._exited(group, message)
        elif isinstance(message, Gone):
            self._gone()

    def _exited(self, group: _Set, message: Exited) -> None:
        if group.ending:
            return
        what = message.cause or describe_exit(message.code)
        if message.rank is None:
            self._store_died(group, message)
            return
        rank = group.ranks[message.rank]
        died = Died(rank.rank, message.pid, message.code, message.stderr, rank.serial, message.when, message.cause)
        rank.die(died)
        if not group.up:
            self._start_failed(
                f"rank {message.rank} (pid {message.pid}) ended while it started: {what}.\n{message.stderr}".rstrip()
                + "\nType `%distributed start` to try again."
            )
            return
        group.cells.died(died, time.monotonic())

    def _store_died(self, group: _Set, message: Exited) -> None:
        what = message.cause or describe_exit(message.code)
        if not group.up:
            self._start_failed(
                f"the rendezvous store (pid {message.pid}) ended while ranks started: {what}. "
                "Type `%distributed start` to try again."
            )
            return
        if message.cause:  # the ranks ended with it, which explains it already
            return
        self.to_notebook(
            Notice(
                f"the rendezvous store of this session (pid {message.pid}) has ended, {what}: "
                "groups that exist go on, but no new group can be made. "
                "`%distributed restart` starts fresh ranks."
            )
        )

    def _gone(self) -> None:
        self._set = None
        self._switchboard.forget(b"rank")
        if self._pending is not None:
            start, self._pending = self._pending, None
            self._start(start)
        else:
            self._log.clear()  # it belonged to this session
            self.to_notebook(Stopped())

    def _agent_died(self) -> None:
        code = self._agent.wait()
        end_descendants()  # its ranks were reparented to this process
        connected = self._switchboard.is_connected(CLIENT_EVENTS)
        if not connected and self._switchboard.socket.poll(int(_HELLO_GRACE * 1000)):
            self._receive_all()
        self.to_notebook(
            Broken(
                f"the session's agent (pid {self._agent.pid}) has ended: {describe_exit(code)}; "
                "all ranks ended with it. `%distributed start` starts a new one."
            )
        )

    # --- from ranks

    def _handle_rank(self, group: _Set, rank: Rank, message: Message) -> None:
        if getattr(message, "rank", rank.rank) != rank.rank:
            raise ValueError(f"rank {rank.rank} speaks for another: {message}")
        if isinstance(message, Reply):
            if message.serial == rank.serial:
                rank.answer(message)
        elif isinstance(message, Display):
            rank.display(message)
        elif isinstance(message, Answer) and message.asker == "controller":
            group.cells.answered(message, time.monotonic())
        elif isinstance(message, (Answer, WidgetMessage)):
            self.to_notebook(message)
        elif isinstance(message, InOrder):
            group.cells.in_order(rank.rank, message, time.monotonic())
        elif isinstance(message, Ready):
            self._ready(group, rank, message)

    def _ready(self, group: _Set, rank: Rank, message: Ready) -> None:
        if group.up:
            raise ValueError(f"rank {rank.rank} is ready already")
        if message.failure:
            self._start_failed(
                f"rank {rank.rank} could not join the process group: {message.failure}\n"
                "Type `%distributed start` to try again, `--backend gloo` for another backend, "
                "or `--no-init` to call init_process_group yourself."
            )
            return
        rank.ready, rank.device, group.backend = True, message.device, message.backend
        group.moved = time.monotonic()

    def _part_ended(self, reply: Reply) -> None:
        """Note that a cell is over on a rank."""
        if self._set is not None:
            self._set.cells.ended(reply, time.monotonic())
