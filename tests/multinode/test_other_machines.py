"""Nodes that differ from the notebook's machine: in their clock, name and folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.conftest import sharing
from tests.multinode.hosts import with_clock_ahead, with_name_and_without
from tests.multinode.nodes import invitations, joined, start

DAY = 86_400


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as found, sharing(found):
        found.ok("%load_ext nbdist\nimport os")
        yield found


def test_the_first_failure_is_first_though_its_machine_s_clock_is_ahead(kernel: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "raised"
    cell = start(kernel, arguments="-n 1")
    where, (token,) = invitations(cell)
    with joined(where, token, with_clock_ahead(DAY)):
        assert cell.finish().status == "ok"
        ahead = kernel.run("%%distributed\nimport time\nprint(int(time.monotonic()))").stdout.split()
        assert abs(int(ahead[-1]) - int(ahead[-4])) > DAY // 2, ahead
        outcome = kernel.run(
            "%%distributed\nimport os, time\n"
            f"gate = {str(gate)!r}\n"
            "if rank == 1:\n    open(gate, 'w').close()\n    raise ValueError('first')\n"
            "while not os.path.exists(gate): time.sleep(0.01)\n"
            "time.sleep(0.3)  # what has to be told apart\n"
            "raise ValueError('second')"
        )
        kernel.run("%distributed stop")
    assert outcome.evalue.startswith("rank 1 ") and "first" in outcome.evalue, str(outcome)


def test_a_machine_without_the_notebook_s_folder_says_where_its_ranks_work(kernel: Kernel, tmp_path: Path) -> None:
    folder = tmp_path / "project" / "here"
    folder.mkdir(parents=True)
    kernel.ok(f"before = os.getcwd()\nos.chdir({str(folder)!r})")
    cell = start(kernel, arguments="-n 1")
    where, (token,) = invitations(cell)
    with joined(where, token, with_name_and_without("node-b", folder.parent)):
        said = cell.finish().stdout
        worked = kernel.run("%%distributed -r @node-b\nimport os\nprint(os.getcwd())").stdout
        kernel.run("%distributed stop")
    kernel.ok("os.chdir(before)")
    home = Path.home()
    assert f"(node-b): it has no folder {folder}, so its ranks work in {home}" in said, said
    assert worked == f"[1] (node-b) {home}\n"
