"""The kernel's connection to its controller: starts that process, sends to it, and runs the thread that listens.

Handles the process and the sockets, and keeps an idle controller for the next ranks; independent of what the messages
mean.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from jupyter_core.paths import jupyter_runtime_dir

from nbdist import shells
from nbdist.base.checks import is_on
from nbdist.client.base.interruption import HEED
from nbdist.client.start.controller_process import FoundController, OwnController
from nbdist.errors import SessionBroken
from nbdist.wire.base.keys import read_key_file
from nbdist.wire.base.message import Message
from nbdist.wire.base.system_text import as_text
from nbdist.wire.bundle import unbundled
from nbdist.wire.frames import encode
from nbdist.wire.lanes import CLIENT_COMMANDS, CLIENT_EVENTS, FIRST_CLIENT, connect, node_lane
from nbdist.wire.messages.handover import AttachRefused, Displaced, Goodbye, Leave
from nbdist.wire.messages.life import Broken, Shutdown
from nbdist.wire.processes.setup import ControllerFailed, ControllerReady, ControllerSetup

_NO_HANDLES = (errno.EMFILE, errno.ENFILE)
_END_LIMIT = 3.0
_LAST_WORDS_MS = 100

_idle: Connection | None = None  # to a controller with its agent and template, so that the next ranks start at once


@dataclass(frozen=True)
class Reachable:
    """A session that another process has started.

    Attributes:
        key_file: Its keys.
        controller: Its controller's process.
    """

    key_file: Path
    controller: int


class Connection:
    """A controller process and this kernel's lanes to it.

    Args:
        patient: Whether nothing waits for it yet; its template then yields the cores to others.
        found: A session whose controller another process has started; None to start one.

    `on_message` is called from the listening thread for each message, and with `Broken` when the controller has ended.
    """

    def __init__(self, patient: bool = False, found: Reachable | None = None) -> None:
        self.pid = os.getpid()
        self.on_message: Callable[[Message], None] = lambda message: None
        self._lock = threading.Lock()
        self._commands: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._over = False  # the controller goes on without this client
        self._number = FIRST_CLIENT if found is None else secrets.randbelow(1 << 60) + 1
        with _explaining():
            _check_system()
            self._process: OwnController | FoundController
            if found is None:
                setup = ControllerSetup(os.getpid(), jupyter_runtime_dir(), *own_place())
                self._process = OwnController(setup, patient)
            else:
                self.key_file = found.key_file
                try:
                    self._process = FoundController(found.controller)
                except ProcessLookupError:
                    raise self._vanished() from None

    @property
    def alive(self) -> bool:
        """Whether the controller runs and belongs to this process (not to one that this process was forked from)."""
        return not self._over and self._process.alive and os.getpid() == self.pid

    def open(self, heed: Callable[[], None]) -> None:
        """Connect once the controller listens.

        Args:
            heed: Called repeatedly while the controller starts; it may raise.

        Raises:
            SessionBroken: The controller did not start.
        """
        if self._commands is not None:
            return
        if isinstance(self._process, OwnController):
            self.key_file = self._await_first_line(self._process, heed)
        try:
            keys = read_key_file(self.key_file)
        except FileNotFoundError:
            raise (self._ended_early() if isinstance(self._process, OwnController) else self._vanished()) from None
        with _explaining():
            end = os.pidfd_open(self._process.pid)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            try:
                events = connect(self._context, keys, node_lane(CLIENT_EVENTS, self._number))
                self._commands = connect(self._context, keys, node_lane(CLIENT_COMMANDS, self._number))
            except zmq.ZMQError:
                os.close(end)
                self._context.destroy(linger=0)
                raise
        self._thread = threading.Thread(target=self._listen, args=(events, end), name="nbdist-client", daemon=True)
        self._thread.start()

    def _await_first_line(self, process: OwnController, heed: Callable[[], None]) -> Path:
        """Return the key file that the controller names in its first line."""
        while not process.says(HEED):
            heed()
        if not (line := process.first_line()):
            raise self._ended_early()
        said = msgspec.json.decode(line, type=ControllerReady | ControllerFailed)
        if isinstance(said, ControllerFailed):
            raise SessionBroken(said.text)
        return Path(said.key_file)

    def _vanished(self) -> SessionBroken:
        return SessionBroken(
            "the session has ended, or its processes can't be seen from here because they are in another container. "
            "`nbdist ls` lists your sessions"
        )

    def _ended_early(self) -> SessionBroken:
        return SessionBroken(
            f"the session's controller (pid {self._process.pid}) ended while it started: "
            f"{self._process.describe_end()}. Type `%distributed start` to try again."
        )

    def send(self, message: Message) -> None:
        """Send to the controller, from any thread."""
        with self._lock:
            if self._commands is not None and os.getpid() == self.pid:
                self._commands.send(encode(message))

    def close(self) -> None:
        """End the controller and everything it started."""
        if os.getpid() != self.pid or self._closing or self._over:
            return
        self._closing = True
        if self._commands is None:
            self._process.terminate()  # not even connected: its agent notices its end and cleans up
        else:
            self.send(Shutdown())
        self._process.end(_END_LIMIT)
        self._join_thread()

    def _join_thread(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_LIMIT)

    def leave(self, message: Leave) -> None:
        """Disconnect from the controller, which goes on without this client."""
        if os.getpid() == self.pid and not self._closing:
            self._closing = True
            self.send(message)
            self._join_thread()  # it ends when the controller has answered
            self._process.release()

    def let_go(self) -> None:
        """End the controller, whose agent then ends the ranks. Doesn't wait, so that a finalizer may call it."""
        self._process.terminate()

    def _listen(self, events: zmq.Socket[bytes], end: int) -> None:
        poller = zmq.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(end, zmq.POLLIN)
        while not self._over:
            ready = dict(poller.poll())
            # The controller's last messages may arrive a moment after its end.
            if events in ready or (end in ready and events.poll(_LAST_WORDS_MS)):
                for frame in events.recv_multipart():
                    self._handle(frame)
            elif end in ready:
                break
        os.close(end)
        self._disconnect(events)
        if not self._closing and not self._over:
            self.key_file.unlink(missing_ok=True)  # in case its agent could not
            how = f"(pid {self._process.pid}) has ended: {self._process.describe_end()}; all ranks ended with it"
            self.on_message(Broken(f"the session's controller {how}. `%distributed start` starts a new one."))

    def _handle(self, frame: bytes) -> None:
        try:
            for message in unbundled(frame):
                self._over = self._over or isinstance(message, AttachRefused | Displaced | Goodbye)
                self.on_message(message)
        except Exception:  # one bad message must not keep the session from receiving the ones that follow
            traceback.print_exc()

    def _disconnect(self, events: zmq.Socket[bytes]) -> None:
        events.close(linger=0)
        with self._lock:
            if self._commands is not None:
                self._commands.close(linger=0)
                self._commands = None
        self._context.term()


def own_place() -> tuple[str, str]:
    """Return this notebook's file, and what stays the same when its kernel restarts; "" for what is not known."""
    seat = ""
    if shells.in_kernel():
        from ipykernel.connect import get_connection_file  # it is a kernel, so this is there

        seat = get_connection_file()
    return as_text(os.environ.get("JPY_SESSION_NAME", "")), as_text(seat)  # Jupyter's server sets it


def _check_system() -> None:
    """Check that processes can be watched by pidfd.

    Raises:
        SessionBroken: This system doesn't support it.
        OSError: No file handle is left.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _NO_HANDLES:
            raise
        raise SessionBroken(
            f"nbdist needs Linux 5.3 or newer with the system call pidfd_open, which Linux {os.uname().release} does "
            "not offer here. Update the system, or the container runtime if its seccomp profile blocks the call."
        ) from None


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Turn what the system refuses into a message of ours."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        hint = "Fix that, then type `%distributed start` again."
        if error.errno in _NO_HANDLES:
            hint = "Close what the notebook has open, or type `ulimit -n 4096` in the shell before you start Jupyter."
        raise SessionBroken(f"the session could not be started: {error.strerror}. {hint}") from None


# --- the idle controller


def prewarm() -> None:
    """Start a controller with its agent and template, unless there is one, so that the next session starts at once.

    Does nothing with NBDIST_PREWARM=0.
    """
    global _idle
    if is_on("NBDIST_PREWARM", default=True) and (_idle is None or not _idle.alive):
        with contextlib.suppress(SessionBroken):  # `start` will report it
            _idle = Connection(patient=True)


def take_idle() -> Connection | None:
    """Return the idle controller, which is no longer idle then; None if there is none."""
    global _idle
    if _idle is None or not _idle.alive:
        return None
    taken, _idle = _idle, None
    return taken


def keep_idle(connection: Connection) -> None:
    """Keep a controller whose ranks have ended, unless there is an idle one already."""
    global _idle
    if _idle is None or not _idle.alive:
        _idle = connection
    else:
        connection.close()


def close_idle() -> None:
    """End the idle controller."""
    if _idle is not None:
        _idle.close()
