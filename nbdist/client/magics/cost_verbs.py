"""The verbs of `%distributed` about costs: memory, free, tflops, why, peak, panel and snapshot.

Owns what they do and print. Their arguments are in `parsers`; what is shown below cells, in `cell_memory` and `costs`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from nbdist import shells
from nbdist.client.costs.cell_memory import CellMemory
from nbdist.client.costs.cell_steps import CellSteps, explain, measure_peaks
from nbdist.client.session.session import get_session, living_session, rank_set_of
from nbdist.metrics.node import host
from nbdist.text import size, table

if TYPE_CHECKING:
    from nbdist.client.costs.memory_report import CellCost
    from nbdist.panel import Panel


class CostVerbs:
    """Shows costs in a notebook. Each verb except `snapshot` also works without a session.

    Args:
        shell: The notebook's shell.

    Attributes:
        memory: Shows below cells what they cost in memory.
        steps: Shows below cells what their training steps took.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.memory = CellMemory(shell)
        self.steps = CellSteps(shell)
        self._shell = shell
        self._panel: Panel | None = None  # once one is requested

    def switch_memory(self, arguments: argparse.Namespace) -> CellCost | None:
        """Show what cells cost, or return what the last one cost (`%distributed memory`)."""
        if arguments.mode is None:
            print(f"memory is {self.memory.mode}")
            return self.memory.last
        self.memory.mode = arguments.mode
        shown = {"on": "a table of what it cost in memory", "compact": "a line on what it cost in memory"}
        print(f"below each cell: {shown.get(arguments.mode, 'nothing about its memory')}")
        return None

    def free(self, arguments: argparse.Namespace) -> None:
        """Free memory on all ranks, or in the notebook's own process (`%distributed free`)."""
        session = living_session()
        freed: Mapping[Any, dict[str, int]]
        freed = session.free() if session is not None else {"notebook": _free_here(self._shell)}
        rows = [
            (
                who,
                size(max(0, report["private"])),
                size(report["private_left"]),
                size(report["device"]),
                size(report["device_left"]),
            )
            for who, report in freed.items()
        ]
        print(table(rows, ("rank", "memory freed", "left", "GPU memory freed", "left")))

    def switch_steps(self, arguments: argparse.Namespace) -> None:
        """Show what training steps take, or report whether that is shown (`%distributed tflops`)."""
        if arguments.state is not None:
            self.steps.switch(arguments.state == "on", here=living_session() is None)
        print(
            "below each cell that makes training steps: what they take"
            if self.steps.shown
            else "nothing about training steps below cells"
        )

    def explain_steps(self, arguments: argparse.Namespace) -> None:
        """Show why the last cell's steps took as long as they did (`%distributed why`)."""
        print(self.explain_last())

    def explain_last(self) -> str:
        """Return why the last cell's steps took as long as they did."""
        return explain(self.steps.last)

    def measure_peak(self, arguments: argparse.Namespace) -> None:
        """Measure the best rate of matrix products (`%distributed peak`)."""
        print(measure_peaks(living_session(), arguments.dtype, arguments.seconds))

    def show_panel(self, arguments: argparse.Namespace) -> None:
        """Show the panel, reusing one that is still open (`%distributed panel`)."""
        from IPython.display import display

        from nbdist.panel import Panel

        self.steps.measure()
        if self._panel is None or self._panel.comm is None:  # or the page has closed it
            self._panel = Panel()
        if arguments.rate is not None:
            self._panel.rate = arguments.rate
        if arguments.text:
            print(self._panel.text)
        else:
            display(self._panel)

    def snapshot(self, arguments: argparse.Namespace) -> None:
        """Write memory snapshots, or have ranks record allocations (`%distributed snapshot`)."""
        session = get_session()
        if arguments.record or arguments.stop:
            session.record_snapshots(0 if arguments.stop else arguments.events)
            print("ranks no longer record allocations" if arguments.stop else "ranks record allocations")
            return
        for rank in rank_set_of(session).among(arguments.ranks) or rank_set_of(session).living():
            path = session.snapshot(rank)
            print(f"rank {rank}: {path} ({size(path.stat().st_size)})")
        print("open them at https://pytorch.org/memory_viz")


def _free_here(shell: InteractiveShell) -> dict[str, int]:
    """Free memory in the notebook's own process, like `Session.free`."""
    before = host.anonymous_memory()
    device = shells.free_memory(shell)
    after = host.anonymous_memory()
    return {
        "private": before - after,
        "private_left": after,
        "device": device,
        "device_left": shells.device_memory(),
    }
