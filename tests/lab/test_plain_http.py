"""A page that came over plain http from another machine, where browsers withhold some of what others have."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from testbed.lab import PLAIN_HOST, Lab, Notebook, show_sidebar

pytestmark = pytest.mark.lab


def test_the_extension_works_in_a_page_that_browsers_do_not_trust(lab: Lab, browser: Browser) -> None:
    far = copy.copy(lab)
    far.url = lab.url.replace("127.0.0.1", PLAIN_HOST)
    cells = ["%load_ext nbdist\n%distributed start -n 2", "%%distributed\nprint('rank', rank)"]
    with Notebook(far, browser, cells) as notebook:
        assert notebook.page.evaluate("isSecureContext") is False
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        expect(sidebar.locator(".nbdist-row")).to_have_count(2)
        notebook.run(1)
        notebook.page.get_by_role("tab", name="rank 1").click()
        notebook.page.get_by_role("button", name="Copy", exact=True).click()
        expect(notebook.page.get_by_role("button", name="Copied", exact=True)).to_be_visible()
        notebook.page.locator(".nbdist-tab-search").focus()
        notebook.page.keyboard.press("Control+V")
        expect(notebook.page.get_by_role("searchbox")).to_have_value("rank 1")
