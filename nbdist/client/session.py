"""A session, from the notebook's side: its ranks' life, and what can be asked of them.

The Python API behind the magics. Knows nothing of processes or sockets; `traffic` knows which rank runs what.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import itertools
import queue
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from linecache import getlines
from types import TracebackType
from typing import Any, ClassVar

import msgspec

from nbdist import transfer
from nbdist.client.connection import Connection
from nbdist.client.options import Arguments
from nbdist.client.report import describe_death
from nbdist.client.results import CellResult, Decoders
from nbdist.client.stacks import Stack, stack_of, with_native_frames
from nbdist.client.task import BackgroundCell, Task
from nbdist.client.traffic import Traffic
from nbdist.devices import visible_gpus
from nbdist.errors import (
    NbdistError,
    RankError,
    SessionBroken,
    SessionBusy,
    SessionClosed,
    SessionError,
    TransferError,
    UsageError,
)
from nbdist.protocol import (
    Ask,
    Broken,
    Execute,
    Message,
    Notice,
    Progress,
    RankInfo,
    Start,
    Started,
    StartFailed,
    StartOptions,
    Stop,
    Stopped,
)
from nbdist.ranks import describe_ranks, format_ranks

_STOP_LIMIT = 10.0
_SURVIVORS_LIMIT = 2.0
_STACK_LIMIT = 1.0

_idle: Connection | None = None
_current: weakref.ref[Session] | None = None


def prewarm() -> None:
    """Start a controller with its agent and template, if none is there, so that the next session starts at once."""
    global _idle
    if _idle is None or not _idle.alive:
        with contextlib.suppress(SessionBroken):  # `start` will tell
            _idle = Connection(patient=True)


def get_session() -> Session:
    """The session of this notebook.

    Raises:
        SessionClosed: There is none.
        SessionBroken: A process that it can't do without has ended. `restart()` of the Session works.
    """
    session = current_session()
    if session is not None and session.broken:
        raise SessionBroken(session.broken)
    if session is None or session.closed:
        count = len(visible_gpus()) or 2
        raise SessionClosed(
            f"no session is running: type `%distributed start -n {count}` first (or `nbdist.Session({count})`)"
        )
    return session


def current_session() -> Session | None:
    """The newest session of this notebook, whatever state it is in."""
    return _current() if _current is not None else None


def session_to_restart() -> Session:
    """Like `get_session`, but one that broke will do."""
    session = current_session()
    return session if session is not None and session.broken else get_session()


@atexit.register
def _close_all() -> None:
    for session in list(Session.instances):
        session._forget()
    if _idle is not None:
        _idle.close()


class Session:
    r"""Ranks that wait for work. As a context manager it stops them at the end.

    >>> with nbdist.Session(2) as session:
    ...     session.run("print(rank)")[1].stdout
    '1\n'

    Args:
        num_processes: Number of ranks; None: one for each GPU of this machine.
        gpus: Which GPUs, as CUDA_VISIBLE_DEVICES would name them; None: all, as far as ranks need them.
        backend: Backend of the process group ("gloo", "nccl", ...); None: the right one for the devices.
        init: Whether to make the process group at all.
        timeout: Seconds after which a collective gives up; None: torch's default of 30 minutes.
        linger: Seconds that the ranks outlive a kernel that was killed.
        exact: Whether an interrupted step's buffers (BatchNorm) and random numbers are put back, so that a run that
            was interrupted equals one that was not. Costs a copy of them after each step.
        progress: Called with a line of text while the ranks start.

    Raises:
        UsageError: An argument is wrong; nothing has been started.
        SessionBroken: The ranks could not be brought up; nothing of them is left.

    Attributes:
        ranks: What each rank is.
        backend: Backend of the process group; "none" without one.
        closed: Whether it has no ranks.
        broken: Why it is closed, if nobody closed it.
        started_in: Seconds that the last start took.
        traffic: Which rank runs what; for the parts of the client.
    """

    instances: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        gpus: Sequence[int | str] | None = None,
        backend: str | None = None,
        init: bool = True,
        timeout: float | None = None,
        linger: float = 0.0,
        exact: bool = False,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        global _current
        self.ranks: list[RankInfo] = []
        self.backend = ""
        self.closed = True
        self.broken = ""
        self.started_in = 0.0
        self.traffic = Traffic(self._on_life)
        self._arguments = Arguments(gpus, backend, init, timeout, exact)
        self._linger = linger
        self._serials = itertools.count(1)
        self._life: queue.SimpleQueue[Message] = queue.SimpleQueue()
        options = self._arguments.options(num_processes)
        self._connect()
        self._bring_up(options, progress)
        Session.instances.add(self)
        _current = weakref.ref(self)

    # --- life

    def restart(self, num_processes: int | None = None, *, progress: Callable[[str], None] = lambda text: None) -> None:
        """End the ranks and bring up a fresh set, with an environment as it is now. Variables on ranks are lost.

        Args:
            num_processes: Number of ranks; None: as many as before.
        """
        options = self._arguments.options(num_processes or len(self.ranks))
        if self.broken:
            self._connection.close()
            self._connect()
        else:
            self._check_open()
        self._bring_up(options, progress)

    def close(self) -> None:
        """Stop the ranks. Their memory is free when this returns; an idle template stays for the next start."""
        global _idle
        if self.closed:
            return
        self.closed = True
        self._connection.send(Stop())
        try:
            self._await_life(Stopped, _STOP_LIMIT)
        except SessionError:
            self._connection.close()
            return
        self.traffic.release("the session was stopped")
        self._connection.on_message = lambda message: None
        if _idle is None or not _idle.alive:
            _idle = self._connection
        else:
            self._connection.close()

    stop = close

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """How often the process groups have been renewed since the start, and one."""
        return self.traffic.generation

    def _forget(self) -> None:
        """The kernel ends: nobody waits for the ranks any more."""
        self.closed = True
        self._connection.close()

    def _connect(self) -> None:
        """Take the idle controller, if there is one, else start one."""
        global _idle
        taken, _idle = (_idle, None) if _idle is not None and _idle.alive else (None, _idle)
        self._connection = taken or Connection()
        self.traffic.attach(self._connection)

    def _bring_up(self, options: StartOptions, progress: Callable[[str], None]) -> None:
        began = time.monotonic()
        self.closed, self.broken = True, ""
        self._life = queue.SimpleQueue()
        self.traffic.release("the ranks were restarted")
        try:
            self._connection.open()
            self._connection.send(Start(options, self._linger))
            started = self._await_life(Started, None, progress)
        except BaseException as error:
            self._give_up_start(error)
            raise
        assert isinstance(started, Started)
        self.ranks, self.backend = started.ranks, started.backend
        self.traffic.begin()
        self.closed = False
        self.started_in = time.monotonic() - began
        for note in started.notes:
            progress(note)
        if options.gpus and all(info.device == "cpu" for info in self.ranks):
            progress("this PyTorch is built without CUDA, so the ranks use the CPU, not the GPUs")
        elif options.gpus and len(options.gpus) < options.count:
            plural = "s" if len(options.gpus) != 1 else ""
            progress(f"{options.count} ranks share {len(options.gpus)} GPU{plural}, so their group uses {self.backend}")

    def _give_up_start(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._connection.send(Stop())
            with contextlib.suppress(SessionError):
                self._await_life(Stopped, _STOP_LIMIT)
        self._connection.close()
        self.broken = str(error) or "the start was interrupted. `%distributed start` begins anew."

    def _await_life(
        self, kind: type[Message], limit: float | None, progress: Callable[[str], None] = lambda text: None
    ) -> Message:
        """Wait for a message about the session's life. The controller bounds how long a start may take."""
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            try:
                message = self._life.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SessionBroken("the session does not answer; type `%distributed start` to begin anew") from None
            if isinstance(message, kind):
                return message
            if isinstance(message, Progress):
                progress(message.text)
            elif isinstance(message, (StartFailed, Broken)):
                raise SessionBroken(message.text)

    def _on_life(self, message: Message) -> None:
        """From the listening thread: what happens to the session as a whole."""
        if isinstance(message, Broken) and not self.broken:
            if not self.closed and not self.traffic.running(info.rank for info in self.ranks):
                self.traffic.notify(Notice(message.text))
            self.closed, self.broken = True, message.text
            self.traffic.release(message.text)
        self._life.put(message)

    def _check_open(self) -> None:
        if self.broken:
            raise SessionBroken(self.broken)
        if self.closed:
            raise SessionClosed(
                "this session is closed: type `%distributed start -n 2` (or `nbdist.Session(2)`) for a new one"
            )

    # --- work

    def run(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        *,
        grace: float = 1.0,
        show: bool = False,
    ) -> CellResult:
        """Run code in the shells of ranks.

        Args:
            code: What a `%%distributed` cell may hold.
            ranks: Where; None: on all.
            timeout: Seconds after which the ranks are interrupted.
            grace: Seconds that ranks may wait in a collective for one that has raised; then they are freed.
            show: Whether to show the output as well.

        Returns:
            The output and the last value of each rank: `result[0].stdout`.

        Raises:
            RankError: A rank raised; the first cause first. RankDied, RankTimeout likewise.
            SessionBusy: One of these ranks is running something else.
        """
        task = self.submit("cell", code, ranks, grace=grace, show=show, keep=True)
        task.wait(timeout)
        return task.result

    def start_cell(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        *,
        number: int = 0,
        offset: int = 0,
        grace: float = 1.0,
        show: bool = True,
        keep: bool = False,
    ) -> Task:
        """Send a cell to ranks; the caller waits for the task, or makes a BackgroundCell of it."""
        return self.submit("cell", code, ranks, number=number, offset=offset, grace=grace, show=show, keep=keep)

    def run_in_background(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        *,
        number: int = 0,
        offset: int = 0,
        grace: float = 1.0,
        show: bool = True,
    ) -> BackgroundCell:
        """Like `run`, but returns at once with a handle: `.done`, `.wait()`, `.output`, `.interrupt()`."""
        task = self.submit("cell", code, ranks, number=number, offset=offset, grace=grace, show=show, keep=True)

        def work() -> None:
            try:
                task.wait(timeout)
            except (NbdistError, KeyboardInterrupt) as error:
                task.error = error
                render = getattr(error, "_render_traceback_", None)
                task.say("\n".join(render() if render is not None else [str(error)]))

        return BackgroundCell(task, work)

    def call(
        self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a function on ranks. It travels by value, as do its arguments and what it returns.

        Returns:
            The return values, in the order of the ranks.

        Raises:
            TransferError: Something can't travel; the text names it.
            RankError: A rank raised.
        """
        name = getattr(function, "__name__", "function")
        call = (function, args, kwargs, _source(function))
        with transfer.pack(call, name=f"call of {name}") as packed:
            payload = msgspec.msgpack.encode(packed.parcel)
            task = self.submit("call", name, ranks, payload=payload, show=True)
            task.wait()
        return self._collect(task)

    def push(self, values: Mapping[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Set variables on ranks. Tensors arrive on the CPU; each rank's copy is its own.

        Raises:
            UsageError: A name is no variable name.
            TransferError: A value can't travel; the text names the part that can't.
        """
        for name in values:
            if not name.isidentifier():
                raise UsageError(f"{name!r} is no variable name: `session.push({{'x': x}})`")
        with contextlib.ExitStack() as stack:
            packed = stack.enter_context(_pack_named(values))
            payload = msgspec.msgpack.encode(packed.parcel)
            self.submit("push", ", ".join(values), ranks, payload=payload, show=True).wait()

    def pull(self, name: str, ranks: Iterable[int] | int | None = None) -> Any:
        """Get a variable (or any expression) from ranks.

        Args:
            name: The variable.
            ranks: Which ranks; None: all; a single number gives that rank's bare value.

        Returns:
            The values, in the order of the ranks.

        Raises:
            UsageError: Some ranks have no such variable; the text names them.
        """
        chosen = [ranks] if isinstance(ranks, int) else ranks
        task = self.submit("pull", name, chosen, show=True)
        try:
            task.wait()
        except RankError as error:
            raise _explain_missing(name, task, error, self.traffic.names) from None
        values = self._collect(task)
        return values[0] if isinstance(ranks, int) else values

    def free(self) -> dict[int, dict[str, int]]:
        """Free what only tracebacks, `Out` and caches keep alive, on all ranks.

        Returns:
            By rank, the bytes freed: "private" (this process), "device" (GPU).
        """
        task = self.submit("free", "", self.living(), show=True)
        task.wait()
        return {rank: msgspec.msgpack.decode(task.replies[rank].payload) for rank in task.ranks}

    def interrupt(self, ranks: Iterable[int] | None = None, *, now: bool = False) -> bool:
        """Stop what ranks run: after the step they are in, if they train. Asked once more: at once.

        Args:
            ranks: Which; None: all.
            now: Without waiting for the end of a step, or for a rank to leave a collective by itself.

        Returns:
            Whether any of them ran something.
        """
        chosen = self._choose(ranks, living=False)
        tasks = set(self.traffic.running(chosen).values())
        for task in tasks:
            task.interrupt(chosen, now=now)
        return bool(tasks)

    def status(self) -> list[dict[str, Any]]:
        """What every rank is, has and does: rank, pid, device, state, generation, memory (bytes), doing."""
        self._check_open()
        known = self.traffic.ask_controller("status")["ranks"]
        living = self.living()
        memory = self.traffic.ask(living, "memory", timeout=1.0)
        stacks = self.traffic.ask(living, "stack", timeout=1.0)
        running = self.traffic.running(living)
        return [_status_row(row, self.generation, memory, stacks, running) for row in known]

    def stacks(self, ranks: Iterable[int] | None = None, *, native: bool = False) -> dict[int, str]:
        """Where the main threads of ranks are, at any time: the whole stack from the user's cell inwards.

        Args:
            ranks: Which; None: all that live.
            native: Whether to show the frames of C code too, by py-spy.

        Returns:
            The stacks by rank, a line for each call; "idle" for a rank that runs nothing.

        Raises:
            UsageError: `native`, and py-spy is not installed or the system does not let it look.
        """
        return {rank: str(found) for rank, found in self.look_at_stacks(ranks, native=native).items()}

    def look_at_stacks(self, ranks: Iterable[int] | None = None, *, native: bool = False) -> dict[int, Stack]:
        """Like `stacks`, but with what `stacks.render` needs to group them."""
        chosen = self._choose(self.living() if ranks is None else ranks)
        answers = self.traffic.ask(chosen, "stack", timeout=_STACK_LIMIT)
        cells = {rank: task.describe() for rank, task in self.traffic.running(chosen).items()}
        found = {rank: stack_of(answers.get(rank), cells.get(rank, "")) for rank in chosen}
        if native:
            pids = {info.rank: info.pid for info in self.ranks if info.rank in chosen}
            found = with_native_frames(found, pids)
        return found

    def logs(self, ranks: Iterable[int] | None = None, cell: int | None = None) -> dict[int, str]:
        """All that a cell printed (stdout and stderr), by rank.

        Args:
            cell: Its number in the notebook; None: the newest that printed.

        Raises:
            UsageError: That cell printed nothing, or the log has it no longer.
        """
        chosen = self._choose(ranks, living=False)
        decoders = Decoders()
        texts: dict[int, list[str]] = {rank: [] for rank in chosen}
        position = None
        while True:
            part = self.traffic.ask_controller("log", {"number": cell, "position": position})
            if "error" in part:
                what = (
                    "no cell has printed anything yet"
                    if cell is None
                    else f"cell {cell} printed nothing on ranks, or the log has it no longer"
                )
                raise UsageError(f"{what}; `%distributed logs` shows the newest")
            for rank, stream, data in part["records"]:
                if rank in texts:
                    texts[rank].append(decoders.decode(rank, stream, data))
            cell, position = part["number"] or cell, part["next"]
            if position is None:
                return {rank: "".join(parts) for rank, parts in texts.items()}

    # --- for the parts of the client

    def living(self) -> list[int]:
        """Ranks that have not died."""
        return [info.rank for info in self.ranks if info.rank not in self.traffic.dead]

    def submit(
        self,
        kind: str,
        code: str,
        ranks: Iterable[int] | None,
        *,
        number: int = 0,
        offset: int = 0,
        payload: bytes = b"",
        grace: float = 1.0,
        show: bool = False,
        keep: bool = False,
    ) -> Task:
        """Send an Execute, once nothing speaks against it."""
        chosen = self._choose(ranks)
        number = number or cell_number()
        task = Task(self.traffic, next(self._serials), number, chosen, code, show=show, keep=keep, grace=grace)
        if others := self._assign(task):
            raise self._busy(others)
        self.traffic.send(Execute(task.serial, chosen, kind, code, number, offset, payload, grace))
        return task

    def _assign(self, task: Task) -> dict[int, Task]:
        """Let a task have its ranks. Survivors of a death get a moment to end what they were running."""
        others = self.traffic.assign(task)
        if not others or not all(other.bereaved for other in others.values()):
            return others
        self.traffic.wait_free(task.ranks, _SURVIVORS_LIMIT)
        return self.traffic.assign(task)

    def _choose(self, ranks: Iterable[int] | None, living: bool = True) -> list[int]:
        """The ranks meant, checked.

        Raises:
            UsageError: One of them does not exist, or is dead.
        """
        self._check_open()
        everyone = [info.rank for info in self.ranks]
        chosen = everyone if ranks is None else sorted(set(ranks))
        unknown = [rank for rank in chosen if rank not in everyone]
        if unknown or not chosen:
            who = describe_ranks(unknown) if unknown else "an empty set"
            raise UsageError(f"{who} isn't in this session: it has ranks {format_ranks(everyone)}")
        dead = [rank for rank in chosen if rank in self.traffic.dead]
        if dead and living:
            alive = format_ranks(self.living())
            others = f"`-r {alive}` uses the living, " if alive else ""
            how = "; ".join(sorted({describe_death(self.traffic.dead[rank]) for rank in dead}))
            raise UsageError(
                f"{describe_ranks(dead)} died ({how}): {others}`%distributed restart` brings up a fresh set"
            )
        return chosen

    def _busy(self, others: Mapping[int, Task]) -> SessionBusy:
        """The error that says what these ranks run, and where they are."""
        ranks = sorted(others)
        lines = self.traffic.ask(ranks, "stack", timeout=0.3)
        where = [
            f"\n  rank {rank}: {lines.get(rank, {}).get('line') or 'in a call that does not let Python answer'}"
            for rank in ranks
        ]
        return SessionBusy(
            f"{describe_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} still running "
            f"{others[ranks[0]].describe()}{''.join(where[:8])}\n"
            "Wait for it, `%distributed interrupt`, or as the last resort `%distributed restart`."
        )

    def _collect(self, task: Task) -> list[Any]:
        """The values that ranks have sent, in the order of the ranks."""
        try:
            return [
                transfer.unpack(msgspec.msgpack.decode(task.replies[rank].payload, type=transfer.Parcel))
                for rank in task.ranks
            ]
        finally:
            self.traffic.send(Ask(0, task.ranks, "release", {"serial": task.serial}))


def _pack_named(values: Mapping[str, Any]) -> transfer.Packed:
    """All values in one parcel, so that tensors which share memory still do; an error names the variable."""
    try:
        return transfer.pack(dict(values), name=next(iter(values)) if len(values) == 1 else "values")
    except TransferError:
        for name, value in values.items():
            transfer.check(value, name=name)
        raise


def _source(function: Callable[..., Any]) -> tuple[str, int, str] | None:
    """File name, number and text of the notebook's cell that defines a function, for tracebacks on ranks."""
    code = getattr(function, "__code__", None)
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(getattr(code, "co_filename", ""))
    return None if code is None or number is None else (code.co_filename, number, "".join(getlines(code.co_filename)))


def cell_number() -> int:
    """The number of the notebook's cell that is running, 0 outside of notebooks."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # `execution_count` is ahead of the running cell in some versions of IPython, and not in others.
    return int(shell.displayhook.prompt_count) if shell is not None else 0


def _explain_missing(name: str, task: Task, error: RankError, names: Mapping[int, Sequence[str]]) -> NbdistError:
    missing = [rank for rank, failure in task.failures.items() if failure.name == "NameError"]
    if len(missing) != len(task.failures):
        return error
    have = [rank for rank in task.ranks if rank not in missing]
    text = f"{describe_ranks(sorted(missing))} {'has' if len(missing) == 1 else 'have'} no {name!r}"
    if have:
        verb = "has" if len(have) == 1 else "have"
        text += f" ({describe_ranks(have)} {verb}: `%distributed pull {name} -r {format_ranks(have)}`)"
    close = difflib.get_close_matches(name, {known for rank in missing for known in names.get(rank, [])}, 3)
    if close:
        text += f"; names like it: {', '.join(sorted(close))}"
    return UsageError(text)


def _status_row(
    row: dict[str, Any],
    generation: int,
    memory: Mapping[int, dict[str, Any]],
    stacks: Mapping[int, dict[str, Any]],
    busy: Mapping[int, Task],
) -> dict[str, Any]:
    rank = row["rank"]
    state = "dead" if row["dead"] else "busy" if row["serial"] else "idle"
    doing = row["dead"]
    if state == "busy":
        task = busy.get(rank)
        doing = stacks.get(rank, {}).get("line") or (task.describe() if task is not None else "")
    return {
        "rank": rank,
        "pid": row["pid"],
        "device": row["device"],
        "state": state,
        "generation": generation,
        "memory": memory.get(rank, {}).get("private"),
        "device_memory": memory.get(rank, {}).get("reserved"),
        "doing": doing,
    }
