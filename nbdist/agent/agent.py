"""The agent: one process per node that owns its ranks.

Starts the template, has ranks forked, reads their pipes and reports their ends. It outlives neither its controller
nor its ranks. Knows nothing of cells.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from nbdist.agent.pipes import PipeReader
from nbdist.agent.warm_template import WarmTemplate, find_torch
from nbdist.metrics.node.sampler import Sampler
from nbdist.processes import allow_many_files, describe_exit, describe_owner, end_descendants, reap_group
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import AGENT_CONTROL, AGENT_OUTPUT, connect
from nbdist.wire.life import Obstacle, Progress, Shutdown, StartOptions
from nbdist.wire.message import Message
from nbdist.wire.output import STDERR, STDOUT, Credit
from nbdist.wire.processes import Exited, Gone, Kill, RankSetup, Spawn, Spawned, SpawnFailed, Spawning
from nbdist.wire.questions import Look, WatchNodes
from nbdist.wire.setup import AgentSetup
from nbdist.wire.template import Forked, ForkFailed, Imported, ImportFailed

_STORE = -1  # the store among the ranks, inside of this process
_FORKS_AT_ONCE = 64  # requests without an answer; the channel holds some 500
_REPORT_PERIOD = 1.0  # seconds between two looks at whether an import gets on
_ORPHANS_LIMIT = 0.5  # seconds that the end of a rank's orphans may take until its own end is reported


def run(template: WarmTemplate, controller: int) -> None:
    """Run the agent.

    Args:
        template: Its template, which has just started.
        controller: Process id of the controller, its parent.
    """
    try:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        setup = msgspec.json.decode(line, type=AgentSetup)
        try:
            end = os.pidfd_open(controller)
        except ProcessLookupError:
            end = -1
        if os.getppid() == controller:  # else it has gone, and its number may be another's
            Agent(setup, template, end).run()
        else:
            _remove(setup.leftovers)
    finally:
        end_descendants()


def _remove(leftovers: list[str]) -> None:
    for path in map(Path, leftovers):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@dataclass
class _Set:
    """The processes of one epoch."""

    spawn: Spawn
    listener: socket.socket | None = None
    store_port: int = 0
    pids: dict[int, int] = field(default_factory=dict)  # pid -> rank
    expected: int = 0  # processes asked for that have not ended
    forked: bool = False  # the store has been asked for, and ranks are
    unasked: deque[int] = field(default_factory=deque)  # ranks that have not been asked for
    complete: bool = False  # and they have all come to life
    ending: bool = False
    kill_at: float | None = None


class Agent:
    """The agent's one loop and what it knows."""

    def __init__(self, setup: AgentSetup, template: WarmTemplate, controller: int) -> None:
        self._setup = setup
        self._template: WarmTemplate | None = template
        self._controller = controller
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = connect(context, setup.keys, AGENT_CONTROL)
        self._output = connect(context, setup.keys, AGENT_OUTPUT)
        self._pipes = PipeReader(setup.token)
        self._sampler = Sampler()
        self._set: _Set | None = None
        self._notes: list[str] = []
        self._report_at = 0.0

    def run(self) -> None:
        """Serve until the controller goes or says so."""
        poller = zmq.Poller()
        for source in (self._control, self._controller, self._pipes, self._sampler.wake):
            poller.register(source, zmq.POLLIN)
        watched: WarmTemplate | None = None
        watched_descriptor = -1
        while True:
            if watched is not self._template:
                if watched is not None:
                    poller.unregister(watched_descriptor)
                watched = self._template
                if watched is not None:
                    watched_descriptor = watched.channel.fileno()
                    poller.register(watched_descriptor, zmq.POLLIN)
            ready = dict(poller.poll(self._patience()))
            if self._controller in ready:
                self._end(remove=True)
                return
            if self._control in ready and not self._handle_messages():
                self._end(remove=False)
                return
            if outputs := [encode(output) for output in self._pipes.read() if output.rank != _STORE]:
                self._output.send_multipart(outputs)
            if watched is not None and watched is self._template and watched_descriptor in ready:
                self._handle_template(watched)
            if self._sampler.wake in ready:
                for node in self._sampler.take():
                    self._say(Look(node))
            self._kill_overdue()
            self._report_progress()

    def _patience(self) -> int | None:
        """Milliseconds until something is due."""
        dues = [self._pipes.due()]
        if self._set is not None and self._set.kill_at is not None:
            dues.append(max(0.0, self._set.kill_at - time.monotonic()))
        if self._imports_for() is not None:
            dues.append(max(0.0, self._report_at - time.monotonic()))
        waits = [due for due in dues if due is not None]
        return int(min(waits) * 1000) + 1 if waits else None

    def _end(self, remove: bool) -> None:
        end_descendants()
        if remove:
            _remove(self._setup.leftovers)
        self._output.close(linger=0 if remove else 500)
        self._control.close(linger=0 if remove else 500)

    # --- what the controller says

    def _handle_messages(self) -> bool:
        """Do what the controller says. False: everything is to end."""
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

    def _handle(self, message: Message) -> None:
        if isinstance(message, Credit):
            self._pipes.credit(message.rank, message.size)
        elif isinstance(message, Spawn):
            self._spawn(message)
        elif isinstance(message, Kill):
            self._kill(message)
        elif isinstance(message, WatchNodes):
            self._sampler.watch(message.period)

    def _spawn(self, message: Spawn) -> None:
        self._set = _Set(message)
        self._notes = []
        if self._template is not None:
            # Ranks with a Python of their own import everything anew.
            reasons = [] if message.options.fresh else self._template.stale(message.options)
            if reasons:
                self._notes.append(f"cold start: {'; '.join(reasons)}")
                self._template.end()
                self._template = None
        if self._template is None:
            path = message.options.search_path()
            # Python's own path unless the notebook means another torch: its folders may hold a `random.py`.
            other = find_torch(path) != find_torch(sys.path)
            self._template = WarmTemplate(message.options.environment, path if other else [])
        self._template.hurry()
        if self._template.ready:
            self._fork_all(self._template, self._set)
        else:
            self._say(Progress("import", self._template.progress() or "importing torch"))
            self._report_at = time.monotonic() + _REPORT_PERIOD

    def _imports_for(self) -> WarmTemplate | None:
        """The template, while a set waits for it."""
        waits = self._set is not None and not self._set.forked and not self._set.ending
        return self._template if waits else None

    def _report_progress(self) -> None:
        """A start is bounded by the time without progress, of which only this process can know."""
        template = self._imports_for()
        if template is None or time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + _REPORT_PERIOD
        if text := template.progress():
            self._say(Progress("import", text))

    def _kill(self, message: Kill) -> None:
        if self._set is None or self._set.spawn.epoch != message.epoch:
            self._say(Gone(message.epoch))
            return
        self._set.ending = True
        self._set.kill_at = time.monotonic() + message.grace
        self._check_gone()

    def _kill_overdue(self) -> None:
        group = self._set
        if group is None or group.kill_at is None or time.monotonic() < group.kill_at or self._template is None:
            return
        group.kill_at = None
        self._template.kill(group.pids)

    # --- what the template says

    def _handle_template(self, template: WarmTemplate) -> None:
        answer, pidfd = template.receive()
        if pidfd is not None:
            os.close(pidfd)
        if answer is None:
            self._template_died(template)
        elif isinstance(answer, Imported):
            template.ready, template.origin = True, answer.origin
            if self._set is not None and not self._set.forked and not self._set.ending:
                self._fork_all(template, self._set)
        elif isinstance(answer, ImportFailed):
            template.reap()
            self._template = None
            self._spawn_failed(answer.text)
        elif isinstance(answer, Forked):
            self._forked(_STORE if answer.rank is None else answer.rank, answer.pid)
        elif isinstance(answer, ForkFailed):
            if self._set is not None:
                self._set.expected -= 1
            self._spawn_failed(f"a rank could not be forked: {answer.error}. Type `%distributed start` to try again.")
        else:
            self._exited(answer.pid, answer.code)

    def _template_died(self, template: WarmTemplate) -> None:
        """Its ranks die with it, by their death signal, and come to us as orphans."""
        self._template = None
        code = template.reap()
        group = self._set
        if group is None:
            return
        cause = (
            f"the template (pid {template.pid}), the process that ranks are forked from, ended: {describe_exit(code)}"
        )
        codes = {pid: reap_group(pid) for pid in group.pids}
        for pid, rank_code in codes.items():
            self._exited(pid, rank_code, cause)
        group.expected = 0
        self._end_orphans()
        if not group.complete:
            self._spawn_failed(f"{cause}. Type `%distributed start` to try again.")
        self._check_gone()

    # --- bringing up a set

    def _fork_all(self, template: WarmTemplate, group: _Set) -> None:
        group.forked = True
        group.unasked.extend(group.spawn.options.ranks)
        try:
            self._fork_store(template, group)
            self._fork_more(template, group)
        except OSError as error:
            self._refused(error, group.spawn.options)

    def _fork_more(self, template: WarmTemplate, group: _Set) -> None:
        """Ask for ranks, not all at once: a template whose answers nobody reads would read no requests either."""
        while group.unasked and group.expected - len(group.pids) < _FORKS_AT_ONCE:
            self._fork_rank(template, group, group.unasked.popleft())

    def _fork_store(self, template: WarmTemplate, group: _Set) -> None:
        # Listening before anybody forks: ranks may connect before the store has come up.
        listener = socket.create_server(("127.0.0.1", group.spawn.options.port), backlog=4096)
        group.listener, group.store_port = listener, listener.getsockname()[1]
        read, write = os.pipe2(os.O_CLOEXEC)
        self._pipes.add(_STORE, STDERR, read)
        template.fork(None, [listener.fileno(), write])
        os.close(write)
        group.expected += 1

    def _fork_rank(self, template: WarmTemplate, group: _Set, rank: int) -> None:
        setup = self._rank_setup(group, rank)
        writers = []
        for stream in (STDOUT, STDERR):
            read, write = os.pipe2(os.O_CLOEXEC)
            self._pipes.add(rank, stream, read)
            writers.append(write)
        memory = os.memfd_create("nbdist-setup", os.MFD_CLOEXEC)
        try:
            os.write(memory, encode(setup))
            os.lseek(memory, 0, os.SEEK_SET)
            template.fork(rank, [*writers, memory], fresh=setup.options.fresh)
            group.expected += 1
        finally:
            for descriptor in (*writers, memory):
                os.close(descriptor)

    def _rank_setup(self, group: _Set, rank: int) -> RankSetup:
        keys, options = self._setup.keys, group.spawn.options
        return RankSetup(
            epoch=group.spawn.epoch,
            rank=rank,
            url=keys.url,
            server_key=keys.server_key,
            public_key=keys.public_key,
            secret_key=keys.secret_key,
            token=self._setup.token,
            store_port=group.store_port,
            gpu_count=len(options.gpus or []),
            threads=max(1, len(os.sched_getaffinity(0)) // options.count),
            options=options,
            folder=self._folder(group, rank),
        )

    def _folder(self, group: _Set, rank: int) -> str:
        """Where a rank keeps temporary files that end with it."""
        return f"{self._setup.folder}/rank-{group.spawn.epoch}-{rank}" if self._setup.folder else ""

    def _refused(self, error: OSError, options: StartOptions) -> None:
        """The system does not allow what the ranks need."""
        if error.errno == errno.EADDRINUSE:
            text = f"port {options.port} is taken{describe_owner(options.port)}: name another, or none"
            self._spawn_failed(text, "port taken")
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            self._spawn_failed(
                f"too few file handles for {options.count} ranks: this system allows a process {allow_many_files()}. "
                "Type `ulimit -n 4096` in the shell before you start Jupyter, or ask for fewer ranks (`-n 2`)."
            )
        else:
            self._spawn_failed(f"the ranks could not be forked: {error}. Type `%distributed start` to try again.")

    def _forked(self, rank: int, pid: int) -> None:
        group = self._set
        assert group is not None
        group.pids[pid] = rank
        if group.ending and self._template is not None:
            self._template.kill([pid])
            return
        if rank == _STORE:
            if group.listener is not None:
                group.listener.close()
        else:
            self._say(Spawned(group.spawn.epoch, rank, pid))
        if self._template is not None:
            try:
                self._fork_more(self._template, group)
            except OSError as error:
                self._refused(error, group.spawn.options)
        if len(group.pids) == group.spawn.options.count + 1:
            group.complete = True
            self._say(Spawning(group.spawn.epoch, self._notes))

    def _spawn_failed(self, text: str, obstacle: Obstacle = "other") -> None:
        group = self._set
        if group is None or group.ending:
            return
        group.ending = True
        group.kill_at = time.monotonic()
        self._say(SpawnFailed(group.spawn.epoch, text, obstacle))
        self._check_gone()

    # --- ends

    def _exited(self, pid: int, code: int, cause: str = "") -> None:
        group = self._set
        if group is None or pid not in group.pids:
            return
        rank = group.pids.pop(pid)
        group.expected -= 1
        for output in self._pipes.drain(rank):
            if rank != _STORE:
                self._output.send(encode(output))
        if not group.ending:
            self._end_orphans()
        if folder := self._folder(group, rank):
            shutil.rmtree(folder, ignore_errors=True)
        tail = self._pipes.stderr_tail(rank)
        # By the output lane: it must not overtake the rank's last words.
        who = None if rank == _STORE else rank
        self._output.send(encode(Exited(group.spawn.epoch, who, pid, code, tail, time.monotonic(), cause)))
        self._check_gone()

    def _check_gone(self) -> None:
        group = self._set
        if group is not None and group.ending and list(group.pids.values()) == [_STORE] and self._template is not None:
            self._template.kill(group.pids)  # the ranks no longer need it
        if group is None or not group.ending or group.expected:
            return
        if group.listener is not None:
            group.listener.close()
        self._set = None
        self._end_orphans()
        self._output.send(encode(Gone(group.spawn.epoch)))

    def _end_orphans(self) -> None:
        """End what ranks have left behind outside of their process groups.

        A living rank adopts its own orphans, so all that comes to this process was a dead rank's.
        """
        end_descendants(_ORPHANS_LIMIT, keep={self._template.pid} if self._template is not None else ())

    def _say(self, message: Message) -> None:
        self._control.send(encode(message))
