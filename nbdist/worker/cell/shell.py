"""The IPython shell of a rank: as in a notebook, but its results and displays go out by the rank's display lane.

Owns how a cell is compiled, named, run and rendered. Independent of the wire.
"""

from __future__ import annotations

import builtins
import contextlib
import linecache
import os
import runpy
import sys
import threading
import traceback as tracebacks
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from IPython.core import page
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist import shells
from nbdist.errors import InteractionError, NbdistError, UsageError
from nbdist.metrics.allocation import oom
from nbdist.wire.messages.cells import Failure
from nbdist.wire.questions.knowing import KnownFailure
from nbdist.worker.cell import class_sources, failures, keyboard
from nbdist.worker.cell.interrupts import CellLoop
from nbdist.worker.cell.launched import is_plain_exit
from nbdist.worker.cell.programs import run_command
from nbdist.worker.cell.scripts import ScriptFolders
from nbdist.worker.lanes.display_lane import DisplayLane

_NO_POST_MORTEM = (
    "%debug does not work on ranks, where each cell frees the frames of the last one: run the cell that fails again, "
    "then use `%distributed debug` in a separate cell"
)
_NO_DEBUGGER = (
    "%pdb does not work on ranks, because all of them would wait for you: after a failure, use `%distributed debug`"
)
_CLEAR_LIMIT = 1.0  # seconds that finalizers of an interrupted cell may take before the next one begins
_KEPT = 10  # errors of a cell that IPython has shown: a loop may show one in each turn
_MAGIC_ADVICE = "use it in a separate cell (with `auto on`, in one that begins with `%%local`)."
_CELL_MAGIC_ADVICE = {"%%memory": "put it above `%%distributed`."}
_SECOND_ADVICE = "another line above it already sends the cell to ranks: remove one of the two lines."


class CellCompiler(CachingCompiler):
    """Compiles a cell so that its line numbers are those of the notebook, where a magic stands above the code."""

    offset = 0
    file = ""  # what debuggers know the cell's code by, "" for IPython's own name
    _current = ""

    def get_code_name(self, raw_code: str, code: str, number: int) -> str:
        return self.file or super().get_code_name(raw_code, code, number)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        self._current = super().cache("\n" * self.offset + transformed_code, number, raw_code)
        return self._current

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        padding = "\n" * self.offset if filename == self._current else ""
        return super().ast_parse(padding + source, filename, symbol)


class RankHistory(HistoryManager):
    """Keeps `In`, and no name `_i7` for each cell beside it: sessions run cells by the ten thousand."""

    shell: Any
    _newest = ("", "", "", "")  # inputs, the newest first

    def store_inputs(self, line_num: int, source: str, source_raw: str | None = None) -> None:
        """Store inputs, see `HistoryManager`; there is no database for them."""
        newest = (source if source_raw is None else source_raw).rstrip("\n")
        self.input_hist_parsed.append(source.rstrip("\n"))
        self.input_hist_raw.append(newest)
        self._newest = newest, *self._newest[:3]
        self.shell.push(dict(zip(("_i", "_ii", "_iii"), self._newest[1:], strict=True)), interactive=False)


class RankDisplayHook(DisplayHook):
    """Sends the value of a cell's last expression instead of printing it."""

    shell: Any
    result_text: str | None = None

    def write_output_prompt(self) -> None: ...

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        self.result_text = format_dict.get("text/plain")
        self.shell.lane.show("result", format_dict, md_dict or {})

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Keep no copy: a history of every image shown would only grow."""

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankDisplayPublisher(DisplayPublisher):
    """Sends what `display` and its friends show."""

    shell: Any

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: object,
    ) -> None:
        display_id = (transient or {}).get("display_id", "")
        self.shell.lane.show("update" if update else "display", data, metadata or {}, display_id)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.lane.show("clear", {}, {}, wait=wait)


class RankShell(InteractiveShell):
    """The shell in which a rank runs cells. Made once per process by `make`."""

    compiler_class = CellCompiler
    displayhook_class = RankDisplayHook
    display_pub_class = RankDisplayPublisher

    compile: CellCompiler
    displayhook: RankDisplayHook
    history_manager: Any
    lane: DisplayLane
    own_names: Mapping[str, Any] = {}  # `rank`, `world_size`, ...: there again after `%reset`
    caught: bool = False  # whether a failure came out of the middle of a training step
    _loop: CellLoop
    _scripts: ScriptFolders
    _failures: list[tuple[BaseException, Failure]]  # what has failed in what runs, or ran last, the first first
    _kept: list[tuple[BaseException, Failure]]  # ... and in the last cell, if something else than a cell has run since
    _gone: KnownFailure  # what has failed last of what was forgotten
    _explain: Callable[[BaseException], NbdistError | None]
    _undisturbed: Callable[[], contextlib.AbstractContextManager[None]]

    @classmethod
    def prepare(cls) -> RankShell:
        """Return the shell as far as it is the same for all ranks. The template makes it before it forks them."""
        config = Config()
        config.HistoryManager.enabled = False  # a database and a thread that no rank needs
        config.IPCompleter.use_jedi = False  # too slow to answer while Tab is held
        shell: RankShell = cls.instance(config=config)
        shell._failures, shell._kept, shell._gone = [], [], KnownFailure()
        shell._scripts = ScriptFolders()
        failures.keep_last_comments()
        class_sources.find_classes()
        return shell

    @classmethod
    def make(
        cls,
        lane: DisplayLane,
        names: dict[str, Any],
        explain: Callable[[BaseException], NbdistError | None],
        undisturbed: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> RankShell:
        """Return the shell; it replaces the notebook's, if that was inherited.

        Args:
            lane: What cells display goes there.
            names: In its namespace.
            explain: Returns an error that explains another one, if there is more to say.
            undisturbed: Holds interrupts back in its body.
        """
        there = shells.current()
        shell = cls.prepare() if there is None or isinstance(there, cls) else cls._in_place_of(there)
        shell.lane = lane
        shell.starting_dir = os.getcwd()
        shell.user_ns["_dh"][:] = [Path.cwd()]
        shell.own_names = names
        shell.user_ns.update(names)
        shell._explain, shell._undisturbed = explain, undisturbed
        shell._loop = CellLoop()
        shell.loop_runner = shell._loop.run
        shell.set_hook("show_in_pager", page.as_hook(shell._show_in_pager), 99)  # type: ignore[no-untyped-call]
        warnings.filterwarnings("ignore", message="To exit: use 'exit'")
        _refuse_magics(shell)
        return shell

    @classmethod
    def _in_place_of(cls, notebook: InteractiveShell) -> RankShell:
        """Return the shell, in a process that was forked from the notebook, whose module and names it leaves alone."""
        module, cells = sys.modules["__main__"], shells.cell_files()
        type(notebook).clear_instance()
        shell = cls.prepare()
        sys.modules["__main__"] = module
        for names in (vars(module), vars(builtins)):
            if "get_ipython" in names:
                names["get_ipython"] = shell.get_ipython
        getattr(shell.compile, "_filename_map", {}).update(cells)
        shell.display_formatter = notebook.display_formatter  # which knows how figures of its libraries are shown
        return shell

    def init_history(self) -> None:
        """Keep the history of one process, not on disk."""
        self.history_manager = RankHistory(shell=self, parent=self)
        self.configurables.append(self.history_manager)

    def init_prompts(self) -> None:
        """Set no `sys.ps1`: libraries take it for a person at a prompt, and refuse to train distributed."""

    def init_user_ns(self) -> None:
        """Fill the namespace, at the beginning and after `%reset`."""
        super().init_user_ns()  # type: ignore[no-untyped-call]
        self.user_ns.update(self.own_names)

    def run(self, code: str, number: int, offset: int, file: str = "") -> tuple[Failure | None, str | None]:
        """Run a cell.

        Args:
            code: Its body.
            number: Its number in the notebook.
            offset: Lines of the cell that stand above the body.
            file: What debuggers know it by.

        Returns:
            What it raised, and the text of its last value; both may be None.
        """
        self.displayhook.result_text = None
        self._start_cell(number, offset, file)
        result = super().run_cell(code, store_history=True)  # type: ignore[no-untyped-call]
        error = result.error_before_exec or result.error_in_exec
        if error is not None and not self._is_known(error):  # an exception handler of the user's has dealt with it
            self._add_failure(error, error.__traceback__)
        failure = self.failure
        return failure, self.displayhook.result_text if failure is None else None

    def run_cell(self, *args: object, **keywords: object) -> Any:
        """Run a cell from inside of another one: its lines are counted from its own first line."""
        offset, self.compile.offset = self.compile.offset, 0
        file, self.compile.file = self.compile.file, ""
        try:
            return super().run_cell(*args, **keywords)  # type: ignore[no-untyped-call]
        finally:
            self.compile.offset, self.compile.file = offset, file

    @property
    def failure(self) -> Failure | None:
        """What has failed since the last `forget_failure`: the first error, with the tracebacks of all; None: nothing.

        An interrupt comes first, whatever failed before it: it decides what is done with the models.
        """
        if not self._failures:
            return None
        ordered = sorted(self._failures, key=lambda entry: not isinstance(entry[0], KeyboardInterrupt))
        tracebacks = "\n\n".join(failure.traceback for _, failure in self._failures)
        return msgspec.structs.replace(ordered[0][1], traceback=tracebacks)

    def fail(self, error: BaseException) -> Failure:
        """Return the failure to send for an exception that was raised outside `run`."""
        self._add_failure(error, error.__traceback__)
        assert self.failure is not None
        return self.failure

    def forget_failure(self) -> None:
        """Let go of the frames of what has failed: they may hold tensors and DataLoader workers."""
        self._gone = msgspec.structs.replace(self.known_failure, gone=True)
        for error, _ in self._failures + self._kept:
            if isinstance(error, KeyboardInterrupt):
                _clear_apart(error)
            else:
                shells.clear_frames(error)
        self._failures, self._kept, self.caught = [], [], False
        shells.forget_failure(self)

    def keep_failure(self) -> None:
        """Keep the frames of what has failed in a cell, for a debugger; what fails from now on is something else."""
        if not self._kept:
            self._kept = self._failures
        elif self._failures is not self._kept:
            for error, _ in self._failures:
                shells.clear_frames(error)
        self._failures, self.caught = [], False

    @property
    def known_failure(self) -> KnownFailure:
        """What can be debugged, or could have been. From any thread."""
        kept = self._kept or self._failures
        if not kept:
            return self._gone
        failure = kept[0][1]
        return KnownFailure(failure.name, failure.text, failure.kind, failure.when)

    def look_into_failure(self) -> None:
        """Open a debugger at what has failed in the last cell.

        Raises:
            UsageError: Its frames are gone.
        """
        if not self._kept:
            raise UsageError("there is nothing to debug on this rank")
        keyboard.look_into(self._kept[0][0])

    def learn_source(self, filename: str, number: int, text: str) -> None:
        """Let tracebacks show a cell of the notebook that has come here only as a compiled function."""
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        getattr(self.compile, "_filename_map", {})[filename] = number

    def is_main(self, function: object) -> bool:
        """Return whether a function belongs to `__main__`: to a cell, or to a file that `%run` runs or has run."""
        return bool(getattr(function, "__module__", None) == self.user_module.__name__)

    def _start_cell(self, number: int, offset: int, file: str) -> None:
        self.compile.offset, self.compile.file = offset, file
        if number:
            self.execution_count = number
        self._loop.provide()
        inputs = self.history_manager.input_hist_parsed
        inputs.extend([""] * (self.execution_count - len(inputs)))
        raw_inputs = self.history_manager.input_hist_raw
        raw_inputs.extend([""] * (self.execution_count - len(raw_inputs)))

    def showtraceback(
        self,
        exc_tuple: object = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        """Fail the cell for what IPython would show instead of raising; print what the user's own code shows."""
        try:
            _, error, traceback = self._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        except ValueError:
            print("No traceback available to show.", file=sys.stderr)
            return
        in_cell = threading.current_thread() is threading.main_thread()
        if not in_cell or failures.is_users_code(sys._getframe(1).f_code):
            print(self._rendered(error, traceback, compiled=running_compiled_code), file=sys.stderr)
        elif not is_plain_exit(error) and len(self._failures) < _KEPT:
            self._add_failure(error, traceback, compiled=running_compiled_code)

    def showsyntaxerror(self, filename: str | None = None, running_compiled_code: bool = False) -> None:
        """Show a syntax error like `showtraceback`."""
        self.showtraceback(running_compiled_code=running_compiled_code)

    def safe_execfile(self, fname: Any, *where: Any, exit_ignore: bool = False, **keywords: Any) -> None:
        """Run a file for `%run`. An error ends the cell there: going on would leave ranks at different places."""
        self._scripts.enter(Path(fname))
        try:
            super().safe_execfile(fname, *where, **keywords | {"raise_exceptions": True})  # type: ignore[no-untyped-call]
        except SystemExit as end:
            if not (exit_ignore or is_plain_exit(end)):
                raise

    def safe_run_module(self, mod_name: str, where: dict[str, Any]) -> None:
        """Run a module for `%run -m`, like `safe_execfile`."""
        try:
            where.update(runpy.run_module(str(mod_name), run_name="__main__", alter_sys=True))
        except SystemExit as end:
            if not is_plain_exit(end):
                raise

    def _rendered(self, error: BaseException, traceback: Any, *, compiled: bool = True) -> str:
        """Return the traceback to show.

        Args:
            compiled: Of a SyntaxError: whether code that was running has raised it, so that its frames are of interest.
        """
        trimmed = failures.trim(traceback, innermost=not isinstance(error, KeyboardInterrupt | SyntaxError))
        if isinstance(error, SyntaxError):
            frames: Any = tracebacks.extract_tb(trimmed) if compiled else []
            return str(self.SyntaxTB.stb2text(self.SyntaxTB.structured_traceback(type(error), error, frames)))
        error = self._explain(error) or error
        rendered = failures.render(type(error), error, trimmed, self.InteractiveTB)
        explained = oom.explain(error, self.user_ns)
        return f"{rendered}\n{explained}" if explained else rendered

    def _add_failure(self, error: BaseException, traceback: object, *, compiled: bool = True) -> None:
        """Keep it; in place of what it came from, which its traceback shows as well."""
        interrupt = failures.answered_by_exit(error)
        if interrupt is not None:
            error, traceback = interrupt, interrupt.__traceback__
        with self._undisturbed():  # else the interrupt that follows from a failure elsewhere would hide this one
            rendered = self._rendered(error, traceback, compiled=compiled)
        self.caught = self.caught or failures.passed_through_step(error)
        failure = failures.describe(self._explain(error) or error, rendered)
        parts = shells.chain(error)
        known = (place for place, (earlier, _) in enumerate(self._failures) if any(earlier is part for part in parts))
        place = next(known, len(self._failures))
        self._failures[place : place + 1] = [(error, failure)]

    def _is_known(self, error: BaseException) -> bool:
        return is_plain_exit(error) or any(known is error for known, _ in self._failures)

    def _format_exception_for_storage(self, exception: BaseException, *_: object, **__: object) -> dict[str, Any]:
        """Render no second traceback for a history that nobody reads, as IPython 9 does."""
        return {"ename": type(exception).__name__, "evalue": "", "traceback": []}

    @contextlib.contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Keep no copy of what is printed, as IPython 9 does for its history."""
        yield

    def system(self, cmd: str) -> None:
        """Run `!cmd`, with the rank's own stdout and stderr."""
        command = self.var_expand(cmd, depth=1)  # type: ignore[no-untyped-call]
        self.user_ns["_exit_code"] = run_command(command, self._undisturbed)

    system_piped = system_raw = system

    def debugger(self, force: bool = False) -> None:
        """Refuse `%debug`: with the cell it is in, the frames of the last failure are gone."""
        if force:
            raise UsageError(_NO_POST_MORTEM)

    @property
    def call_pdb(self) -> bool:
        """Whether a debugger opens after a failure: never, since all ranks would wait for the user."""
        return False

    @call_pdb.setter
    def call_pdb(self, wanted: bool) -> None:
        if wanted:
            raise InteractionError(_NO_DEBUGGER)

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing: ranks have no GUI event loop; figures are shown as images."""

    def ask_exit(self) -> None:
        """End the cell, not the rank, on `exit`."""
        raise SystemExit

    def _show_in_pager(self, data: object, start: int, screen_lines: int) -> None:
        bundle = data if isinstance(data, dict) else {"text/plain": data}
        self.lane.show("display", {"text/plain": str(bundle.get("text/plain", ""))}, {})


def _clear_apart(error: BaseException) -> None:
    """Clear the frames of an interrupt in a thread of their own, which may not come to its end.

    An interrupt between the acquiring of a lock and its `with` block leaves the lock taken, and a finalizer may wait
    for it forever: that of a DataLoader's iterator does. Between cells nobody could interrupt that.
    """
    thread = threading.Thread(target=shells.clear_frames, args=(error,), name="nbdist-clear", daemon=True)
    thread.start()
    thread.join(_CLEAR_LIMIT)


def _refuse_magics(shell: RankShell) -> None:
    """Say where the notebook's own magics belong, instead of "not found"."""

    def refuse(name: str) -> None:
        def magic(*_: str) -> NoReturn:
            raise UsageError(f"{name} works in the notebook, not on ranks: {advice}")

        kind = "cell" if name.startswith("%%") else "line"
        advice = _MAGIC_ADVICE if kind == "line" else _CELL_MAGIC_ADVICE.get(name, _SECOND_ADVICE)
        shell.magics_manager.register_function(magic, kind, name.strip("%"))

    for name in ("%distributed", "%dist", "%%distributed", "%%dist", "%%rank", "%%local", "%%memory"):
        refuse(name)
