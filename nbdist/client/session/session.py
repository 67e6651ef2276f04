"""A session, from the notebook's side: the requests that its ranks accept.

The Python API behind the magics. Independent of processes and sockets; its set of ranks handles how they start and end.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nbdist import shells
from nbdist.base.checks import check_seconds
from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted
from nbdist.client.base import interruption
from nbdist.client.base.results import CellResult
from nbdist.client.healing.heal import HealReport, ShrinkReport, grow, heal, shrink
from nbdist.client.healing.on_death import heal_all, outlive
from nbdist.client.ranks.background import BackgroundCell
from nbdist.client.ranks.rank_set import Ranks, RankSet
from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.requests.rank_requests import RankRequests
from nbdist.client.saving.restore import find as find_save
from nbdist.client.saving.restore import restore
from nbdist.client.saving.save import KEEP, SaveReport, save
from nbdist.client.session.allocation_end import AllocationEnd
from nbdist.client.session.attaching import conclude, take_over
from nbdist.client.session.watches import Watches
from nbdist.client.start import farewell
from nbdist.client.start.expected_end import ExpectedEnd, expected_end
from nbdist.client.start.node_arguments import check_more_nodes, nodes_wanted
from nbdist.client.start.session_plan import SessionPlan, has_chosen_plan
from nbdist.client.start.start_options import start_options
from nbdist.client.start.start_settings import OnDeath, StartSettings
from nbdist.client.start.starting import StartLine
from nbdist.errors import (
    UsageError,
)
from nbdist.plan import Plan
from nbdist.visits import name_of
from nbdist.wire.messages.handover import Choices
from nbdist.wire.messages.life import RankInfo, StartOptions

T = TypeVar("T")
R = TypeVar("R", HealReport, ShrinkReport)

_sessions: list[weakref.ref[Session]] = []  # of this notebook, the newest last


class Session(RankRequests):
    r"""Ranks that wait for work. As a context manager, it stops them at the end.

    >>> with nbdist.Session(2) as session:
    ...     session.run("print(rank)")[1].stdout
    '1\n'

    Args:
        num_processes: Number of ranks; None: one for each GPU of this machine. With several nodes: on each of them.
        num_nodes: Number of machines, this one too. The others join by `nbdist join`; what to run there is printed.
        master_addr: The address of this machine by which the others reach it.
        master_port: The port where it listens for them; None: any.
        interface: The network between the nodes; None: the one that leads to `master_addr`.
        token_file: A new file for the tokens that they join with, while they are waited for; None: they are printed.
        node_timeout: Seconds that another node may be silent until its ranks count as lost; None: 60. It is reported
                after a third of that, at most 10.
        private_network: Whether to refuse a `master_addr` or `interface` that is not of a private network.
        on: The cluster on which nbdist starts the other nodes: the name of a profile in ~/.config/nbdist/clusters.toml,
                or what a profile would hold, `{"engine": "ssh", "hosts": ["node-a", "node-b:4"]}`.
        gpus: Which GPUs, as CUDA_VISIBLE_DEVICES would name them: [0, 2], "0,2"; None: all, as far as ranks need them.
        backend: Backend of the process group ("gloo", "nccl", ...); None: the right one for the devices.
        init: Whether to make the process group at all.
        timeout: Seconds until a collective times out; None for torch's default of 30 minutes.
        linger: Seconds that the ranks outlive a crash of this process, for `attach`; None: NBDIST_LINGER, else 900 in a
                notebook or a terminal, and 0 in a script. They outlive the restart of a kernel for at most 60.
        keep: Whether they outlive an orderly end of this process too, as long as a crash.
        exact: Whether to restore an interrupted step's buffers (BatchNorm) and random numbers, so that an interrupted
                run equals one that was not. Costs a copy of them after each step.
        on_death: What to do when ranks die under a cell. "ask": raise `RankDied`. "heal": replace them, and run the
                cell again from the last step of what is prepared. "stop": end the session.
        until: When the allocation ends, "18:00" or an ISO date; None: when the Slurm job does, if this is one.
        time_left: A command that prints how long that is, in seconds or as [D-]HH:MM:SS, instead.
        warn: Seconds before that, when the notebook is told; 0: it is not.
        idle: Seconds without a cell after which the ranks end; the notebook stays. None: they don't.
        save: The folder to which the session is saved once its end is announced: by a signal, by the clock, or as the
                ranks are idle. Ranks that train stop first, after the same step. None: it is not saved.
        every: Seconds between two saves to that folder before the end; ranks that train go on. None: there are none.
        end_grace: Seconds by which the session outlives SIGTERM, for a save: schedulers end jobs by that signal. It is
                announced, as SIGUSR1 is. With `save` it is 25 if it is 0.
        replace: Whether to stop this notebook's other sessions first; a message reports it.
        progress: Called with a line of text while the ranks start.

    A session ends when nothing refers to it any more; one that was attached is left to whoever attaches next.

    Attributes:
        cells: Handles of the cells that ran when `attach` took the session over.

    Raises:
        UsageError: An argument is invalid; nothing has been started or stopped.
        SessionBroken: The ranks could not be started; none is left.
    """

    cells: Sequence[BackgroundCell] = ()

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        num_nodes: int = 1,
        master_addr: str | None = None,
        master_port: int | None = None,
        interface: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        node_timeout: float | None = None,
        private_network: bool = False,
        on: str | Mapping[str, Any] | None = None,
        gpus: Sequence[int | str] | int | str | None = None,
        backend: str | None = None,
        init: bool = True,
        timeout: float | None = None,
        linger: float | None = None,
        keep: bool = False,
        exact: bool = False,
        on_death: OnDeath = "ask",
        until: str | None = None,
        time_left: str | None = None,
        warn: float = 600.0,
        idle: float | None = None,
        save: str | os.PathLike[str] | None = None,
        every: float | None = None,
        end_grace: float = 0.0,
        replace: bool = True,
        progress: Callable[[StartLine], None] = lambda line: None,
    ) -> None:
        _refuse_on_ranks()
        given = StartSettings.among(locals())  # the settings are this function's arguments: a test compares them
        self._settings, self._nodes = nodes_wanted(given)
        self._rank_set = RankSet(farewell.linger_or_default(self._settings.linger), self._settings.keep)
        self._plan = SessionPlan()
        self._watches = Watches(self, self._rank_set, self._settings, expected_end(self._settings))
        options = self._start_options(self._settings.num_processes)
        if replace:
            _stop_others()
        farewell.watch_kernel()
        self._bring_up(options, progress)
        _sessions[:] = [weakref.ref(session) for session in (*known_sessions(), self)]

    def _take_over(self, name: str | None, *, take: bool, show: Callable[[str], None]) -> None:
        told, attachment = take_over(self._rank_set, name, take=take)
        began = told.started
        choices = began.choices
        chosen = {
            "on_death": choices.on_death,
            "warn": choices.warn,
            "idle": choices.idle,
            "save": choices.save or None,
            "every": choices.every,
        }
        self._settings = StartSettings.among(msgspec.structs.asdict(began) | chosen)
        self._nodes = began.nodes
        self._plan = SessionPlan()
        expected = None if choices.ends_at is None else ExpectedEnd(choices.ends_at, choices.end_source)
        self._watches = Watches(self, self._rank_set, self._settings, expected)
        self._watches.begin()
        self._plan.adopt(Plan.from_json(began.choices.plan))
        farewell.watch_kernel()
        _sessions[:] = [weakref.ref(known) for known in (*known_sessions(), self)]
        for line in (str(attachment), *attachment.notices):
            show(line)
        conclude(attachment.ended, show)
        self.cells = [BackgroundCell(task, None, self) for task in attachment.running]

    def restart(
        self, num_processes: int | None = None, *, progress: Callable[[StartLine], None] = lambda line: None
    ) -> None:
        """End the ranks and start fresh ones, with the environment as it is now. Variables on ranks are lost.

        Args:
            num_processes: Number of ranks, on each node; None: as many as before.
        """
        if self._nodes is not None and num_processes is not None:
            here = [0] if self._nodes.ranks_of(0) == 0 else []
            self._nodes = msgspec.structs.replace(self._nodes, ranks=num_processes, shares=here)
        self._bring_up(self._start_options(num_processes or len(self.ranks)), progress)

    def _start_options(self, count: int | None) -> StartOptions:
        options = start_options(self._settings, self._own_ranks(count))
        return self._plan.carry(options, self._nodes)

    def _bring_up(self, options: StartOptions, progress: Callable[[StartLine], None]) -> None:
        self._watches.end.begin()
        self._rank_set.start(options, progress, self._nodes)
        self._watches.begin()
        if words := self._watches.end.words:
            progress(StartLine(words))
        self._keep_choices()

    def _keep_choices(self) -> None:
        """Give the controller what a client that attaches has to know."""
        chosen = self._settings
        saves_to = os.path.abspath(self.saves_to) if self.saves_to else ""  # another client may be in another folder
        ends = *self._watches.ends, chosen.warn, chosen.idle, saves_to, chosen.every
        self._rank_set.traffic.send(Choices(self.plan.to_json(), chosen.on_death, self._nodes, *ends))

    @classmethod
    def attach(
        cls,
        name: str | None = None,
        *,
        take: bool = False,
        keep: bool | None = None,
        show: Callable[[str], None] = print,
    ) -> Session:
        """Take over a session whose client is gone, or gives it up: `nbdist.attach`.

        What runs goes on, with its output so far; what has ended meanwhile is shown, with its errors.

        Args:
            name: As `nbdist ls` shows it, or the beginning of it; None: the only one that has no client.
            take: Whether to take it also from a client that is there.
            keep: Whether the ranks go on when this process ends in an orderly way; None: in a script or a terminal.
            show: Called with each line about it.

        Raises:
            UsageError: There is no such session, or it can't be taken over; nothing has changed.
            SessionBroken: It does not answer.
        """
        _refuse_on_ranks()
        if (own := next((known for known in known_sessions() if not known.closed), None)) is not None:
            count = counted(len(own.ranks), "rank")
            raise UsageError(
                f"this notebook already has session {own.name} with {count}. To attach to another one, first leave it "
                "running with `%distributed detach`, or end it with `%distributed stop`"
            )
        session = cls.__new__(cls)
        session._rank_set = RankSet(keep=not shells.in_kernel() if keep is None else keep)
        try:
            with interruption.deferred():  # half of it would be a session that nobody has
                session._take_over(name, take=take, show=show)
        except BaseException:  # a Ctrl-C, too: nobody would have the session that it has taken
            if not session.closed:
                session.detach(session._rank_set.linger or farewell.LINGER)
            raise
        return session

    def detach(self, linger: float | None = None) -> float:
        """Leave the ranks to whoever attaches; the session is closed here.

        Args:
            linger: Seconds that they go on without anybody; None: as long as after a crash.

        Returns:
            These seconds.

        Raises:
            UsageError: They would end at once.
        """
        check_seconds("linger", linger)
        seconds = self._rank_set.linger if linger is None else linger
        if not seconds:
            raise UsageError(
                "this session has a linger time of 0, so its ranks would end immediately: use "
                "`%distributed detach --linger 12h`"
            )
        self._rank_set.leave(
            seconds, "this notebook is detached from its session: `%distributed attach` brings it back"
        )
        return seconds

    def _own_ranks(self, count: int | None) -> int | None:
        """Return the number of ranks of this machine to prepare; None: one for each GPU."""
        own = self._nodes.ranks_of(0) if self._nodes is not None else count
        return 1 if own == 0 else own  # none is started then, and the store is no rank

    def close(self, grace: float = 1.0) -> None:
        """Stop the ranks. Their memory is free when this returns; an idle template stays for the next start.

        Args:
            grace: Seconds for ranks that are still working to end by themselves.
        """
        self._rank_set.close(grace)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.broken or self.closed:
            return f"<nbdist.Session: {'broken' if self.broken else 'closed'}>"
        devices = sorted({info.device for info in self.ranks})
        return f"<nbdist.Session: {describe_ranks(info.rank for info in self.ranks)} on {', '.join(devices)}>"

    @property
    def ranks(self) -> list[RankInfo]:
        """Each rank's number, process and device."""
        return self._rank_set.ranks

    @property
    def backend(self) -> str:
        """Backend of the process group; "none" without one."""
        return self._rank_set.backend

    @property
    def closed(self) -> bool:
        """Whether it has no ranks."""
        return self._rank_set.closed

    @property
    def broken(self) -> str:
        """Why it is closed, if nobody closed it."""
        return self._rank_set.broken

    @property
    def saves_to(self) -> str:
        """The folder to which it is saved once its end is announced; "": it is not."""
        return os.fspath(self._settings.save or "")

    @property
    def time_left(self) -> float | None:
        """Seconds until the allocation ends, or the session after SIGTERM; None: that is not known."""
        return self._watches.end.seconds_left

    @property
    def name(self) -> str:
        """By which `attach`, `nbdist ls` and `nbdist stop` know it."""
        return name_of(self._rank_set.key_file)

    @property
    def plan(self) -> Plan:
        """How models that ranks prepare are made distributed."""
        return self._plan.current

    def set_plan(self, plan: Plan) -> None:
        """Have everything that ranks prepare from now on follow a plan; what is prepared already keeps its own.

        Raises:
            UsageError: These ranks can't follow it; nothing has changed anywhere.
            SessionBusy: A rank is running something.
        """
        self._rank_set.check_open()
        living = self._rank_set.living()
        self._plan.set(plan, self.ranks, self.backend, functools.partial(self._rank_set.set_up, ranks=living))
        self._keep_choices()

    # --- to a folder and back

    def save(self, directory: str | os.PathLike[str], *, keep: int | None = KEEP, stop: bool = False) -> SaveReport:
        """Save the session: the names of its ranks, what is prepared, and the cells that have run.

        It appears all at once as a new folder, `save-N`, beside earlier ones. `Session.restore` starts from it. In a
        cell that trains it is made between two steps, the same ones on all ranks, and the cell goes on.

        Args:
            directory: Where saves are, on a file system that all ranks share.
            keep: How many saves may stay there, this one included; None: all.
            stop: Whether to stop first what ranks run, after the same step on all ranks if they train.

        Returns:
            What was saved, and which names could not be, with the reasons; it prints as a few lines.

        Raises:
            UsageError: An argument is invalid, or ranks have died; nothing was written.
            SessionBusy: Ranks run something else than one cell that trains on all of them.
            SessionError: The cell was interrupted, or a rank has died; earlier saves are whole.
            CheckpointError: It could not be written, as when the disk is full; earlier saves are whole.
        """
        return save(self._rank_set, Path(directory), keep, self.plan.to_json(), self._settings, stop=stop)

    @classmethod
    def restore(
        cls,
        directory: str | os.PathLike[str],
        num_processes: int | None = None,
        *,
        progress: Callable[[StartLine], None] = lambda line: None,
        show: Callable[[str], None] = print,
        **settings: Any,
    ) -> Session:
        """Start a session from a save.

        Cells that were marked with `%%distributed --setup` run again, and the imports and definitions of all others.
        Then what they have prepared takes the saved training, and each rank the names that it had. A plan that was
        chosen in this notebook takes the place of the saved one. Saves hold pickles: load only those that you trust.

        Args:
            directory: A save, or a folder with saves, of which the newest whole one is taken.
            num_processes: Number of ranks; None: as many as saved it. They may be others: what is prepared is sharded
                again, and names that all ranks had alike are on all ranks again.
            progress: Called with a line of text while the ranks start.
            show: Called with what has come back.
            settings: The further arguments of a session; those that are not given are as they were, where that does
                not depend on the machine.

        Raises:
            UsageError: There is no such save, or an argument is invalid; nothing was started.
            CheckpointError: It is damaged; likewise.
            RankError: A setup cell has failed; the ranks have ended.
        """
        path, saved = find_save(Path(directory))
        own_machine = settings.get("num_nodes", 1) == 1 and settings.get("on") is None
        count = saved.world_size if num_processes is None and own_machine else num_processes
        chosen = StartSettings.among({"num_processes": count, **settings}).completed(saved.settings)
        session = cls(**dataclasses.asdict(chosen), progress=progress, replace=settings.get("replace", True))
        try:
            if not has_chosen_plan():
                session.set_plan(Plan.from_json(saved.plan))
            show(str(restore(session._rank_set, path, saved)))
        except BaseException:  # a Ctrl-C, too: nobody would have the session
            session.close()
            raise
        return session

    # --- work

    def run(
        self,
        code: str,
        ranks: Ranks = None,
        timeout: float | None = None,
        *,
        grace: float = 1.0,
        show: bool = False,
        setup: bool = False,
    ) -> CellResult:
        """Run code in the shells of ranks.

        Args:
            code: The code, as in a `%%distributed` cell.
            ranks: The ranks: one, some, or "0,2-3"; None for all. The same for all methods that take ranks.
            timeout: Seconds after which the ranks are interrupted.
            grace: Seconds that ranks may wait in a collective for one that raised; then they are freed.
            show: Whether to show the output as well.
            setup: Whether ranks that replace dead ones run it first.

        Returns:
            The output and the last value of each rank: `result[0].stdout`.

        Raises:
            RankError: A rank raised; the first cause first. RankDied, RankTimeout likewise.
            SessionBusy: One of these ranks runs something else.
        """
        check_seconds("timeout", timeout)
        options = CellOptions(grace=grace, show=show, keep=True, setup=setup)

        def attempt() -> CellResult:
            with interruption.deferred():
                task = self._rank_set.submit("cell", code, ranks, options)
                task.wait(timeout)
            return task.result

        return outlive_deaths(self, attempt, print if show else lambda line: None)

    def run_in_background(
        self,
        code: str,
        ranks: Ranks = None,
        timeout: float | None = None,
        *,
        grace: float = 1.0,
        show: bool = True,
    ) -> BackgroundCell:
        """Run code like `run`, but return at once with a handle: `.done`, `.wait()`, `.output`, `.interrupt()`."""
        return start_in_background(self, code, ranks, timeout, CellOptions(grace=grace, show=show, keep=True))

    def heal(
        self,
        ranks: Ranks = None,
        *,
        kill: bool = False,
        progress: Callable[[StartLine], None] | None = print,
    ) -> HealReport:
        """Replace ranks that have died by new processes, which take their places in all process groups.

        The others keep their variables, groups, models and handles. The newcomers run the cells that were marked with
        `%%distributed --setup`, else the imports and definitions of all cells. Where the machine of ranks is lost, it
        waits for another that takes its place.

        Args:
            ranks: The ranks; None for all that have died.
            kill: Whether to end those first that live, as one that is stuck in C for good.
            progress: Called with lines of text while it waits for a machine: what to run there. None: don't wait.

        Returns:
            What was done; it prints as a few lines.

        Raises:
            UsageError: One of them lives, or no other rank does; nothing has changed.
            SessionBusy: The other ranks run something.
            SessionBroken: They could not be replaced; the ranks that live are as they were.
            RankError: They were replaced; then a cell that they ran to be set up failed.
        """
        token_file = self._nodes.token_file if self._nodes is not None else ""
        return heal(self._rank_set, ranks, kill=kill, catch_up=self._catch_up, progress=progress, token_file=token_file)

    def _catch_up(self, newcomers: Sequence[int]) -> None:
        """Have newcomers follow the plan."""
        self._plan.catch_up(self.ranks, functools.partial(self._rank_set.set_up, ranks=newcomers))

    def shrink(self, ranks: Ranks = None) -> ShrinkReport:
        """Go on without the ranks that have died, as a smaller session. The others keep their variables.

        They are numbered from 0 on, and get a new default process group, with DDP models and prepared loaders.

        Args:
            ranks: Ranks that are given up although they live; their variables are lost.

        Returns:
            What was done, and who has which number now; it prints as a few lines.

        Raises:
            UsageError: No rank has died and none is named, or none would be left; nothing has changed.
            SessionBusy: Ranks run something.
            SessionBroken: It failed; `%distributed restart` starts fresh ranks.
        """
        return self._checked(shrink(self._rank_set, ranks))

    def grow(
        self,
        num_processes: int,
        ranks: Ranks = None,
        *,
        num_nodes: int = 0,
        progress: Callable[[StartLine], None] = print,
    ) -> HealReport:
        """Add ranks, on free GPUs. They run the setup cells first, as after a `heal`.

        Args:
            num_processes: How many on each machine. All ranks are numbered machine by machine afterwards.
            ranks: Which machines, by ranks on them, such as "@node-b"; None: all.
            num_nodes: Add them on so many other machines instead, in a session that was started over several.
            progress: Called with lines of text while it waits for these: what to run there.

        Returns:
            What was done; it prints as a few lines.

        Raises:
            UsageError: There is no GPU for them, or ranks have died.
            SessionBusy: Ranks run something.
            SessionBroken: They could not be added; the others are as they were.
            RankError: They were added; then a cell that they ran to be set up failed.
        """
        if num_nodes != 0:
            check_more_nodes(self._nodes, num_nodes, ranks)
        report = grow(
            self._rank_set,
            num_processes,
            ranks,
            lambda total: start_options(self._settings, total).gpus,
            self._catch_up,
            machines=num_nodes,
            progress=progress,
            token_file=self._nodes.token_file if self._nodes is not None else "",
        )
        if self._nodes is not None:
            counts = [*Counter(info.node for info in self._rank_set.ranks).values()]
            self._nodes = self._nodes.with_ranks(counts)
            self._keep_choices()
        return self._checked(report)

    def _checked(self, report: R) -> R:
        """Return a report of a changed number of ranks, with a note if the plan does not fit it."""
        notes = [report.notes, self._plan.explain_misfit(self.ranks, self.backend)]
        return dataclasses.replace(report, notes="\n".join(note for note in notes if note))


def rank_set_of(session: Session) -> RankSet:
    """Return the ranks of a session, for parts of the client that need more of them than a user does."""
    return session._rank_set


def end_of(session: Session) -> AllocationEnd:
    """Return what is known of the end of a session's allocation."""
    return session._watches.end


def lines_of_watches(session: Session) -> list[str]:
    """Return lines for `status` on the end of a session's allocation, and on its regular saves."""
    return session._watches.words


def outlive_deaths(session: Session, attempt: Callable[[], T], report: Callable[[str], object] = print) -> T:
    """Run a cell by `attempt`, and do what the session is to do when ranks die under it. `report`: shows that."""
    replace = functools.partial(heal_all, session._rank_set, session.heal, report)
    return outlive(attempt, session._settings.on_death, replace, session.close, session._rank_set.set_up, report)


def start_in_background(
    session: Session, code: str, ranks: Ranks, timeout: float | None, options: CellOptions
) -> BackgroundCell:
    """Run code in the background. The session is kept until the cell has ended."""
    check_seconds("timeout", timeout)
    return BackgroundCell(session._rank_set.submit("cell", code, ranks, options), timeout, session)


def known_sessions() -> list[Session]:
    """Return the sessions that are still referenced, the newest last."""
    return [session for known in _sessions if (session := known()) is not None]


def _stop_others() -> None:
    """Stop the sessions that a new one replaces."""
    for session in known_sessions():
        if not session.closed and session._rank_set.owned:
            session.close()
            keep = "`nbdist.Session(..., replace=False)` keeps it"
            print(
                f"nbdist: the previous session ({counted(len(session.ranks), 'rank')}) was stopped; {keep}",
                file=sys.stderr,
                flush=True,
            )
    _sessions.clear()


def _refuse_on_ranks() -> None:
    """Raise an error on a rank, where each rank would start ranks of its own."""
    if shells.on_rank():
        raise UsageError(f"this is rank {os.environ.get('RANK')}: start sessions in the notebook, not on ranks")
