"""Tab and Shift-Tab in a cell that runs on ranks, as a reader presses them in JupyterLab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Locator, expect

from testbed.lab import Lab, Notebook

pytestmark = pytest.mark.lab

START = "%load_ext nbdist\n%distributed start -n 2"
NAMES = """\
%%distributed
def train_on_ranks(steps, lr=0.1):
    "Trains what only ranks have."
train_other_ranks = 1"""
BUSY = "%%distributed --background\nimport time\nwhile True: time.sleep(0.01)"


@pytest.fixture(scope="module")
def two(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook whose ranks have names that the kernel has not."""
    cells = [START, NAMES, "", f"{BUSY}", "%distributed interrupt --now"]
    with Notebook(lab, browser, cells) as notebook:
        notebook.run(0)
        notebook.run(1)
        yield notebook


def typed(notebook: Notebook, text: str) -> Locator:
    """Type into the empty cell, from its beginning. Returns its editor."""
    editor = notebook.page.locator(".jp-Cell").nth(2).locator(".cm-content")
    editor.click()
    notebook.page.keyboard.press("Control+a")
    notebook.page.keyboard.press("Delete")
    for index, line in enumerate(text.split("\n")):
        if index:
            notebook.page.keyboard.press("Enter")
        notebook.page.keyboard.type(line)
    return editor


def test_tab_offers_names_that_only_ranks_have(two: Notebook) -> None:
    editor = typed(two, "%%distributed\ntrain_")
    two.page.keyboard.press("Tab")
    offered = two.page.locator(".jp-Completer-item")
    expect(offered.filter(has_text="train_on_ranks")).to_be_visible()
    expect(offered.filter(has_text="train_other_ranks")).to_be_visible()
    two.shoot("completion")
    two.page.keyboard.press("Enter")
    expect(editor).to_contain_text("train_on")


def test_shift_tab_shows_signature_and_words_of_a_function_on_ranks(two: Notebook) -> None:
    typed(two, "%%distributed\ntrain_on_ranks(")
    two.page.keyboard.press("Shift+Tab")
    tooltip = two.page.locator(".jp-Tooltip")
    expect(tooltip).to_contain_text("train_on_ranks(steps, lr=0.1)")
    expect(tooltip).to_contain_text("Trains what only ranks have.")
    two.page.keyboard.press("Escape")


def test_names_are_offered_while_ranks_are_busy_and_inspection_says_so(two: Notebook) -> None:
    two.run(3)
    typed(two, "%%distributed\ntrain_")
    two.page.keyboard.press("Tab")
    expect(two.page.locator(".jp-Completer-item").filter(has_text="train_on_ranks")).to_be_visible()
    two.page.keyboard.press("Escape")
    typed(two, "%%distributed\ntrain_on_ranks(")
    two.page.keyboard.press("Shift+Tab")
    expect(two.page.locator(".jp-Tooltip")).to_contain_text("train_on_ranks lives on ranks, which are busy")
    two.page.keyboard.press("Escape")
    two.run(4)
