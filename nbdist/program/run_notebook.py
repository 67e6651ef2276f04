"""Runs a notebook from top to end in the kernel `python3`, with parameters as papermill has them, and saves it.

nbclient, which papermill uses as well, runs the cells; without it one line says what to install.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import keyword
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nbdist.base.text import did_you_mean, number_or_text
from nbdist.errors import PackageError, UsageError
from nbdist.program.costs import summary
from nbdist.program.ends import exit_code, terminable
from nbdist.program.notebook_client import make_client

_AGAIN, _PATIENCE = 5.0, 20.0  # seconds until an interrupt is repeated, and until the kernel is killed
_START = re.compile(r"^(%(?:distributed|dist)[ \t]+start\b)(.*)$", re.MULTILINE)
_PLACE = re.compile(r"[ \t]*(?<!\S)--on[ \t=]+\S+")
_COUNT = re.compile(r"[ \t]*(?<!\S)(?:-n|--num-processes)(?:[ \t=]+(?:\{[^}]*\}|\S+)|\d+)")


def run(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, str],
    count: int | None,
    on: str | None = None,
    *,
    force: bool = False,
) -> int:
    """Run a notebook, and save it with its outputs, also if a cell fails or the run is interrupted.

    Args:
        notebook: The notebook.
        output: Where to save it.
        parameters: The new values of variables of the cell tagged `parameters`, as they were typed.
        count: Number of ranks in place of that of its `%distributed start`; None: as it says.
        on: The profile of the machines in place of that line's; None: as it says.
        force: Whether to overwrite the output.

    Returns:
        The exit code: 0, 1 if a cell failed, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        UsageError: The notebook can't be read, or can't have these parameters. Nothing was run.
        PackageError: nbclient or nbformat is missing.
    """
    nbclient, nbformat = _packages()
    content = _read(notebook, nbformat)
    _check_output(notebook, output, force)
    _set_parameters(content, parameters, nbformat, notebook)
    if count is not None:
        _set_flag(content, f"-n {count}", _COUNT, notebook)
    if on is not None:
        _set_flag(content, f"--on {shlex.quote(on)}", _PLACE, notebook)
    reason, code = "", 0
    client = make_client(nbclient, content, notebook.parent)
    began = time.monotonic()
    execution = Execution(client)
    try:
        with terminable():
            execution.start()
            execution.wait()
    except KeyboardInterrupt as interrupt:
        execution.stop()
        reason, code = "interrupted", exit_code(interrupt)
    if execution.error is not None and not reason:
        if not isinstance(
            execution.error, nbclient.exceptions.CellExecutionError | nbclient.exceptions.DeadKernelError
        ):
            raise execution.error
        reason, code = str(execution.error).strip(), 1
    nbformat.write(content, output)
    if reason:
        print(reason, file=sys.stderr)
        print(f"nbdist: {notebook} did not reach its end; as far as it came: {output}", file=sys.stderr)
        return code
    if client.spent:
        print(summary(client.spent, time.monotonic() - began))
    print(f"wrote {output}")
    return 0


def _packages() -> tuple[ModuleType, ModuleType]:
    try:
        import nbclient
        import nbclient.exceptions
        import nbformat
    except ImportError as error:
        raise PackageError(
            f"running a notebook needs {error.name}: `pip install nbclient nbformat`, or `pip install 'nbdist[run]'`"
        ) from None
    return nbclient, nbformat


def _read(path: Path, nbformat: Any) -> Any:
    from nbdist.export.source.notebook_file import read_notebook

    read_notebook(path)  # for its errors
    return nbformat.read(path, as_version=4)


def _check_output(notebook: Path, output: Path, force: bool) -> None:
    if output.suffix != ".ipynb":
        raise UsageError(f"{output} is not a notebook: name it with the suffix .ipynb")
    if not output.parent.is_dir():
        raise UsageError(f"{output} can't be written: there is no folder {output.parent}")
    if output.exists() and not force:
        same = " (it is the notebook itself)" if output.resolve() == notebook.resolve() else ""
        raise UsageError(f"{output} exists already{same}: pass --force to overwrite it")


# --- parameters


def _set_parameters(content: Any, parameters: Mapping[str, str], nbformat: Any, notebook: Path) -> None:
    """Add a cell that sets the parameters below the one with their defaults, in place of an earlier one."""
    if not parameters:
        return
    tagged = [cell for cell in content.cells if "parameters" in cell.metadata.get("tags", [])]
    if not tagged:
        raise UsageError(f"{notebook} has no cell tagged `parameters`, which has the variables that -p may set")
    known = _names(tagged[0].source)
    for name in parameters:
        if name not in known:
            hint = did_you_mean(name, known, "{}")
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(f"{notebook} has no parameter {name!r}{hint} Its cell tagged `parameters` sets: {listed}.")
    content.cells = [each for each in content.cells if "injected-parameters" not in each.metadata.get("tags", [])]
    lines = [f"{name} = {_value(text)!r}" for name, text in parameters.items()]
    magic = re.match(r"(?:[ \t]*(?:#.*)?\n)*(%%.*\n)", tagged[0].source)  # where the defaults are set: ranks, too
    source = (magic[1] if magic else "") + "# Parameters\n" + "\n".join(lines)
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
    content.cells.insert(content.cells.index(tagged[0]) + 1, cell)


def _names(source: str) -> set[str]:
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError as error:
        raise UsageError(f"the cell tagged `parameters` is not Python ({error.msg}, line {error.lineno})") from None
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {name for name in names if not keyword.iskeyword(name)}


def _value(text: str) -> Any:
    """Return what a typed value means: True, False, None, a number, else the text; as papermill reads it."""
    words = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
    return words[text] if text in words else number_or_text(text)


def _set_flag(content: Any, flag: str, former: re.Pattern[str], notebook: Path) -> None:
    """Have the notebook start its ranks with a flag, in place of the one that it has."""
    changed = 0
    for cell in content.cells:
        if cell.cell_type == "code":
            before = copy.copy(cell.source)
            cell.source = _START.sub(lambda line: f"{line[1]} {flag}{former.sub('', line[2]).rstrip()}", before)
            changed += cell.source != before or _START.search(before) is not None
    if not changed:
        name = flag.partition(" ")[0]
        raise UsageError(f"{notebook} has no line `%distributed start`, which {name} would change: leave out {name}")


class Execution:
    """A notebook that runs in a thread of its own, since nbclient would take the signals of the main thread.

    Args:
        client: nbclient's.

    Attributes:
        error: Why it has ended before its time.
    """

    def __init__(self, client: Any) -> None:
        self.error: BaseException | None = None
        self._client = client
        self._stopped = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._execute, name="nbdist-notebook", daemon=True)
        client.on_cell_start = self._refuse

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end. Signals raise here."""
        while not self._done.wait(0.5):  # a `join` that a signal interrupts takes the thread for ended
            pass

    def stop(self) -> None:
        """Interrupt the cell that runs, and wait for the kernel's end; kill it if that takes too long."""
        self._stopped = True
        began = asked = time.monotonic()
        self._signal(signal.SIGINT)
        while not self._done.is_set():
            with contextlib.suppress(KeyboardInterrupt):  # another Ctrl-C: it is ending already
                self._done.wait(0.2)
            now = time.monotonic()
            if now - asked > _AGAIN:
                self._signal(signal.SIGINT if now - began < _PATIENCE else signal.SIGKILL)
                asked = now

    def _execute(self) -> None:
        try:
            self._client.execute()
        except BaseException as error:  # the main thread raises or shows it
            self.error = error
        finally:
            self._done.set()

    def _refuse(self, **_: object) -> None:
        if self._stopped:
            raise KeyboardInterrupt

    def _signal(self, number: int) -> None:
        pid = getattr(getattr(self._client.km, "provisioner", None), "pid", None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
