"""The sessions of this user on this machine, seen from outside: `nbdist ls`, `nbdist stop`.

A session's key file, which only its owner can read, is how it is found and reached. Knows nothing of notebooks.
"""

from __future__ import annotations

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

from nbdist.errors import UsageError
from nbdist.text import counted
from nbdist.wire.frames import decode, encode
from nbdist.wire.keys import read_key_file
from nbdist.wire.lanes import VISITOR, connect
from nbdist.wire.life import Shutdown
from nbdist.wire.message import Message
from nbdist.wire.visitor_messages import Describe, Description

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


def sessions() -> list[Found]:
    """Return the sessions of this user on this machine, those of a notebook's next start left out."""
    found = []
    for file in _key_files():
        try:
            description = _ask(file, Describe())
        except _NotThere:
            continue
        if description is None or description.ranks or description.running:
            found.append(Found(file.stem.removeprefix("nbdist-")[:_NAME], file, description))
    return found


def table(found: list[Found]) -> str:
    """Return the sessions as a table."""
    rows: list[tuple[str, ...]] = [("session", "kernel", "notebook", "ranks", "nodes", "GPUs", "runs", "since")]
    rows += [(each.name, *_cells(each.description)) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cells(description: Description | None) -> tuple[str, ...]:
    if description is None:
        return ("?", "", "", "", "", "does not answer", "")
    cells = [
        (f"cell {cell.number}" if cell.number else "a function") + f" for {cell.seconds:.0f} s"
        for cell in description.running
    ]
    return (
        f"{description.kernel}{' (ended)' if description.alone else ''}",
        description.notebook or "?",
        str(description.ranks),
        ",".join(description.nodes),
        str(description.gpus),
        ", ".join(cells) or "nothing",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(description.since)) if description.since else "starting",
    )


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
        except _NotThere:
            continue  # it has ended meanwhile
        _await_end(each)
    return [each.name for each in chosen]


def _by_name(name: str, known: list[Found]) -> Found:
    meant = [each for each in known if each.name.startswith(name)]
    if len(meant) == 1:
        return meant[0]
    names = ", ".join(each.name for each in known) or "none"
    what = f"{name!r} means {counted(len(meant), 'session')}" if meant else f"there is no session {name!r}"
    raise UsageError(f"{what}: this user has {names} here. `nbdist ls` shows them, `nbdist stop --all` ends all")


def _await_end(found: Found) -> None:
    deadline = time.monotonic() + _END_LIMIT
    while found.key_file.exists():
        if time.monotonic() > deadline:
            raise UsageError(f"session {found.name} has not ended within {_END_LIMIT:g} s; `nbdist ls` shows it")
        time.sleep(0.02)


def _key_files() -> Iterator[Path]:
    own = os.getuid()
    for folder, pattern in (
        (Path(jupyter_runtime_dir()), "nbdist-*.json"),
        (Path(tempfile.gettempdir()), "nbdist-keys-*/nbdist-*.json"),
    ):
        yield from sorted(file for file in folder.glob(pattern) if file.stat().st_uid == own)


class _NotThere(Exception):
    """The session has ended."""


def _ask(file: Path, message: Message) -> Description | None:
    """Ask a session; None: it has not answered, or there is nothing to answer.

    Raises:
        _NotThere: It has ended.
    """
    try:
        keys = read_key_file(file)
    except (OSError, json.JSONDecodeError, KeyError):
        raise _NotThere from None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lane = f"{VISITOR}/{secrets.randbelow(1 << 60)}".encode()
    events = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
    visitor = connect(context, keys, lane, events)
    gone = visitor.get_monitor_socket()
    poller = zmq.Poller()
    poller.register(visitor, zmq.POLLIN)
    poller.register(gone, zmq.POLLIN)
    try:
        visitor.send(encode(message))
        ready = dict(poller.poll(int(_ANSWER_LIMIT * 1000)))
        if visitor in ready:
            answer = decode(visitor.recv())
            return answer if isinstance(answer, Description) else None
        if gone in ready:
            raise _NotThere
        return None
    except msgspec.DecodeError:  # another version of nbdist
        return None
    finally:
        visitor.disable_monitor()
        context.destroy(linger=200)
