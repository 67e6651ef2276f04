"""The controller: routes between the notebook, the agent and the ranks, and knows which ranks are alive.

Owns the output log, and decides when sets of ranks start and stop; `node_table` knows the nodes, `members` the ranks,
`rank_order` puts what one rank sends in order, `cells` knows what runs. It imports no torch and unpickles nothing.
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
from pathlib import Path

import msgspec
import zmq

from nbdist.controller.client_side import ClientSide
from nbdist.controller.logwriter import LogWriter
from nbdist.controller.members import Members
from nbdist.controller.node_table import KnownNode, NodeTable, NoEntrance
from nbdist.controller.outputlog import LastOutput, OutputLog, Part
from nbdist.controller.portraits import Portraits
from nbdist.controller.rank_order import Rank
from nbdist.controller.shares import shared_out
from nbdist.controller.switchboard import Switchboard
from nbdist.controller.takeover import attached, hindrance, started_with
from nbdist.processes import describe_exit, end_descendants
from nbdist.text import counted
from nbdist.wire.cells import Execute, InOrder, Interrupt, Reply, Returned
from nbdist.wire.frames import decode, sequence_of
from nbdist.wire.handover import Attach, AttachRefused, Choices, Ending, Leave
from nbdist.wire.healing import GiveUpHeal, Heal, Rejoin
from nbdist.wire.knowing import KnownFailure, Release
from nbdist.wire.lanes import (
    AGENT_CONTROL,
    AGENT_FREIGHT,
    CLIENT_EVENTS,
    GUEST,
    LANES,
    NODE_LANES,
    RANK_CELL,
    RANK_CONTROL,
    RANK_DISPLAY,
    RANK_LANES,
    VISITOR,
    node_lane,
    parse_lane,
    whole,
)
from nbdist.wire.life import SERIALS, Broken, Shutdown, Start, StartFailed, Stop, Stopped
from nbdist.wire.message import VERSION, Hello, Message
from nbdist.wire.nodes import Join, NodeLeft, Pong
from nbdist.wire.output import Credit, Display, LogPart, Notice, Prompt, ReadLog, WidgetMessage
from nbdist.wire.question import NoAnswer
from nbdist.wire.questions import OF_AGENTS, Answer, Ask, GetStatus, Look, Status, WatchNodes, ask
from nbdist.wire.rank_processes import Gone, Ready
from nbdist.wire.setup import AgentSetup, ControllerFailed, ControllerReady, ControllerSetup, encode_line
from nbdist.wire.stopping import Enter
from nbdist.wire.visitor_messages import Describe

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
        self._members: Members | None = None
        self._epoch = 0
        self._serials = itertools.count(1)  # blocks of them: no client gives a number that another has given
        self._pending: Start | None = None  # waits for the end of the present set, or for nodes to come
        self._started: Start | None = None  # what the present set was started with
        self._choices = Choices()  # of that set
        self._poller = zmq.Poller()
        self._unreadable: set[bytes] = set()  # lanes for which the notebook was already told of a lost message
        log = OutputLog()
        self._log = LogWriter(log, lambda text: self.to_notebook(Notice(text)))
        self._shut_down = False  # the notebook asked to end everything
        with contextlib.ExitStack() as undo:
            undo.callback(self._log.close)
            self._switchboard = Switchboard(Path(setup.runtime_folder), setup.kernel)
            undo.callback(self._switchboard.remove_files)
            self._side = ClientSide(setup, kernel, self._switchboard, self._poller, self._pay)
            self._portraits = Portraits(self._switchboard)
            self._nodes = NodeTable(self._switchboard, self.to_notebook, self._node_lost)
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
        starters = self._nodes.starters.fileno()
        for source in (self._switchboard.socket, self._agent_end, self._log.fileno(), starters):
            self._poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(self._poller.poll(self._patience()))
            if self._agent_end in ready:
                self._agent_died()
                return
            if not self._side.alone and self._side.client.end in ready:
                self._client_left(None)
            if self._side.leave_at is not None and time.monotonic() >= self._side.leave_at:
                return
            if self._switchboard.socket in ready and not self._receive_all():
                return
            if self._log.fileno() in ready:
                self._log.finish()
            if starters in ready and (why := self._nodes.heed_starters()):
                self._nodes_fail(why)
            self._tick()
            self._side.deliver()

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
        self._switchboard.remove_files()
        self._switchboard.close()
        return left

    def _patience(self) -> int | None:
        members = self._members.due() if self._members is not None else None
        dues = [self._side.leave_at, self._nodes.due(), self._portraits.due(), members]
        due = min(due for due in dues if due is not None)
        return None if due == float("inf") else min(max(0, int((due - time.monotonic()) * 1000) + 1), _LONGEST_POLL)

    def _tick(self) -> None:
        now = time.monotonic()
        self._nodes.tick(now)
        self._portraits.tick(now)
        if self._members is not None:
            self._members.tick(now)
        elif self._pending is not None and now >= self._nodes.due_to_come:
            self._give_up_waiting(self._pending)

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
            name, epoch, number, life = parse_lane(identity)
        except ValueError:  # from a stranger
            return
        rank = self._sender(epoch, number, life)
        sequence = sequence_of(frame) if name == RANK_DISPLAY else None
        if rank is not None and sequence is not None:
            rank.miss_display(sequence, str(error))
        elif (rank is not None or epoch < 0) and name in LANES and identity not in self._unreadable:
            self._unreadable.add(identity)
            sender = f"rank {number}" if rank is not None else f"the {name.partition('.')[0]}"
            what = f"{type(error).__name__}: {error}"
            self.to_notebook(Notice(f"a message from {sender} could not be handled and is lost ({what})"))

    def _handle(self, identity: bytes, message: Message) -> None:
        name, epoch, number, life = parse_lane(identity)
        if name == GUEST:
            self._guest(identity, message)
        elif isinstance(message, Hello):
            self._hello(identity, message)
        elif name == VISITOR:
            self._receive_visitor(identity, message)
        elif name in RANK_LANES:
            rank = self._sender(epoch, number, life)
            if rank is None:  # the process has ended, and its place was taken
                return
            if not self._switchboard.is_connected(identity):
                raise ValueError(f"{identity!r} has not said hello")
            if self._members is not None:
                self._handle_rank(self._members, rank, message)
        elif name == AGENT_FREIGHT:
            if self._members is not None:
                self._members.cargo.handle(number, message)
        elif name in NODE_LANES:
            self._handle_agent(number, message)
        elif isinstance(message, Attach):
            self._attach(number, message)
        elif number == self._side.client.number:  # else of one that has lost the session
            self._handle_client(message)

    def _sender(self, epoch: int, number: int, life: int) -> Rank | None:
        """Return the rank that a lane belongs to; None if the process has ended."""
        members = self._members
        rank = members.present(number) if members is not None and members.epoch == epoch else None
        return rank if rank is not None and rank.life == life else None

    def _hello(self, identity: bytes, message: Hello) -> None:
        if message.version != VERSION:
            raise ValueError(f"{identity!r} speaks version {message.version}, this controller {VERSION}")
        name, epoch, number, life = parse_lane(identity)
        members = self._members
        ours = members is not None and name in RANK_LANES and members.epoch == epoch
        if ours and members is not None and not members.is_on(number, node := self._switchboard.relay_of(identity)):
            raise ValueError(f"node {node} speaks for rank {number}, which is on another")
        if ours and self._sender(epoch, number, life) is None:
            raise ValueError(f"the process of rank {number} that says hello has been replaced")
        self._switchboard.connect(identity)
        if name == AGENT_CONTROL:
            self._nodes.connected(number)

    def _receive_visitor(self, identity: bytes, message: Message) -> None:
        """Answer somebody who has the notebook's key file."""
        if isinstance(message, Describe):
            self._portraits.make(identity, self._side, self._members, [node.host for node in self._nodes])
            return
        if isinstance(message, Shutdown):
            self.to_notebook(
                Broken(
                    "the session was ended by `nbdist stop`; all ranks ended with it. `%distributed start` starts one"
                )
            )
            self._shut_down = True
        self._switchboard.disconnect(identity)

    # --- clients come and go

    def _client_left(self, message: Leave | None) -> None:
        """Handle a client that is gone: the ranks go on for as long as it asked, or was told for a crash."""
        members = self._members
        lasts = members is not None and members.up and not members.ending and not self._side.unseen.launches
        if message is not None:
            self._side.heed(message, lasts)
        else:
            self._side.lose_process(lasts)
        self._drop_what_it_wanted()

    def _drop_what_it_wanted(self) -> None:
        """Stop what only the last client wanted: samples, newcomers that it was about to set up, values."""
        self._nodes.broadcast(WatchNodes(0.0))
        if self._members is not None:
            self._members.give_up_heal()
            self._members.cells.prompts.refuse_all()
            for serial, ranks in self._side.unseen.take_lent().items():
                self._members.cargo.release(serial)
                self._members.to_ranks(RANK_CONTROL, sorted(ranks), ask(0, [], Release(serial)))

    def _attach(self, number: int, message: Attach) -> None:
        members = self._members
        why = hindrance(self._side, members, message, ending=self._shut_down)
        if not why:
            try:
                was_alone, away = self._side.alone, self._side.away
                self._side.take(number, message)
            except OSError as error:
                why = f"process {message.pid} is out of sight here ({error.strerror}): attach from the same container"
        if why or members is None or self._started is None:
            self._switchboard.send(node_lane(CLIENT_EVENTS, number), AttachRefused(why))
            return
        if not was_alone:
            self._drop_what_it_wanted()
        started, first_serial = started_with(self._started, self._choices), next(self._serials) * SERIALS

        def tell(printed: dict[int, LastOutput]) -> None:
            if self._side.client.number == number:
                self._side.open(attached(self._side.unseen, members, started, first_serial, away, printed))

        self._log.tails(tell, self._side.unseen.serials)

    # --- from the notebook

    def _handle_client(self, message: Message) -> None:
        members = self._members
        if isinstance(message, Credit):
            self._side.paid(message)
        elif isinstance(message, Ask):
            self._ask(message)
        elif isinstance(message, GetStatus):
            self.to_notebook(members.status(message.request) if members is not None else Status(message.request, []))
        elif isinstance(message, ReadLog):
            self._read_log(message)
        elif isinstance(message, WatchNodes):
            self._nodes.broadcast(message)
        elif isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Shutdown):
            self._shut_down = True
        elif isinstance(message, Stop):
            self._stop(message.grace)
        elif isinstance(message, Leave):
            self._client_left(message)
        elif isinstance(message, Ending):
            self._side.ending = message
        elif isinstance(message, Choices):
            self._choices = message
        elif members is not None:
            self._handle_work(members, message)

    def _handle_work(self, members: Members, message: Message) -> None:
        if isinstance(message, Execute):
            self._side.unseen.begin(message)
            members.begin(message)
        elif isinstance(message, Interrupt):
            members.stop(message)
        elif isinstance(message, Returned):
            members.cells.returned_elsewhere(message, time.monotonic())
        elif isinstance(message, WidgetMessage):
            members.to_rank(RANK_CELL, message.rank, message)
        elif isinstance(message, Heal):
            members.heal(message)
        elif isinstance(message, Rejoin):
            members.rejoin()
        elif isinstance(message, GiveUpHeal):
            members.give_up_heal()

    def _ask(self, message: Ask) -> None:
        if message.asker != "notebook":
            raise ValueError("only the controller asks in its own name")
        members = self._members
        if members is not None and isinstance(message.question, Release):
            members.cargo.release(message.question.serial)
            self._side.unseen.released(message.question.serial)
        if members is not None and isinstance(message.question, Enter):
            for number in message.ranks:
                members.cells.prompts.answered(number)
        living = [number for number in message.ranks if members is not None and members.lives(number)]
        for number in set(message.ranks).difference(living):
            self.to_notebook(Answer(message.request, number, NoAnswer("it has died")))
        if members is None:
            return
        if not isinstance(message.question, OF_AGENTS):
            members.to_ranks(RANK_CONTROL, living, msgspec.structs.replace(message, ranks=[]))
            return
        for number in living:
            members.to_agent_of(number, msgspec.structs.replace(message, ranks=[number]))

    # --- to the notebook

    def to_notebook(self, message: Message) -> None:
        """Send to the client, if there is one."""
        self._side.send(message)

    def _keep(self, serial: int, number: int, rank: int, stream: int, data: bytes) -> None:
        """Log what a rank printed. Without a notebook, the log consumes the output and so pays for it."""
        pay = functools.partial(self._pay, Credit(rank, len(data))) if self._side.alone else None
        self._log.write(serial, number, rank, stream, data, pay)

    def _pay(self, credit: Credit) -> None:
        """Let a rank print or show as much more."""
        if self._members is None:
            return
        if credit.items:
            self._members.to_rank(RANK_DISPLAY, credit.rank, credit)
        else:
            self._members.to_agent_of(credit.rank, credit)

    def _read_log(self, message: ReadLog) -> None:
        def answer(part: Part | None) -> None:
            self.to_notebook(LogPart(message.request, **(vars(part) if part is not None else {})))

        self._log.read(
            answer, serials=message.serials, number=message.cell, ranks=message.ranks, position=message.position
        )

    # --- start and end of a set

    def _start(self, message: Start) -> None:
        self._pending = message
        if self._members is not None:
            self._members.end()
            return
        try:
            self._nodes.want(message.nodes)
        except NoEntrance as error:
            self._pending = None
            self.to_notebook(StartFailed(str(error)))
            return
        self._start_when_all_are_there()

    def _start_when_all_are_there(self) -> None:
        message = self._pending
        if message is None or self._members is not None or self._nodes.missing > 0:
            return
        try:
            shares = shared_out(message.options, message.nodes, self._nodes)
        except NoEntrance as error:
            self._pending = None
            self.to_notebook(StartFailed(str(error)))
            return
        self._pending, self._started, self._choices = None, message, Choices()
        self._epoch += 1
        self._side.begin_set(message.linger)
        self._members = Members(
            self._epoch,
            shares,
            message.nodes.address if message.nodes is not None else "127.0.0.1",
            message.nodes.interface if message.nodes is not None else "",
            self._nodes,
            self._switchboard,
            self.to_notebook,
            self._keep,
            next(self._serials) * SERIALS,
        )
        self._members.spawn()

    def _give_up_waiting(self, message: Start) -> None:
        assert message.nodes is not None
        self._pending = None
        came, missing = message.nodes.count - self._nodes.missing, self._nodes.missing
        self._nodes.dismiss()
        self.to_notebook(
            StartFailed(
                f"{came} of {message.nodes.count} nodes came; {counted(missing, 'node')} did not come within "
                f"{message.nodes.patience:g} s. Is {message.nodes.address} an address that the others reach, and does "
                "a firewall let them through? `%distributed start` tries again, with new lines to paste"
            )
        )

    def _nodes_fail(self, why: str) -> None:
        """Give up nodes that won't come."""
        if self._pending is not None and self._members is None:
            self._pending = None
            self._nodes.dismiss()
            self.to_notebook(StartFailed(f"{why}. Then type `%distributed start` again"))
        else:
            self.to_notebook(Notice(why))

    def _stop(self, grace: float) -> None:
        self._pending = None
        self._nodes.broadcast(WatchNodes(0.0))  # for another session the agents are asked anew
        if self._members is not None:
            self._members.end(grace)
        else:
            self._nodes.dismiss()
            self.to_notebook(Stopped())

    def _check_gone(self) -> None:
        if self._members is None or not self._members.all_gone:
            return
        self._members = None
        self._switchboard.forget(b"rank")
        if self._pending is not None:
            self._start(self._pending)
        else:
            self._log.clear()  # it was of this session
            self._nodes.dismiss()
            self.to_notebook(Stopped())

    # --- other nodes

    def _guest(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Join) and self._nodes.join(identity, self._switchboard.key_of(identity), message):
            self._start_when_all_are_there()

    def _node_lost(self, node: KnownNode, why: str) -> None:
        if self._members is not None:
            self._members.lose(node, why)
            self._check_gone()

    # --- from agents

    def _handle_agent(self, node: int, message: Message) -> None:
        if isinstance(message, Look):
            if node in self._nodes:  # else it has just been lost; by that name, as two may have one
                self.to_notebook(Look(msgspec.structs.replace(message.node, name=self._nodes[node].host)))
        elif isinstance(message, Pong):
            self._nodes.heard(node, message, time.monotonic())
        elif isinstance(message, NodeLeft):
            if node in self._nodes and node:
                self._nodes.lose(self._nodes[node], message.why)
        elif self._members is not None and getattr(message, "epoch", self._members.epoch) == self._members.epoch:
            if isinstance(message, Gone):
                self._members.gone(node)
                self._check_gone()
            else:
                self._members.handle_agent(node, message)

    def _agent_died(self) -> None:
        code = self._agent.wait()
        end_descendants(keep=self._nodes.starters.alive())  # its ranks were reparented to this process
        if not self._side.connected and self._switchboard.socket.poll(int(_HELLO_GRACE * 1000)):
            self._receive_all()
        self.to_notebook(
            Broken(
                f"the session's agent (pid {self._agent.pid}) has ended: {describe_exit(code)}; "
                "all ranks ended with it. `%distributed start` starts a new one."
            )
        )

    # --- from ranks

    def _handle_rank(self, members: Members, rank: Rank, message: Message) -> None:
        if getattr(message, "rank", rank.rank) != rank.rank:
            raise ValueError(f"rank {rank.rank} speaks for another: {message}")
        if isinstance(message, Reply):
            if message.serial == rank.serial:
                rank.answer(_on_our_clock(message, members.offset(rank.rank)))
        elif isinstance(message, (Display, Prompt)):
            if isinstance(message, Prompt):
                members.cells.asked(message, rank.serial)
            rank.display(message)
            if self._side.alone:
                members.cells.prompts.refuse_all()
        elif isinstance(message, Answer) and message.asker == "controller":
            members.cells.answered(message, time.monotonic())
        elif isinstance(message, Answer):
            self.to_notebook(_answer_on_our_clock(message, members.offset(rank.rank)))
        elif isinstance(message, WidgetMessage):
            self.to_notebook(message)
        elif isinstance(message, InOrder):
            members.in_order(rank.rank, message)
        elif isinstance(message, Ready):
            members.ready(rank, message)


def _answer_on_our_clock(answer: Answer, offset: float) -> Answer:
    """Return the answer with the time of the failure that it reports, if it does, on our clock."""
    if not isinstance(answer.body, KnownFailure) or not offset:
        return answer
    body = msgspec.structs.replace(answer.body, when=answer.body.when - offset)
    return msgspec.structs.replace(answer, body=body)


def _on_our_clock(reply: Reply, offset: float) -> Reply:
    """Return the reply with its failure's time on our clock, so that failures of all nodes compare."""
    if reply.failure is None or not offset:
        return reply
    failure = msgspec.structs.replace(reply.failure, when=reply.failure.when - offset)
    return msgspec.structs.replace(reply, failure=failure)
