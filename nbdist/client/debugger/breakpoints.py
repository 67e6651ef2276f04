"""The kernel's debugger with the ranks behind it: what JupyterLab and VS Code ask of it reaches ranks, too.

Breakpoints go to the kernel and to ranks alike; a rank is attached when a cell comes to it while there are any. To the
page, a stopped rank is a thread of the kernel. Lives in the loop of the kernel's control thread, except for what
observers are told.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import itertools
import re
import sys
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec

from nbdist import shells
from nbdist.client.base import interruption
from nbdist.client.debugger.adapter import DapMessage
from nbdist.client.debugger.all_stopped import AllStopped
from nbdist.client.debugger.attached_rank import AttachedRank, DebuggedProcess, Numbers
from nbdist.client.debugger.debug_lines import Dial, dial_elsewhere, dial_here
from nbdist.client.debugger.last_connection import LastConnection
from nbdist.client.ranks import observers
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.errors import NbdistError
from nbdist.wire.messages.life import RankInfo
from nbdist.wire.questions.questions import ask
from nbdist.wire.questions.stopping import Rest

_ON_RANKS = re.compile(r"\s*%%(distributed|dist|rank)\b")  # how a cell begins that runs on ranks only
_KERNELS = 20.0  # seconds for the kernel's own debugpy to answer a page that connects, on a busy machine
_ATTACH = 60.0  # seconds to attach to ranks, on a busy machine
_LET_GO = 5.0  # seconds for stopped ranks to go on before they are interrupted
_STEP = 0.5  # seconds for a rank to stop again, before JupyterLab is shown another
_THREADS, _REFERENCES = 2**29, 2**30
_BY_THREAD = ("stackTrace", "continue", "next", "stepIn", "stepOut", "pause", "exceptionInfo")
_BY_REFERENCE = (
    *("scopes", "variables", "evaluate", "setVariable", "setExpression"),
    *("richInspectVariables", "copyToGlobals"),  # the kernel's own
)
_DEAF = (
    "the kernel's debugger does not answer. If it still does not when it is switched on again, restart the kernel: "
    "`%distributed attach` then brings the ranks back"
)
_GO_ON = ("continue", "next", "stepIn", "stepOut")
_HEADINGS = ("special variables", "function variables")
_REFERENCE_NAMES = ("frameId", "srcFrameId", "variablesReference")
_HIDDEN = re.compile(r"_i?\d*$|__\w+__$|(In|Out|_oh|_dh|_ih|_ii|_iii|get_ipython|exit|quit|open)$")


def offer(kernel: Any) -> None:
    """Let breakpoints reach ranks, if this kernel has a debugger."""
    debugger, thread = getattr(kernel, "debugger", None), getattr(kernel, "control_thread", None)
    if debugger is not None and thread is not None:
        observers.subscribe(RankBreakpoints(kernel, thread.io_loop.asyncio_loop))


class RankBreakpoints(observers.Observer):
    """Stands before the kernel's debugger.

    Args:
        kernel: The kernel.
        loop: The loop of its control thread, in which it handles requests.
    """

    def __init__(self, kernel: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._debugger, self._loop = kernel.debugger, loop
        self._publish: Callable[[DapMessage], None] = kernel.debugger.event_callback
        self._kernels: Callable[[DapMessage], Awaitable[DapMessage]] = kernel.debugger.process_request
        self._sequence = itertools.count(1)
        self._jupyterlab = False  # which shows one stack, not a list of threads
        self._breakpoints: dict[str, DapMessage] = {}
        self._exceptions: DapMessage = {}
        self._only_on_ranks: set[str] = set()  # files of cells that the kernel does not run itself
        self._attached: dict[DebuggedProcess, AttachedRank] = {}
        self._chosen: DebuggedProcess | None = None  # the one whose frame was looked at last
        self._all = AllStopped()
        self._last = LastConnection()
        # Held weakly: ranks that nobody else holds any more end.
        self._sets: weakref.WeakValueDictionary[DebuggedProcess, RankSet] = weakref.WeakValueDictionary()
        self._threads, self._references = Numbers(_THREADS), Numbers(_REFERENCES)
        kernel.debugger.process_request = self.process_request

    # --- from the page

    async def process_request(self, request: DapMessage) -> DapMessage:
        """Handle what the page asks of the kernel's debugger."""
        command = request["command"]
        if command in _BY_THREAD or command in _BY_REFERENCE:
            answer = await self._ask_rank(request)
            return answer if answer is not None else await self._kernels(request)
        handlers: dict[str, Callable[[DapMessage], Awaitable[DapMessage]]] = {
            "initialize": self._initialize,
            "attach": self._attach_again,
            "dumpCell": self._dump_cell,
            "setBreakpoints": self._set_breakpoints,
            "setExceptionBreakpoints": self._set_exceptions,
            "threads": self._list_threads,
            "debugInfo": self._info,
            "disconnect": self._disconnect,
        }
        return await handlers.get(command, self._kernels)(request)

    async def _initialize(self, request: DapMessage) -> DapMessage:
        self._jupyterlab = request.get("arguments", {}).get("clientID") == "jupyterlab"
        await self._last.wait_for_end()
        try:
            return await asyncio.wait_for(self._kernels(request), _KERNELS)
        # The kernel would wait for ever, and hear nothing else meanwhile, no button either.
        except asyncio.TimeoutError:
            self._debugger.stop()
            self._debugger.is_started = False
            return _refusal(request, _DEAF)

    async def _attach_again(self, request: DapMessage) -> DapMessage:
        """Have breakpoints again on the ranks that were attached before the debugger was off."""
        answer = await self._kernels(request)
        for rank in self._reachable():
            await self._quietly(rank.set_all(self._breakpoints, self._exceptions))
        return answer

    async def _dump_cell(self, request: DapMessage) -> DapMessage:
        answer = await self._kernels(request)
        if answer.get("success") and _ON_RANKS.match(request["arguments"]["code"]):
            self._only_on_ranks.add(answer["body"]["sourcePath"])
        return answer

    async def _set_breakpoints(self, request: DapMessage) -> DapMessage:
        arguments = request["arguments"]
        path = arguments["source"].get("path", "")
        if arguments.get("breakpoints"):
            self._breakpoints[path] = arguments
        else:
            self._breakpoints.pop(path, None)
        for rank in self._reachable():
            if not rank.muted:
                await self._quietly(rank.set_all(self._breakpoints, self._exceptions))
        if path not in self._only_on_ranks or not self._debugger.is_started:
            return await self._kernels(request)
        self._debugger.breakpoint_list[path] = arguments["breakpoints"]  # what debugInfo tells
        places = [
            {"verified": True, "line": each["line"], "source": {"path": path}} for each in arguments["breakpoints"]
        ]
        return _answer(request, {"breakpoints": places})

    async def _set_exceptions(self, request: DapMessage) -> DapMessage:
        self._exceptions = request["arguments"] if request["arguments"].get("filters") else {}
        for rank in self._reachable():
            if not rank.muted:
                await self._quietly(rank.set_all(self._breakpoints, self._exceptions))
        return await self._kernels(request)

    async def _list_threads(self, request: DapMessage) -> DapMessage:
        answer = await self._kernels(request)
        for rank in self._reachable():
            for thread in rank.stopped or [1]:
                name = f"rank {rank.rank}"
                answer["body"]["threads"].append({"id": self._threads.give(rank.process, thread), "name": name})
        return answer

    async def _info(self, request: DapMessage) -> DapMessage:
        answer = await self._kernels(request)
        stopped = [self._threads.give(rank.process, rank.stopped[0]) for rank in self._stopped()]
        answer["body"]["stoppedThreads"] = [*stopped, *answer["body"]["stoppedThreads"]]
        return answer

    async def _disconnect(self, request: DapMessage) -> DapMessage:
        self._breakpoints, self._exceptions = {}, {}
        # They stay attached: debugpy does not survive a client that comes soon after another has gone.
        await self._let_go(self._reachable())
        if self._debugger.is_started:
            self._last.ends(str(self._debugger.debugpy_client.debugpy_port))
        return await self._kernels(request)

    # --- to one rank

    async def _ask_rank(self, request: DapMessage) -> DapMessage | None:
        """Return the answer of the rank that is meant; None: the kernel itself is."""
        command, arguments = request["command"], dict(request.get("arguments", {}))
        if self._all.is_meant(arguments):
            return _answered(request, self._all.answer(command))
        if self._all.chosen and command in _GO_ON and not self._debugger.stopped_threads and (all_ := self._stopped()):
            await asyncio.gather(*(self._quietly(self._go_on(rank, command)) for rank in all_))
            return _answer(request, {"allThreadsContinued": False})
        if command in _BY_THREAD:
            name, numbers = "threadId", self._threads
        else:
            name = next((name for name in _REFERENCE_NAMES if self._references.find(arguments.get(name))), "")
            numbers = self._references
        found = numbers.find(arguments.get(name))
        if command in _BY_THREAD and self._jupyterlab and (meant := self._current(found, command)) is not None:
            found = meant.process, meant.stopped[0]
        if found is None:
            return None
        process, arguments[name] = found
        rank = self._attached.get(process)
        if rank is None:
            return _refusal(request, "this rank is no longer being debugged")
        try:
            return _answered(request, self._renumbered(rank, await self._serve(rank, command, arguments)))
        except (OSError, asyncio.TimeoutError) as error:
            return _refusal(request, str(error) or "this rank does not answer")

    def _current(self, asked: tuple[DebuggedProcess, int] | None, command: str) -> AttachedRank | None:
        """Return the stopped rank that JupyterLab means by a thread; None: the one that it names.

        It has one current thread, whose stack here has the frames of all, so going on is meant for the rank whose
        frame was looked at last. Before version 4.6 it calls every thread 1.
        """
        stopped = self._stopped()
        looked_at = next((rank for rank in stopped if rank.process == self._chosen), None)
        if asked is not None:
            return looked_at if command != "stackTrace" else None
        if self._debugger.stopped_threads or not stopped:  # the kernel's own thread is meant
            return None
        return looked_at or stopped[0]

    async def _serve(self, rank: AttachedRank, command: str, arguments: DapMessage) -> DapMessage:
        if command == "stackTrace":
            return await self._stack(rank, arguments)
        if command == "scopes":  # a frame is selected; what else is asked of one may come after the next selection
            self._chosen, self._all.chosen = rank.process, False
        if command == "richInspectVariables":
            return await self._rich(rank, arguments)
        if command == "copyToGlobals":
            target = f"globals()[{arguments['dstVariableName']!r}]"
            value = {"expression": target, "value": arguments["srcVariableName"], "frameId": arguments["srcFrameId"]}
            return await rank.ask("setExpression", value)
        if command in _GO_ON:
            rank.steps = command != "continue"
        answer = await rank.ask(command, arguments)
        if command == "continue" and answer.get("success"):
            answer["body"] = {"allThreadsContinued": False}
        if command == "variables" and answer.get("success"):
            variables = answer["body"]["variables"]
            answer["body"]["variables"] = [each for each in variables if not _HIDDEN.match(each["name"])]
        return answer

    async def _go_on(self, rank: AttachedRank, command: str) -> None:
        rank.steps = command != "continue"
        await rank.ask(command, {"threadId": rank.stopped[0]})

    async def _stack(self, rank: AttachedRank, arguments: DapMessage) -> DapMessage:
        """Return the frames of a rank; for JupyterLab, followed by those of the others that are stopped."""
        answer = await rank.frames(arguments)
        if not self._jupyterlab or not answer.get("success"):
            return answer
        others = [other for other in self._stopped() if other is not rank]
        frames = _named(rank, answer)
        places = [(rank.rank, frame) for frame in answer["body"]["stackFrames"][:1]]
        for other in others:
            if not other.stopped:  # it has gone on meanwhile
                continue
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                stack = self._renumbered(other, await other.frames({"threadId": other.stopped[0]}))
                frames += _named(other, stack)
                places += [(other.rank, frame) for frame in stack["body"]["stackFrames"][:1]]
        frames = self._all.added(frames, places)
        answer["body"] = {"stackFrames": frames, "totalFrames": len(frames)}
        return answer

    async def _rich(self, rank: AttachedRank, arguments: DapMessage) -> DapMessage:
        """Return a variable as a cell would show it."""
        name = arguments["variableName"]
        if not name.isidentifier():
            return {
                "success": name in ("special variables", "function variables"),
                "body": {"data": {}, "metadata": {}},
            }
        code = f"__import__('json').dumps(get_ipython().display_formatter.format({name}), default=str)"
        arguments = {"expression": code, "frameId": arguments["frameId"], "context": "clipboard"}
        answer = await rank.ask("evaluate", arguments)
        if answer.get("success"):
            data, metadata = msgspec.json.decode(_literal(answer["body"]["result"]))
            answer["body"] = {"data": data, "metadata": metadata}
        return answer

    def _renumbered(self, rank: AttachedRank, answer: DapMessage) -> DapMessage:
        """Return an answer in the notebook's numbers."""
        body = answer.get("body", {})
        for part in (body, *body.get("scopes", ()), *body.get("variables", ())):
            if "variablesReference" in part:
                part["variablesReference"] = self._references.give(rank.process, part["variablesReference"])
        for frame in body.get("stackFrames", ()):
            others = self._references.find(frame["id"]) is not None or self._all.is_meant({"frameId": frame["id"]})
            if not others:  # else it has its number
                frame["id"] = self._references.give(rank.process, frame["id"])
        return answer

    async def _attach(self, rank: int, process: DebuggedProcess, dial: Dial) -> None:
        attached = AttachedRank(rank, process, self._on_event, self._on_end)
        await attached.attach(dial, self._breakpoints, self._exceptions)
        rank_set = self._sets.get(process)
        if rank_set is None or rank_set.left:  # meanwhile: its next client's debugger could not attach
            attached.leave()
        elif not attached.ended:
            self._attached[process] = attached
            self._tell("thread", {"threadId": self._threads.give(process, 1), "reason": "started"})
            for thread in attached.stopped:  # meanwhile
                self._tell_stop(attached, thread, {"reason": "breakpoint"})

    def _reachable(self) -> list[AttachedRank]:
        return sorted(self._attached.values(), key=lambda rank: rank.rank)

    def _stopped(self) -> list[AttachedRank]:
        return [rank for rank in self._reachable() if rank.stopped]

    async def _quietly(self, work: Awaitable[None]) -> None:
        """Do something for a rank, which may be ending."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await work

    # --- from ranks

    def _on_event(self, rank: AttachedRank, event: DapMessage) -> None:
        kind, body = event["event"], event.get("body", {})
        if kind not in ("stopped", "continued") or self._attached.get(rank.process) is not rank:
            return
        if kind == "stopped":
            self._tell_stop(rank, body["threadId"], body)
            return
        thread = self._threads.give(rank.process, body["threadId"])
        self._references.forget(rank.process)
        self._note(rank, stopped=False)
        self._tell("continued", {"threadId": thread, "allThreadsContinued": False})
        self._loop.call_later(_STEP if rank.steps else 0.0, self._show_another, rank)

    def _tell_stop(self, rank: AttachedRank, thread: int, body: DapMessage) -> None:
        self._note(rank, stopped=True)
        number = self._threads.give(rank.process, thread)
        self._tell("stopped", {**body, "threadId": number, "allThreadsStopped": False})

    def _on_end(self, rank: AttachedRank) -> None:
        """Handle that a rank can't be debugged any more: it has died."""
        if self._attached.get(rank.process) is not rank:  # it never was attached
            return
        del self._attached[rank.process]
        self._references.forget(rank.process)
        self._note(rank, stopped=False)
        self._tell("continued", {"threadId": self._threads.give(rank.process, 1), "allThreadsContinued": False})
        self._tell("thread", {"threadId": self._threads.give(rank.process, 1), "reason": "exited"})
        self._show_another(rank)

    def _show_another(self, gone: AttachedRank) -> None:
        """Have JupyterLab, which shows one stopped thread, show the next, unless this one has stopped again."""
        if self._jupyterlab and not gone.stopped and (stopped := self._stopped()):
            thread = self._threads.give(stopped[0].process, stopped[0].stopped[0])
            self._tell("stopped", {"reason": "breakpoint", "threadId": thread, "allThreadsStopped": False})

    def _tell(self, kind: str, body: DapMessage) -> None:
        self._publish({"type": "event", "seq": next(self._sequence), "event": kind, "body": body})

    def _note(self, rank: AttachedRank, *, stopped: bool) -> None:
        """Have nobody's waiting for a stopped rank end by a time limit."""
        rank_set = self._sets.get(rank.process)
        task = rank_set.traffic.running([rank.rank]).get(rank.rank) if rank_set is not None else None
        if rank_set is None or task is None:
            return
        task.halt(rank.rank, stopped=stopped)
        if stopped:
            rank_set.traffic.send(ask(0, task.ranks, Rest(task.serial)))

    # --- from observed cells, in their threads

    def cell_comes(self, key: str, ranks: Sequence[int]) -> None:
        """Attach to the ranks, if there are breakpoints."""
        rank_set = RankSet.instances.get(key)
        if rank_set is None or not self._debugger.is_started or not (self._breakpoints or self._exceptions):
            return
        chosen = {_process(rank_set, info): info.rank for info in rank_set.ranks if info.rank in ranks}
        if rank_set.traffic.running(list(chosen.values())):
            return
        new = {process: rank for process, rank in chosen.items() if process not in self._attached}
        try:
            dials = self._dials(rank_set, new) if new else {}
            self._sets.update(dict.fromkeys(chosen, rank_set))
            self._in_loop(self._prepare(chosen, dials), _ATTACH)
        except (NbdistError, OSError, TimeoutError, asyncio.TimeoutError) as error:
            why = str(error) or "their debuggers do not answer"
            print(f"nbdist: breakpoints do not stop ranks in this cell: {why}", file=sys.stderr)

    def _dials(self, rank_set: RankSet, ranks: dict[DebuggedProcess, int]) -> dict[DebuggedProcess, Dial]:
        """Have ranks listen for a debugger, and return what connects to each."""
        with interruption.deferred():
            task = rank_set.submit("debugpy", "", list(ranks.values()))
            task.wait()
        ports = {rank: msgspec.msgpack.decode(task.replies[rank].payload, type=int) for rank in task.ranks}
        streams = rank_set.traffic.streams
        return {
            process: functools.partial(dial_elsewhere, streams, rank, ports[rank])
            if process.node
            else functools.partial(dial_here, ports[rank])
            for process, rank in ranks.items()
            if rank in ports
        }

    async def _prepare(self, ranks: dict[DebuggedProcess, int], dials: dict[DebuggedProcess, Dial]) -> None:
        """Attach to those that are not yet, and renew the breakpoints of those that had to do without."""
        self._all.chosen = False
        known = [self._attached[process] for process in ranks if process in self._attached]
        for rank in known:
            rank.rank = ranks[rank.process]
        new = [self._attach(ranks[process], process, dial) for process, dial in dials.items()]
        renewed = [rank.set_all(self._breakpoints, self._exceptions) for rank in known if rank.muted]
        await asyncio.gather(*new, *renewed)

    def cell_interrupted(self, task: TaskRecord, ranks: Collection[int]) -> None:
        """Let stopped ranks run on, so that the interrupt reaches the user's code and not the debugger."""
        going = [rank for rank in self._reachable() if rank.rank in ranks and self._runs(rank, task)]
        if going:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                self._in_loop(self._let_go(going), _LET_GO)

    def ranks_left(self, key: str) -> None:
        """Leave the ranks to the debugger of whoever drives them next; those that are stopped run on."""
        rank_set = RankSet.instances.get(key)
        if rank_set is None:  # it never took any work
            return
        with contextlib.suppress(RuntimeError):  # the kernel ends
            self._loop.call_soon_threadsafe(self._leave, rank_set)

    def _leave(self, rank_set: RankSet) -> None:
        for rank in self._reachable():
            if self._sets.get(rank.process) is rank_set:
                rank.leave()

    def _runs(self, rank: AttachedRank, task: TaskRecord) -> bool:
        rank_set = self._sets.get(rank.process)
        return rank_set is not None and rank_set.traffic.running([rank.rank]).get(rank.rank) is task

    async def _let_go(self, ranks: list[AttachedRank]) -> None:
        await asyncio.gather(*(self._quietly(rank.let_go()) for rank in ranks))

    def _in_loop(self, work: Coroutine[Any, Any, None], limit: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(limit)


def cell_file() -> str:
    """Return what the debugger of the kernel knows the running cell by; "" while it is off."""
    debugger = getattr(getattr(shells.current(), "kernel", None), "debugger", None)
    frame = sys._getframe(1) if debugger is not None and debugger.is_started else None
    known = shells.cell_files()
    while frame is not None and frame.f_code.co_filename not in known:
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


def _process(rank_set: RankSet, info: RankInfo) -> DebuggedProcess:
    return DebuggedProcess(info.pid, rank_set.traffic.key, info.node) if info.node else DebuggedProcess(info.pid)


def _answer(request: DapMessage, body: DapMessage) -> DapMessage:
    return _answered(request, {"success": True, "body": body})


def _answered(request: DapMessage, answer: DapMessage) -> DapMessage:
    """Return the answer to a request that was passed on under another number."""
    envelope = {"type": "response", "seq": request["seq"], "request_seq": request["seq"], "command": request["command"]}
    return {"success": False, "body": {}, **answer, **envelope}


def _refusal(request: DapMessage, why: str) -> DapMessage:
    return _answered(request, {"success": False, "message": why})


def _named(rank: AttachedRank, answer: DapMessage) -> list[DapMessage]:
    """Return the frames of a stack, with the rank in their names."""
    frames: list[DapMessage] = answer.get("body", {}).get("stackFrames", [])
    return [{**frame, "name": f"rank {rank.rank}: {frame['name']}"} for frame in frames]


def _literal(text: str) -> str:
    """Return a text from its repr."""
    return str(ast.literal_eval(text))
