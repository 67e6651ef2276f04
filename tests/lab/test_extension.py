"""The extension as a reader sees it: in JupyterLab, in a browser. Pictures are kept in build/screenshots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Locator, expect

from tests.lab.browser import CURRENT, Lab, Notebook

pytestmark = pytest.mark.lab

LOOP = "%%distributed\nimport time\nwhile True: time.sleep(0.05)"
PRINT = """\
%%distributed
print("both")
print(f"<b>rank {rank}</b>")
f"value {rank}\""""
FLOOD = "%%distributed\nfor line in range(20_000): print(rank, line)"
NEWER = """\
import comm
state = {"protocol": 99, "version": "9.9", "ranks": 0, "cells": []}
reply = {"id": 0, "state": state, "text": "", "failed": False}
comm.get_comm_manager().register_target("nbdist.control", lambda line, opening: line.send(reply))
# nbdist"""


def show(notebook: Notebook) -> Locator:
    """Open the sidebar."""
    notebook.command("nbdist:show-ranks", {})
    sidebar = notebook.page.locator(".nbdist-sidebar")
    expect(sidebar).to_be_visible()
    return sidebar


@pytest.fixture(scope="module")
def two(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook with two ranks, its sidebar open."""
    cells = ["%load_ext nbdist\n%distributed start -n 2", LOOP, "%%distributed\nrank", "kept = 1", PRINT, FLOOD]
    with Notebook(lab, browser, cells) as notebook:
        show(notebook)
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
        sidebar = show(notebook)
        expect(sidebar).to_contain_text("This notebook has no ranks yet.")
        sidebar.get_by_label("Number of ranks").fill("two")
        expect(sidebar.get_by_role("alert")).to_contain_text("a whole number from 1 to 1024")
        expect(sidebar.get_by_role("button", name="Add and run")).to_be_disabled()
        sidebar.get_by_label("Number of ranks").fill("2")
        sidebar.get_by_label("Plan").select_option("ddp")
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
        notebook.page.locator(".jp-Dialog").get_by_role("button", name="Stop").click()
        expect(sidebar.locator(".nbdist-sidebar-text")).to_have_text("2 ranks stopped")
        expect(sidebar.locator(".nbdist-start")).to_be_visible()


def test_buttons_act_while_a_cell_runs(two: Notebook) -> None:
    sidebar = two.page.locator(".nbdist-sidebar")
    text = sidebar.locator(".nbdist-sidebar-text")
    expect(sidebar.get_by_role("button", name="Interrupt now")).to_be_disabled()
    two.start(1)
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


def test_after_a_reload_while_a_cell_runs_the_buttons_act_from_the_next_cell_on(two: Notebook) -> None:
    two.start(1)
    status = two.page.locator(".nbdist-status")
    expect(status).to_have_text("2 ranks: [0 of 2 done]")
    two.save()
    two.reload()
    sidebar = show(two)
    expect(sidebar).to_contain_text("Waiting for the kernel.")  # JupyterLab does not know yet that it has threads
    two.interrupt()
    expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
    two.start(1)
    expect(status).to_have_text("2 ranks: [0 of 2 done]")
    sidebar.get_by_role("button", name="Interrupt now").click()
    expect(status).to_have_text("2 ranks: idle")


def test_picker_badge_and_keys_write_the_line_that_says_where_a_cell_runs(two: Notebook) -> None:
    page = two.page
    two.choose(3)
    picker = page.locator(".nbdist-run-on")
    badge = page.locator(".jp-Cell").nth(3).locator(".nbdist-badge-of-cell")
    expect(picker).to_have_value("kernel")
    picker.select_option("all")
    assert two.source(3) == "%%distributed\nkept = 1"
    expect(badge).to_have_value("all")
    badge.select_option("choose")
    dialog = page.locator(".jp-Dialog")
    dialog.get_by_role("textbox").fill("0;1")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("'0;1' does not name ranks")
    dialog.get_by_role("textbox").fill("1")
    page.keyboard.press("Enter")
    expect(badge.locator("option:checked")).to_have_text("rank 1")
    assert two.source(3) == "%%distributed -r 1\nkept = 1"
    two.shoot("badges")
    two.choose(3)
    expect(picker.locator("option:checked")).to_have_text("rank 1")
    page.locator(".jp-Cell").nth(3).focus()
    page.keyboard.press("Control+Alt+r")
    expect(picker).to_have_value("kernel")
    assert two.source(3) == "kept = 1"


def test_output_has_a_tab_for_each_rank(two: Notebook) -> None:
    two.run(4)
    cell = two.page.locator(".jp-Cell").nth(4)
    output, view = cell.locator(".jp-OutputArea"), cell.locator(".nbdist-tab-view")
    expect(cell.get_by_role("tab")).to_have_text(["all", "0", "1"])
    expect(output).to_contain_text("[0-1] both")
    cell.get_by_role("tab", name="1").click()
    expect(output).to_be_hidden()
    assert view.inner_text().splitlines() == ["both", "<b>rank 1</b>", "'value 1'"]
    two.shoot("output-by-rank")
    cell.get_by_role("searchbox").fill("RANK")
    expect(view).to_have_text("<b>rank 1</b>")
    two.page.keyboard.press("Escape")
    cell.get_by_role("tab", name="1").press("ArrowLeft")
    expect(cell.get_by_role("tab", name="0")).to_be_focused()
    expect(view).to_contain_text("rank 0")
    cell.get_by_role("tab", name="all").click()
    expect(output).to_be_visible()

    # The notebook keeps the output as every front end shows it.
    two.save()
    saved = two.page.evaluate(f"{CURRENT}.content.widgets[4].model.outputs.toJSON()")
    assert [each["output_type"] for each in saved] == ["stream", "display_data"]
    assert list(saved[1]["data"]) == ["text/plain"]


def test_the_tab_of_a_rank_that_has_printed_much_has_every_line(two: Notebook) -> None:
    two.run(5)
    cell = two.page.locator(".jp-Cell").nth(5)
    cell.get_by_role("tab", name="1").click()
    expect(cell.locator(".nbdist-tab-count")).to_have_text("20000 lines")
    two.clear(5)
    expect(cell.get_by_role("tab")).to_have_count(0)


def test_a_restarted_kernel_has_no_ranks_and_can_start_them_again(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, ["%load_ext nbdist\n%distributed start -n 2"]) as notebook:
        sidebar = show(notebook)
        notebook.run(0)
        expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
        notebook.restart_kernel()
        expect(sidebar).to_contain_text("nbdist is not loaded in this notebook's kernel")
        expect(notebook.page.locator(".nbdist-status")).to_be_hidden()
        notebook.run(0)
        expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)


def test_a_kernel_with_another_version_is_named(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, [NEWER]) as notebook:
        sidebar = show(notebook)
        notebook.run(0)
        expect(sidebar).to_contain_text("The kernel runs nbdist 9.9, which this page cannot talk to.")
        expect(sidebar.get_by_role("button", name="Stop")).to_be_hidden()
