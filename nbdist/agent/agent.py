"""The agent: one process per node that owns its ranks.

Starts the template, has ranks forked, reads their pipes and reports their ends. It outlives neither whoever has started
it nor its connection to the controller. Independent of cells.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import msgspec
import zmq

from nbdist.agent import surroundings
from nbdist.agent.forks.fork_channel import ForkChannel
from nbdist.agent.forks.warm_template import WarmTemplate, find_torch
from nbdist.agent.link import EVENTS, Link
from nbdist.agent.pipes import PipeReader
from nbdist.agent.process_set import STORE, ProcessSet
from nbdist.agent.relay import Relay
from nbdist.agent.slow_looks import NativeStacks, SlowLooks, memory_of
from nbdist.agent.storage import NodeStorage
from nbdist.base.end_signals import EndSignalPipe
from nbdist.base.processes import allow_many_files, describe_exit, describe_owner, end_descendants, reap_group, state_of
from nbdist.metrics.node.sampler import Sampler
from nbdist.wire.base.message import Message
from nbdist.wire.bundle import Bundle
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import AGENT_CONTROL, AGENT_OUTPUT, AGENT_TRANSFERS, connect, node_lane, send_parts
from nbdist.wire.messages.announcements import EndAnnounced
from nbdist.wire.messages.healing import EndRanks, Respawn
from nbdist.wire.messages.life import Obstacle, Progress, Shutdown, StartOptions
from nbdist.wire.messages.output import Credit
from nbdist.wire.messages.rank_processes import Exited, Gone, Kill, Spawn, Spawned, SpawnFailed, Spawning, StoreOpened
from nbdist.wire.processes.nodes import SILENT, Ping, Pong
from nbdist.wire.processes.setup import AgentSetup
from nbdist.wire.processes.template_messages import Forked, ForkFailed, Imported, ImportFailed
from nbdist.wire.questions.knowing import GetMemoryFromOutside
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import Answer, Ask, Look, WatchNodes
from nbdist.wire.questions.stopping import GetProcess, ProcessState

_CHUNKS_AT_ONCE = 32  # of values from other machines, before what ranks print is read again
_REPORT_PERIOD = 1.0  # seconds between two looks at whether an import gets on
_ORPHANS_LIMIT = 0.5  # seconds that the end of a rank's orphans may take until its own end is reported


def run(template: WarmTemplate, controller: int) -> int:
    """Run the agent.

    Args:
        template: Its template, which has just started.
        controller: Process id of its parent: the controller, or on other nodes whoever has joined with it.

    Returns:
        Its exit code: SILENT if the controller was given up because nothing came from it.
    """
    try:
        line = sys.stdin.buffer.readline()
        if not line:
            return 0
        setup = msgspec.json.decode(line, type=AgentSetup)
        try:
            end = os.pidfd_open(controller)
        except ProcessLookupError:
            end = -1
        if os.getppid() == controller:  # else it is gone, and its pid may belong to another process
            return Agent(setup, template, end).run()
        _remove(setup.leftovers)
        return 0
    finally:
        end_descendants()


def _remove(leftovers: list[str]) -> None:
    for path in map(Path, leftovers):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class Agent:
    """The agent's single loop and its state."""

    def __init__(self, setup: AgentSetup, template: WarmTemplate, controller: int) -> None:
        self._setup = setup
        self._template: WarmTemplate | None = template
        self._controller = controller
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = connect(context, setup.keys, node_lane(AGENT_CONTROL, setup.node), EVENTS if setup.node else 0)
        self._output = connect(context, setup.keys, node_lane(AGENT_OUTPUT, setup.node))
        self._link = Link(self._control, setup.keys.url, setup.timeout) if setup.node else None
        self._relay = Relay(context, setup.keys, setup.node) if setup.node else None
        self._transfers = connect(context, setup.keys, node_lane(AGENT_TRANSFERS, setup.node)) if setup.node else None
        self._storage = NodeStorage(self._send_transfer)
        self._pipes = PipeReader(setup.token)
        self._sampler = Sampler()
        self._looks = SlowLooks()
        self._stacks = NativeStacks()
        self._ends = EndSignalPipe()
        self._set: ProcessSet | None = None
        self._outputs = Bundle()
        self._watched: dict[ForkChannel, int] = {}  # sources of forks, and their polled descriptors
        self._notes: list[str] = []
        self._report_at = 0.0

    def run(self) -> int:
        """Serve until the controller is gone or asks to stop. Returns the exit code."""
        poller = zmq.Poller()
        own = (self._sampler.wake, self._looks.wake, self._ends.descriptor)
        for source in (self._control, self._controller, self._pipes, *own):
            poller.register(source, zmq.POLLIN)
        for other in (self._link.events if self._link is not None else None, self._transfers):
            if other is not None:
                poller.register(other, zmq.POLLIN)
        while True:
            self._watch_sources(poller)
            ready = dict(poller.poll(self._patience()))
            if self._controller in ready:
                self._end(remove=True)
                return 0
            if self._control in ready and not self._handle_messages():
                self._end(remove=False)
                return 0
            for output in self._pipes.read():
                if output.rank != STORE:
                    self._outputs.add(output)
            if self._outputs:
                send_parts(self._output, *self._outputs.take())
            for forks in self._sources():
                if self._watched.get(forks) in ready:
                    self._handle_source(forks)
            if self._sampler.wake in ready:
                for node in self._sampler.take():
                    self._say(Look(node))
            if self._looks.wake in ready:
                for answer in self._looks.take():
                    self._say(answer)
            if self._ends.descriptor in ready:
                for name, seconds in self._ends.take():
                    self._say(EndAnnounced(name, "agent", os.getpid(), seconds=seconds))
            if self._transfers in ready:
                self._take_transfers()
            if self._link is not None and self._link.is_lost(self._link.events in ready):
                self._end(remove=True)
                return SILENT if self._link.is_silent else 0
            self._kill_overdue()
            self._report_progress()

    def _sources(self) -> list[ForkChannel]:
        """Return the processes that fork for us: the template, and the one that forked the current set."""
        found = [self._template.channel] if self._template is not None else []
        if self._set is not None and self._set.source.is_open and self._set.source not in found:
            found.append(self._set.source)
        return found

    def _watch_sources(self, poller: zmq.Poller) -> None:
        """Poll the current sources, and no others."""
        sources = self._sources()
        for gone in self._watched.keys() - sources:
            poller.unregister(self._watched.pop(gone))
        for new in [source for source in sources if source not in self._watched]:
            self._watched[new] = new.fileno()
            poller.register(self._watched[new], zmq.POLLIN)

    def _patience(self) -> int | None:
        """Return the milliseconds until something is due."""
        dues = [self._pipes.due()]
        if self._set is not None and self._set.kill_at is not None:
            dues.append(max(0.0, self._set.kill_at - time.monotonic()))
        if self._imports_for() is not None:
            dues.append(max(0.0, self._report_at - time.monotonic()))
        if self._link is not None:
            dues.append(self._link.patience())
        waits = [due for due in dues if due is not None]
        return int(min(waits) * 1000) + 1 if waits else None

    def _end(self, remove: bool) -> None:
        self._looks.close()
        end_descendants()
        if remove or self._setup.node:
            _remove(self._setup.leftovers)
        if self._relay is not None:
            self._relay.close()
        if self._transfers is not None:
            self._transfers.close(linger=0)
        self._output.close(linger=0 if remove else 500)
        self._control.close(linger=0 if remove else 500)

    # --- messages from the controller

    def _handle_messages(self) -> bool:
        """Handle the controller's messages. False if it asked to end everything."""
        while self._control.poll(0):
            frame = self._control.recv()
            try:
                message = decode(frame)
                if isinstance(message, Shutdown):
                    return False
                self._handle(message)
            except Exception:  # one bad message must not cost the user all ranks
                traceback.print_exc()
        return True

    def _take_transfers(self) -> None:
        assert self._transfers is not None
        for _ in range(_CHUNKS_AT_ONCE):
            if not self._transfers.poll(0):
                return
            self._storage.handle(decode(self._transfers.recv()))

    def _send_transfer(self, message: Message | bytes) -> None:
        assert self._transfers is not None
        self._transfers.send(message if isinstance(message, bytes) else encode(message))

    def _handle(self, message: Message) -> None:
        if isinstance(message, Credit):
            self._pipes.credit(message.rank, message.size)
        elif isinstance(message, Spawn):
            self._spawn(message)
        elif isinstance(message, Kill):
            self._kill(message)
        elif isinstance(message, Respawn):
            self._respawn(message)
        elif isinstance(message, EndRanks):
            self._end_ranks(message)
        elif isinstance(message, WatchNodes):
            self._sampler.watch(message.period)
        elif isinstance(message, Ask):
            self._answer(message)
        elif isinstance(message, Ping):
            self._say(Pong(message.sent, time.monotonic()))
            if self._link is not None:
                self._link.heard()

    def _answer(self, message: Ask) -> None:
        pids = {rank: pid for pid, rank in self._set.pids.items()} if self._set is not None else {}
        for rank in message.ranks:
            if rank not in pids:
                self._say(Answer(message.request, rank, NoAnswer("it has ended"), message.asker))
            elif isinstance(message.question, GetProcess):
                state = ProcessState(pids[rank], state_of(pids[rank]))
                self._say(Answer(message.request, rank, state, message.asker))
            else:
                look = memory_of if isinstance(message.question, GetMemoryFromOutside) else self._stacks.look
                self._looks.begin(message, rank, look, pids[rank])

    def _spawn(self, message: Spawn) -> None:
        self._notes = []
        if self._setup.node:
            options, self._notes = surroundings.here(message.options)
            message = msgspec.structs.replace(message, options=options)
        self._ends.spare(message.options.end_grace)
        if message.options.fork_address:
            self._spawn_from_notebook(message)
            return
        template = self._usable_template(message.options)
        template.hurry()
        self._set = self._processes(message, template.channel)
        if template.ready:
            self._fork_all(self._set)
        else:
            self._say(Progress("import", template.progress() or "importing torch"))
            self._report_at = time.monotonic() + _REPORT_PERIOD

    def _respawn(self, message: Respawn) -> None:
        """Fork newcomers for ranks that have died, from the same template as the others."""
        group = self._set
        if group is None or group.ending or group.spawn.incarnation != message.incarnation:
            return
        if self._setup.node:
            message = surroundings.with_gpus(message, group.spawn.options)
        try:
            group.fork_again(message)
        except OSError as error:
            self._refused(error, group.spawn.options)

    def _end_ranks(self, message: EndRanks) -> None:
        group = self._set
        if group is not None and group.spawn.incarnation == message.incarnation:
            group.end_ranks(message.slots)

    def _spawn_from_notebook(self, message: Spawn) -> None:
        """Have the notebook fork the ranks, which needs no template."""
        try:
            self._set = self._processes(message, ForkChannel.to(message.options.fork_address))
        except OSError as error:  # it has given up meanwhile
            self._report(SpawnFailed(message.incarnation, f"the notebook can't be asked to fork: {error}"))
            return
        self._fork_all(self._set)

    def _processes(self, message: Spawn, source: ForkChannel) -> ProcessSet:
        """Return the set of processes that are to be forked."""
        keys = self._relay.keys if self._relay is not None else self._setup.keys
        return ProcessSet(message, source, self._pipes, keys, self._setup)

    def _usable_template(self, options: StartOptions) -> WarmTemplate:
        """Return the template, replaced by a new one if it is stale."""
        if self._template is not None and (reasons := self._template.stale(options)):
            self._notes.append(f"cold start: {'; '.join(reasons)}")
            self._template.end()
            self._template = None
        if self._template is None:
            path = options.search_path()
            # Use Python's own path unless the notebook uses a different torch: its folders may hold a `random.py`.
            other = find_torch(path) != find_torch(sys.path)
            self._template = WarmTemplate(options.environment, path if other else [])
        return self._template

    def _imports_for(self) -> WarmTemplate | None:
        """Return the template while a set waits for it."""
        waits = self._set is not None and not self._set.forked and not self._set.ending
        return self._template if waits else None

    def _report_progress(self) -> None:
        """Report the progress of an import: a start may only take so long without any, which only this process sees."""
        template = self._imports_for()
        if template is None or time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + _REPORT_PERIOD
        if text := template.progress():
            self._say(Progress("import", text))

    def _kill(self, message: Kill) -> None:
        if self._set is None or self._set.spawn.incarnation != message.incarnation:
            self._report(Gone(message.incarnation))
            return
        self._set.ending = True
        self._set.kill_at = time.monotonic() + message.grace
        self._check_gone()

    def _kill_overdue(self) -> None:
        group = self._set
        if group is None or group.kill_at is None or time.monotonic() < group.kill_at:
            return
        group.kill_at = None
        group.source.kill(group.pids)

    # --- messages from the processes that fork

    def _handle_source(self, source: ForkChannel) -> None:
        answer, pidfd = source.receive()
        if pidfd is not None:
            os.close(pidfd)
        if answer is None:
            self._source_ended(source)
        elif isinstance(answer, Imported):
            self._template_ready(answer.origin)
        elif isinstance(answer, ImportFailed):
            self._template_failed(answer.text)
        elif isinstance(answer, Forked):
            self._forked(STORE if answer.rank is None else answer.rank, answer.pid)
        elif isinstance(answer, ForkFailed):
            if self._set is not None:
                self._set.expected -= 1
            self._not_forked(f"a rank could not be forked: {answer.error}")
        else:
            self._exited(answer.pid, answer.code)

    def _template_ready(self, origin: str) -> None:
        assert self._template is not None
        self._template.ready, self._template.origin = True, origin
        if self._imports_for() is not None and self._set is not None:
            self._fork_all(self._set)

    def _template_failed(self, text: str) -> None:
        assert self._template is not None
        failed, self._template = self._template, None
        failed.reap()
        if self._set is not None and self._set.source is failed.channel:
            self._spawn_failed(text)

    def _source_ended(self, source: ForkChannel) -> None:
        """Handle the end of a process that forks. Its ranks die with it; those of the template are reparented to us."""
        group = self._set if self._set is not None and self._set.source is source else None
        pids = list(group.pids) if group is not None else []
        if self._template is not None and self._template.channel is source:
            template, self._template = self._template, None
            what = f"the template (pid {template.pid}), which ranks are forked from,"
            cause = f"{what} ended: {describe_exit(template.reap())}"
            codes = {pid: reap_group(pid) for pid in pids}
        else:
            cause = "the connection to the notebook, which ranks are forked from, was closed"
            codes = dict.fromkeys(pids, -signal.SIGKILL)
            source.close()
        if group is not None:
            self._lost(group, codes, cause)

    def _lost(self, group: ProcessSet, codes: dict[int, int], cause: str) -> None:
        """Handle the loss of all processes of a set, which ended with the process they were forked from."""
        for pid, code in codes.items():
            self._exited(pid, code, cause)
        group.expected = 0
        self._end_orphans()
        if not group.complete:
            self._not_forked(cause)
        self._check_gone()

    # --- bringing up a set

    def _fork_all(self, group: ProcessSet) -> None:
        try:
            group.fork_all()
        except OSError as error:
            self._refused(error, group.spawn.options)
        else:
            self._check_complete(group)

    def _refused(self, error: OSError, options: StartOptions) -> None:
        """Report that the system denies what the ranks need."""
        if error.errno == errno.EADDRINUSE:
            text = f"port {options.port} is taken{describe_owner(options.port)}: choose another port, or leave it out"
            self._spawn_failed(text, "port taken")
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            self._spawn_failed(
                f"not enough file descriptors for {options.count} ranks: this system allows {allow_many_files()} per "
                "process. Type `ulimit -n 4096` in the shell before you start Jupyter, or ask for fewer ranks (`-n 2`)."
            )
        else:
            self._not_forked(f"the ranks could not be forked: {error}")

    def _forked(self, rank: int, pid: int) -> None:
        group = self._set
        assert group is not None
        group.pids[pid] = rank
        if group.ending or rank in group.unwanted:
            group.source.kill([pid])
            return
        if rank == STORE:
            group.close_listener()
            self._report(StoreOpened(group.spawn.incarnation, group.store))
        else:
            self._report(Spawned(group.spawn.incarnation, rank, pid))
        try:
            group.fork_more()
        except OSError as error:
            self._refused(error, group.spawn.options)
        self._check_complete(group)

    def _check_complete(self, group: ProcessSet) -> None:
        if not group.complete and not group.ending and group.all_forked:
            group.complete = True
            self._report(Spawning(group.spawn.incarnation, self._notes))

    def _not_forked(self, text: str) -> None:
        verb = "heal" if self._set is not None and self._set.complete else "start"
        self._spawn_failed(f"{text}. Type `%distributed {verb}` to try again.")

    def _spawn_failed(self, text: str, obstacle: Obstacle = "other") -> None:
        group = self._set
        if group is None or group.ending:
            return
        if group.complete:  # it was about newcomers, and the others live on
            group.unasked.clear()
            self._report(SpawnFailed(group.spawn.incarnation, text, obstacle))
            return
        group.ending = True
        group.kill_at = time.monotonic()
        self._report(SpawnFailed(group.spawn.incarnation, text, obstacle))
        self._check_gone()

    # --- ends

    def _exited(self, pid: int, code: int, cause: str = "") -> None:
        group = self._set
        if group is None or pid not in group.pids:
            return
        rank = group.pids.pop(pid)
        group.expected -= 1
        for output in self._pipes.drain(rank):
            if rank != STORE:
                self._output.send(encode(output))
        if not group.ending:
            self._end_orphans()
        if folder := group.folder(rank):
            shutil.rmtree(folder, ignore_errors=True)
        tail = self._pipes.stderr_tail(rank)
        who = None if rank == STORE else rank
        self._report(Exited(group.spawn.incarnation, who, pid, code, tail, time.monotonic(), cause))
        self._check_gone()

    def _check_gone(self) -> None:
        group = self._set
        if group is not None and group.ending and list(group.pids.values()) == [STORE]:
            group.source.kill(group.pids)  # the ranks no longer need it
        if group is None or not group.ending or group.expected:
            return
        group.close_listener()
        self._set = None
        if group.source not in self._sources():
            group.source.close()
        self._end_orphans()
        self._report(Gone(group.spawn.incarnation))

    def _end_orphans(self) -> None:
        """End processes that ranks left behind outside of their process groups.

        A living rank adopts its own orphans, so all that are reparented to this process belonged to a dead rank.
        """
        own = {self._template.pid} if self._template is not None else set()
        end_descendants(_ORPHANS_LIMIT, keep=own | self._stacks.pids)

    def _report(self, message: Message) -> None:
        """Report how a set's processes fare, in one order: an end overtakes neither its reason nor the last output."""
        self._output.send(encode(message))

    def _say(self, message: Message) -> None:
        self._control.send(encode(message))
