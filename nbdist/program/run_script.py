"""Runs a script on ranks of this machine, as torchrun does, with output by rank and the first failure first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nbdist.errors import LaunchError, UsageError
from nbdist.launcher import notebook_launcher
from nbdist.program.costs import ProgramCosts, summary
from nbdist.program.ends import exit_code, terminable
from nbdist.program.on_rank import run_program


def run(script: Path, arguments: Sequence[str], count: int | None, on: str | None = None) -> int:
    """Run a script on ranks, and print what they spent.

    Args:
        script: The script.
        arguments: What it finds in `sys.argv`.
        count: Number of ranks, on each machine; None: one for each GPU.
        on: The profile of the machines, which reach the script at the same path; None: this machine.

    Returns:
        The exit code: 0, 1 if a rank failed, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        UsageError: There is no such file or profile, or the number of ranks is invalid. Nothing was started.
    """
    if not script.is_file():
        raise UsageError(f"there is no file {script}: pass the path of a script or notebook")
    try:
        with terminable():
            found = notebook_launcher(_named(script, arguments), (), count, on=on, start_method="warm")
    except LaunchError as error:
        print("\n".join([f"nbdist: {error}", *error.__notes__]), file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("nbdist: interrupted; all ranks have ended", file=sys.stderr)
        return exit_code(interrupt)
    spent = [each for each in found if isinstance(each, ProgramCosts)]
    print(summary(spent, max(each.seconds for each in spent)))
    return 0


def _named(script: Path, arguments: Sequence[str]) -> Callable[[], ProgramCosts]:
    """Return what ranks call, under the name that messages show."""
    path, given = str(script.absolute()), list(arguments)

    def program() -> ProgramCosts:
        return run_program(path, given)

    program.__name__ = script.name
    return program
