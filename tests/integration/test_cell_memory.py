"""What cells cost in memory, below them in a real notebook: here, on ranks, and after something went wrong."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.kernel import Kernel, Outcome

MIB = 1 << 20


def data_of(outcome: Outcome) -> dict[str, Any]:
    """What the cell's memory output carries."""
    found = [
        content["metadata"]["nbdist"]["memory"]
        for kind, content in outcome.events
        if kind == "display_data" and "nbdist" in content["metadata"]
    ]
    assert len(found) == 1, str(outcome)
    return dict(found[0])


def is_silent(outcome: Outcome) -> bool:
    return not outcome.displays


def consumed(outcome: Outcome) -> dict[str, float]:
    """MiB by rank."""
    return {rank: usage["cpu"]["consumed"] / MIB for rank, usage in data_of(outcome)["ranks"].items()}


def test_a_plain_notebook_shows_its_own_process(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    assert is_silent(kernel.ok("%distributed memory on"))
    outcome = kernel.ok("x = bytearray(50 << 20)")
    assert abs(data_of(outcome)["notebook"]["cpu"]["consumed"] - 50 * MIB) < MIB
    assert "+50.0 MiB" in outcome.plain[-1]
    kernel.ok("%distributed memory off")
    assert is_silent(kernel.ok("y = bytearray(50 << 20)"))


INTERRUPTS_IPYTHON = """import ast
class Interrupt(ast.NodeTransformer):
    def visit(self, node):
        get_ipython().ast_transformers.remove(self)
        raise KeyboardInterrupt
get_ipython().ast_transformers.append(Interrupt())"""


def test_cells_are_measured_on_after_an_interrupt_that_has_struck_outside_of_one(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\n%distributed memory on")
    kernel.ok(INTERRUPTS_IPYTHON)
    kernel.fails("x = 1", "KeyboardInterrupt")
    assert data_of(kernel.ok("x = 2"))["notebook"] is not None
    assert data_of(kernel.ok("get_ipython().run_cell('x = 3'); x = 4"))["notebook"] is not None
    kernel.ok("%distributed memory off")


def test_a_long_cell_of_blank_lines_and_comments_costs_no_time(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    kernel.ok("%distributed memory compact")
    assert data_of(kernel.ok("# one\n\n" * 200 + "x = 1"))["notebook"] is not None
    assert is_silent(kernel.ok("# one\n\n" * 200 + "%distributed memory off"))


def test_only_the_marked_cell_is_measured_while_off(ranks: Kernel) -> None:
    assert is_silent(ranks.ok("x = 1"))
    assert data_of(ranks.ok("%%memory\nx = bytearray(40 << 20)"))["notebook"]["cpu"]["consumed"] > 39 * MIB
    assert len(ranks.ok("%%memory compact  # one line\nx = 1").plain[-1].splitlines()) == 1


def test_a_cell_on_ranks_is_measured_on_each_of_them(ranks: Kernel) -> None:
    outcome = ranks.ok("%%memory\n%%distributed\nkept = bytearray((40 + 40 * rank) << 20)\nbytearray(90 << 20); pass")
    assert [round(size, -1) for size in consumed(outcome).values()] == [40, 80]
    peaks = [usage["cpu"]["peaked"] / MIB for usage in data_of(outcome)["ranks"].values()]
    assert all(abs(peak - 90) < 2 for peak in peaks)
    assert "@1" in outcome.plain[-1]
    ranks.ok("%%distributed\ndel kept")


def test_line_numbers_below_the_mark_are_those_of_the_notebook(ranks: Kernel) -> None:
    outcome = ranks.fails("%%memory\n%%distributed\n\n1 / 0", "RankError")
    assert "line 4" in outcome.traceback
    assert sorted(data_of(outcome)["ranks"]) == ["0", "1"]


def test_calls_and_several_runs_in_one_cell_count_together(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nparts = []")
    outcome = ranks.ok(
        "%%memory\nimport nbdist\nsession = nbdist.get_session()\n"
        "for _ in range(2):\n    session.run('parts.append(bytearray(40 << 20))')\n"
        "session.call(lambda: None)"
    )
    assert all(abs(size - 80) < 4 for size in consumed(outcome).values())
    ranks.ok("%%distributed\ndel parts")


def test_verbs_alone_have_no_line(ranks: Kernel) -> None:
    ranks.ok("%distributed memory compact")
    assert is_silent(ranks.ok("%distributed status"))
    ranks.ok("%distributed memory off")


def test_a_background_cell_has_its_line_when_it_ends(ranks: Kernel) -> None:
    ranks.ok("%distributed memory compact")
    cell = ranks.start("%%distributed --background\nkept = bytearray(40 << 20)")
    cell.finish()
    cell.wait_late("CPU: consumed")
    ranks.ok("%distributed memory off")
    ranks.ok("%%distributed\ndel kept")


def test_the_last_figures_can_be_asked_for(ranks: Kernel) -> None:
    ranks.ok("%%memory\n%%distributed -r 1\nkept = bytearray(40 << 20)")
    ranks.ok("cost = %distributed memory")
    assert ranks.value("list(cost.data['ranks'])") == ["1"]
    assert 39 * MIB < ranks.value("cost.data['ranks']['1']['cpu']['consumed']") < 42 * MIB


def test_a_cell_that_keeps_more_each_time_is_called_a_leak_the_third_time(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nlosses = []")
    cell = "%%memory\n%%distributed -r 0\nlosses.append(bytearray(40 << 20))"
    hints = [data_of(ranks.ok(cell))["hint"] for _ in range(3)]
    assert hints[:2] == ["", ""]
    assert "kept memory 3 times in a row" in hints[2]
    ranks.ok("%%distributed\ndel losses")


def test_wrong_words_are_refused_with_the_right_ones(ranks: Kernel) -> None:
    assert "compact" in ranks.fails("%distributed memory full", "UsageError").evalue
    refused = ranks.fails("%%memory full\nx = 1", "UsageError")
    assert "`%%memory compact`" in refused.evalue and is_silent(refused)


def test_an_experiment_works_in_cells_of_ranks_and_takes_their_results_along(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nimport nbdist, numpy\ne = nbdist.experiment('load').begin()")
    ranks.ok("%%distributed --quiet\nmodel = bytearray(40 << 20)\nscratch = numpy.ones(50 << 20, 'u1')\nscratch")
    lines = ranks.ok("%%distributed\ne.end(keep=['model'])\nprint('scratch' in globals(), 'model' in globals())").lines
    for rank in (0, 1):
        assert "deleted scratch" in lines[rank][0]
        assert lines[rank][-1] == "False True"
    freed = ranks.ok("%%distributed\nprint(e.data['memory']['CPU']['reclaimed'] >> 20)").lines
    assert all(abs(int(texts[0]) - 50) <= 1 for texts in freed.values())
    ranks.ok("%%distributed\ndel model, e")


def test_what_an_out_of_memory_error_holds_comes_back_with_free(ranks: Kernel) -> None:
    outcome = ranks.fails(
        "%%distributed -r 1\nimport torch\ndef train():\n    scratch = torch.ones(25 << 20)\n"
        "    return torch.empty(scratch.numel() << 30)\ntrain()",
        "RankError",
    )
    assert "nbdist: out of memory on cpu" in outcome.traceback
    assert "100 MiB  scratch (float32, 26214400)" in outcome.traceback
    rows = [line.split() for line in ranks.ok("%distributed free").stdout.splitlines()]
    assert rows[0][:5] == ["rank", "private", "memory", "freed", "left"]
    assert [row[0] for row in rows[1:]] == ["0", "1"]


def test_free_works_in_the_notebook_after_ranks_have_raised(own_ranks: Kernel) -> None:
    own_ranks.fails("%%distributed\n1 / 0", "RankError")
    own_ranks.ok("%distributed stop")
    assert own_ranks.ok("%distributed free").stdout.splitlines()[1].split()[0] == "notebook"


def test_free_gives_the_figure_of_each_rank(ranks: Kernel) -> None:
    ranks.ok("%%distributed -r 1 --quiet\nimport numpy\nnumpy.ones(60 << 20, 'u1')")
    freed = ranks.value("__import__('nbdist').get_session().free()")
    assert freed[1]["private"] > 55 * MIB > freed[0]["private"]
    assert freed[1]["private_left"] > 0


def test_an_error_in_the_notebook_itself_is_explained_and_freed_too(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    outcome = kernel.fails("import numpy\nscratch = numpy.ones(40 << 20, 'u1')\nnumpy.ones(1 << 50)", "MemoryError")
    assert "nbdist: out of memory on cpu" in outcome.stdout
    assert "scratch (uint8, 41943040)" in outcome.stdout
    kernel.run("def fill():\n    held = bytearray(80 << 20)\n    1 / 0\nfill()")
    row = kernel.ok("%distributed free").stdout.splitlines()[1].split()
    assert row[0] == "notebook"
    assert float(row[1]) > 75


@pytest.mark.gpu
def test_after_an_out_of_memory_error_of_a_gpu_its_memory_comes_back(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\nimport torch")
    cell = "def fill():\n    held = torch.ones(64 << 20, device='cuda')\n    torch.ones(1 << 45, device='cuda')\nfill()"
    outcome = kernel.fails(cell, "OutOfMemoryError")
    assert "nbdist: out of memory on cuda:0" in outcome.stdout
    assert "held (float32, 67108864)" in outcome.stdout
    kernel.ok("%distributed free")
    assert kernel.value("torch.cuda.memory_reserved()") == 0


def test_a_rank_that_died_is_missing(own_ranks: Kernel) -> None:
    outcome = own_ranks.fails(
        "%%memory\n%%distributed\nimport os\nif rank == 1:\n    os.kill(os.getpid(), 9)", "RankDied"
    )
    assert data_of(outcome)["missing"] == {"1": "died"}
    assert "rank 1: n/a, it died" in outcome.plain[-1]
