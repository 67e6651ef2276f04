"""The magics: `%distributed`, `%%distributed` and their relatives. They parse the line and call the session."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
import shlex
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class

from nbdist import cuda_guard, shells
from nbdist.base import requirements
from nbdist.base.ranks import describe_ranks, format_ranks
from nbdist.base.text import counted, size, span, table
from nbdist.client.base import interruption
from nbdist.client.costs import history
from nbdist.client.costs.cell_memory import parse_mark
from nbdist.client.costs.profiles import CellProfile
from nbdist.client.debugger import breakpoints
from nbdist.client.magic_lines import parsers
from nbdist.client.magic_lines.cluster_flags import cluster_flags
from nbdist.client.magic_lines.magic_line import HelpShown, suggest_verb, without_comment
from nbdist.client.magic_lines.start_flags import start_keywords
from nbdist.client.magics import looking, memory_parts
from nbdist.client.magics import plan_verb as plans
from nbdist.client.magics.completion import install_completion
from nbdist.client.magics.cost_verbs import CostVerbs
from nbdist.client.magics.plan_form import PlanForm
from nbdist.client.magics.router import CellRouter
from nbdist.client.ranks.background import BackgroundCell, wait_all
from nbdist.client.ranks.task import Task
from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.session import session as sessions
from nbdist.client.session.attaching import settle_previous
from nbdist.client.session.current import get_session, living_session, session_to_restart, survive_warnings
from nbdist.client.session.session import Session, rank_set_of
from nbdist.client.start.connection import prewarm
from nbdist.client.start.starting import StartLine
from nbdist.errands import errand_offer
from nbdist.errors import SessionClosed, UsageError
from nbdist.lab import activity, kernel_status, lines


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics and warm up in the background (`%load_ext nbdist`)."""
    if shells.on_rank():
        raise UsageError("this is a rank: nbdist's magics live in the notebook, so load it in a local cell")
    if isinstance(shell.magics_manager.registry.get("DistributedMagics"), DistributedMagics):
        return  # `%reload_ext`
    if (text := requirements.complaint()) is not None:
        print(text)
    cuda_guard.arm()
    magics = DistributedMagics(shell)
    shell.register_magics(magics)
    magics.watch_cells()
    history.watch_cells(shell)
    install_completion(shell, magics)
    if shells.in_kernel():
        lines.offer(magics)
        kernel_status.keep_busy(shells.current().kernel)
        activity.publish()
        survive_warnings()
        breakpoints.offer(shells.current().kernel)
    errand_offer.offer(magics)
    if living_session() is None:
        prewarm()


@magics_class
class DistributedMagics(Magics):
    """All magics."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._session: Session | None = None  # keeps alive a session started by a magic
        self._costs = CostVerbs(shell)
        self._router = CellRouter(shell)
        self._follow = looking.FollowVerb()
        self.plan_form = PlanForm()  # of pages
        self._actions: dict[str, Callable[[argparse.Namespace], Any]] = {
            "start": self._start,
            "attach": self._attach,
            "detach": self._detach,
            "follow": self._follow.follow,
            "stop": self._stop,
            "restart": self._restart,
            "save": self._save,
            "status": self._status,
            "auto": self._switch_auto,
            "plan": self._plan,
            "push": self._push,
            "pull": self._pull,
            "logs": looking.logs,
            "memory": self._costs.switch_memory,
            "free": self._costs.free,
            "panel": self._costs.show_panel,
            "tflops": self._costs.switch_steps,
            "why": self._costs.explain_steps,
            "advise": self._costs.advise,
            "peak": self._costs.measure_peak,
            "interrupt": self._interrupt,
            "heal": self._heal,
            "shrink": self._shrink,
            "grow": self._grow,
            "debug": looking.debug,
            "snapshot": self._costs.snapshot,
            "stacks": looking.stacks,
            "flight": looking.flight,
            "look": looking.look,
            "variables": looking.variables,
        }
        self.verb_parsers = parsers.verb_parsers()
        self.cell_parser = parsers.cell_parser()

    @property
    def auto(self) -> bool:
        """Whether every cell runs on all ranks."""
        return self._router.auto

    # --- what a page's buttons need, and what visitors want: `nbdist.lab`, `nbdist.errands`

    def stop(self) -> str:
        """End the session, and return what to say."""
        session = get_session()
        session.close()
        self._session = None
        return f"{counted(len(session.ranks), 'rank')} stopped{self._leave_auto()}"

    def _leave_auto(self) -> str:
        """Switch `auto` off, and return what to add to what is said."""
        was, self._router.auto = self._router.auto, False
        return "\nauto is off: cells run in the notebook again" if was else ""

    def restart(self) -> str:
        """Replace the ranks by fresh ones, and return what to say."""
        session = session_to_restart()
        session.restart()
        return _ready(session)

    def why(self) -> str:
        """Return why the last cell's steps took as long as they did."""
        return self._costs.explain_last()

    def held_memory(self, session: Session, ranks: str | None) -> str:
        """Return what the memory of ranks is held as."""
        return memory_parts.held_table(session, ranks)

    # --- magics

    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on ranks, or do something with the session. `%distributed --help` lists the verbs."""
        return self._respond(line, cell)

    @line_cell_magic
    def dist(self, line: str, cell: str | None = None) -> Any:
        """Run `%distributed` or `%%distributed` by its short name."""
        return self._respond(line, cell)

    @cell_magic
    def rank(self, line: str, cell: str) -> Any:
        """Run a cell on the given ranks: `%%rank 0,2`."""
        ranks, *flags = re.split(r"\s+(?=-\D)", without_comment(line).strip(), maxsplit=1)
        if not ranks or ranks.startswith("-"):
            raise UsageError("%%rank needs ranks: `%%rank 0`, `%%rank 0,2-3`")
        return self._respond(" ".join([f"-r {shlex.quote(ranks)}", *flags]), cell)

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run a cell in the notebook itself, even with `%distributed auto on`."""
        if without_comment(line).strip():
            raise UsageError(f"%%local takes no arguments, got {line.strip()!r}: `%%local` alone on the first line")
        self.shell.run_cell(cell).raise_error()

    @cell_magic
    def memory(self, line: str, cell: str) -> None:
        """Show what this cell costs in memory, even with `%distributed memory off`."""
        self._costs.memory.show_this_cell(parse_mark(line))
        self.shell.run_cell(cell).raise_error()

    def _respond(self, line: str, cell: str | None) -> Any:
        try:
            return self._do(line) if cell is None else self._run(line, cell)
        except HelpShown as shown:
            print(shown)
            return None
        except KeyboardInterrupt as interrupt:
            if hasattr(interrupt, "_render_traceback_"):  # it says already what was interrupted
                raise
            what = " ".join(f"%distributed {line}".split()[:2]) if cell is None else "%%distributed"
            raise interruption.interruption(f"`{what}` was interrupted before its end: type it again") from None

    # --- cells

    def watch_cells(self) -> None:
        """See every cell before IPython does, for `%%local`, `%%memory` and `auto on`."""
        self._costs.memory.install()
        self._router.install()

    def _run(self, line: str, cell: str) -> Any:
        arguments = self.cell_parser.read(line)
        if arguments.tee and arguments.capture is None:
            raise UsageError(
                "--tee needs --capture, because it shows the output that --capture keeps: "
                "`%%distributed --capture NAME --tee`"
            )
        if arguments.background and arguments.profile is not None:
            raise UsageError("--profile shows its table below the cell, so it can't be combined with --background")
        session = self._session_for_cell(arguments.auto)
        code, offset = shells.from_first_line(cell, 0 if arguments.auto else 1)
        number = shells.cell_number()
        _check_syntax(code, offset, number)
        ranks = rank_set_of(session).among(arguments.ranks)
        show = not arguments.quiet and (arguments.capture is None or arguments.tee)
        keep = arguments.capture is not None or arguments.background
        file = breakpoints.cell_file()
        options = CellOptions(number, offset, arguments.grace, show, keep, setup=arguments.setup, file=file)
        if arguments.background:
            handle = sessions.start_in_background(session, code, ranks, arguments.timeout, options)
            return self._keep(arguments.capture, handle)
        profile = CellProfile(arguments.profile, number) if arguments.profile is not None else None
        if profile is not None:
            options = replace(options, profile=profile.folder)

        def attempt() -> Task:
            with contextlib.ExitStack() as afterwards, interruption.deferred():
                task = rank_set_of(session).submit("cell", code, ranks, options)
                afterwards.callback(self._report, task, profile)
                self._keep(arguments.capture, task.result)
                task.wait(arguments.timeout)
            return task

        task = sessions.outlive_deaths(session, attempt)
        if arguments.auto and task.silent:
            print(f"ran on {describe_ranks(task.ranks)}")  # so that nobody takes it for a local cell
        return None

    def _report(self, task: Task, profile: CellProfile | None) -> None:
        """Print below a cell what was measured."""
        if profile is not None:
            print(profile.conclude(task))
        if line := self._costs.steps.below(task):
            print(line)

    def _session_for_cell(self, auto: bool) -> Session:
        try:
            return get_session()
        except SessionClosed as error:
            if refusal := self._follow.refusal:
                raise SessionClosed(refusal) from None
            hint = "; with `%distributed auto off` cells run in the notebook again" if auto else ""
            raise SessionClosed(f"{error}{hint}") from None

    def _keep(self, name: str | None, value: Any) -> Any:
        if name is None:
            return value
        self.shell.user_ns[name] = value.output if isinstance(value, BackgroundCell) else value
        return value

    # --- verbs

    def _do(self, line: str) -> Any:
        verb, _, rest = without_comment(line).strip().partition(" ")
        if verb in ("", "-h", "--help", "help"):
            asked = self.verb_parsers.get(rest.strip())
            raise HelpShown(asked.format_help() if asked is not None else self._overview())
        if verb not in self._actions:
            raise UsageError(suggest_verb(verb, sorted(self._actions)))
        return self._actions[verb](self.verb_parsers[verb].read(rest))

    def _overview(self) -> str:
        rows = [(f"%distributed {verb}", parser.description) for verb, parser in self.verb_parsers.items()]
        rows.append(("%%distributed", self.cell_parser.description))
        rows.append(("%%rank 0,2", "Run the cell on these ranks."))
        rows.append(("%%local", "Run the cell in the notebook, even with `auto on`."))
        rows.append(("%%memory", "Show what the cell costs in memory; goes above any other magic."))
        words = table(rows, ("magic", "what it does"))
        flags = self.cell_parser.format_help()
        more = "%dist and %%dist are short forms. Each verb has --help: `%distributed start --help`."
        return f"{words}\n\n{more}\n\n{flags}"

    def _start(self, arguments: argparse.Namespace) -> None:
        if arguments.dry_run:
            from nbdist.client.start.cluster_arguments import manifest_of  # others need not wait for it

            count = arguments.num_nodes if arguments.num_nodes > 1 else None
            print(manifest_of(cluster_flags(arguments), count), end="")
            return
        running = living_session()
        if running is not None:
            if not arguments.replace:
                count = arguments.num_processes or len(running.ranks)
                raise UsageError(
                    f"a session with {counted(len(running.ranks), 'rank')} is already running: "
                    f"`%distributed restart -n {count}` for fresh ranks, "
                    "`%distributed start --replace ...` for a different session, or `%distributed stop`"
                )
            running.close()
        settle_previous(replace=arguments.replace, say=print)
        if arguments.directory is not None:
            found = Session.restore(arguments.directory, **start_keywords(arguments), progress=show_progress)
        else:
            found = Session(**start_keywords(arguments), progress=show_progress)
        self._session = found
        print(_ready(found))

    def _save(self, arguments: argparse.Namespace) -> None:
        print(get_session().save(arguments.directory, keep=arguments.keep, stop=arguments.stop))

    def _attach(self, arguments: argparse.Namespace) -> None:
        if arguments.wait and (own := self._attached_to(arguments.name)) is not None and own.cells:
            with interruption.deferred():
                wait_all([cell for cell in own.cells if not cell.done])
            return
        with interruption.deferred():  # output is shown before the wait: a Ctrl-C at once is meant for the cells
            session = self._session = Session.attach(arguments.name, take=arguments.take)
            self._follow.stop()
            if arguments.wait:
                wait_all(session.cells)

    def _attached_to(self, name: str | None) -> Session | None:
        """Return the notebook's session if that is the one to attach to."""
        own = self._session
        return own if own is not None and not own.closed and own.name.startswith(name or "") else None

    def _detach(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        seconds = session.detach(arguments.linger)
        print(
            f"detached; {counted(len(session.ranks), 'rank')} left running for {span(seconds)}: "
            f"`%distributed attach {session.name}` brings the session back, `nbdist stop {session.name}` ends it"
            f"{self._leave_auto()}"
        )

    def _stop(self, arguments: argparse.Namespace) -> None:
        print(self.stop())

    def _restart(self, arguments: argparse.Namespace) -> None:
        session = session_to_restart()
        session.restart(arguments.num_processes, progress=show_progress)
        print(_ready(session))

    def _status(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        several = any(info.node for info in session.ranks)
        rows = [
            (
                row["rank"],
                *([row["node"]] if several else []),
                row["pid"],
                row["device"],
                row["state"],
                row["generation"],
                size(row["memory"]),
                size(row["device_memory"]) + (" (driver)" if row["device_memory_by"] == "driver" else ""),
                row["doing"],
            )
            for row in session.status()
        ]
        where = ["node"] if several else []
        print(table(rows, ("rank", *where, "pid", "device", "state", "generation", "memory", "GPU memory", "doing")))
        for line in sessions.lines_of_watches(session):
            print(line)
        if cells := session.setup_cells:
            print(f"setup cells, which new ranks run first: {format_ranks(cells)}")
        if self._router.auto:
            print("auto is on: every cell runs on all ranks (`%%local` runs one in the notebook)")

    def _heal(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        ranks = rank_set_of(session).among(arguments.ranks)
        print(session.heal(ranks, kill=arguments.kill, progress=show_progress))

    def _shrink(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        print(session.shrink(rank_set_of(session).among(arguments.ranks)))

    def _grow(self, arguments: argparse.Namespace) -> None:
        session, nodes = get_session(), arguments.num_nodes
        print(session.grow(arguments.n, arguments.ranks, num_nodes=nodes, progress=show_progress))

    def _switch_auto(self, arguments: argparse.Namespace) -> None:
        if arguments.state == "on":
            get_session()
        self._router.auto = arguments.state == "on"
        print(
            "from now on, every cell runs on all ranks; `%%local` runs one in the notebook"
            if self._router.auto
            else "cells run in the notebook again"
        )

    def _plan(self, arguments: argparse.Namespace) -> None:
        print(plans.do(living_session(), arguments))

    def _push(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        missing = [name for name in arguments.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(
                f"can't push {', '.join(map(repr, missing))}: not defined in the notebook. Define it in a local cell "
                "first"
            )
        session.push({name: self.shell.user_ns[name] for name in arguments.names}, arguments.ranks)

    def _pull(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        if arguments.target is not None and len(arguments.names) != 1:
            raise UsageError("--as names one variable, so pull one at a time: `%distributed pull loss --as first`")
        ranks = rank_set_of(session).among(arguments.ranks)
        single = ranks[0] if ranks is not None and len(ranks) == 1 else None
        if len(session.ranks) == 1:
            single = 0
        targets = [arguments.target or name for name in arguments.names]
        for target in targets:
            if not target.isidentifier():
                raise UsageError(f"{target!r} is not a variable name: add `--as NAME`")
        values = [session.pull(name, ranks if single is None else single) for name in arguments.names]
        self.shell.user_ns.update(zip(targets, values, strict=True))

    def _interrupt(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        if not session.interrupt(arguments.ranks, now=arguments.now):
            print("nothing to interrupt: these ranks are idle")


def show_progress(line: StartLine) -> None:
    """Report what a start is doing, if it takes long."""
    if line.stage == "import":
        print(f"{line} …", flush=True)
    elif line.stage != "join":
        print(line, flush=True)


def _ready(session: Session) -> str:
    devices = sorted({info.device for info in session.ranks})
    group = f"process group {session.backend}" if session.backend != "none" else "no process group"
    nodes = len({info.node for info in session.ranks})
    where = f" on {counted(nodes, 'node')}" if nodes > 1 else ""
    ready = f"{counted(len(session.ranks), 'rank')}{where} ready in {rank_set_of(session).started_in:.1f} s"
    return f"{ready}: {', '.join(devices)}; {group}"


def _check_syntax(code: str, offset: int, number: int) -> None:
    """Report a syntax error once, here, instead of on every rank."""
    try:
        source = "\n" * offset + TransformerManager().transform_cell(code)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks issue them
            compile(source, f"Cell In[{number}]", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        raise UsageError(f"the cell has a syntax error, so it did not run\n{text}") from None
