"""The controller: routes between the notebook, the agent and the ranks, and knows which ranks are alive.

Owns the output log, and decides when sets of ranks start and stop; `node_table` knows the nodes, `members` the ranks,
`rank_order` puts what one rank sends in order, `cells` knows what runs. It imports no torch and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import sys
import time
import traceback
from pathlib import Path

import msgspec
import zmq

from nbdist.base.end_signals import EndSignalPipe
from nbdist.base.processes import describe_exit, end_descendants
from nbdist.controller.base.logwriter import LogWriter
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.base.outputlog import LastOutput, OutputLog, Part
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.clients.client_side import ClientSide
from nbdist.controller.clients.takeover import attached, hindrance, started_with
from nbdist.controller.clients.unattended_save import UnattendedSave
from nbdist.controller.clients.visitors import Visitors, cells_run, status_of
from nbdist.controller.nodes.node_table import KnownNode, NodeTable
from nbdist.controller.ranks.members import Members
from nbdist.controller.ranks.rank_sets import RankSets
from nbdist.visits import name_of
from nbdist.wire.base.message import VERSION, Handlers, Hello, Message
from nbdist.wire.bundle import unbundled
from nbdist.wire.frames import sequence_of
from nbdist.wire.lanes import (
    AGENT_CONTROL,
    AGENT_TRANSFERS,
    CLIENT_EVENTS,
    GUEST,
    LANES,
    NODE_LANES,
    RANK_CONTROL,
    RANK_DISPLAY,
    RANK_LANES,
    VISITOR,
    node_lane,
    parse_lane,
    whole,
)
from nbdist.wire.messages.announcements import EndAnnounced
from nbdist.wire.messages.cells import Execute
from nbdist.wire.messages.errands import ErrandDone
from nbdist.wire.messages.handover import Attach, AttachRefused, Choices, Ending, Leave
from nbdist.wire.messages.life import Broken, Shutdown, Start, Stop
from nbdist.wire.messages.output import Credit, LogPart, Notice, ReadLog
from nbdist.wire.messages.rank_processes import Gone
from nbdist.wire.processes.nodes import Join, NodeLeft, Pong
from nbdist.wire.processes.setup import AgentSetup, ControllerFailed, ControllerReady, ControllerSetup, encode_line
from nbdist.wire.questions.debug_bytes import TellDebugger
from nbdist.wire.questions.knowing import Release
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import OF_AGENTS, Answer, Ask, GetCellsRun, GetStatus, Look, WatchNodes, ask
from nbdist.wire.questions.stopping import Enter

_LONGEST_POLL = 1 << 30  # milliseconds; zmq takes no more than an int
_HELLO_GRACE = 0.2  # seconds that a notebook which is just connecting has to do so, if there is bad news


def run(agent: subprocess.Popen[bytes]) -> None:
    """Run a controller.

    Args:
        agent: The agent process, just started and waiting for its setup on standard input.
    """
    starters: list[int] = []
    try:
        controller = _make(agent)
        if controller is not None:
            try:
                controller.run()
            finally:
                starters = controller.close()
    finally:
        end_descendants(keep=starters)


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


class Controller:
    """The controller's single loop and its state."""

    def __init__(self, setup: ControllerSetup, kernel: int, agent: subprocess.Popen[bytes]) -> None:
        self._agent = agent
        self._agent_end = os.pidfd_open(agent.pid)
        self._poller = zmq.Poller()
        self._unreadable: set[bytes] = set()  # lanes for which the notebook was already told of a lost message
        log = OutputLog()
        self._log = LogWriter(log, lambda text: self.to_notebook(Notice(text)))
        self._shut_down = False  # the notebook asked to end everything
        self._ends = EndSignalPipe()
        with contextlib.ExitStack() as undo:
            undo.callback(self._log.close)
            self._router = MessageRouter(Path(setup.runtime_folder), setup.kernel)
            undo.callback(self._router.remove_files)
            self._side = ClientSide(setup, kernel, self._router, self._poller, self._pay)
            self._visitors = Visitors(self._router, self._side, self._log)
            self._nodes = NodeTable(self._router, self.to_notebook, self._node_lost)
            self._sets = RankSets(
                self._nodes, self._router, self.to_notebook, self._keep, self._side.begin_set, self._log.clear
            )
            self._from_client = self._handlers_of_client()
            self._from_agent = self._handlers_of_agents()
            self._save = UnattendedSave(
                self._side, self._sets, self._poller, name_of(self._router.key_file), self._note
            )
            self._introduce(log.folder)
            undo.pop_all()

    def _introduce(self, log_folder: Path | None) -> None:
        """Send the agent and the notebook the address to connect to."""
        files = [*self._router.files, *([log_folder] if log_folder is not None else [])]
        setup = AgentSetup(
            keys=self._router.node_keys,
            token=b"\x1b]nbdist;%s;" % secrets.token_hex(8).encode(),
            leftovers=[str(path) for path in files],
            folder=str(log_folder or ""),
        )
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # we are about to notice that it ended
            self._agent.stdin.write(encode_line(setup))
            self._agent.stdin.close()
        _say_first(ControllerReady(str(self._router.key_file)))

    def run(self) -> None:
        """Serve until the notebook is gone or asks to stop."""
        starters = self._nodes.starters.fileno()
        for source in (self._router.socket, self._agent_end, self._log.fileno(), starters, self._ends.descriptor):
            self._poller.register(source, zmq.POLLIN)
        while True:
            self._tick()
            self._side.deliver()
            ready = dict(self._poller.poll(self._patience()))
            if self._agent_end in ready:
                self._agent_died()
                return
            if not self._side.alone and self._side.client.end in ready:
                self._client_left(None)
            if self._side.leave_at is not None and time.monotonic() >= self._side.leave_at:
                return
            if self._router.socket in ready and not self._receive_all():
                return
            if self._log.fileno() in ready:
                self._log.finish()
            if self._ends.descriptor in ready:
                self._announce_ends()
            if self._save.descriptor in ready:
                self._save.read()
            if starters in ready and (why := self._nodes.heed_starters()):
                self._sets.nodes_fail(why)
            self._side.deliver()  # before the notebook hears of what is due, as it waits for this

    def close(self) -> list[int]:
        """End everything that this controller has started, and leave nothing behind.

        Returns:
            The processes that still end other nodes, and then themselves.
        """
        self._nodes.broadcast(Shutdown())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(1)
        self._nodes.starters.close()
        left = self._nodes.starters.alive()
        end_descendants(keep=left)
        self._side.deliver()
        self._log.close()
        self._router.remove_files()
        self._router.close()
        return left

    def _patience(self) -> int | None:
        members = self._members.due() if self._members is not None else None
        dues = [self._side.leave_at, self._nodes.due(), self._visitors.descriptions.due(), members]
        dues += [self._save.due()] if self._side.alone else []
        due = min(due for due in dues if due is not None)
        return None if due == float("inf") else min(max(0, int((due - time.monotonic()) * 1000) + 1), _LONGEST_POLL)

    def _tick(self) -> None:
        now = time.monotonic()
        self._nodes.tick(now)
        self._visitors.descriptions.tick(now)
        (self._members or self._sets).tick(now)
        if self._side.alone:
            self._save.tick(now)

    @property
    def _members(self) -> Members | None:
        """The present set of ranks."""
        return self._sets.members

    # --- messages

    def _receive_all(self) -> bool:
        """Handle the messages that have arrived. False if the notebook asked to end everything."""
        for identity, frames in self._router.received(256):  # then look at the other sources again
            for frame in whole(frames):
                try:
                    for message in unbundled(frame):
                        self._handle(identity, message)
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
            name, incarnation, number, life = parse_lane(identity)
        except ValueError:  # from a stranger
            return
        rank = self._sender(incarnation, number, life)
        sequence = sequence_of(frame) if name == RANK_DISPLAY else None
        if rank is not None and sequence is not None:
            rank.miss_display(sequence, str(error))
        elif (rank is not None or incarnation < 0) and name in LANES and identity not in self._unreadable:
            self._unreadable.add(identity)
            sender = f"rank {number}" if rank is not None else f"the {name.partition('.')[0]}"
            text = f"a message from {sender} could not be handled and is lost ({type(error).__name__}: {error})"
            self.to_notebook(Notice(text))

    def _handle(self, identity: bytes, message: Message) -> None:
        name, incarnation, number, life = parse_lane(identity)
        if name == GUEST:
            self._guest(identity, message)
        elif isinstance(message, Hello):
            self._hello(identity, message)
        elif name == VISITOR:
            self._shut_down |= self._visitors.receive(identity, message, self._members, self._nodes.hosts)
        elif name in RANK_LANES:
            rank = self._sender(incarnation, number, life)
            if rank is None:  # the process has ended, and its place was taken
                return
            if not self._router.is_connected(identity):
                raise ValueError(f"{identity!r} has not said hello")
            if self._members is not None:
                self._members.handle_rank(rank, message)
                if self._side.alone:
                    self._members.cells.prompts.refuse_all()
        elif name == AGENT_TRANSFERS:
            if self._members is not None:
                self._members.transfers.handle(number, message)
        elif name in NODE_LANES:
            self._handle_agent(number, message)
        elif isinstance(message, Attach):
            self._attach(number, message)
        elif number == self._side.client.number:  # else of one that has lost the session
            self._handle_client(message)

    def _sender(self, incarnation: int, number: int, life: int) -> Rank | None:
        """Return the rank that a lane belongs to; None if the process has ended."""
        members = self._members
        if members is None or members.roster.incarnation != incarnation:
            return None
        return members.roster.sender(number, life)

    def _hello(self, identity: bytes, message: Hello) -> None:
        if message.version != VERSION:
            raise ValueError(f"{identity!r} speaks version {message.version}, this controller {VERSION}")
        name, incarnation, number, life = parse_lane(identity)
        members = self._members
        if members is not None and name in RANK_LANES and members.roster.incarnation == incarnation:
            rank, node = members.roster.where.rank_in(number), self._router.relay_of(identity)
            if rank is not None and not members.roster.where.is_on(rank, node):
                raise ValueError(f"node {node} speaks for rank {rank}, which is on another")
            if self._sender(incarnation, number, life) is None:
                raise ValueError(f"the process in slot {number} that says hello has been replaced")
        self._router.connect(identity)
        if name == AGENT_CONTROL:
            self._nodes.connected(number)

    # --- clients come and go

    def _client_left(self, message: Leave | None) -> None:
        """Handle a client that is gone: the ranks go on for as long as it asked, or was told for a crash."""
        members = self._members
        lasts = (
            members is not None and members.roster.up and not members.roster.ending and not self._side.unseen.launches
        )
        if message is not None:
            self._side.heed(message, lasts)
        else:
            self._side.lose_process(lasts)
        self._drop_what_it_wanted()

    def _drop_what_it_wanted(self) -> None:
        """Stop what only the last client wanted: samples, newcomers that it was about to set up, values, debuggers."""
        self._visitors.errands.give_up()
        self._nodes.broadcast(WatchNodes(0.0))
        if self._members is not None:
            self._members.newcomers.give_up()
            self._members.cells.prompts.refuse_all()
            outbox, everyone = self._members.outbox, self._members.roster.everyone()
            outbox.to_ranks(RANK_CONTROL, everyone, ask(0, [], TellDebugger(b"")))  # those it has stopped go on
            for serial, ranks in self._side.unseen.take_lent().items():
                self._members.transfers.release(serial)
                outbox.to_ranks(RANK_CONTROL, sorted(ranks), ask(0, [], Release(serial)))

    def _attach(self, number: int, message: Attach) -> None:
        members = self._members
        why = hindrance(self._side, members, message, ending=self._shut_down)
        if not why:
            try:
                was_alone, away = self._side.alone, self._side.away
                self._side.take(number, message)
            except OSError as error:
                seen = f"process {message.pid} can't be seen from here ({error.strerror})"
                why = f"{seen}: attach from the same container"
        if why or members is None or self._sets.started is None:
            self._router.send(node_lane(CLIENT_EVENTS, number), AttachRefused(why))
            return
        if not was_alone:
            self._drop_what_it_wanted()
        started, first_serial = started_with(self._sets.started, self._sets.choices), self._sets.first_serial()

        def tell(printed: dict[int, LastOutput]) -> None:
            if self._side.client.number == number:
                self._side.open(attached(self._side.unseen, members, started, first_serial, away, printed))

        self._log.tails(tell, self._side.unseen.serials)

    # --- from the notebook

    def _handlers_of_client(self) -> Handlers[[]]:
        return (
            Handlers[[]]()
            .on(Credit, self._side.paid)
            .on(Ask, self._ask)
            .on(GetStatus, lambda message: self.to_notebook(status_of(self._members, message.request)))
            .on(GetCellsRun, lambda message: self.to_notebook(cells_run(self._members, message.request)))
            .on(ReadLog, self._read_log)
            .on(WatchNodes, self._nodes.broadcast)
            .on(Start, self._start)
            .on(Shutdown, self._note_shutdown)
            .on(Stop, lambda message: self._sets.stop(message.grace))
            .on(Leave, self._client_left)
            .on(Ending, self._side.note_ending)
            .on(Choices, self._sets.choose)
            .on(ErrandDone, self._visitors.errands.done)
        )

    def _handle_client(self, message: Message) -> None:
        if self._from_client(message) or self._members is None:
            return
        if isinstance(message, Execute):
            self._side.unseen.begin(message)
        self._members.handle_client(message)

    def _start(self, message: Start) -> None:
        self._ends.spare(message.options.end_grace)
        self._sets.start(message)

    def _note_shutdown(self, message: Shutdown) -> None:
        self._shut_down = True

    def _ask(self, message: Ask) -> None:
        if message.asker != "notebook":
            raise ValueError("only the controller asks in its own name")
        members = self._members
        if members is not None and isinstance(message.question, Release):
            members.transfers.release(message.question.serial)
            self._side.unseen.released(message.question.serial)
        if members is not None and isinstance(message.question, Enter):
            for number in message.ranks:
                members.cells.prompts.answered(number)
        living = [number for number in message.ranks if members is not None and members.roster.lives(number)]
        for number in set(message.ranks).difference(living):
            self.to_notebook(Answer(message.request, number, NoAnswer("it has died")))
        if members is None:
            return
        if not isinstance(message.question, OF_AGENTS):
            members.outbox.to_ranks(RANK_CONTROL, living, msgspec.structs.replace(message, ranks=[]))
            return
        for number in living:
            members.outbox.to_agent_of(number, msgspec.structs.replace(message, ranks=[number]))

    # --- to the notebook

    def to_notebook(self, message: Message) -> None:
        """Send to the client, if there is one."""
        self._side.send(message)
        if isinstance(message, EndAnnounced):
            self._save.announced()

    def _note(self, text: str) -> None:
        """Keep a line for the next client."""
        self.to_notebook(Notice(text))

    def _keep(self, serial: int, number: int, rank: int, stream: int, data: bytes) -> None:
        """Log what a rank printed. Without a notebook, the log consumes the output and so pays for it."""
        pay = functools.partial(self._pay, Credit(rank, len(data))) if self._side.alone else None
        self._log.write(serial, number, rank, stream, data, pay)

    def _pay(self, credit: Credit) -> None:
        """Let a rank print or show as much more."""
        if self._members is None:
            return
        if credit.items:
            self._members.outbox.to_rank(RANK_DISPLAY, credit.rank, credit)
        else:
            self._members.outbox.to_agent_of(credit.rank, credit)

    def _read_log(self, message: ReadLog) -> None:
        def answer(part: Part | None) -> None:
            self.to_notebook(LogPart(message.request, **(vars(part) if part is not None else {})))

        self._log.read(
            answer, serials=message.serials, number=message.cell, ranks=message.ranks, position=message.position
        )

    # --- other nodes

    def _guest(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Join) and self._nodes.join(identity, self._router.key_of(identity), message):
            self._sets.node_came()

    def _node_lost(self, node: KnownNode, why: str) -> None:
        if self._members is not None:
            self._members.lose(node, why)
            self._sets.check_gone()

    # --- from agents

    def _handlers_of_agents(self) -> Handlers[[int]]:
        return (
            Handlers[[int]]()
            .on(Look, self._looked)
            .on(Pong, lambda message, node: self._nodes.heard(node, message, time.monotonic()))
            .on(NodeLeft, self._node_left)
            .on(Gone, self._processes_gone)
            .on(EndAnnounced, self._end_announced)
        )

    def _handle_agent(self, node: int, message: Message) -> None:
        members = self._members
        if not self._from_agent(message, node) and members is not None and self._is_of_present(message, members):
            members.handle_agent(node, message)

    def _is_of_present(self, message: Message, members: Members) -> bool:
        """Return whether a message is about the present set of ranks, and not about one that has ended."""
        incarnation = members.roster.incarnation
        return bool(getattr(message, "incarnation", incarnation) == incarnation)

    def _looked(self, message: Look, node: int) -> None:
        if node in self._nodes:  # else it has just been lost; by that name, as two may have one
            self.to_notebook(Look(msgspec.structs.replace(message.node, name=self._nodes[node].host)))

    def _node_left(self, message: NodeLeft, node: int) -> None:
        if node in self._nodes and node:
            self._nodes.lose(self._nodes[node], message.why)

    def _processes_gone(self, message: Gone, node: int) -> None:
        if self._members is not None and self._is_of_present(message, self._members):
            self._members.gone(node)
            self._sets.check_gone()

    # --- the end of the allocation

    def _announce_ends(self) -> None:
        for name, seconds in self._ends.take():
            self.to_notebook(EndAnnounced(name, "controller", os.getpid(), seconds=seconds))

    def _end_announced(self, message: EndAnnounced, node: int) -> None:
        if node in self._nodes:
            host = self._nodes[node].host if node else ""
            self.to_notebook(msgspec.structs.replace(message, host=host))

    def _agent_died(self) -> None:
        code = self._agent.wait()
        end_descendants(keep=self._nodes.starters.alive())  # its ranks were reparented to this process
        if not self._side.connected and self._router.socket.poll(int(_HELLO_GRACE * 1000)):
            self._receive_all()
        self.to_notebook(
            Broken(
                f"the session's agent (pid {self._agent.pid}) has ended: {describe_exit(code)}; "
                "all ranks ended with it. `%distributed start` starts a new one."
            )
        )
