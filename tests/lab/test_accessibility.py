"""What keyboards, screen readers and weak eyes need, by axe's rules, of all that nbdist adds to a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="pip install playwright")
pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from testbed.lab import Lab, Notebook, show_sidebar, unfold

pytestmark = pytest.mark.lab

ROOT = str(Path(__file__).resolve().parents[2])
PRINT = "%%distributed\nimport torch\nw = torch.arange(6.0) + rank\nprint('both')\nprint(f'rank {rank}')"
PANEL = f"""\
import sys; sys.path.insert(0, {ROOT!r})
from testbed.panel_samples import Source, gpus
import nbdist
source = Source()
source.show(gpus(8))
nbdist.Panel(source=source)"""
SIDEBAR, PANEL_OF_CELL = ".nbdist-sidebar", ".jp-OutputArea .nbdist-panel"


@pytest.fixture(scope="module")
def plain(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook without ranks, all of its sidebar open."""
    with Notebook(lab, browser, ["x = 1"]) as notebook:
        sidebar = show_sidebar(notebook)
        unfold(sidebar, "This machine")
        expect(sidebar).to_contain_text("no NVIDIA GPUs")
        yield notebook


@pytest.fixture(scope="module")
def two(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook with two ranks that have printed, all of its sidebar open."""
    with Notebook(lab, browser, ["%load_ext nbdist\n%distributed start -n 2", PRINT]) as notebook:
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        notebook.run(1)
        notebook.page.get_by_role("tab", name="1").first.click()
        expect(sidebar.get_by_role("option").locator(".nbdist-memory")).to_have_count(2)
        notebook.page.evaluate(f"document.querySelectorAll('{SIDEBAR} details').forEach(each => each.open = true)")
        sidebar.get_by_role("button", name="w", exact=True).click()
        expect(sidebar.locator(".nbdist-variable-histogram")).to_have_count(2)
        sidebar.get_by_role("button", name="Stacks").click()
        expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("idle")
        yield notebook


@pytest.fixture(scope="module")
def panel(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook with a panel."""
    with Notebook(lab, browser, [PANEL, "source.show(gpus(8))", "source.show(gpus(256))"]) as notebook:
        notebook.run(0)
        yield notebook


def breaches(notebook: Notebook, *parts: str) -> list[str]:
    """Return which rules these parts of the page break, and where, in both themes."""
    found = []
    for theme, is_light in ("JupyterLab Dark", False), ("JupyterLab Light", True):
        notebook.command("apputils:change-theme", {"theme": theme})
        expect(notebook.page.locator(f"body[data-jp-theme-light={str(is_light).lower()}]")).to_have_count(1)
        expect(notebook.page.locator("#jupyterlab-splash")).to_have_count(0)
        for part in parts:
            expect(notebook.page.locator(part).first).to_be_visible()
        said = Axe().run(notebook.page, context={"include": [[part] for part in parts]}).response
        assert said["passes"]
        found += [f"{theme}: {rule['help']}: {node['html']}" for rule in said["violations"] for node in rule["nodes"]]
    return found


def test_the_sidebar_of_a_notebook_without_ranks(plain: Notebook) -> None:
    assert breaches(plain, SIDEBAR) == []


def test_the_sidebar_of_one_with_ranks_with_all_its_forms_and_tables(two: Notebook) -> None:
    assert breaches(two, SIDEBAR) == []


def test_what_stands_at_cells_and_in_the_bars(two: Notebook) -> None:
    parts = (".nbdist-run-on-item", ".nbdist-badge-of-cell", ".nbdist-tabs", ".nbdist-tab-view", ".nbdist-status")
    assert breaches(two, *parts) == []


def test_the_panel_with_the_details_of_a_rank(panel: Notebook) -> None:
    panel.run(1)
    panel.page.locator(f"{PANEL_OF_CELL} .nbdist-row").nth(2).click()
    expect(panel.page.locator(f"{PANEL_OF_CELL} .nbdist-details")).to_be_visible()
    assert breaches(panel, PANEL_OF_CELL) == []


def test_the_map_of_many_ranks(panel: Notebook) -> None:
    panel.run(2)
    expect(panel.page.locator(PANEL_OF_CELL)).to_contain_text("256 ranks")
    assert breaches(panel, PANEL_OF_CELL) == []
