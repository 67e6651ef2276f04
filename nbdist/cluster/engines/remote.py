"""`nbdist join` on another machine, through a program that runs commands there (ssh, srun).

Owns that program's process. Independent of how the machine was found.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

NO_NBDIST = 66  # EX_NOINPUT; exit code of the other machine's Python where it has no nbdist
CANNOT_JOIN = 2  # of `nbdist join`, which has said why
_LAST_LINES = 5
_END_LIMIT = 3.0  # seconds

# The current folder is not searched: a `random.py` there would take the library's place. An exit code that is not 0
# means that this machine never was a node; how a node has left, the session knows from its agent.
_JOIN = f"""\
import os, sys
sys.path[:] = [entry for entry in sys.path if entry]
line = os.environ.get("SLURM_PROCID", "0") if sys.argv[2] == "by-task" else "0"
try:
    from nbdist.command import main
    code = main(["join", sys.argv[1], "--token-file", "-", "--token-line", line])
except ModuleNotFoundError as error:
    print(error, file=sys.stderr)
    sys.exit({NO_NBDIST})
sys.exit(code if code == {CANNOT_JOIN} else 0)
"""


def join_command(python: str, address: str, by_task: bool = False) -> list[str]:
    """Return what a machine runs to be a node.

    Args:
        python: Its Python.
        address: Where the session listens.
        by_task: Whether Slurm runs it, with one token for each of its tasks.
    """
    return [python, "-c", _JOIN, address, "by-task" if by_task else "one"]


class Remote:
    """A program that runs `nbdist join` elsewhere; its standard input is what keeps that alive.

    Args:
        command: The program and its arguments.
        tokens: What goes to its standard input, a line each.
        environment: Its variables; None: ours.
    """

    def __init__(
        self, command: Sequence[str], tokens: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
        )
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._rest = b""
        assert self._process.stdin is not None and self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `read` will say
            self._process.stdin.write("".join(f"{token}\n" for token in tokens).encode())
            self._process.stdin.flush()

    def fileno(self) -> int:
        """Return what to wait for before `read`."""
        assert self._process.stderr is not None
        return self._process.stderr.fileno()

    def read(self) -> bool:
        """Take what it has printed. False: it has ended."""
        try:
            found = os.read(self.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + found).split(b"\n")
        self._last += [text for line in lines if (text := line.decode(errors="replace").strip())]
        return bool(found)

    def wait(self) -> int:
        """Return its exit code, once it has ended."""
        return self._process.wait()

    @property
    def last_line(self) -> str:
        """What it has printed last, as a rule why it has ended; "": nothing."""
        rest = self._rest.decode(errors="replace").strip()
        return rest or (self._last[-1] if self._last else "")

    @property
    def last_lines(self) -> str:
        """The last lines that it has printed."""
        return "\n".join([*self._last, self._rest.decode(errors="replace")]).strip()

    def let_go(self) -> None:
        """Have the other machine leave."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """End it, by force if it takes long."""
        self.let_go()
        try:
            self._process.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ended(remotes: Mapping[int, Remote], tick: float | None = None) -> Iterator[int | None]:
    """Yield the key of each program as it ends, until all have; and None each `tick` seconds."""
    with selectors.DefaultSelector() as selector:
        for key, remote in remotes.items():
            selector.register(remote, selectors.EVENT_READ, key)
        while selector.get_map():
            ready = selector.select(tick)
            for found, _ in ready:
                if not remotes[found.data].read():
                    selector.unregister(found.fileobj)
                    yield found.data
            if not ready:
                yield None
