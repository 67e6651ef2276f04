"""The sessions of this user on this machine, seen from outside: `nbdist ls`, `nbdist stop`, and what attaches.

A session's key file, which only its owner can read, is how it is found and reached. Independent of notebooks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from jupyter_core.paths import jupyter_runtime_dir

from nbdist.base.text import counted, size, span
from nbdist.errors import UsageError
from nbdist.wire.base.keys import Home, read_home, read_key_file
from nbdist.wire.base.message import Message
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import VISITOR, connect
from nbdist.wire.messages.handover import Leaving
from nbdist.wire.messages.life import Shutdown
from nbdist.wire.messages.visitor_messages import Describe, Description, InterruptAll

_ANSWER_LIMIT = 2.0  # seconds; a controller answers at once, even if its ranks are stuck
_END_LIMIT = 10.0
_NAME = 8  # characters of a session's name


@dataclass(frozen=True)
class Found:
    """A session that has ranks.

    Attributes:
        name: By which it is stopped.
        key_file: What reaches it.
        description: What it has said; None: it has not answered.
    """

    name: str
    key_file: Path
    description: Description | None

    @property
    def lonely(self) -> bool:
        """Whether it has no client."""
        return self.left is not None

    @property
    def kernel(self) -> int:
        """The process of its client, or of the last one; 0: not known."""
        return self.description.kernel if self.description is not None else 0

    @property
    def notebook(self) -> str:
        """The file of that client; "" if unknown."""
        return self.description.notebook if self.description is not None else ""

    @property
    def left(self) -> Leaving | None:
        """How its last client has left; None if there is one."""
        return self.description.left if self.description is not None else None

    @property
    def is_own(self) -> bool:
        """Whether this process drives it."""
        return not self.lonely and self.kernel == os.getpid()

    def is_of(self, notebook: str, seat: str) -> bool:
        """Return whether a notebook, or one that had its kernel, is or was its client."""
        told = self.description
        return told is not None and bool((notebook and told.notebook == notebook) or (seat and told.seat == seat))

    @property
    def holder(self) -> str:
        """The client, for people."""
        return f"{self.notebook} (pid {self.kernel})" if self.notebook else f"pid {self.kernel}"

    @property
    def holds(self) -> str:
        """What its ranks hold, for people: "8 ranks, 212 GiB"."""
        assert self.description is not None
        return f"{counted(self.description.ranks, 'rank')}, {size(self.description.memory)}"


def sessions() -> list[Found]:
    """Return the sessions of this user on this machine, those of a notebook's next start left out."""
    return [each for each in _all() if each.description is None or each.description.ranks or each.description.running]


def of_this_machine(*, but_of: int = 0) -> list[Found]:
    """Return those that have ranks and answer. `but_of`: a process; none that it has started is asked."""
    return [each for each in _all(but_of) if each.description is not None and each.description.ranks]


def names() -> frozenset[str]:
    """Return the names of all sessions whose key files are there, with ranks or without. No session is asked."""
    return frozenset(map(name_of, _key_files()))


def reach(name: str) -> Found:
    """Return the session with this name, or one that begins so.

    Raises:
        UsageError: There is none, or several, or it can't be reached from here; the text says why.
    """
    meant = [file for file in _key_files(own=False) if name_of(file).startswith(name)] if name else []
    if len(meant) != 1:
        raise _not_one(name, [name_of(file) for file in meant], sessions())
    (file,) = meant
    shown = name_of(file)
    try:
        owner, home = file.stat().st_uid, read_home(file)
        description = _ask(file, Describe()) if owner == os.getuid() and home == Home.here(home.kernel) else None
    except PermissionError:
        raise UsageError(f"session {shown} belongs to another user: only its owner can read {file}") from None
    except (OSError, msgspec.DecodeError, SessionGone):
        raise UsageError(f"session {shown} has ended. `nbdist ls` shows the others") from None
    if owner != os.getuid():
        raise UsageError(f"session {shown} belongs to another user (uid {owner}, who owns {file})")
    if home.host != Home.here().host:
        raise UsageError(f"session {shown} runs on {home.host}, and this is {Home.here().host}: attach there")
    if home.version != Home.here().version:
        raise UsageError(
            f"session {shown} runs nbdist {home.version}, and this is {Home.here().version}: attach with that version"
        )
    if description is None:
        raise UsageError(f"session {shown} does not answer. `nbdist stop {shown}` ends it")
    return Found(shown, file, description)


def _all(but_of: int = 0) -> Iterator[Found]:
    for file in _key_files():
        try:
            home = read_home(file)
            if home.host == Home.here().host and (not but_of or home.kernel != but_of):
                yield Found(name_of(file), file, _ask(file, Describe()))
        except (OSError, msgspec.DecodeError, SessionGone):
            continue


def name_of(file: Path) -> str:
    """Return the name of the session with this key file."""
    return file.stem.removeprefix("nbdist-")[:_NAME]


def table(found: list[Found]) -> str:
    """Return the sessions as a table."""
    rows: list[tuple[str, ...]] = [
        (("session", "kernel", "notebook", "ranks", "nodes", "GPUs", "memory", "runs", "since", "client"))
    ]
    rows += [(each.name, *_cells(each.description)) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cells(description: Description | None) -> tuple[str, ...]:
    if description is None:
        return ("?", "", "", "", "", "", "does not answer", "", "")
    cells = [
        (f"cell {cell.number}" if cell.number else "a function") + f" for {cell.seconds:.0f} s"
        for cell in description.running
    ]
    return (
        str(description.kernel),
        description.notebook or "?",
        str(description.ranks),
        ",".join(description.nodes),
        str(description.gpus),
        size(description.memory),
        ", ".join(cells) or "nothing",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(description.since)) if description.since else "starting",
        client_of(description),
    )


def client_of(description: Description) -> str:
    """Return whether a session has a client, or how its last one has left, for people."""
    if description.left is None:
        return "there"
    return f"{description.left}, ends in {span(description.seconds_left)}"


def stop(names: list[str]) -> list[str]:
    """End sessions, and wait until they have.

    Args:
        names: Their names, as `sessions` has them, or beginnings of these; empty: all.

    Returns:
        The names of those that have ended.

    Raises:
        UsageError: There is no such session, nothing was stopped then; or one has not ended in time.
    """
    known = sessions()
    chosen = [_by_name(name, known) for name in names] if names else known
    for each in chosen:
        try:
            _ask(each.key_file, Shutdown())
        except SessionGone:
            continue  # it has ended meanwhile
        _await_end(each)
    return [each.name for each in chosen]


def interrupt(name: str) -> None:
    """Stop what a session's ranks run, after the current step if they train.

    Args:
        name: Its name, or a beginning of it.

    Raises:
        UsageError: There is no such session, or it does not answer.
    """
    found = _by_name(name, sessions())
    try:
        answer = _ask(found.key_file, InterruptAll())
    except SessionGone:
        raise UsageError(f"session {found.name} has ended. `nbdist ls` shows the others") from None
    if answer is None:
        raise UsageError(f"session {found.name} does not answer. `nbdist stop {found.name}` ends it")


def _by_name(name: str, known: list[Found]) -> Found:
    meant = [each for each in known if each.name.startswith(name)]
    if len(meant) == 1:
        return meant[0]
    raise _not_one(name, [each.name for each in meant], known)


def _not_one(name: str, meant: list[str], known: list[Found]) -> UsageError:
    names = ", ".join(each.name for each in known) or "none"
    what = f"{name!r} means {counted(len(meant), 'session')}" if meant else f"there is no session {name!r}"
    return UsageError(
        f"{what}: you have {names} on this machine. `nbdist ls` describes them, `nbdist stop --all` ends all"
    )


def _await_end(found: Found) -> None:
    deadline = time.monotonic() + _END_LIMIT
    while found.key_file.exists():
        if time.monotonic() > deadline:
            raise UsageError(f"session {found.name} has not ended within {_END_LIMIT:g} s; `nbdist ls` shows it")
        time.sleep(0.02)


def _key_files(*, own: bool = True) -> Iterator[Path]:
    """Yield the key files on this machine, of this user only or of all whose files are in sight."""
    for folder, pattern in (
        (Path(jupyter_runtime_dir()), "nbdist-*.json"),
        (Path(tempfile.gettempdir()), "nbdist-keys-*/nbdist-*.json"),
    ):
        for file in sorted(folder.glob(pattern)):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if not own or file.stat().st_uid == os.getuid():
                    yield file


class SessionGone(Exception):
    """The session has ended."""


class Visitor:
    """A connection to a session for questions, which does not drive it. A context manager.

    Args:
        key_file: What reaches it.

    Raises:
        SessionGone: It has ended.
    """

    def __init__(self, key_file: Path) -> None:
        try:
            keys = read_key_file(key_file)
        except (OSError, json.JSONDecodeError, KeyError):
            raise SessionGone from None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        lane = f"{VISITOR}/{secrets.randbelow(1 << 60)}".encode()
        events = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
        self._lane = connect(self._context, keys, lane, events)
        self._gone = self._lane.get_monitor_socket()
        self._poller = zmq.Poller()
        self._poller.register(self._lane, zmq.POLLIN)
        self._poller.register(self._gone, zmq.POLLIN)

    def ask(self, message: Message) -> Message | None:
        """Return the answer; None: there was none in time, or it can't be read.

        Raises:
            SessionGone: The session has ended.
        """
        self._lane.send(encode(message))
        return self.wait()

    def wait(self) -> Message | None:
        """Return the answer to a question that had none in time; as `ask`."""
        ready = dict(self._poller.poll(int(_ANSWER_LIMIT * 1000)))
        if self._lane in ready:
            try:
                return decode(self._lane.recv())
            except msgspec.DecodeError:  # another version of nbdist
                return None
        if self._gone in ready:
            raise SessionGone
        return None

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._lane.disable_monitor()
        self._context.destroy(linger=200)


def _ask(file: Path, message: Message) -> Description | None:
    """Ask a session; None: it has not answered, or there is nothing to answer.

    Raises:
        SessionGone: It has ended.
    """
    with Visitor(file) as visitor:
        answer = visitor.ask(message)
        return answer if isinstance(answer, Description) else None
