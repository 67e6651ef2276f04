"""The warm template at work: ranks are forked from it. The notebook uses the same code when it forks ranks itself.

Owns the ranks' and the store's processes: it is their parent, reaps them and ends what remains of their process groups.
Each child then runs `nbdist.worker.rank`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import traceback

from nbdist.base.processes import reap_group
from nbdist.wire.processes.template_messages import (
    ChildEnded,
    EndChildren,
    Fork,
    Forked,
    ForkFailed,
    Imported,
    decode_request,
    encode,
)
from nbdist.worker import rank


class Template:
    """Forks on request until the agent closes its end of the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._children: dict[int, int] = {}  # pid -> pidfd
        self._spared = False

    def serve(self, origin: str) -> None:
        """Serve until the agent is gone. `origin` is the file that torch was imported from."""
        self._channel.send(encode(Imported(origin)))
        self.fork_on_request()

    def fork_on_request(self) -> None:
        """Handle the agent's requests; return when it is gone and no child is left."""
        try:
            while self._serve_once():
                pass
        finally:
            self._end_children()

    def _serve_once(self) -> bool:
        """Wait for events and handle them. False if the agent is gone."""
        for key, _ in self._selector.select():
            if key.fileobj is not self._channel:
                self._reap(int(key.data))
            elif not self.handle_request():
                return False
        return True

    def handle_request(self) -> bool:
        # Not inherited by programs that another thread of this process starts.
        data, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        request = decode_request(data)
        if isinstance(request, EndChildren):
            for pid in request.pids:
                self._kill(pid)
            return True
        try:
            self._fork(request, descriptors)
        except Exception as error:  # the template lives on: ranks are forked from it
            self._channel.send(encode(ForkFailed(str(error))))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, request: Fork, descriptors: list[int]) -> None:
        if request.spared != self._spared:  # the children end with this process
            self._spared = request.spared
            signal.signal(signal.SIGTERM, signal.SIG_IGN if request.spared else signal.SIG_DFL)
        pid = self.make_child(request, descriptors)
        pidfd = os.pidfd_open(pid)
        self._children[pid] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        socket.send_fds(self._channel, [encode(Forked(request.rank, pid))], [pidfd])

    def make_child(self, request: Fork, descriptors: list[int]) -> int:
        """Fork a process that becomes what was requested.

        Returns:
            Its process id.
        """
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"the template has {threads} threads, which would be missing in a fork")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(parent, request, descriptors)
        return pid

    def let_go(self) -> None:
        """Close the parent's resources in a child."""
        self._channel.close()
        self._selector.close()
        for pidfd in self._children.values():
            os.close(pidfd)

    def _run_child(self, parent: int, request: Fork, descriptors: list[int]) -> None:
        code = 1
        try:
            self.let_go()
            if request.rank is None:
                rank.become_store(parent, *descriptors)
            elif request.fresh:
                rank.enter_anew(parent, descriptors)
            else:
                rank.become_rank(parent, *descriptors)
            code = 0
        except BaseException:  # nothing may get out of the fork into the template's code
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)

    def _kill(self, pid: int) -> None:
        if pid in self._children:
            try:
                os.killpg(pid, signal.SIGKILL)  # ours: it is not reaped yet
            except ProcessLookupError:
                os.kill(pid, signal.SIGKILL)  # not the leader of its group yet

    def _reap(self, pid: int) -> None:
        pidfd = self._children.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = reap_group(pid)
        with contextlib.suppress(OSError):  # the agent is gone; serve() is about to notice
            self._channel.send(encode(ChildEnded(pid, code)))

    def _end_children(self) -> None:
        for pid in list(self._children):
            self._kill(pid)
        for pid in list(self._children):
            self._reap(pid)
