"""The kernel's connection to its controller: starts that process, sends to it, and runs the thread that listens.

Handles the process and the sockets; independent of what the messages mean.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq
from jupyter_core.paths import jupyter_runtime_dir

from nbdist.client.session.interruption import HEED
from nbdist.errors import SessionBroken
from nbdist.processes import describe_exit, python_command
from nbdist.wire.frames import decode, encode
from nbdist.wire.keys import read_key_file
from nbdist.wire.lanes import CLIENT_COMMANDS, CLIENT_EVENTS, connect
from nbdist.wire.life import Broken, Shutdown
from nbdist.wire.message import Message
from nbdist.wire.setup import ControllerFailed, ControllerReady, ControllerSetup, encode_line
from nbdist.wire.system_text import as_text

_NO_HANDLES = (errno.EMFILE, errno.ENFILE)
_END_LIMIT = 3.0
_LAST_WORDS_MS = 100


class Connection:
    """A controller process and this kernel's lanes to it.

    Args:
        patient: Whether nothing waits for it yet; its template then yields the cores to others.

    `on_message` is called from the listening thread for each message, and with `Broken` when the controller has ended.
    """

    def __init__(self, patient: bool = False) -> None:
        self.pid = os.getpid()
        self.on_message: Callable[[Message], None] = lambda message: None
        self._lock = threading.Lock()
        self._commands: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        with _explaining():
            _check_system()
            self._process = subprocess.Popen(
                python_command("nbdist.controller.controller_boot", "patient" if patient else "urgent"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
            )
        notebook = os.environ.get("JPY_SESSION_NAME", "")  # which Jupyter's server sets
        setup = ControllerSetup(os.getpid(), jupyter_runtime_dir(), as_text(notebook))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `open` will report it
            self._process.stdin.write(encode_line(setup))
            self._process.stdin.close()

    @property
    def alive(self) -> bool:
        """Whether the controller runs and belongs to this process (not to one that this process was forked from)."""
        return self._process.poll() is None and os.getpid() == self.pid

    def open(self, heed: Callable[[], None]) -> None:
        """Connect once the controller listens.

        Args:
            heed: Called repeatedly while the controller starts; it may raise.

        Raises:
            SessionBroken: The controller did not start.
        """
        if self._commands is not None:
            return
        line = self._first_line(heed)
        if not line:
            raise self._ended_early()
        said = msgspec.json.decode(line, type=ControllerReady | ControllerFailed)
        if isinstance(said, ControllerFailed):
            raise SessionBroken(said.text)
        self.key_file = Path(said.key_file)
        try:
            keys = read_key_file(self.key_file)
        except FileNotFoundError:
            raise self._ended_early() from None
        with _explaining():
            end = os.pidfd_open(self._process.pid)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            try:
                events = connect(self._context, keys, CLIENT_EVENTS)
                self._commands = connect(self._context, keys, CLIENT_COMMANDS)
            except zmq.ZMQError:
                os.close(end)
                self._context.destroy(linger=0)
                raise
        self._thread = threading.Thread(target=self._listen, args=(events, end), name="nbdist-client", daemon=True)
        self._thread.start()

    def _first_line(self, heed: Callable[[], None]) -> bytes:
        """Return the controller's first line; empty if it has ended."""
        assert self._process.stdout is not None
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        while not waiting.poll(HEED * 1000):
            heed()
        return self._process.stdout.readline()

    def _ended_early(self) -> SessionBroken:
        return SessionBroken(
            f"the session's controller (pid {self._process.pid}) ended while it started: "
            f"{describe_exit(self._process.wait())}. Type `%distributed start` to try again."
        )

    def send(self, message: Message) -> None:
        """Send to the controller, from any thread."""
        with self._lock:
            if self._commands is not None and os.getpid() == self.pid:
                self._commands.send(encode(message))

    def close(self) -> None:
        """End the controller and everything it started."""
        if os.getpid() != self.pid or self._closing:
            return
        self._closing = True
        if self._commands is None:
            self._process.terminate()  # not even connected: its agent notices its end and cleans up
        else:
            self.send(Shutdown())
        try:
            self._process.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_LIMIT)

    def let_go(self) -> None:
        """End the controller, whose agent then ends the ranks. Doesn't wait, so that a finalizer may call it."""
        self._process.terminate()

    def _listen(self, events: zmq.Socket[bytes], end: int) -> None:
        poller = zmq.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(end, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            # The controller's last messages may arrive a moment after its end.
            if events in ready or (end in ready and events.poll(_LAST_WORDS_MS)):
                for frame in events.recv_multipart():
                    self._handle(frame)
            elif end in ready:
                break
        os.close(end)
        self._disconnect(events)
        if not self._closing:
            self.key_file.unlink(missing_ok=True)  # in case its agent could not
            how = f"(pid {self._process.pid}) has ended: {describe_exit(self._process.wait())}; all ranks ended with it"
            self.on_message(Broken(f"the session's controller {how}. `%distributed start` starts a new one."))

    def _handle(self, frame: bytes) -> None:
        try:
            self.on_message(decode(frame))
        except Exception:  # one bad message must not keep the session from receiving the ones that follow
            traceback.print_exc()

    def _disconnect(self, events: zmq.Socket[bytes]) -> None:
        events.close(linger=0)
        with self._lock:
            if self._commands is not None:
                self._commands.close(linger=0)
                self._commands = None
        self._context.term()


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
