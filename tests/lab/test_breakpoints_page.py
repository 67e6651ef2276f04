"""Breakpoints in the gutter of a cell on ranks, in JupyterLab's own debugger."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from testbed.lab import Lab, Notebook

pytestmark = pytest.mark.lab

CELL = """\
%%distributed
def scale(by):
    held = by * 10
    return held
total = scale(rank + 1)
print(total)"""


def test_a_breakpoint_in_the_gutter_stops_ranks_one_after_the_other(lab: Lab, browser: Browser) -> None:
    cells = ["%load_ext nbdist\n%distributed start -n 2", CELL]
    with Notebook(lab, browser, cells) as notebook:
        page = notebook.page
        notebook.run(0)
        page.locator(".jp-DebuggerBugButton").click()
        cell = page.locator(".jp-Cell").nth(1)
        cell.locator(".cm-breakpoint-gutter .cm-gutterElement").nth(4).click()
        expect(page.locator(".jp-DebuggerBreakpoint")).to_contain_text("4")
        notebook.start(1)
        stack = page.locator(".jp-DebuggerCallstackFrame")
        expect(stack).to_have_count(5)
        expect(cell.locator(".jp-DebuggerEditor-highlight")).to_contain_text("return held")
        for rank in (0, 1):
            stack.filter(has_text=f"rank {rank}: scale").click()
            expect(page.get_by_role("treeitem", name=f"held: {10 * (rank + 1)}")).to_be_visible()
        notebook.shoot("breakpoint")
        notebook.command("debugger:continue", {})  # rank 1, whose frame is selected
        expect(stack).to_have_count(2)
        expect(stack.nth(0)).to_contain_text("rank 0: scale")
        expect(page.get_by_role("treeitem", name="held: 10")).to_be_visible()
        notebook.command("debugger:next", {})
        expect(stack).to_have_count(1)
        expect(stack).to_contain_text("rank 0: <module>")
        notebook.command("debugger:continue", {})
        expect(cell.locator(".jp-OutputArea")).to_contain_text("[1] 20")
        expect(stack).to_have_count(0)
        notebook.start(1)
        stack.filter(has_text="all stopped ranks: 0-1").click()
        for rank in (0, 1):
            expect(page.get_by_role("treeitem", name=f"rank {rank}: scale, line 4")).to_be_visible()
        notebook.shoot("breakpoint_all")
        notebook.command("debugger:continue", {})
        expect(cell.locator(".jp-OutputArea")).to_contain_text("[1] 20")
        expect(stack).to_have_count(0)
        page.locator(".jp-DebuggerBugButton").click()
