"""A rank that the notebook's debugger is attached to: the handshake, its breakpoints, and what it is stopped at.

Lives in the loop of the kernel's control thread. Knows one rank; `breakpoints` routes the page's requests to it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nbdist.client.debugger.adapter import Adapter, DapMessage
from nbdist.client.debugger.debug_lines import Dial


class DebuggedProcess(NamedTuple):
    """A process of a rank: its id, and for one of another machine the session, by its name, and the node."""

    pid: int
    session: str = ""
    node: int = 0


class Numbers:
    """Numbers for what ranks number themselves, so that they are the only ones in the notebook.

    Args:
        first: Where to begin. debugpy's own numbers are small, for threads, or addresses.
    """

    def __init__(self, first: int) -> None:
        self._next = itertools.count(first)
        self._given: dict[tuple[DebuggedProcess, int], int] = {}
        self._meant: dict[int, tuple[DebuggedProcess, int]] = {}

    def give(self, process: DebuggedProcess, number: int) -> int:
        """Return the number for a rank's own one; 0, which means none, stays."""
        if not number:
            return 0
        known = (process, number)
        if known not in self._given:
            given = self._given[known] = next(self._next)
            self._meant[given] = known
        return self._given[known]

    def find(self, given: object) -> tuple[DebuggedProcess, int] | None:
        """Return the process of the rank and its own number; None: not one of these."""
        return self._meant.get(given) if isinstance(given, int) else None

    def forget(self, process: DebuggedProcess) -> None:
        """Forget a rank's numbers, which it may give to something else now."""
        for known in [known for known in self._given if known[0] == process]:
            del self._meant[self._given.pop(known)]


class AttachedRank:
    """A rank with its debugger.

    Args:
        rank: Its number.
        process: Its process.
        on_event: Called with this object and each event of its debugger.
        on_end: Called with this object when it can't be debugged any more.

    Attributes:
        rank, process: As above. The number is changed from outside.
        stopped: The threads that are stopped, by debugpy's own numbers, the first first.
        muted: Whether its breakpoints have been taken away, so that the cell comes to its end.
        ended: Whether it can't be debugged any more.
        steps: Whether it was told last to make one step.
    """

    def __init__(
        self,
        rank: int,
        process: DebuggedProcess,
        on_event: Callable[[AttachedRank, DapMessage], None],
        on_end: Callable[[AttachedRank], None],
    ) -> None:
        self.rank, self.process = rank, process
        self.stopped: list[int] = []
        self.muted = self.ended = self.steps = False
        self._on_event, self._on_end = on_event, on_end
        self._initialized = asyncio.get_running_loop().create_future()
        self._paths: set[str] = set()

    async def attach(self, dial: Dial, breakpoints: Mapping[str, DapMessage], exceptions: DapMessage) -> None:
        """Attach to its debugger and set all breakpoints.

        Args:
            dial: Connects to it.
            breakpoints: The arguments of `setBreakpoints`, by source.
            exceptions: Those of `setExceptionBreakpoints`.

        Raises:
            OSError: It does not listen, or its connection has ended.
            TimeoutError: It does not answer.
        """
        self._adapter = Adapter(*await dial(), self._event, self._end)
        client = {"clientID": "nbdist", "adapterID": "debugpy", "pathFormat": "path", "supportsVariableType": True}
        await self._adapter.ask("initialize", client | {"linesStartAt1": True, "columnsStartAt1": True})
        rules = [{"module": "nbdist", "include": False}]  # which may be no installed package, so "my code"
        # Else a step from one statement of a cell to the next would stop in IPython, which runs them one by one.
        options = {"justMyCode": True, "redirectOutput": False, "subProcess": False, "rules": rules}
        attached = self._adapter.send("attach", options)
        await asyncio.wait([self._initialized, attached], return_when=asyncio.FIRST_COMPLETED)
        if attached.done() and not attached.result().get("success"):
            self._adapter.close()
            raise ConnectionError("debugpy on this rank could not be attached to")
        await self.set_all(breakpoints, exceptions)
        await self._adapter.ask("configurationDone", {})
        await attached

    async def ask(self, command: str, arguments: DapMessage) -> DapMessage:
        """Pass a request on, in the rank's own numbers.

        Raises:
            OSError: Its connection has ended.
            TimeoutError: It does not answer.
        """
        return await self._adapter.ask(command, arguments)

    async def set_all(self, breakpoints: Mapping[str, DapMessage], exceptions: DapMessage) -> None:
        """Have all breakpoints of the page set, and no others."""
        self.muted = False
        for path in self._paths - breakpoints.keys():
            await self.ask("setBreakpoints", {"source": {"path": path}, "breakpoints": []})
        for arguments in breakpoints.values():
            await self.ask("setBreakpoints", arguments)
        self._paths = set(breakpoints)
        await self.ask("setExceptionBreakpoints", exceptions or {"filters": []})

    async def let_go(self) -> None:
        """Have it run on, past all breakpoints, until they are set again. Its debugger stays attached."""
        await self.set_all({}, {})
        self.muted = True
        if self.stopped:
            await self.ask("continue", {"threadId": self.stopped[0]})

    def leave(self) -> None:
        """End the connection: the rank runs on, and another debugger may come."""
        self.stopped = []
        self._adapter.close()

    async def frames(self, arguments: DapMessage) -> DapMessage:
        """Return the answer to `stackTrace` without what has started the process, the only frames without a file."""
        answer = await self.ask("stackTrace", arguments)
        frames: list[DapMessage] = answer.get("body", {}).get("stackFrames", [])
        while len(frames) > 1 and not os.path.isabs(frames[-1].get("source", {}).get("path", "")):
            frames.pop()
        for frame in frames:  # where a rank's machine has no file of a cell, the notebook still has it
            frame.get("source", {}).pop("sourceReference", None)
        return answer

    def _event(self, event: DapMessage) -> None:
        kind, body = event["event"], event.get("body", {})
        if kind == "initialized":
            self._initialized.set_result(None)
            return
        thread = body.get("threadId", 0)
        if kind == "stopped":
            self.stopped = [thread, *(other for other in self.stopped if other != thread)]
        elif kind == "continued":
            all_go_on = body.get("allThreadsContinued", True)
            self.stopped = [] if all_go_on else [other for other in self.stopped if other != thread]
        elif kind == "terminated":
            self._adapter.close()
            return
        self._on_event(self, event)

    def _end(self) -> None:
        self.stopped, self.ended = [], True
        if not self._initialized.done():
            self._initialized.set_result(None)
        self._on_end(self)
