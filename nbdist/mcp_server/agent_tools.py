"""The tools that agents see. What they say of themselves is all that an agent knows of nbdist."""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from nbdist import visits
from nbdist._version import __version__
from nbdist.client.session.session import Session
from nbdist.errors import NbdistError
from nbdist.mcp_server import answer_texts
from nbdist.mcp_server.answer_texts import KnownSession, SessionList, StartNews
from nbdist.mcp_server.session_links import SessionLinks
from nbdist.wire.messages.errands import (
    AnyErrand,
    CellNews,
    ErrandDone,
    HealRanks,
    InterruptCells,
    LookAtCell,
    LookAtRanks,
    ReadFlight,
    ReadLogs,
    ReadMemory,
    ReadStacks,
    ReadVariables,
    ReadWhy,
    RunCell,
    SaveRanks,
    SessionNews,
    StopNews,
    StopRanks,
    TextPage,
)

INSTRUCTIONS = """\
nbdist runs cells of Python on the ranks of a distributed PyTorch job. The ranks keep their variables, models and \
process groups from one cell to the next, and the user's notebook and you may use the same ranks.
Call `sessions` to see what there is. `run` returns at once with a cell's number; call `cell` with that number, and \
with `next` of the answer before as `since`, until its state is no longer queued or running. All ranks run the same \
cell: make a collective on all of them or on none. If a cell does not go on, `cell` says in `waits` which rank waits \
for which, and `stacks` where each rank is; `interrupt` stops it, and variables are kept."""

_LONGEST_WAIT = 30.0
_LOOK = 1.0  # seconds: so long the end of the connection may have to wait for a tool
_NAME = 40  # characters of an agent's name
_CONTROL = re.compile(r"[^\x20-\x7e\u00a0-\uffff]")
_LOOKS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ADDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
_DESTROYS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)

A = TypeVar("A")

SessionName = Annotated[
    str | None, Field(description="Name of the session, or its start. Default: this server's own, else the only one.")
]
RankNames = Annotated[str | None, Field(description='Ranks, as "0,2-3". Default: all.')]
CellNumber = Annotated[int, Field(description="The cell's number, as `run` or `status` gives it.")]
Since = Annotated[
    int,
    Field(description="Characters of the output that you have: `next` of the answer before. -1: only the last page."),
]
Waiting = Annotated[float, Field(ge=0, description="Seconds to wait for the cell's end before answering, at most 30.")]


class AgentTools:
    """The tools of one server.

    Args:
        links: The sessions.
    """

    def __init__(self, links: SessionLinks) -> None:
        self._links = links

    # --- that look

    async def sessions(self) -> Annotated[CallToolResult, SessionList]:
        """List the user's sessions on this machine: their ranks, what they run, and who drives them.

        A session that a notebook drives can be used as it is: your cells run on its ranks, in turn with the user's.
        One that nobody drives has to be taken over first, with `attach`.
        """
        found = await _in_thread(lambda: SessionList([_row(each) for each in visits.sessions()]))
        return _answer(found, answer_texts.of_sessions(found))

    async def cell(
        self,
        cell: CellNumber,
        context: Context,
        since: Since = 0,
        rank: Annotated[
            int | None, Field(description="Only this rank's output. Default: all, equal lines once.")
        ] = None,
        wait: Waiting = 0.0,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, CellNews]:
        """Look at a cell: its state, new output, the failure, who waits for whom. Also at cells of the user.

        state: queued (its ranks run something else), running, done, failed, interrupted, lost (the ranks ended).
        output: at most 8,000 characters from `since` on. "[0-3] " stands before a line that ranks 0 to 3
        have printed. If `left` is not 0, call again with `next` as `since`.
        failure: of the rank that failed first, with its traceback; what others raised because of it follows.
        waits: which ranks have not moved for seconds, in which collective, and for which ranks they wait.
        values: the value of the last expression, by ranks. displays: what your cell has displayed, as text.
        """
        news = await self._look_at_cell(context, session, cell, since, rank, wait)
        return _answer(news, answer_texts.of_cell(news))

    async def status(
        self,
        context: Context,
        memory: Annotated[bool, Field(description="Also measure what each rank holds; takes some ms more.")] = False,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, SessionNews]:
        """Show each rank (idle, busy or dead, what it is doing), and the cells: running, queued, and the last ones."""
        news = _given((await self._ask(context, session, LookAtRanks(memory))).session)
        return _answer(news, answer_texts.of_session(news))

    async def stacks(
        self, context: Context, ranks: RankNames = None, session: SessionName = None
    ) -> Annotated[CallToolResult, TextPage]:
        """Show where ranks are in the cell that they run: their Python stacks, equal ones once. For stuck cells."""
        return await self._read(context, session, ReadStacks(ranks))

    async def flight(
        self,
        context: Context,
        ranks: RankNames = None,
        count: Annotated[int, Field(ge=1, le=50, description="How many collectives.")] = 10,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, TextPage]:
        """Show the last collectives of all ranks side by side, and the first in which they differ."""
        return await self._read(context, session, ReadFlight(ranks, count))

    async def memory(
        self, context: Context, ranks: RankNames = None, session: SessionName = None
    ) -> Annotated[CallToolResult, TextPage]:
        """Show what memory of ranks is held as: parameters, gradients, optimizer state, the largest other tensor, peak.

        The ranks have to be idle for this. `status` with memory=true shows how much they hold, also while they run.
        """
        return await self._read(context, session, ReadMemory(ranks))

    async def why(self, context: Context, session: SessionName = None) -> Annotated[CallToolResult, TextPage]:
        """Explain why training steps took as long as they did: data, evaluation, collectives, or waiting for a rank.

        About the last cell that made steps. In a session of a notebook, steps are measured only after the user has
        typed `%distributed tflops on` or opened the panel.
        """
        return await self._read(context, session, ReadWhy())

    async def variables(
        self,
        context: Context,
        name: Annotated[
            str, Field(description='One variable or an entry of it, as "w" or "cfg[\'lr\']". Default: a table of all.')
        ] = "",
        ranks: RankNames = None,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, TextPage]:
        """Show the variables on ranks, and whether ranks agree on them; of a tensor also its mean, NaNs and so on.

        Works while a cell runs.
        """
        return await self._read(context, session, ReadVariables(name, ranks))

    async def logs(
        self,
        context: Context,
        cell: Annotated[int | None, Field(description="The cell's number. Default: the newest that printed.")] = None,
        rank: Annotated[int | None, Field(description="Whose output. Default: that of all ranks.")] = None,
        words: Annotated[str, Field(description="Only lines that contain this, in capitals or not.")] = "",
        since: Since = 0,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, TextPage]:
        """Read what any cell of the session has printed, from the output log, or search that."""
        return await self._read(context, session, ReadLogs(cell, rank, words, since))

    # --- that act

    async def start(
        self,
        context: Context,
        ranks: Annotated[int | None, Field(ge=1, description="How many. Default: one for each GPU.")] = None,
        gpus: Annotated[str | None, Field(description='Which GPUs, as "0,2". Default: all that are needed.')] = None,
    ) -> Annotated[CallToolResult, StartNews]:
        """Start ranks of your own. Do this only if no session is there that you should share with the user.

        They hold their GPUs until `stop`, and end with this server, unless it was started with --keep.
        """
        notes: list[str] = []

        def begin() -> Session:
            return self._links.start(ranks, gpus, lambda line: notes.append(str(line)))

        return await self._begun(context, await _in_thread(begin), notes)

    async def attach(self, context: Context, session: SessionName = None) -> Annotated[CallToolResult, StartNews]:
        """Take over a session that nobody drives, as one whose notebook has crashed. What runs there goes on.

        Not needed for a session that a notebook drives. The ranks outlive this server.
        """
        notes: list[str] = []
        found = await _in_thread(lambda: self._links.attach(session, notes.append))
        return await self._begun(context, found, notes)

    async def detach(self) -> Annotated[CallToolResult, TextPage]:
        """Leave this server's own session to others: the user takes it over with `%distributed attach`."""
        page = TextPage(await _in_thread(self._links.detach))
        return _answer(page, page.text)

    async def run(
        self,
        code: Annotated[str, Field(description="Python, as in a notebook's cell: top-level await and magics work.")],
        context: Context,
        ranks: RankNames = None,
        timeout: Annotated[
            float | None, Field(gt=0, description="Seconds after which the ranks are interrupted. Default: never.")
        ] = None,
        wait: Waiting = 0.0,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, CellNews]:
        """Run a cell on ranks, and return at once with its number: poll `cell` for its output and end.

        The code runs on each of the ranks, and variables stay. `rank`, `world_size` and `device` are set,
        and the process group is initialized. If the ranks are busy, the cell waits for its turn (state "queued"). Where
        a notebook drives the session, code and output appear there, too, under your name. With `wait`, a short cell has
        ended when this returns, and the answer has its output.
        """
        request = RunCell(code, ranks, timeout)
        news = _given((await self._ask(context, session, request)).cell)
        if wait > 0:
            news = await self._look_at_cell(context, session, news.cell, 0, None, wait)
        return _answer(news, answer_texts.of_cell(news))

    async def interrupt(
        self,
        context: Context,
        cell: Annotated[int | None, Field(description="Which cell. Default: all that run or wait there.")] = None,
        ranks: RankNames = None,
        now: Annotated[bool, Field(description="Do not wait for the end of the training step.")] = False,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, StopNews]:
        """Stop cells, the user's too, as Ctrl-C does: all ranks after the same step if they train. Variables are kept.

        Look at `cell` for the end. If a rank is stuck, it is freed by force after some seconds; a second call hurries.
        """
        news = _given((await self._ask(context, session, InterruptCells(cell, ranks, now))).stopped)
        return _answer(news, answer_texts.of_stop(news))

    async def save(
        self,
        context: Context,
        directory: Annotated[str, Field(description="Folder for saves, on a file system that all ranks share.")],
        keep: Annotated[int | None, Field(ge=1, description="How many saves may stay there; null: all.")] = 2,
        stop: Annotated[bool, Field(description="First stop what ranks run, after a step if they train.")] = False,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, TextPage]:
        """Save the ranks' variables, models and optimizers to a folder. `%distributed start --from` restores."""
        return await self._read(context, session, SaveRanks(directory, keep, stop))

    async def heal(
        self,
        context: Context,
        ranks: RankNames = None,
        kill: Annotated[bool, Field(description="First end these ranks, which live: for one stuck for good.")] = False,
        session: SessionName = None,
    ) -> Annotated[CallToolResult, TextPage]:
        """Replace ranks that have died by new processes: the others keep their variables, models and process groups.

        The new ranks run the imports and definitions of earlier cells; other variables are missing there.
        """
        return await self._read(context, session, HealRanks(ranks, kill))

    async def stop(self, context: Context, session: SessionName = None) -> Annotated[CallToolResult, TextPage]:
        """End the ranks of a session, the user's too. All their variables are lost; `save` keeps them."""
        return await self._read(context, session, StopRanks())

    # --- how they do it

    async def _ask(self, context: Context, session: str | None, request: AnyErrand) -> ErrandDone:
        who = _who(context)
        return await _in_thread(lambda: self._links.ask(session, request, who))

    async def _read(self, context: Context, session: str | None, request: AnyErrand) -> CallToolResult:
        page = _given((await self._ask(context, session, request)).text)
        return _answer(page, answer_texts.of_page(page))

    async def _look_at_cell(
        self, context: Context, session: str | None, cell: int, since: int, rank: int | None, wait: float
    ) -> CellNews:
        """Return how a cell goes, after its end or some seconds."""
        deadline = time.monotonic() + min(wait, _LONGEST_WAIT)
        while True:
            left = deadline - time.monotonic()
            request = LookAtCell(cell, since, rank, max(0.0, min(left, _LOOK)))
            news = _given((await self._ask(context, session, request)).cell)
            if left <= _LOOK or news.state not in ("queued", "running"):
                return news

    async def _begun(self, context: Context, session: Session, notes: list[str]) -> CallToolResult:
        found = _given((await self._ask(context, session.name, LookAtRanks())).session)
        news = StartNews(found, notes)
        return _answer(news, answer_texts.of_start(news))


def add_tools(server: MCPServer[Any], links: SessionLinks, *, read_only: bool) -> None:
    """Give a server its tools.

    Args:
        server: The server.
        links: The sessions.
        read_only: Whether only those that change nothing are offered.
    """
    tools = AgentTools(links)
    looking = (
        tools.sessions,
        tools.cell,
        tools.status,
        tools.stacks,
        tools.flight,
        tools.memory,
        tools.why,
        tools.variables,
        tools.logs,
    )
    adding, destroying = (
        (tools.start, tools.attach, tools.detach, tools.save),
        (tools.run, tools.heal, tools.interrupt, tools.stop),
    )
    chosen: list[tuple[Callable[..., Any], ToolAnnotations]] = [(each, _LOOKS) for each in looking]
    if not read_only:
        chosen += [(each, _ADDS) for each in adding] + [(each, _DESTROYS) for each in destroying]
    for function, hints in chosen:
        server.add_tool(function, description=inspect.cleandoc(function.__doc__ or ""), annotations=hints)


def make_server(links: SessionLinks, *, read_only: bool, **more: Any) -> MCPServer[Any]:
    """Return a server with its tools. `more`: further arguments of MCPServer."""
    level: Literal["WARNING"] = "WARNING"
    instructions = INSTRUCTIONS + ("\nThis server only looks: it runs and changes nothing." if read_only else "")
    server: MCPServer[Any] = MCPServer(
        "nbdist", version=__version__, instructions=instructions, log_level=level, **more
    )
    add_tools(server, links, read_only=read_only)
    return server


async def _in_thread(work: Callable[[], A]) -> A:
    try:
        return await anyio.to_thread.run_sync(work)
    except NbdistError as error:
        raise ToolError(str(error)) from None


def _given(part: A | None) -> A:
    if part is None:
        raise ToolError("the session has answered something else: is it of another version of nbdist?")
    return part


def _answer(found: Any, text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=text)], structured_content=dataclasses.asdict(found))


def _who(context: Context) -> str:
    """Return the name that the agent's program has given, for people."""
    given = context.session.client_params
    name = _CONTROL.sub("", given.client_info.name)[:_NAME].strip() if given is not None else ""
    return f"agent {name}" if name else "an agent"


def _row(found: visits.Found) -> KnownSession:
    told = found.description
    if told is None:
        return KnownSession(found.name, False, found.is_own, "unknown: it does not answer")
    running = [
        f"{f'cell {cell.number}' if cell.number else 'a function'} for {cell.seconds:.0f} s" for cell in told.running
    ]
    driver = "this server" if found.is_own else found.holder
    driven_by = driver if told.left is None else f"nobody ({visits.client_of(told)})"
    return KnownSession(found.name, True, found.is_own, driven_by, told.ranks, told.gpus, told.memory, running)
