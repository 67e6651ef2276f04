"""How a cell's memory reads: a line and a table, over ranks as min, mean and max."""

from __future__ import annotations

import json

import pytest

from nbdist.client.costs.cell_memory import parse_mark, raise_peaks, strip_mark
from nbdist.client.costs.memory_report import HERE, CellCost
from nbdist.errors import UsageError
from nbdist.metrics.memory import DeviceUsage, MemoryUsage, Usage
from nbdist.metrics.node.sample import GpuSample

MIB = 1 << 20


def usage(consumed: int, peaked: int = 0, seconds: float = 1.0, why: str = "", kept: int = 0) -> MemoryUsage:
    """A process that had 100 MiB before. Arguments in MiB."""
    end = 100 + consumed
    cpu = Usage(100 * MIB, end * MIB, (max(100, end) + peaked) * MIB)
    return MemoryUsage(seconds, cpu, why=why, kept=kept * MIB)


def on_gpu(allocated: int, device: int) -> MemoryUsage:
    wide = Usage(0, device * MIB, device * MIB, sampled=True)
    gpu = DeviceUsage(Usage(0, allocated * MIB, allocated * MIB), Usage(0, 64 * MIB, 64 * MIB), wide, "GPU-1")
    return MemoryUsage(1.0, Usage(0, 0, 0), {"cuda:0": gpu})


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_process_of_its_own_has_plain_figures() -> None:
    header, row = words(CellCost(2.5, {HERE: usage(8, 20)}).render("on"))
    assert header == ["2.50", "s", "consumed", "peaked", "used"]
    assert row == ["CPU", "+8.0", "MiB", "+20.0", "MiB", "108", "MiB"]


def test_over_ranks_each_figure_is_least_mean_and_most_with_the_rank_that_has_it() -> None:
    cost = CellCost(2.5, {0: usage(1), 1: usage(6, seconds=2.4), 2: usage(2)})
    text = cost.render("on")
    assert text.count("min / mean / max @rank") == 1 and text.splitlines()[0].startswith("min / mean / max @rank")
    assert words(text)[1][:8] == ["CPU", "+1.0", "/", "+3.0", "/", "+6.0", "MiB", "@1"]
    assert text.splitlines()[-1] == "2.50 s, slowest rank 1: 2.40 s"


def test_html_has_the_tables_figures_and_takes_no_words_for_markup() -> None:
    cost = CellCost(2.5, {0: usage(1, why="<b>no peak</b>"), 1: usage(6)}, hint="a < b")
    html = cost.html()
    assert html.count("<td") == 4 and "+6.0 MiB @1</td>" in html
    assert "&lt;b&gt;no peak&lt;/b&gt;" in html and "hint: a &lt; b" in html and "<b>" not in html


def test_what_is_zero_on_all_ranks_is_one_figure() -> None:
    cost = CellCost(1.0, {rank: MemoryUsage(1.0, Usage(0, 0, 0)) for rank in (0, 1)})
    assert words(cost.render("on"))[1] == ["CPU", "0", "B", "0", "B", "0", "B"]


def test_compact_is_one_line_that_aligns_with_the_next_cells() -> None:
    first, second = (CellCost(2.5, {HERE: usage(size)}).render("compact") for size in (8, 128))
    assert first == "CPU: consumed   +8.0 MiB, peaked      0 B, used 108 MiB; 2.50 s"
    assert first.index("peaked") == second.index("peaked")


def test_gpus_of_ranks_are_one_kind_and_what_was_sampled_says_so() -> None:
    rows = {
        row[0] + " " + row[1]: row for row in words(CellCost(1.0, {0: on_gpu(8, 70), 1: on_gpu(4, 70)}).render("on"))
    }
    assert {"GPU allocated", "GPU reserved", "GPU in"} <= set(rows)
    assert "≥" in rows["GPU in"]
    assert "≥" not in rows["GPU allocated"]


def test_compact_shows_what_torch_and_all_have_of_a_gpu() -> None:
    line = CellCost(1.0, {0: on_gpu(8, 70)}).render("compact")
    assert "cuda:0 allocated: consumed   +8.0 MiB" in line
    assert "reserved 64.0 MiB, in all 70.0 MiB" in line


def test_a_rank_that_died_is_shown_as_missing_and_no_part_of_the_mean() -> None:
    text = CellCost(1.0, {0: usage(4), 2: usage(4)}, {1: "died"}).render("on")
    assert "rank 1: n/a, it died" in text.splitlines()
    assert words(text)[1][1:7] == ["+4.0", "/", "+4.0", "/", "+4.0", "MiB"]


def test_what_is_not_known_is_said_once_for_the_ranks_it_is_not_known_of() -> None:
    why = "CPU peak n/a: because"
    text = CellCost(1.0, {0: usage(1, why=why), 1: usage(1, why=why), 2: usage(1)}).render("on")
    assert text.splitlines()[-1] == f"ranks 0-1: {why}"


def test_memory_that_malloc_keeps_is_said_to_be_kept() -> None:
    text = CellCost(1.0, {0: usage(40), 1: usage(40, kept=30)}).render("on")
    assert "malloc keeps 30.0 MiB on rank 1" in text


def test_pieces_of_one_cell_are_one() -> None:
    both = CellCost(1.0, {0: usage(4)}).then(CellCost(1.0, {0: usage(6), 1: usage(1)}))
    assert both.usages[0].seconds == 2.0
    assert sorted(both.usages) == [0, 1]


def test_the_data_is_json_in_bytes() -> None:
    data = json.loads(json.dumps(CellCost(1.0, {0: on_gpu(8, 70)}, {1: "died"}).data))
    assert data["ranks"]["0"]["devices"]["cuda:0"]["allocated"]["consumed"] == 8 * MIB
    assert data["missing"] == {"1": "died"}


@pytest.mark.parametrize("uuid", ["GPU-1", "MIG-1"])  # CUDA does not tell one from the other
def test_what_samplers_saw_of_a_whole_gpu_raises_its_peak(uuid: str) -> None:
    seen = [GpuSample(uuid, 0, used=90 * MIB), GpuSample("GPU-2", 1, used=99 * MIB)]
    gpu = raise_peaks(on_gpu(8, 70), seen).devices["cuda:0"]
    assert gpu.device == Usage(0, 70 * MIB, 90 * MIB, sampled=True)
    assert gpu.allocated == Usage(0, 8 * MIB, 8 * MIB)


# --- `%%memory`


@pytest.mark.parametrize(
    ("cell", "left"),
    [
        ("a = 1\n", "a = 1\n"),
        ("%%memory\na = 1\n", "\na = 1\n"),
        ("%%memory compact\na = 1\n", "\na = 1\n"),
        ("%%memory\n\n%%distributed -r 0\na\n", "%%distributed -r 0\n\n\na\n"),
        ("%%memory wrong\na\n", "%%memory wrong\na\n"),
    ],
)
def test_the_line_is_taken_off_and_all_others_keep_their_numbers(cell: str, left: str) -> None:
    assert "".join(strip_mark(cell.splitlines(keepends=True))) == left


def test_what_it_does_not_take_is_said_with_what_it_does() -> None:
    assert (parse_mark(""), parse_mark("compact")) == ("on", "compact")
    with pytest.raises(UsageError, match="`%%memory compact`"):
        parse_mark("wrong")
