"""The magics: `%distributed`, `%%distributed` and their relatives. They read what was typed and call the session."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class

from nbdist import cuda_guard
from nbdist.client import session as sessions
from nbdist.client import stacks
from nbdist.client.arguments import (
    HelpShown,
    MagicParser,
    count,
    names,
    number,
    seconds,
    size,
    suggest_verb,
    table,
    variable,
)
from nbdist.client.completion import install_completion
from nbdist.client.display import FOLD_LIMIT, Publisher
from nbdist.client.session import Session, get_session
from nbdist.client.task import BackgroundCell
from nbdist.errors import SessionClosed, UsageError
from nbdist.ranks import describe_ranks, parse_ranks

_AUTO_LINE = "%%distributed --auto\n"
# With `auto on` these run in the notebook: our own magics, and what changes the environment that all ranks share.
_STAYS_HERE = re.compile(r"%%?(distributed|dist|rank|local|pip|conda|mamba|micromamba|uv|(re)?load_ext\s+nbdist)\b")
_LEAVES = re.compile(r"(exit|quit)(\(\))?")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext nbdist`: register the magics and warm up in the background."""
    if os.environ.get("RANK") is not None and type(shell).__name__ == "RankShell":
        raise UsageError("this is a rank: nbdist's magics live in the notebook, so load it in a local cell")
    if isinstance(shell.magics_manager.registry.get("DistributedMagics"), DistributedMagics):
        return  # `%reload_ext`
    cuda_guard.arm()
    magics = DistributedMagics(shell)
    shell.register_magics(magics)
    magics.watch_cells()
    install_completion(shell, magics)
    if os.environ.get("NBDIST_PREWARM", "1").lower() not in ("0", "false", "no", "off"):
        sessions.prewarm()


@magics_class
class DistributedMagics(Magics):
    """Everything that a user types."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._session: Session | None = None  # keeps a session alive that a magic has started
        self._cells = 0  # that are running, one inside the other
        self.auto = False
        self._verbs: dict[str, tuple[MagicParser, Callable[[argparse.Namespace], Any]]] = {
            "start": (_start_parser(), self._start),
            "stop": (MagicParser("%distributed stop", "Stop the ranks."), self._stop),
            "restart": (_restart_parser(), self._restart),
            "status": (MagicParser("%distributed status", "Show every rank: what it is, has and does."), self._status),
            "auto": (_auto_parser(), self._switch_auto),
            "push": (_push_parser(), self._push),
            "pull": (_pull_parser(), self._pull),
            "logs": (_logs_parser(), self._logs),
            "free": (
                MagicParser("%distributed free", "Free what only tracebacks, Out and caches keep alive."),
                self._free,
            ),
            "interrupt": (_interrupt_parser(), self._interrupt),
            "stacks": (_stacks_parser(), self._stacks),
        }
        self.cell_parser = _cell_parser()

    @property
    def verb_parsers(self) -> dict[str, MagicParser]:
        """What each verb takes."""
        return {verb: parser for verb, (parser, _) in self._verbs.items()}

    # --- magics

    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on ranks, or do something with the session. `%distributed --help` lists the verbs."""
        return self._respond(line, cell)

    @line_cell_magic
    def dist(self, line: str, cell: str | None = None) -> Any:
        """`%distributed` and `%%distributed` in short."""
        return self._respond(line, cell)

    @cell_magic
    def rank(self, line: str, cell: str) -> Any:
        """`%%rank 0,2`: run a cell on these ranks."""
        ranks, *flags = re.split(r"\s+(?=-\D)", line.strip(), maxsplit=1)
        if not ranks or ranks.startswith("-"):
            raise UsageError("%%rank needs ranks: `%%rank 0`, `%%rank 0,2-3`")
        return self._respond(" ".join([f"-r {shlex.quote(ranks)}", *flags]), cell)

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run a cell in the notebook itself, also while `%distributed auto on`."""
        if line.strip():
            raise UsageError(
                f"%%local takes nothing, and {line.strip()!r} was given: `%%local` alone on the first line"
            )
        self.shell.run_cell(cell).raise_error()

    def _respond(self, line: str, cell: str | None) -> Any:
        try:
            return self._do(line) if cell is None else self._run(line, cell)
        except HelpShown as shown:
            print(shown)
            return None

    # --- cells

    def watch_cells(self) -> None:
        """See every cell before IPython does, for `%%local` and `auto on`."""
        self.shell.input_transformers_cleanup.append(self._route)
        manager: Any = self.shell.input_transformer_manager
        is_complete = manager.check_complete

        def check_complete(cell: str) -> Any:
            """With `auto on` a terminal must not wait for the blank line that ends a cell magic."""
            self._enter_cell()
            try:
                return is_complete(cell)
            finally:
                self._leave_cell()

        manager.check_complete = check_complete
        self.shell.events.register("pre_execute", self._enter_cell)
        self.shell.events.register("post_execute", self._leave_cell)

    def _enter_cell(self) -> None:
        self._cells += 1

    def _leave_cell(self) -> None:
        self._cells = max(0, self._cells - 1)

    def _route(self, lines: list[str]) -> list[str]:
        """Input transformer: `%%local` is taken off, and with `auto on` other cells get a magic on top.

        What a running cell has IPython transform (`%time expression`, `%run`) is left as it is.
        """
        first = next((at for at, line in enumerate(lines) if line.strip()), None)
        if self._cells or first is None:
            return lines
        if lines[first].strip() == "%%local":
            return [*lines[:first], "\n", *lines[first + 1 :]]
        code = (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        line = next(code, "%dist")
        leaves = _LEAVES.fullmatch(line) and not hasattr(self.shell, "kernel")  # a terminal
        if not self.auto or leaves or _STAYS_HERE.match(line):
            return lines
        return [_AUTO_LINE, *lines]

    def _run(self, line: str, cell: str) -> Any:
        arguments = self.cell_parser.read(line)
        if arguments.tee and arguments.capture is None:
            raise UsageError("--tee shows what --capture keeps: `%%distributed --capture NAME --tee`")
        session = self._session_for_cell(arguments.auto)
        code, offset = _strip(cell, 0 if arguments.auto else 1)
        number = sessions.cell_number()
        _check_syntax(code, offset, number)
        ranks = _ranks(arguments.ranks, session)
        where: dict[str, Any] = {"number": number, "offset": offset, "grace": arguments.grace}
        show = not arguments.quiet and (arguments.capture is None or arguments.tee)
        if arguments.background:
            handle = session.run_in_background(code, ranks, arguments.timeout, show=show, **where)
            return self._keep(arguments.capture, handle)
        task = session.start_cell(code, ranks, show=show, keep=arguments.capture is not None, **where)
        self._keep(arguments.capture, task.result)
        task.wait(arguments.timeout)
        if arguments.auto and task.silent:
            print(f"ran on {describe_ranks(task.ranks)}")  # so that nobody takes it for a local cell
        return None

    def _session_for_cell(self, auto: bool) -> Session:
        try:
            return get_session()
        except SessionClosed as error:
            hint = "; with `%distributed auto off` cells run in the notebook again" if auto else ""
            raise SessionClosed(f"{error}{hint}") from None

    def _keep(self, name: str | None, value: Any) -> Any:
        if name is None:
            return value
        self.shell.user_ns[name] = value.output if isinstance(value, BackgroundCell) else value
        return value

    # --- verbs

    def _do(self, line: str) -> Any:
        verb, _, rest = line.strip().partition(" ")
        if verb in ("", "-h", "--help", "help"):
            raise HelpShown(self._overview())
        if verb not in self._verbs:
            raise UsageError(suggest_verb(verb, sorted(self._verbs)))
        parser, action = self._verbs[verb]
        return action(parser.read(rest))

    def _overview(self) -> str:
        rows = [(f"%distributed {verb}", parser.description) for verb, (parser, _) in self._verbs.items()]
        rows.append(("%%distributed", self.cell_parser.description))
        rows.append(("%%rank 0,2", "Run the cell on these ranks."))
        rows.append(("%%local", "Run the cell in the notebook, also while `auto on`."))
        words = table(rows, ("magic", "what it does"))
        flags = self.cell_parser.format_help()
        return f"{words}\n\n%dist and %%dist are the same. Each verb has --help.\n\n{flags}"

    def _start(self, arguments: argparse.Namespace) -> None:
        running = sessions.current_session()
        if running is not None and not running.closed:
            if not arguments.replace:
                count = arguments.n or len(running.ranks)
                raise UsageError(
                    f"a session with {_number_of_ranks(running)} is running already: "
                    f"`%distributed restart -n {count}` for a fresh set, "
                    "`%distributed start --replace ...` for one of another kind, or `%distributed stop`"
                )
            running.close()
        progress = _Progress()
        self._session = Session(
            arguments.n,
            gpus=arguments.gpus,
            backend=arguments.backend,
            init=not arguments.no_init,
            timeout=arguments.timeout,
            linger=arguments.linger,
            exact=arguments.exact,
            progress=progress,
        )
        progress.done(self._session)

    def _stop(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        session.close()
        self._session = None
        print(f"{_number_of_ranks(session)} stopped")
        if self.auto:
            self.auto = False
            print("auto is off: cells run in the notebook again")

    def _restart(self, arguments: argparse.Namespace) -> None:
        session = sessions.session_to_restart()
        progress = _Progress()
        session.restart(arguments.n, progress=progress)
        progress.done(session)

    def _status(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        rows = [
            (
                row["rank"],
                row["pid"],
                row["device"],
                row["state"],
                row["generation"],
                size(row["memory"]),
                size(row["device_memory"]),
                row["doing"],
            )
            for row in session.status()
        ]
        print(table(rows, ("rank", "pid", "device", "state", "generation", "memory", "GPU memory", "doing")))
        if self.auto:
            print("auto is on: every cell runs on all ranks (`%%local` for one that should not)")

    def _switch_auto(self, arguments: argparse.Namespace) -> None:
        if arguments.state == "on":
            get_session()
        self.auto = arguments.state == "on"
        print(
            "every cell runs on all ranks from now on; `%%local` keeps one here"
            if self.auto
            else "cells run in the notebook again"
        )

    def _push(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        missing = [name for name in arguments.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(
                f"the notebook has no {', '.join(map(repr, missing))} to push; define it in a local cell first"
            )
        ranks = _ranks(arguments.ranks, session)
        session.push({name: self.shell.user_ns[name] for name in arguments.names}, ranks)

    def _pull(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        if arguments.target is not None and len(arguments.names) != 1:
            raise UsageError("--as names one variable, so pull one at a time: `%distributed pull loss --as first`")
        ranks = _ranks(arguments.ranks, session)
        single = ranks[0] if ranks is not None and len(ranks) == 1 else None
        if len(session.ranks) == 1:
            single = 0
        targets = [arguments.target or name for name in arguments.names]
        for target in targets:
            if not target.isidentifier():
                raise UsageError(f"{target!r} is no variable name: add `--as NAME`")
        values = [session.pull(name, ranks if single is None else single) for name in arguments.names]
        self.shell.user_ns.update(zip(targets, values, strict=True))

    def _logs(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        texts = session.logs(_ranks(arguments.ranks, session), arguments.cell)
        text = "".join(_with_prefix(rank, printed, arguments.tail) for rank, printed in texts.items())
        if arguments.save is not None:
            try:
                with open(arguments.save, "w", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                raise UsageError(f"can't write {arguments.save}: {error.strerror}; give --save another file") from None
            print(f"{size(len(text.encode()))} written to {arguments.save}")
        elif len(text) > FOLD_LIMIT:
            raise UsageError(
                f"the log has {size(len(text.encode()))}, too much for a page: "
                "`%distributed logs --save FILE`, or `--tail 100`"
            )
        else:
            publisher = Publisher(0)
            publisher.text("stdout", text)
            publisher.complete()

    def _free(self, arguments: argparse.Namespace) -> None:
        freed = get_session().free()
        print(
            table(
                [(rank, size(max(0, report["private"])), size(report["device"])) for rank, report in freed.items()],
                ("rank", "memory freed", "GPU memory freed"),
            )
        )

    def _interrupt(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        if not session.interrupt(_ranks(arguments.ranks, session), now=arguments.now):
            print("nothing to interrupt: these ranks run nothing")

    def _stacks(self, arguments: argparse.Namespace) -> None:
        session = get_session()
        found = session.look_at_stacks(_ranks(arguments.ranks, session), native=arguments.native)
        print(stacks.render(found))


class _Progress:
    """Says what a start is doing, when it takes long enough to wonder."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    def __call__(self, text: str) -> None:
        if text.startswith("importing"):
            print(f"{text} …", flush=True)
        elif not text.startswith("ranks join"):
            print(text, flush=True)

    def done(self, session: Session) -> None:
        devices = sorted({info.device for info in session.ranks})
        group = f"process group {session.backend}" if session.backend != "none" else "no process group"
        print(f"{_number_of_ranks(session)} ready in {session.started_in:.1f} s: {', '.join(devices)}; {group}")


def _number_of_ranks(session: Session) -> str:
    return f"{len(session.ranks)} rank{'s' if len(session.ranks) != 1 else ''}"


def _ranks(text: str | None, session: Session) -> list[int] | None:
    if text is None:
        return None
    try:
        return list(parse_ranks(text, len(session.ranks)))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _strip(cell: str, above: int) -> tuple[str, int]:
    """The cell without the blank lines at its top, and how many lines stand above it then."""
    lines = cell.split("\n")
    blank = 0
    while blank < len(lines) - 1 and not lines[blank].strip():
        blank += 1
    return "\n".join(lines[blank:]), above + blank


def _check_syntax(code: str, offset: int, number: int) -> None:
    """Say a syntax error once, here, instead of on every rank."""
    try:
        source = "\n" * offset + TransformerManager().transform_cell(code)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks give them
            compile(source, f"Cell In[{number}]", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        raise UsageError(f"the cell has a syntax error, so it ran nowhere\n{text}") from None


def _with_prefix(rank: int, text: str, tail: int | None) -> str:
    lines = text.removesuffix("\n").split("\n") if text else []
    return "".join(f"[{rank}] {line}\n" for line in (lines if tail is None else lines[-tail:]))


# --- what each magic takes


def _add_ranks(parser: MagicParser) -> None:
    parser.add_argument("-r", "--ranks", metavar="RANKS", help="which ranks, for example 0,2-3 (default: all)")


def _add_group(parser: MagicParser) -> None:
    parser.add_argument(
        "-n", "--num-processes", dest="n", type=count, metavar="N", help="number of ranks (default: one per GPU)"
    )


def _cell_parser() -> MagicParser:
    parser = MagicParser("%%distributed", "Run the cell on all ranks.")
    _add_ranks(parser)
    parser.add_argument(
        "--background",
        "-b",
        action="store_true",
        help="return at once with a handle: .done .wait() .output .interrupt()",
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="interrupt the ranks after S seconds")
    parser.add_argument(
        "--grace",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds that ranks may wait in a collective for one that has raised (default: 1)",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="show no output (errors are shown)")
    parser.add_argument(
        "--capture",
        type=variable,
        metavar="NAME",
        help="keep the output as NAME[rank].stdout, .stderr, .outputs, .result, .error; don't show it",
    )
    parser.add_argument("--tee", action="store_true", help="with --capture: show it too")
    parser.add_argument("--auto", action="store_true", help=argparse.SUPPRESS)
    return parser


def _start_parser() -> MagicParser:
    parser = MagicParser("%distributed start", "Bring up ranks.")
    _add_group(parser)
    parser.add_argument(
        "--gpus", type=names, metavar="LIST", help="which GPUs, for example 0,2 (default: as many as ranks)"
    )
    parser.add_argument(
        "--backend", metavar="NAME", help="backend of the process group (default: nccl and gloo with GPUs, else gloo)"
    )
    parser.add_argument("--no-init", action="store_true", help="don't call init_process_group: the cells will")
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="seconds after which a collective gives up (default: 1800)"
    )
    parser.add_argument(
        "--linger",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds that the ranks outlive a killed kernel (default: 0)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="put back what an interrupted step has moved: buffers (BatchNorm) and random numbers",
    )
    parser.add_argument("--replace", action="store_true", help="stop the session that is running first")
    return parser


def _restart_parser() -> MagicParser:
    parser = MagicParser("%distributed restart", "End the ranks and bring up a fresh set; their variables are lost.")
    _add_group(parser)
    return parser


def _auto_parser() -> MagicParser:
    parser = MagicParser("%distributed auto", "Run every cell on all ranks, or stop doing so.")
    parser.add_argument("state", choices=("on", "off"))
    return parser


def _push_parser() -> MagicParser:
    parser = MagicParser("%distributed push", "Copy variables of the notebook to ranks.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    _add_ranks(parser)
    return parser


def _pull_parser() -> MagicParser:
    parser = MagicParser(
        "%distributed pull", "Copy variables of ranks to the notebook: a list by rank; of one rank its bare value."
    )
    parser.add_argument("names", nargs="+", metavar="NAME")
    _add_ranks(parser)
    parser.add_argument("--as", dest="target", type=variable, metavar="NAME", help="under another name")
    return parser


def _logs_parser() -> MagicParser:
    parser = MagicParser("%distributed logs", "Show all that a cell printed on ranks, the newest by default.")
    _add_ranks(parser)
    parser.add_argument("--cell", type=number, metavar="N", help="the cell's number")
    parser.add_argument("--tail", type=number, metavar="LINES", help="only the last lines of each rank")
    parser.add_argument("--save", metavar="FILE", help="write it to a file")
    return parser


def _interrupt_parser() -> MagicParser:
    parser = MagicParser(
        "%distributed interrupt",
        "Stop what ranks run: after the step they are in, if they train, else by KeyboardInterrupt.",
    )
    _add_ranks(parser)
    parser.add_argument("--now", action="store_true", help="don't wait for the step, or for a collective to end")
    return parser


def _stacks_parser() -> MagicParser:
    parser = MagicParser("%distributed stacks", "Show where the ranks are: their stacks, equal ones together.")
    _add_ranks(parser)
    parser.add_argument("--native", action="store_true", help="with the frames of C code, by py-spy")
    return parser
