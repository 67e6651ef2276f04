"""The tabs above a cell's output, by rank, in notebooks as they are saved and as they run."""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Locator, expect

from testbed.lab import CURRENT, Lab, Notebook, search_output, show_sidebar

pytestmark = pytest.mark.lab


LATE = """\
%%distributed
import pathlib, time
while not pathlib.Path("go").exists(): time.sleep(0.05)
print("late", rank)"""

ONE_FAILS = """\
%%distributed
if rank == 1: raise ValueError("bad shape")

print(f"rank {rank} is here")"""

FAILS_AFTER = """\
%%distributed
if rank == 1:
    print("begin", end="")
    raise ValueError("bad shape")"""

SAME = """\
%%distributed
run = globals().get("run", 0) + 1
print("run", run)
print("on rank", rank)"""

BARS = """\
%%distributed
import os, time
print(f"\\rbefore\\rtrained {20 * (rank + 1)} %", end="", flush=True)
end = time.monotonic() + 60
while not os.path.exists("go_on") and time.monotonic() < end: time.sleep(0.02)
print(f"\\rtrained 100 % in {rank + 1} s")
print("trained", rank)"""

BARS_WITH_PRINTS = """\
%%distributed
import sys, time, torch.distributed as dist
for epoch in range(2):
    for step in range(1, 31):
        print(f"\\repoch {epoch}: {step * (rank + 1) * 50 // 30} %", end="", file=sys.stderr, flush=True)
        if step % 3: time.sleep(0.02)
        print("step", step, flush=True)
    dist.barrier()  # a bar that ends before another rank's has begun is a line of its own
    print(f"\\repoch {epoch}: 100 %", file=sys.stderr, flush=True)"""

FAILS_IN_BACKGROUND = """\
%%distributed --background
if rank == 1: raise ValueError("bad shape")"""

TURNS = """\
%%distributed
turn = globals().get("turn", 0) + 1
if rank == 0 or turn != 2: print("turn", turn)"""


@pytest.fixture(scope="module")
def two(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook with two ranks and a saved output of eight."""

    def prepare(notebook: nbformat.NotebookNode) -> None:
        notebook.cells[1].outputs = [_text("".join(f"[{rank}] line {rank}\n" for rank in range(8)))]
        notebook.cells[1].execution_count = 1

    cells = [
        "%load_ext nbdist\n%distributed start -n 2",
        "%%distributed\nwork()",
        LATE,
        TURNS,
        ONE_FAILS,
        FAILS_AFTER,
        SAME,
        SAME,
        BARS,
        FAILS_IN_BACKGROUND,
        BARS_WITH_PRINTS,
    ]
    with Notebook(lab, browser, cells, prepare) as notebook:
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
        notebook.command("application:toggle-right-area", {})
        yield notebook


def _saved(lab: Lab, browser: Browser, *outputs: nbformat.NotebookNode) -> Notebook:
    """Open a notebook whose only cell ran on ranks and has these outputs."""

    def prepare(notebook: nbformat.NotebookNode) -> None:
        notebook.cells[0].outputs = list(outputs)
        notebook.cells[0].execution_count = 1

    return Notebook(lab, browser, ["%%distributed\nwork()"], prepare)


def _text(text: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def _open_log(cell: Locator) -> None:
    log = cell.get_by_role("button", name="Log")
    log.click()
    expect(log).to_have_attribute("aria-pressed", "true")


def _cell(notebook: Notebook, index: int = 0) -> Locator:
    return notebook.page.locator(".jp-Cell").nth(index)


def test_a_saved_line_that_looks_like_a_label_of_millions_of_ranks_is_text(lab: Lab, browser: Browser) -> None:
    text = "[0] first\n[1] second\n[0-9999999] x\n[5-2] y\n[70000] z\n"
    with _saved(lab, browser, _text(text)) as notebook:
        cell = _cell(notebook)
        expect(cell.locator(".jp-OutputArea")).to_contain_text("[0-9999999] x")
        expect(cell.get_by_role("tab")).to_have_text(["all", "0", "1"])
        cell.get_by_role("tab", name="1").click()
        expect(cell.locator(".nbdist-tab-view")).to_have_text("second")


@pytest.mark.parametrize("width", [1100, 900, 700])
def test_all_tools_are_within_the_width_of_the_output(two: Notebook, width: int) -> None:
    cell, page = _cell(two, 1), two.page
    page.set_viewport_size({"width": width, "height": 900})
    cell.get_by_role("tab", name="7").click()
    log = cell.get_by_role("button", name="Log")
    if log.get_attribute("aria-pressed") == "false":
        log.click()
    expect(cell.locator(".nbdist-log-pages")).to_contain_text("page 1")
    bar, output = cell.locator(".nbdist-tabs"), cell.locator(".jp-Cell-outputWrapper").bounding_box()
    assert output
    for tool in bar.locator("button:visible, input, .nbdist-tab-count:visible").all():
        box = tool.bounding_box()
        assert box
        assert output["x"] <= box["x"] and box["x"] + box["width"] <= output["x"] + output["width"], tool.inner_text()
        assert output["y"] <= box["y"], tool.inner_text()
        assert box["y"] + box["height"] <= cell.locator(".nbdist-tab-view").bounding_box()["y"], tool.inner_text()  # type: ignore[index]
    assert two.page.locator(".jp-WindowedPanel-outer").evaluate("element => element.scrollWidth <= element.clientWidth")
    two.shoot(f"output-tabs-{width}")


def test_the_tools_take_one_line_where_there_is_room(two: Notebook) -> None:
    two.page.set_viewport_size({"width": 1400, "height": 900})
    cell = _cell(two, 1)
    cell.get_by_role("tab", name="all").click()
    cell.hover()
    tools = [tool.bounding_box() for tool in cell.locator(".nbdist-tabs button:visible").all()]
    assert len({tool["y"] for tool in tools if tool}) == 1
    expect(cell.locator(".jp-OutputCollapser")).to_be_visible()
    two.shoot("output-tabs")


def test_a_collapsed_output_hides_the_text_of_a_rank(two: Notebook) -> None:
    cell = _cell(two, 1)
    cell.get_by_role("tab", name="3").click()
    view = cell.locator(".nbdist-tab-view")
    expect(view).to_have_text("line 3")
    two.choose(1)
    two.command("notebook:hide-cell-outputs", {})
    expect(cell.locator(".jp-OutputPlaceholder")).to_be_visible()
    expect(view).to_be_hidden()
    expect(cell.locator(".nbdist-tabs")).to_be_hidden()
    two.command("notebook:show-cell-outputs", {})
    expect(view).to_have_text("line 3")
    expect(cell.get_by_role("tab", name="3")).to_have_attribute("aria-selected", "true")


def test_a_chosen_tab_stays_when_the_cell_runs_again_and_prints_late(lab: Lab, two: Notebook) -> None:
    cell, go = _cell(two, 2), lab.folder / "go"
    go.touch()
    two.run(2)
    cell.get_by_role("tab", name="1").click()
    expect(cell.locator(".nbdist-tab-view")).to_have_text("late 1")
    go.unlink()
    two.start(2)
    expect(cell.get_by_role("tab")).to_have_count(0)
    go.touch()
    expect(cell.get_by_role("tab", name="1")).to_have_attribute("aria-selected", "true")
    expect(cell.locator(".nbdist-tab-view")).to_have_text("late 1")
    expect(cell.locator(".jp-OutputArea")).to_be_hidden()


def test_output_without_the_chosen_rank_is_shown_whole_and_the_choice_comes_back_with_it(two: Notebook) -> None:
    cell = _cell(two, 3)
    output, view = cell.locator(".jp-OutputArea"), cell.locator(".nbdist-tab-view")
    two.run(3)
    cell.get_by_role("tab", name="1").click()
    expect(view).to_have_text("turn 1")
    two.run(3)
    expect(cell.get_by_role("tab")).to_have_count(0)
    expect(output).to_be_visible()
    expect(output).to_have_text("[0] turn 2")
    two.run(3)
    expect(view).to_have_text("turn 3")
    expect(output).to_be_hidden()


def test_lines_are_not_cut_off_when_the_code_font_is_enlarged(lab: Lab, browser: Browser) -> None:
    text = "".join(f"[{rank}] line {line}\n" for line in range(10) for rank in range(2))
    with _saved(lab, browser, _text(text)) as notebook:
        cell, page = _cell(notebook), notebook.page
        cell.get_by_role("tab", name="1").click()
        expect(cell.locator(".nbdist-tab-view")).to_contain_text("line 9")
        page.evaluate("document.documentElement.style.setProperty('--jp-code-font-size', '26px')")
        heights = """() => {
            const bottom = name => document.querySelector(name).getBoundingClientRect().bottom;
            return bottom('.nbdist-tab-view') >= bottom('.nbdist-lines-text') - 1;
        }"""
        page.wait_for_function(heights)


def test_what_failed_is_in_each_ranks_tab_and_is_searched_and_downloaded(lab: Lab, browser: Browser) -> None:
    traceback = ["rank 1 raised ValueError: bad", "\x1b[31mCell In[1], line 2\x1b[0m", "[7] is no label"]
    error = nbformat.v4.new_output("error", ename="RankError", evalue="bad", traceback=traceback)
    shown = ["rank 1 raised ValueError: bad", "Cell In[1], line 2", "[7] is no label"]
    with _saved(lab, browser, _text("[0-1] begin\n[1] soon\n"), error) as notebook:
        cell, page = _cell(notebook), notebook.page
        expect(cell.get_by_role("tab")).to_have_text(["all", "0", "1"])
        view = cell.locator(".nbdist-tab-view")
        cell.get_by_role("tab", name="1").click()
        expect(view).to_contain_text("soon")
        assert view.inner_text().splitlines() == ["begin", "soon", *shown]
        expect(view.locator(".ansi-red-fg")).to_have_text("Cell In[1], line 2")
        cell.get_by_role("tab", name="0").click()
        expect(view).not_to_contain_text("soon")
        assert view.inner_text().splitlines() == ["begin", *shown]
        copy, download_lines = (cell.get_by_role("button", name=name) for name in ("Copy", "Download"))
        search_output(cell, "nobody has printed this")
        expect(view).to_have_text("No matching lines.")
        expect(copy).to_be_disabled()
        expect(download_lines).to_be_disabled()
        search_output(cell, "valueerror")
        expect(view).to_have_text(shown[0])
        expect(copy).to_be_enabled()
        cell.get_by_role("tab", name="all").click()
        with page.expect_download() as download:
            download_lines.click()
        assert download.value.path().read_text().splitlines() == ["[0-1] begin", "[1] soon", *shown]


def test_the_log_is_offered_also_if_ranks_come_after_a_tab_was_chosen(lab: Lab, browser: Browser) -> None:
    def prepare(notebook: nbformat.NotebookNode) -> None:
        notebook.cells[1].outputs = [_text("[0] first\n[1] second\n")]
        notebook.cells[1].execution_count = 1
        notebook.cells[2].outputs = [_text("[0] saved while\n[1] it ran\n")]  # in a kernel of long ago

    cells = ["%load_ext nbdist\n%distributed start -n 2", "%%distributed\nwork()", "%%distributed\nmore()"]
    with Notebook(lab, browser, cells, prepare) as notebook:
        cell = _cell(notebook, 1)
        log = cell.locator(".nbdist-log-pages")
        cell.get_by_role("tab", name="1").click()
        expect(log).to_be_hidden()
        notebook.run(0)
        expect(log).not_to_have_attribute("hidden", "")
        expect(_cell(notebook, 2).get_by_role("status")).to_have_text("")


def test_a_rank_that_failed_without_having_printed_has_a_tab_and_a_log(two: Notebook) -> None:
    cell = _cell(two, 4)
    two.start(4)
    expect(cell.get_by_role("tab")).to_have_text(["all", "0", "1"])
    failed = cell.get_by_role("tab", name="rank 1, failed")
    failed.click()
    view = cell.locator(".nbdist-tab-view")
    expect(view).to_contain_text("rank 1 raised ValueError: bad shape")
    expect(view).not_to_contain_text("rank 0 is here")
    _open_log(cell)
    assert view.inner_text().startswith("rank 1 raised ValueError: bad shape\n")
    assert view.inner_text().rstrip().endswith("\nValueError: bad shape")
    cell.get_by_role("tab", name="rank 0").click()
    _open_log(cell)
    expect(view).to_have_text("rank 0 is here")


def test_a_cell_that_failed_in_the_background_has_tabs_too(two: Notebook) -> None:
    two.run(9)
    cell = _cell(two, 9)
    cell.get_by_role("tab", name="rank 1, failed").click()
    _open_log(cell)
    assert cell.locator(".nbdist-tab-view").inner_text().startswith("rank 1 raised ValueError: bad shape\n")


def test_the_log_of_a_rank_ends_with_its_failure_and_a_search_finds_it(two: Notebook) -> None:
    cell = _cell(two, 5)
    two.start(5)
    view = cell.locator(".nbdist-tab-view")
    cell.get_by_role("tab", name="rank 1, failed").click()
    _open_log(cell)
    assert view.inner_text().startswith("begin\nrank 1 raised ValueError: bad shape\n")
    assert view.inner_text().rstrip().endswith("\nValueError: bad shape")
    search_output(cell, "valueerror: bad shape")
    expect(view).to_have_text("rank 1 raised ValueError: bad shape ValueError: bad shape")
    cell.get_by_role("tab", name="rank 0").click()
    _open_log(cell)
    expect(view).to_have_text("This rank has printed nothing.")


def test_a_ranks_tab_shows_its_own_progress_bar_while_the_cell_runs_and_later(two: Notebook, lab: Lab) -> None:
    cell = _cell(two, 8)
    view = cell.locator(".nbdist-tab-view")
    two.start(8)
    expect(cell.locator(".jp-OutputArea")).to_contain_text("[0-1] trained 20 % (20-40 %)")
    for rank, text in (("1", "trained 40 %"), ("0", "trained 20 %")):
        cell.get_by_role("tab", name=rank).click()
        expect(view.locator(".nbdist-lines")).to_have_text(text)
    cell.get_by_role("tab", name="1").click()
    (lab.folder / "go_on").touch()
    expect(view).to_have_text("trained 100 % in 2 s trained 1")
    cell.get_by_role("tab", name="all").click()
    expect(cell.locator(".jp-OutputArea")).to_contain_text("[0-1] trained 100 % in 1 s")
    two.save()
    two.reload()
    cell.get_by_role("tab", name="1").click()
    expect(view).to_have_text("trained 100 % in 2 s trained 1")


def test_bars_with_prints_in_between_are_shown_once_in_their_final_state(two: Notebook) -> None:
    two.run(10)
    cell = _cell(two, 10)
    output = cell.locator(".jp-OutputArea")
    bars = output.get_by_text(re.compile("epoch"))
    for _ in range(2):
        expect(bars).to_have_text(
            [re.compile(r"\[0-1\] epoch 0: 100 %\s*$"), re.compile(r"\[0-1\] epoch 1: 100 %\s*$")]
        )
        assert not [line for line in output.inner_text().splitlines() if line.endswith(" ")]
        empty = output.locator(".jp-OutputArea-child").filter(has_not_text=re.compile(r"\S"))
        assert all(height == 0 for height in empty.evaluate_all("all => all.map(each => each.clientHeight)"))
        for rank in ("0", "1"):
            cell.get_by_role("tab", name=rank).click()
            lines = cell.locator(".nbdist-tab-view .nbdist-lines")
            expect(lines).to_contain_text("epoch 1: 100 %")
            assert sorted(line for line in lines.inner_text().splitlines() if "epoch" in line) == [
                "epoch 0: 100 %",
                "epoch 1: 100 %",
            ]
        cell.get_by_role("tab", name="all").click()
        two.save()
        two.reload()


def test_of_cells_with_the_same_code_each_has_its_own_log_also_after_a_reload(two: Notebook) -> None:
    two.run(6)
    two.run(7)
    two.page.evaluate(f"{CURRENT}.content.widgets[6].model.sharedModel.execution_count = null")
    two.save()  # as while the first runs
    two.reload()
    for index in (6, 7):
        cell = _cell(two, index)
        cell.get_by_role("tab", name="0").click()
        _open_log(cell)
        expect(cell.locator(".nbdist-tab-view .nbdist-lines")).to_have_text(f"run {index - 5} on rank 0")


def test_the_log_says_whose_it_is_if_that_of_the_cell_is_not_known(two: Notebook, lab: Lab) -> None:
    two.run(6)
    two.run(7)
    newest = two.page.evaluate(f"{CURRENT}.content.widgets[7].model.sharedModel.execution_count")
    two.save()
    saved = nbformat.read(lab.folder / two.name, as_version=4)
    saved.nbformat_minor = 4  # cells of old files have no ids
    for cell in saved.cells:
        del cell["id"]
        cell.execution_count = None
    nbformat.write(saved, lab.folder / two.name)
    two.reload()
    cell = _cell(two, 6)
    cell.get_by_role("tab", name="0").click()
    _open_log(cell)
    expect(cell.locator(".nbdist-tab-view .nbdist-lines")).to_have_text(
        f"it is not known which run of the code above this is. Cell {newest} is the newest. Its log: run 4 on rank 0"
    )
