"""The names of a process's innermost function with their values, as py-spy sees them from outside."""

from __future__ import annotations

import re

import msgspec

from nbdist.agent.slow_looks import NativeStacks
from nbdist.wire.questions.stopping import NativeStack

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_OTHERS = re.compile(r"^<|/(site|dist)-packages/|/lib/python\d")  # whichever Python it is


class _Name(msgspec.Struct):
    name: str
    repr: str | None = None


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int
    locals: list[_Name] | None = None


class _Thread(msgspec.Struct):
    frames: list[_Frame]
    thread_name: str | None = None


def names_from_outside(looks: NativeStacks, pid: int) -> list[str] | NativeStack:
    """Return where the main thread is in the user's own code, and the names there; or what keeps py-spy from it."""
    found = looks.dump(pid, "--locals", "--json")
    if isinstance(found, NativeStack):
        return found
    try:
        threads = msgspec.json.decode(found, type=list[_Thread])
    except msgspec.MsgspecError as error:
        return NativeStack(obstacle="other", text=f"another version of py-spy: {error}")
    main = next((each for each in threads if each.thread_name == "MainThread"), None)
    frames = [each for each in main.frames if not _OF_OTHERS.search(each.filename)] if main else []
    return _described(frames[0]) if frames else ["nowhere in code of its own"]


def _described(frame: _Frame) -> list[str]:
    place = f"{frame.filename.rpartition('/')[2]}:{frame.line}"
    names = (f"{each.name} = {_ADDRESS.sub('', each.repr or '?')}" for each in frame.locals or ())
    return [place if frame.name.startswith("<") else f"{place}, in {frame.name}", *names]
