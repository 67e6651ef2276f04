"""The extension in Jupyter Notebook 7, which has no status bar. Pictures are kept in build/screenshots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="pip install playwright")
pytest.importorskip("notebook", reason="pip install notebook")

from playwright.sync_api import Browser, expect

from testbed.lab import LOOP, Lab, Notebook, expect_place, show_sidebar, start_loop
from tests.lab.browser import jupyterlab

pytestmark = pytest.mark.lab

CELLS = [
    "%load_ext nbdist",
    "",
    "%%distributed\nprint('both')\nprint(f'rank {rank}')\nonly_on_ranks = 1",
    LOOP,
    "kept = 1",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with jupyterlab(tmp_path_factory.mktemp("notebook"), module="notebook") as server:
        yield server


@pytest.fixture(scope="module")
def two(server: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook whose two ranks the form in the sidebar has started."""
    with Notebook(server, browser, CELLS) as notebook:
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        expect(sidebar).to_contain_text("No ranks are running.")
        notebook.choose(1)
        sidebar.get_by_label("Number of ranks").fill("2")
        sidebar.get_by_role("button", name="Add and run").first.click()
        expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
        yield notebook


def test_the_form_has_added_its_cell_and_the_sidebar_says_what_runs(two: Notebook) -> None:
    assert two.source(1) == "%distributed start -n 2"
    expect(two.page.locator(".nbdist-sidebar-head")).to_have_text("2 ranks on cpu")


def test_buttons_act_while_a_cell_runs(two: Notebook) -> None:
    sidebar = two.page.locator(".nbdist-sidebar")
    start_loop(two, 3)
    expect(sidebar.locator(".nbdist-sidebar-cell")).to_contain_text("0 of 2 done")
    sidebar.get_by_role("button", name="Stacks").click()
    expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("while True: time.sleep(0.05)")
    sidebar.get_by_role("button", name="Interrupt now").click()
    two.wait_until(lambda: not two.is_running(3), "the cell to end")


def test_keys_act_here_too(two: Notebook) -> None:
    start_loop(two, 3)
    expect(two.page.locator(".nbdist-sidebar-cell")).to_contain_text("0 of 2 done")  # else none to interrupt
    two.page.keyboard.press("Control+Alt+Shift+K")
    two.wait_until(lambda: not two.is_running(3), "the cell to end")


def test_output_has_tabs_and_cells_have_badges(two: Notebook) -> None:
    two.run(2)
    cell = two.page.locator(".jp-Cell").nth(2)
    expect(cell.get_by_role("tab")).to_have_text(["all", "0", "1"])
    cell.get_by_role("tab", name="1").click()
    expect(cell.locator(".nbdist-tab-view")).to_have_text("both rank 1")
    two.choose(4)
    two.page.locator(".nbdist-run-on").select_option("all")
    assert two.source(4) == "%%distributed\nkept = 1"
    expect_place(two.page.locator(".jp-Cell").nth(4), "all ranks")
    two.shoot("notebook-7")


def test_nothing_of_the_sidebar_is_cut_off(two: Notebook) -> None:
    box = show_sidebar(two).bounding_box()
    width = two.page.viewport_size
    assert box and width and box["x"] + box["width"] <= width["width"]


def test_there_is_no_status_bar_and_nothing_misses_it(two: Notebook) -> None:
    expect(two.page.locator(".nbdist-status")).to_have_count(0)
