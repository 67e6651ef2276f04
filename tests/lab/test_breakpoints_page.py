"""Breakpoints in the gutter of a cell on ranks, in JupyterLab's own debugger."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from tests.lab.browser import Lab, Notebook

pytestmark = pytest.mark.lab

CELL = """\
%%distributed
def scale(by):
    held = by * 10
    return held
print(scale(rank + 1))"""


def test_a_breakpoint_in_the_gutter_stops_ranks_one_after_the_other(lab: Lab, browser: Browser) -> None:
    cells = ["%load_ext nbdist\n%distributed start -n 2", CELL]
    with Notebook(lab, browser, cells) as notebook:
        page = notebook.page
        notebook.run(0)
        page.locator(".jp-DebuggerBugButton").click()
        cell = page.locator(".jp-Cell").nth(1)
        cell.locator(".cm-breakpoint-gutter .cm-gutterElement").nth(4).click()
        breakpoints = page.locator(".jp-DebuggerBreakpoints-body")
        expect(breakpoints).to_contain_text("4")
        notebook.start(1)
        stack = page.locator(".jp-DebuggerCallstackFrame")
        expect(stack).to_have_count(4)
        expect(stack.filter(has_text="rank 0: scale")).to_have_count(1)
        other = 1 if "rank 0" in stack.nth(0).inner_text() else 0
        expect(cell.locator(".jp-DebuggerEditor-highlight")).to_contain_text("return held")
        notebook.shoot("breakpoint")
        notebook.command("debugger:continue", {})
        expect(stack).to_have_count(2)
        expect(stack.nth(0)).to_contain_text(f"rank {other}: scale")
        notebook.command("debugger:continue", {})
        expect(cell.locator(".jp-OutputArea")).to_contain_text("[1] 20")
        expect(stack).to_have_count(0)
        page.locator(".jp-DebuggerBugButton").click()
