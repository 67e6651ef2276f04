"""The extension as a reader sees it: in JupyterLab, in a browser. Pictures are kept in build/screenshots."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from testbed.lab import (
    CURRENT,
    LOOP,
    Lab,
    Notebook,
    expect_place,
    move_cell,
    number,
    search_output,
    show_sidebar,
    start_loop,
    unfold,
)

pytestmark = pytest.mark.lab

COUNT = """\
%%distributed
import itertools, time
for line in itertools.count():
    print("rank", rank, "line", line, flush=True)
    time.sleep(0.05)"""
PRINT = """\
%%distributed
print("both")
print(f"<b>rank {rank}</b>")
f"value {rank}\""""
TRAIN = """\
%%distributed
import time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while True:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step(); optimizer.zero_grad(); time.sleep(0.01)"""
FLOOD = "%%distributed\nfor line in range(20_000): print(rank, line)"
LONG_AND_WRITTEN_OVER = """\
%%distributed -r 0
for line in range(20_000): print(line)
for part in ("10 %", "\\r20 %", "\\rdone\\n", "la", "st\\n"): print(part, end="", flush=True)"""
LONG_LINE = "%%distributed\nwords = '" + 60 * "long " + "'"
DIE = "%%distributed -r 1\nimport os\nos._exit(1)"
DRIFT = """\
%%distributed
import torch
w = torch.arange(6.0) + rank
mixed = ["text", 1][rank]
shapes = torch.ones(2 + rank, dtype=torch.int16)
same = 0.25
state = {"layers": [{"bias": w}, {"bias": same}]}"""


@pytest.fixture(scope="module")
def two(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook with two ranks, its sidebar open."""
    cells = [
        "%load_ext nbdist\n%distributed start -n 2",
        LOOP,
        "%%distributed\nrank",
        "kept = 1",
        PRINT,
        FLOOD,
        DRIFT,
        DIE,
        TRAIN,
        "%distributed tflops on",
        "%distributed tflops off",
        LONG_AND_WRITTEN_OVER,
        LONG_LINE,
        COUNT,
    ]
    with Notebook(lab, browser, cells) as notebook:
        show_sidebar(notebook)
        notebook.run(0)
        yield notebook


def test_a_notebook_that_does_not_use_ranks_loads_little_and_its_kernel_is_left_alone(
    lab: Lab, browser: Browser
) -> None:
    with Notebook(lab, browser, ["x = 1"]) as notebook:
        notebook.run(0)
        resources = "performance.getEntriesByType('resource').filter(each => each.name.includes('/extensions/nbdist/'))"
        sizes = notebook.page.evaluate(resources + ".map(each => each.decodedBodySize)")
        assert 0 < sum(sizes) < 100_000
        loaded = notebook.page.evaluate(resources + ".map(each => each.name).join()")
        assert "sidebar" not in loaded and "run_on" not in loaded
        kernel = f"{CURRENT}.sessionContext.session.kernel"
        comms = notebook.page.evaluate(f"{kernel}.requestCommInfo({{}}).then(reply => reply.content.comms)")
        assert comms == {}
        expect(notebook.page.locator(".nbdist-run-on")).to_have_count(0)


def test_the_form_writes_and_runs_a_cell_and_the_panel_shows_its_ranks(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, ["x = 1", ""]) as notebook:
        sidebar = show_sidebar(notebook)
        expect(sidebar).to_contain_text("This notebook has no ranks yet.")
        expect(sidebar).to_contain_text("Ranks are processes that run cells with %%distributed in their first line")
        sidebar.get_by_label("Number of ranks").fill("two")
        expect(sidebar.get_by_role("alert")).to_contain_text("a whole number from 1 to 1024")
        expect(sidebar.get_by_role("button", name="Add and run")).to_be_disabled()
        sidebar.get_by_label("Number of ranks").fill("2")
        plan = sidebar.get_by_label("Plan")
        expect(plan.get_by_role("option")).to_have_text(["not set here", "ddp", "fsdp", "hsdp", "deepspeed"])
        plan.select_option("ddp")
        sidebar.get_by_label("Precision").select_option("bf16")
        notebook.shoot("sidebar-start-form")
        sidebar.get_by_role("button", name="Add and run").click()
        expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
        assert notebook.source(1) == (
            "%load_ext nbdist\n%distributed start -n 2\n%distributed plan ddp --precision bf16"
        )
        expect(sidebar.locator(".nbdist-start")).to_be_hidden()
        expect(notebook.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")

        # What the buttons end, the kernel has ended.
        sidebar.get_by_role("button", name="Stop").click()
        dialog = notebook.page.locator(".jp-Dialog")
        expect(dialog).to_contain_text("The variables of all ranks are lost.")  # and no GPUs are free, as it has none
        dialog.get_by_role("button", name="Stop").click()
        expect(sidebar.locator(".nbdist-sidebar-text")).to_have_text("2 ranks stopped")
        expect(sidebar.locator(".nbdist-start")).to_be_visible()


def test_a_double_click_on_the_form_adds_one_cell(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, [""]) as notebook:
        sidebar = show_sidebar(notebook)
        sidebar.get_by_label("Number of ranks").fill("2")
        sidebar.get_by_role("button", name="Add and run").dblclick()
        expect(notebook.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")
        added = notebook.page.evaluate(f"{CURRENT}.content.widgets.map(cell => cell.model.sharedModel.getSource())")
        assert [source for source in added if source] == ["%load_ext nbdist\n%distributed start -n 2"]

        sidebar.get_by_role("button", name="Stop").click()
        notebook.page.locator(".jp-Dialog").get_by_role("button", name="Stop").click()
        expect(sidebar.get_by_role("button", name="Add and run")).to_be_enabled()


def test_buttons_act_while_a_cell_runs(two: Notebook) -> None:
    sidebar = two.page.locator(".nbdist-sidebar")
    text = sidebar.locator(".nbdist-sidebar-text")
    expect(sidebar.get_by_role("button", name="Interrupt now")).to_be_disabled()
    start_loop(two, 1)
    expect(sidebar.locator(".nbdist-sidebar-cell")).to_contain_text("0 of 2 done")
    expect(two.page.locator(".nbdist-status")).to_have_text("2 ranks: [0 of 2 done]")
    sidebar.get_by_role("button", name="Stacks").click()
    expect(text).to_contain_text("while True: time.sleep(0.05)")
    two.shoot("sidebar-while-a-cell-runs")
    sidebar.get_by_role("button", name="Interrupt now").click()
    two.wait_until(lambda: not two.is_running(1), "the cell to end")
    expect(two.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")
    sidebar.get_by_role("button", name="Why").click()
    expect(text).not_to_contain_text("time.sleep")


def test_jupyterlab_and_its_server_know_that_the_kernel_is_busy_while_a_cell_runs(two: Notebook) -> None:
    sidebar = two.page.locator(".nbdist-sidebar")
    shown = two.page.locator("#jp-bottom-panel").get_by_text("Python 3")
    start_loop(two, 1)
    sidebar.get_by_role("button", name="Stacks").click()
    expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("while True: time.sleep(0.05)")
    expect(shown).to_have_text(re.compile("Busy"))
    assert two.server_status() == "busy"
    two.interrupt()
    expect(shown).to_have_text(re.compile("Idle"))
    two.wait_until(lambda: two.server_status() == "idle", "the server to know of the end")


def test_a_sidebar_that_was_hidden_shows_its_ranks_again(two: Notebook) -> None:
    rows = two.page.locator(".nbdist-sidebar .nbdist-row")
    expect(rows).to_have_count(2)
    two.command("application:toggle-right-area", {})
    expect(rows).to_have_count(0)
    two.command("application:toggle-right-area", {})
    expect(rows).to_have_count(2)


def test_the_step_of_a_training_loop_is_shown_while_it_runs(two: Notebook) -> None:
    cell, status = two.page.locator(".nbdist-sidebar-cell"), two.page.locator(".nbdist-status")
    two.run(9)
    two.start(8)
    expect(cell).to_contain_text(re.compile(r"cell \d+: 0 of 2 done, step [\d,]+, \d+ s"))
    expect(status).to_have_text(re.compile(r"2 ranks: step [\d,]+, \[0 of 2 done\]"))
    before = number(cell.inner_text().split("step ")[1])
    two.wait_until(lambda: number(cell.inner_text().split("step ")[1]) > before, "a later step")
    two.page.locator(".nbdist-sidebar").get_by_role("button", name="Interrupt", exact=True).click()
    expect(status).to_have_text("2 ranks: idle")
    two.run(10)


def test_after_a_reload_while_a_cell_runs_the_sidebar_shows_it_and_its_buttons_act(two: Notebook) -> None:
    two.start(13)
    status = two.page.locator(".nbdist-status")
    cell = two.page.locator(".jp-Cell").nth(13)
    expect(status).to_have_text("2 ranks: [0 of 2 done]")
    expect(cell.get_by_role("tab")).to_have_count(3)
    two.save()
    two.reload()
    sidebar = show_sidebar(two)
    expect(status).to_have_text("2 ranks: [0 of 2 done]")
    expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
    sidebar.get_by_role("button", name="Stacks").click()
    expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("time.sleep")
    # JupyterLab shows nothing of what a cell prints after a reload.
    expect(cell.get_by_role("status")).to_have_text("Newer lines are in the log: choose a rank and click Log")
    cell.get_by_role("tab", name="1").click()
    count = cell.locator(".nbdist-tab-count").first
    expect(count).to_have_text(re.compile(r"\d+ lines?"))
    shown = number(count.inner_text())
    cell.get_by_role("button", name="Log").click()
    two.wait_until(lambda: number(count.inner_text()) > shown, "newer lines")
    sidebar.get_by_role("button", name="Interrupt now").click()
    expect(status).to_have_text("2 ranks: idle")
    two.run(3)  # in the kernel's main thread, as ever


LISTEN = f"""() => {{
  const kernel = {CURRENT}.sessionContext.session.kernel;
  [lines, news] = [new Set(), 0];
  kernel.iopubMessage.connect((_, {{ header, content }}) => {{
    if (header.msg_type !== "comm_msg") return;
    lines.add(content.comm_id);
    if (content.data.type === "update") news++;
  }});
}}"""


@pytest.mark.parametrize("farewell", ["heard", "lost"])
def test_after_a_reload_while_a_cell_runs_the_kernel_sends_nothing_to_the_page_before(
    two: Notebook, farewell: str
) -> None:
    show_sidebar(two)
    two.start(1)
    expect(two.page.locator(".nbdist-status")).to_have_text("2 ranks: [0 of 2 done]")
    two.save()
    if farewell == "lost":
        two.page.evaluate("() => { WebSocket.prototype.send = () => undefined }")
    two.reload()
    sidebar = show_sidebar(two)
    expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
    two.page.evaluate(LISTEN)
    two.wait_until(lambda: two.page.evaluate("news") >= 3, "the panel's news")
    assert two.page.evaluate("lines.size") == 1
    sidebar.get_by_role("button", name="Interrupt now").click()
    expect(two.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")


def test_picker_badge_and_keys_write_the_line_that_says_where_a_cell_runs(two: Notebook) -> None:
    page = two.page
    two.choose(3)
    picker = page.locator(".nbdist-run-on")
    cell = page.locator(".jp-Cell").nth(3)
    expect(picker).to_have_value("kernel")
    picker.select_option("all")
    assert two.source(3) == "%%distributed\nkept = 1"
    expect_place(cell, "all ranks")
    move_cell(cell, "choose")
    dialog = page.locator(".jp-Dialog")
    dialog.get_by_role("textbox").fill("0;1")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("'0;1' is not a list of ranks")
    dialog.get_by_role("textbox").fill("1")
    page.keyboard.press("Enter")
    expect_place(cell, "rank 1")
    assert two.source(3) == "%%distributed -r 1\nkept = 1"
    two.shoot("badges")
    two.choose(3)
    expect(picker.locator("option:checked")).to_have_text("rank 1")
    cell.focus()
    page.keyboard.press("Control+Alt+r")
    expect(picker).to_have_value("kernel")
    assert two.source(3) == "kept = 1"


def test_the_badge_leaves_the_end_of_a_long_line_to_be_read(two: Notebook) -> None:
    two.choose(12)
    cell = two.page.locator(".jp-Cell").nth(12)
    badge = cell.locator(".nbdist-badge-of-cell").bounding_box()
    cell.locator(".cm-scroller").evaluate("element => { element.scrollLeft = element.scrollWidth }")
    end = """element => {
        const range = document.createRange();
        range.selectNodeContents(element);
        return range.getBoundingClientRect().right;
    }"""
    assert badge
    assert cell.locator(".cm-line").last.evaluate(end) <= badge["x"]


@pytest.mark.parametrize("index", [0, 2, 3, 4])
def test_the_badge_and_the_active_cells_own_buttons_lie_side_by_side(two: Notebook, index: int) -> None:
    two.choose(index)
    cell = two.page.locator(".jp-Cell").nth(index)
    badge, buttons = cell.locator(".nbdist-badge-of-cell"), cell.locator(".jp-cell-toolbar")
    expect(badge).to_have_css("opacity", "1")
    expect(buttons).to_be_visible()
    ours, others = badge.bounding_box(), buttons.bounding_box()
    assert ours and others
    beside = ours["x"] >= others["x"] + others["width"] or others["x"] >= ours["x"] + ours["width"]
    assert beside or ours["y"] >= others["y"] + others["height"]


def test_the_tiles_of_the_narrow_panel_are_equally_wide(two: Notebook) -> None:
    tiles = two.page.locator(".nbdist-sidebar .nbdist-stat:visible")
    expect(tiles.nth(1)).to_be_visible()
    assert len({tile.bounding_box()["width"] for tile in tiles.all()}) == 1  # type: ignore[index]


def test_the_sidebars_parts_begin_at_the_same_edge(two: Notebook) -> None:
    titles = two.page.locator(".nbdist-sidebar .nbdist-machine-title")
    assert len({title.bounding_box()["x"] for title in titles.all() if title.is_visible()}) == 1  # type: ignore[index]


def test_output_has_a_tab_for_each_rank(two: Notebook) -> None:
    two.run(4)
    cell = two.page.locator(".jp-Cell").nth(4)
    output, view = cell.locator(".jp-OutputArea"), cell.locator(".nbdist-tab-view")
    expect(cell.get_by_role("tab")).to_have_text(["all", "0", "1"])
    expect(output).to_contain_text("[0-1] both")
    cell.get_by_role("tab", name="1").click()
    expect(output).to_be_hidden()
    expect(view).to_have_text("both <b>rank 1</b> 'value 1'")
    two.shoot("output-by-rank")
    search_output(cell, "RANK")
    expect(view).to_have_text("<b>rank 1</b>")
    two.page.keyboard.press("Escape")
    cell.get_by_role("tab", name="1").press("ArrowLeft")
    expect(cell.get_by_role("tab", name="0")).to_be_focused()
    expect(view).to_contain_text("rank 0")
    cell.get_by_role("tab", name="all").click()
    expect(output).to_be_visible()
    cell.get_by_role("button", name="Differences").click()
    expect(output).to_be_hidden()
    differing = {"[0] <b>rank 0</b>", "[1] <b>rank 1</b>", "[0] 'value 0'", "[1] 'value 1'"}
    two.wait_until(lambda: set(view.inner_text().splitlines()) == differing, "the lines that differ")
    with two.page.expect_download() as download:
        cell.get_by_role("button", name="Download").click()
    assert set(download.value.path().read_text().splitlines()) == differing
    cell.get_by_role("button", name="Differences").click()
    expect(output).to_be_visible()

    # The notebook keeps the output as every front end shows it.
    two.save()
    saved = two.page.evaluate(f"{CURRENT}.content.widgets[4].model.outputs.toJSON()")
    assert [each["output_type"] for each in saved] == ["stream", "display_data"]
    assert list(saved[1]["data"]) == ["text/plain"]


def test_of_much_output_the_page_holds_what_is_in_view_and_the_log_has_every_line(two: Notebook) -> None:
    two.run(5)
    cell = two.page.locator(".jp-Cell").nth(5)
    lines = cell.locator(".nbdist-long-text .nbdist-lines")
    expect(lines).to_contain_text("19999")  # it follows
    assert len(lines.inner_text().splitlines()) < 200
    two.shoot("much-output")
    lines.evaluate("element => { element.scrollTop = 0 }")
    expect(lines).to_contain_text(re.compile(r"^\[\d\] \d 0\n"))
    cell.get_by_role("tab", name="1").click()
    count = cell.locator(".nbdist-tab-count").first
    expect(count).to_have_text("20000 lines")
    expect(cell.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "true")
    cell.get_by_role("button", name="Log").click()
    expect(cell.locator(".nbdist-tab-view")).to_contain_text("1 0\n1 1\n")
    expect(cell.locator(".nbdist-log-pages")).to_contain_text("page 1, the last")
    two.shoot("log-of-a-rank")
    search_output(cell, "1 1999")
    expect(count).to_have_text("11 lines")
    two.clear(5)
    expect(cell.get_by_role("tab")).to_have_count(0)


def test_long_output_is_written_over_as_in_a_terminal(two: Notebook) -> None:
    two.run(11)
    (stream,) = two.page.evaluate(f"{CURRENT}.content.widgets[11].model.outputs.toJSON()")
    assert stream["text"].split("\n") == [*(f"[0] {line}" for line in range(20_000)), "[0] done", "[0] last", ""]
    lines = two.page.locator(".jp-Cell").nth(11).locator(".nbdist-lines")
    expect(lines).to_contain_text("[0] 19999\n[0] done\n[0] last\n")


def test_variables_show_which_differ_and_by_how_much(two: Notebook) -> None:
    variables = two.page.locator(".nbdist-variables")
    unfold(variables, "Variables")
    two.run(6)  # and it is looked again
    row = variables.get_by_role("listitem").filter(has=two.page.get_by_role("button", name="w", exact=True))
    expect(row).to_contain_text("2 different values")
    expect(row).to_contain_text("Tensor, float32 [6], cpu, 24 B")
    expect(variables.get_by_role("listitem").filter(has_text="float")).to_have_count(2)
    row.get_by_role("button", name="w", exact=True).click()
    expect(row.get_by_role("row").nth(2)).to_contain_text("3.5")
    expect(row.get_by_role("img")).to_have_count(2)
    row.get_by_role("button", name="Compare").click()
    expect(row).to_contain_text("w differs on ranks 0 and 1: 6 elements of 6, by up to 1")
    two.shoot("variables")
    other = variables.get_by_role("listitem").filter(has=two.page.get_by_role("button", name="mixed", exact=True))
    expect(other).to_contain_text("str (rank 0), int (rank 1)")
    other = variables.get_by_role("listitem").filter(has=two.page.get_by_role("button", name="shapes", exact=True))
    expect(other).to_contain_text("Tensor, int16 [2] (rank 0), int16 [3] (rank 1), cpu, 4 B to 6 B")

    # A cell that ends keeps the choice, and the answer as one from before.
    answer = row.locator(".nbdist-variable-comparison [role=status]")
    one, another = row.get_by_label("First rank"), row.get_by_label("Second rank")
    one.select_option("1")
    another.select_option("0")
    row.get_by_role("button", name="Compare").click()
    expect(answer).to_have_text("w differs on ranks 0 and 1: 6 elements of 6, by up to 1; the first at flat index 0")
    two.run(6)
    expect(answer).to_have_text(re.compile("^Before the table was refreshed: w differs on ranks 0 and 1"))
    expect(one).to_have_value("1")
    expect(another).to_have_value("0")
    row.get_by_role("button", name="Compare").click()
    expect(answer).to_have_text(re.compile("^w differs on ranks 0 and 1"))


def test_what_differs_in_a_dict_is_opened_by_a_click(two: Notebook) -> None:
    variables = two.page.locator(".nbdist-variables")
    if variables.get_attribute("open") is None:
        unfold(variables, "Variables")
    two.run(6)
    variables.get_by_role("button", name="state", exact=True).click()
    entries = variables.get_by_role("list", name="Entries that differ").get_by_role("listitem")
    expect(entries).to_have_count(1)
    expect(entries).to_contain_text("state['layers'][0]['bias']")
    expect(entries).to_contain_text("Tensor, float32 [6], cpu, 24 B")
    entries.get_by_role("button", name="state['layers'][0]['bias']").click()
    expect(entries.get_by_role("img")).to_have_count(2)
    two.run(6)  # what is open stays so
    expect(entries.get_by_role("img")).to_have_count(2)
    entries.get_by_role("button", name="Compare").click()
    expect(entries).to_contain_text("state['layers'][0]['bias'] differs on ranks 0 and 1: 6 elements of 6, by up to 1")
    two.shoot("variables-inside")
    variables.get_by_role("button", name="state", exact=True).click()
    expect(entries).to_have_count(0)


def test_heal_replaces_a_rank_that_died_and_restart_all_of_them(two: Notebook) -> None:
    sidebar, status = two.page.locator(".nbdist-sidebar"), two.page.locator(".nbdist-status")
    heal = sidebar.get_by_role("button", name="Heal")
    expect(heal).to_be_disabled()
    two.start(7)
    expect(status).to_contain_text("1 dead")
    heal.click()
    expect(status).to_have_text("2 ranks: idle")
    expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("rank 1")
    two.shoot("healed")
    two.run(6)
    same = two.page.locator(".nbdist-variables").get_by_role("button", name="same")
    expect(same).to_have_count(1)
    sidebar.get_by_role("button", name="Restart").click()
    two.page.locator(".jp-Dialog").get_by_role("button", name="Restart").click()
    expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("2 ranks ready")
    expect(heal).to_be_disabled()
    expect(same).to_have_count(0)


def test_a_restarted_kernel_has_no_ranks_and_can_start_them_again(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, ["%load_ext nbdist\n%distributed start -n 2"]) as notebook:
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
        notebook.restart_kernel()
        expect(sidebar).to_contain_text("nbdist is not loaded in this notebook's kernel")
        expect(notebook.page.locator(".nbdist-status")).to_be_hidden()
        notebook.run(0)
        expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)


def test_after_a_restart_the_log_says_that_a_number_is_another_cells(lab: Lab, browser: Browser) -> None:
    cells = [
        "%load_ext nbdist\n%distributed start -n 2",
        "%%distributed\nprint('one')",
        "%%distributed\nprint('other')",
    ]
    with Notebook(lab, browser, cells) as notebook:
        notebook.run(0)
        notebook.run(1)
        notebook.restart_kernel()
        notebook.run(0)
        notebook.run(2)
        for index, begin in (
            (1, "cell 2 ran different code in this kernel than the code above. Its log:\nother"),
            (2, "other"),
        ):
            cell = notebook.page.locator(".jp-Cell").nth(index)
            cell.get_by_role("tab", name="0").click()
            cell.get_by_role("button", name="Log").click()
            expect(cell.locator(".nbdist-log-pages")).to_contain_text("page 1, the last")
            expect(cell.locator(".nbdist-tab-view .nbdist-lines")).to_have_text(begin)
