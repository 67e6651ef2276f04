"""The verbs of `%distributed` about costs: memory, free, tflops, why, advise, peak, panel and snapshot.

Owns what they do and print. Their arguments are in `parsers`; what is shown below cells, in `cell_memory` and `costs`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from nbdist import shells
from nbdist.base.text import size, table
from nbdist.client.costs import advice
from nbdist.client.costs.cell_memory import CellMemory
from nbdist.client.costs.cell_steps import HERE, NOTHING_TIMED, CellSteps, explain, measure_peaks, without_peak
from nbdist.client.magics import memory_parts
from nbdist.client.session.current import get_session, living_session
from nbdist.client.session.session import Session, rank_set_of
from nbdist.errors import SessionBusy, UsageError
from nbdist.metrics.node import active_meter, host

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
        if arguments.parts or arguments.model or arguments.batch or arguments.ranks:
            self._show_parts(arguments)
            return None
        if arguments.mode is None:
            print(f"memory is {self.memory.mode}")
            return self.memory.last
        self.memory.mode = arguments.mode
        places = {"on": "a table below each cell shows", "compact": "a line below each cell shows"}
        where = places.get(arguments.mode)
        print(f"{where} what it cost in memory" if where else "cells do not show what they cost in memory")
        return None

    @staticmethod
    def _show_parts(arguments: argparse.Namespace) -> None:
        """Show what memory is held as (`%distributed memory --parts`)."""
        if arguments.mode is not None:
            raise UsageError(f"--parts shows what is held now, so it can't be combined with {arguments.mode!r}")
        if (arguments.model is None) != (arguments.batch is None):
            raise UsageError("the peak of a step needs both: `%distributed memory --parts --model model --batch batch`")
        session = living_session()
        print(memory_parts.held_table(session, arguments.ranks))
        if arguments.model is not None:
            print(memory_parts.peak_in_words(session, arguments.model, arguments.batch))

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
        print(table(rows, ("rank", "private memory freed", "left", "GPU memory freed", "left")))

    def switch_steps(self, arguments: argparse.Namespace) -> None:
        """Show what training steps take, or report whether that is shown (`%distributed tflops`)."""
        if arguments.state is not None:
            self.steps.switch(arguments.state == "on", here=living_session() is None)
        print(
            "below each cell that trains, lines show what its steps took"
            if self.steps.shown
            else "cells do not show what their training steps took"
        )

    def explain_steps(self, arguments: argparse.Namespace) -> None:
        """Show why the last cell's steps took as long as they did (`%distributed why`)."""
        print(self.explain_last())

    def explain_last(self) -> str:
        """Return why the last cell's steps took as long as they did."""
        if self.steps.trouble:
            return self.steps.trouble
        return "\n".join(part for part in (explain(self.steps.last), self._data_advice()) if part)

    def _data_advice(self) -> str:
        """Return what would end the waiting for data, measured where it was longest; empty if it was not long."""
        rank = advice.rank_to_ask(self.steps.last)
        if rank is None or (self.steps.last[rank].waiting or 0.0) < advice.WAITING:
            return ""
        try:
            return advice.data_advice_on(self._session_of(rank), rank)
        except (UsageError, SessionBusy) as error:
            return f"the DataLoader was not measured: {error}"

    def advise(self, arguments: argparse.Namespace) -> None:
        """Measure what would make the last cell's steps faster (`%distributed advise`)."""
        rank = advice.rank_to_ask(self.steps.last)
        if rank is None:
            raise UsageError(self.steps.trouble or NOTHING_TIMED)
        session = self._session_of(rank)
        if session is not None and arguments.ranks is not None:
            rank, *others = rank_set_of(session).among(arguments.ranks) or [rank]
            if others:
                raise UsageError(f"-r {arguments.ranks} names several ranks; measure on one of them: -r {rank}")
        print(advice.advise_on(session, rank, arguments.seconds))

    @staticmethod
    def _session_of(rank: int) -> Session | None:
        """Return the session in which a rank has trained; None for the notebook's own process."""
        if rank == HERE:
            return None
        session = get_session()
        if rank not in rank_set_of(session).living():
            raise UsageError(f"rank {rank}, which has trained, is not alive: run a cell that trains again")
        return session

    def measure_peak(self, arguments: argparse.Namespace) -> None:
        """Measure the best rate of matrix products (`%distributed peak`)."""
        dtypes = [arguments.dtype] if arguments.dtype else without_peak(self.steps.last.values())
        print(measure_peaks(living_session(), dtypes, arguments.seconds))

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
    active_meter.release()
    device = shells.free_memory(shell)
    after = host.anonymous_memory()
    return {
        "private": before - after,
        "private_left": after,
        "device": device,
        "device_left": shells.device_memory(),
    }
