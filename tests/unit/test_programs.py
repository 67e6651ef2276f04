"""Which programs a cell has started: what the kernel says about their start is a hundredth of a second wide."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from nbdist.worker.cell.programs import Programs

TIMES = 20  # of which some are within one tick of the kernel's clock


@contextmanager
def program() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_program_that_was_started_right_before_the_cell_is_none_of_its_own() -> None:
    programs = Programs()
    for _ in range(TIMES):
        with program() as pid:
            programs.begin()
            assert pid not in programs.to_interrupt(again=True)


def test_a_program_that_is_started_right_after_its_beginning_is() -> None:
    programs = Programs()
    for _ in range(TIMES):
        with program():
            programs.begin()
            with program() as pid:
                assert pid in programs.to_interrupt(again=True)
