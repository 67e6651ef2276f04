"""Run a notebook in a real kernel and show it in the terminal while it runs.

Owns the run, what is printed, and the two files it leaves: the executed notebook and the same as a page of
HTML. Independent of nbdist: any notebook will do. The kernel is always this environment's Python, whatever
other kernels are installed on the machine.

Exit code: 0, or 1 when a cell failed or the kernel died, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

SOURCE_LINES_SHOWN = 12
MARGIN = "  | "


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder for what is left behind")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a cell may take (default: 600)")
    parser.add_argument("--quiet", action="store_true", help="print one line, or the cells if one fails")
    arguments = parser.parse_args()

    arguments.output.mkdir(parents=True, exist_ok=True)
    executed = arguments.output / arguments.notebook.name
    page = executed.with_suffix(".html")
    executed.unlink(missing_ok=True)
    page.unlink(missing_ok=True)

    notebook = nbformat.read(arguments.notebook, as_version=4)
    screen = Screen(hold_back=arguments.quiet)
    run = Run(notebook, screen, folder=arguments.output, seconds_per_cell=arguments.timeout)
    began = time.monotonic()
    problem = run.to_the_end()
    seconds = time.monotonic() - began

    nbformat.write(notebook, executed)
    write_page(notebook, page)
    if problem is None:
        print(f"{arguments.notebook}: {run.number} cells in {seconds:.1f} s")
        return 0
    screen.release()
    print(
        f"{arguments.notebook}: {problem} (after {seconds:.1f} s). As far as it came: {executed}",
        file=sys.stderr,
    )
    return 130 if run.interrupted else 1


def write_page(notebook: NotebookNode, page: Path) -> None:
    from nbconvert import HTMLExporter  # a third of a second, and only at the end

    text, _ = HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": page.stem}})
    page.write_text(text, encoding="utf-8")


class Screen:
    """The terminal. Keeps everything back until `release` where only failures are of interest."""

    def __init__(self, hold_back: bool) -> None:
        self._held: list[str] | None = [] if hold_back else None
        self._at_line_start = True

    def line(self, text: str) -> None:
        """Write a line of our own, on a line of its own."""
        self.end_line()
        self._write(text + "\n")

    def end_line(self) -> None:
        """End the line that a cell has begun, if there is one."""
        if not self._at_line_start:
            self._write("\n")
        self._at_line_start = True

    def output(self, text: str) -> None:
        """Write what a cell printed, behind a margin. Progress bars may return to the start of their line."""
        if not text:
            return
        first = MARGIN if self._at_line_start else ""
        self._write(first + re.sub(r"([\n\r])(?=.)", rf"\1{MARGIN}", text, flags=re.DOTALL))
        self._at_line_start = text.endswith("\n")

    def release(self) -> None:
        """Write what was kept back, and keep nothing back from now on."""
        held, self._held = self._held, None
        self._write("".join(held or []))

    def _write(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
            return
        sys.stdout.write(text)
        sys.stdout.flush()


class Run(NotebookClient):
    """One run of a notebook, cell by cell, that shows every output when it comes."""

    def __init__(self, notebook: NotebookNode, screen: Screen, folder: Path, seconds_per_cell: int) -> None:
        self._kernel = own_kernel()
        self._interruption: asyncio.Future[Any] | None = None
        super().__init__(
            notebook,
            km=self._kernel,
            timeout=seconds_per_cell,
            # Without it each start warns that other users of this machine might listen on loopback.
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            # What the notebook writes stays out of the repository.
            resources={"metadata": {"path": str(folder)}},
            coalesce_streams=True,
            on_notebook_start=self._begin,
            on_cell_start=self._show_source,
            on_cell_executed=self._show_end,
        )
        self.owns_km = True  # made for this run, so it ends with it
        self.number = 0
        self.interrupted = False
        self._screen = screen
        self._total = sum(is_code(cell) for cell in notebook.cells)
        self._began = 0.0
        self._redrawn: dict[str, str] = {}

    def to_the_end(self) -> str | None:
        """Run all cells.

        Returns:
            None, or what went wrong in a few words; the details have been shown as output.
        """
        try:
            asyncio.run(self.async_execute())
        except CellExecutionError as error:
            if self.interrupted:
                return f"interrupted in cell {self.number} of {self._total}"
            return f"cell {self.number} of {self._total} failed with {error.ename}"
        except CellTimeoutError:
            return f"cell {self.number} of {self._total} took more than {self.timeout} s; --timeout allows more"
        except DeadKernelError:
            return f"the kernel died in cell {self.number} of {self._total}"
        except KeyboardInterrupt:
            self.interrupted = True
            return f"interrupted twice in cell {self.number} of {self._total}"
        return None

    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        """Keep one output of the running cell, as the base class does, and show it."""
        kept = super().output(outs, msg, display_id, cell_index)
        if kept is not None:
            self._screen.output(as_text(kept))
        return kept

    def _update_display_id(self, display_id: str, msg: dict[str, Any]) -> None:
        super()._update_display_id(display_id, msg)
        if msg["msg_type"] == "update_display_data":
            self._redrawn[display_id] = as_text(msg["content"])

    def _begin(self, notebook: NotebookNode) -> None:
        loop = asyncio.get_running_loop()

        def interrupt() -> None:  # the first Ctrl-C is the notebook's, the second one ours
            self.interrupted = True
            loop.remove_signal_handler(signal.SIGINT)
            self._interruption = asyncio.ensure_future(self._kernel.interrupt_kernel())

        loop.add_signal_handler(signal.SIGINT, interrupt)

    def _show_source(self, cell: NotebookNode, cell_index: int) -> None:
        self._began = time.monotonic()
        if not is_code(cell):
            for heading in re.findall(r"^#+ .*", cell.source, flags=re.MULTILINE):
                self._screen.line(f"\n{heading}")
            return
        self.number += 1
        lines = cell.source.splitlines()
        more = len(lines) - SOURCE_LINES_SHOWN
        self._screen.line(f"\ncell {self.number} of {self._total}")
        for line in lines[:SOURCE_LINES_SHOWN]:
            self._screen.line(f"    {line}".rstrip())
        if more > 0:
            self._screen.line(f"    ... {more} more lines")

    def _show_end(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        for text in self._redrawn.values():  # what was drawn over and over is shown as it was at the end
            self._screen.end_line()
            self._screen.output(text)
        self._redrawn.clear()
        self._screen.line(f"  {time.monotonic() - self._began:.1f} s")


def own_kernel() -> AsyncKernelManager:
    """Return a manager for the kernel of this very Python; other kernels of the machine are not seen."""
    folder = Path(sys.prefix) / "share" / "jupyter" / "kernels"
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(folder)]))


def is_code(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and bool(cell.source.strip())


def as_text(output: dict[str, Any]) -> str:
    """Return what a terminal can show of an output: its text, or the name of what it is."""
    kind = output.get("output_type", "display_data")
    if kind == "stream":
        return str(output["text"])
    if kind == "error":
        return "\n".join(output["traceback"]) + "\n"
    data = output["data"]
    text = data.get("text/plain") or f"<{', '.join(data)}>"
    return f"{text}\n"


if __name__ == "__main__":
    sys.exit(main())
