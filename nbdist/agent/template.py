"""The warm template: one thread, everything imported, nothing of the user's; ranks are forked from it.

Owns the ranks' and the store's processes: it is their parent, reaps them and ends what is left of their process
groups. It never runs a tensor operation (OpenMP's threads do not survive a fork), never touches CUDA, and knows
nothing of the wire.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

# While torch's largest library is loaded no other can be: what needs one comes before, pure Python meanwhile.
_BEFORE_MAPPING = ("cmath", "decimal", "fcntl", "random", "shutil", "subprocess", "unicodedata")
_WHILE_MAPPING = "sympy"
# What ranks need sooner or later: dynamo for the first optimizer step, stack_data and pygments for the first traceback.
_PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "IPython.core.interactiveshell",
    "IPython.core.magics.execution",
    "stack_data",
    "pygments.formatters.html",
    "pygments.formatters.terminal256",
    "pygments.lexers.python",
    "nbdist.worker.rank",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",
)
_PRELOADED_IF_THERE = ("torch.profiler._cupti_monitor",)  # parts of torch that its first optimizer step imports


def main() -> None:
    """Run the template; its channel to the agent is the file descriptor given as first argument."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2]) or sys.path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # imports make half a million objects that are never freed
    try:
        origin = _preload()
    except Exception as error:
        channel.send(json.dumps({"failed": _describe_import_failure(error)}).encode())
        return
    # Not collected before: the little garbage of imports is shared by all ranks, and finding it takes 0.2 s.
    gc.freeze()  # else each rank's first collection would copy every page (37 MB a rank)
    channel.send(json.dumps({"ready": origin}).encode())
    Template(channel).serve()


def _preload() -> str:
    for module in _BEFORE_MAPPING:
        __import__(module)
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        meanwhile = threading.Thread(target=__import__, args=(_WHILE_MAPPING,))
        meanwhile.start()
        _map_torch_library(spec.origin)  # in this thread: torch's profiler complains in all others
        meanwhile.join()
    for module in _PRELOADED:
        __import__(module)
    for module in _PRELOADED_IF_THERE:
        with contextlib.suppress(ImportError):
            __import__(module)
    _prepare_shell()
    return str(sys.modules["torch"].__file__)


def _map_torch_library(torch: str) -> None:
    """Load torch's largest library while a second core is busy with other imports (0.2 s)."""
    libc = ctypes.CDLL(None)
    libc.dlopen.restype = ctypes.c_void_p
    # A foreign call lets other threads run, which `CDLL(...)` does not. If it fails, the import will tell.
    libc.dlopen(str(Path(torch).parent / "lib" / "libtorch_cpu.so").encode(), os.RTLD_NOW | os.RTLD_GLOBAL)


def _prepare_shell() -> None:
    """Make the shell once for all ranks, which takes longer than all else that a rank does to stand up (30 ms)."""
    from nbdist.worker.cell.shell import RankShell

    RankShell.prepare()


_AGAIN = "`%distributed start` again."


def _describe_import_failure(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"PyTorch is not installed for {sys.executable}. Type `%pip install torch`, then {_AGAIN}"
    last = traceback.format_exception_only(error)[-1].strip()
    return f"the ranks' imports failed: {last}. Fix the installation for {sys.executable} (`%pip check`), then {_AGAIN}"


class Template:
    """Forks on request until the agent's end of the channel is closed."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._children: dict[int, int] = {}  # pid -> pidfd

    def serve(self) -> None:
        """Do what the agent asks for; return when it has gone, and no child is left."""
        try:
            while self._serve_once():
                pass
        finally:
            self._end_children()

    def _serve_once(self) -> bool:
        """Wait for what comes and see to it. False: the agent has gone."""
        for key, _ in self._selector.select():
            if key.fileobj is not self._channel:
                self._reap(int(key.data))
            elif not self._handle_request():
                return False
        return True

    def _handle_request(self) -> bool:
        # Not for programs that another thread of this process starts.
        data, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        request = json.loads(data)
        if "kill" in request:
            for pid in request["kill"]:
                self._kill(pid)
            return True
        try:
            self._fork(request, descriptors)
        except Exception as error:
            self._channel.send(json.dumps({"fork_failed": request, "error": str(error)}).encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        pid = self.make_child(request, descriptors)
        pidfd = os.pidfd_open(pid)
        self._children[pid] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        socket.send_fds(self._channel, [json.dumps({"forked": request["id"], "pid": pid}).encode()], [pidfd])

    def make_child(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Fork a process that becomes what is asked for.

        Returns:
            Its process id.
        """
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"the template has {threads} threads; a fork would not take them along")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(parent, request, descriptors)
        return pid

    def let_go(self) -> None:
        """In a child: close what is the parent's."""
        self._channel.close()
        self._selector.close()
        for pidfd in self._children.values():
            os.close(pidfd)

    def _run_child(self, parent: int, request: dict[str, Any], descriptors: list[int]) -> None:
        code = 1
        try:
            self.let_go()
            from nbdist.worker import rank

            if request["fresh"]:
                rank.enter_anew(parent, descriptors)
            rank.enter(parent, request["role"], descriptors)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)

    def _kill(self, pid: int) -> None:
        if pid in self._children:
            try:
                os.killpg(pid, signal.SIGKILL)  # ours: it is not reaped yet
            except ProcessLookupError:
                os.kill(pid, signal.SIGKILL)  # not yet the leader of its group

    def _reap(self, pid: int) -> None:
        from nbdist.processes import reap_group

        pidfd = self._children.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = reap_group(pid)
        with contextlib.suppress(OSError):  # the agent has gone; serve() is about to see it
            self._channel.send(json.dumps({"exited": pid, "code": code}).encode())

    def _end_children(self) -> None:
        for pid in list(self._children):
            self._kill(pid)
        for pid in list(self._children):
            self._reap(pid)
