"""The panel as a reader sees it: in JupyterLab, in a browser. Pictures are kept in build/screenshots."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from testbed.kernel import wait_until
from testbed.lab import ROOT, Lab, Notebook, number

pytestmark = pytest.mark.lab

SAMPLES = f"""\
import sys; sys.path.insert(0, {str(ROOT)!r})
from testbed.panel_samples import Source, gpus, stuck
import nbdist
"""
SHOW = SAMPLES + "source = Source()\npanel = nbdist.Panel(source=source)\nsource.show(gpus({count}))\npanel"
MOVE = "for tick in range(1, 50): source.show(gpus({count}, tick))"


@pytest.fixture(scope="module")
def eight(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook that shows eight GPUs, shared by tests that leave it as they found it."""
    cells = [SHOW.format(count=8), MOVE.format(count=8), "source.show(gpus(2))", "source.show(gpus(8))"]
    with Notebook(lab, browser, cells) as notebook:
        notebook.run(0)
        yield notebook


def test_rows_appear_and_numbers_move_while_a_cell_runs(lab: Lab, browser: Browser) -> None:
    grow = "%%distributed\nimport time, torch\nkept = []\nfor _ in range(600):\n"
    grow += "    kept.append(torch.ones((1 + rank) << 17)); time.sleep(0.1)"  # slowly: below a GiB
    start = "%load_ext nbdist\n%distributed start -n 2\n%distributed panel --rate 0.25"
    with Notebook(lab, browser, [start, grow, "%distributed stop"]) as notebook:
        notebook.run(0)
        memory = notebook.panel.get_by_role("option").locator(".nbdist-memory")
        expect(memory).to_have_count(2)
        expect(notebook.panel).to_contain_text("no GPUs: ")
        notebook.save()
        notebook.start(1)
        expect(memory.nth(1)).to_contain_text("MiB")
        before = number(memory.nth(1).inner_text())
        notebook.wait_until(lambda: number(memory.nth(1).inner_text()) > before, "a larger figure")
        notebook.shoot("two-ranks-while-a-cell-runs")

        # What the reader wants reaches the kernel meanwhile, too.
        notebook.listen()
        notebook.panel.get_by_label("Update interval").select_option("0.5")
        notebook.wait_until(lambda: ["live", 0.5] in notebook.told, "the kernel's word that it has the rate")
        notebook.panel.get_by_role("button", name="Pause").click()
        notebook.wait_until(lambda: ["paused", 0.5] in notebook.told, "the kernel's word that it rests")
        notebook.panel.get_by_role("button", name="Resume").click()
        notebook.wait_until(lambda: notebook.told[-1] == ["live", 0.5], "the kernel's word that it goes on")
        assert notebook.is_running(1)

        # A page that is opened anew gets its widgets when the cell has ended; until then the copy stands there.
        notebook.reload()
        expect(notebook.copy).to_contain_text(re.compile(r"2 ranks: all idle saved copy, as of 20\d\d-"))
        notebook.interrupt()
        expect(memory.nth(1)).to_contain_text("MiB")
        expect(notebook.panel.locator(".nbdist-machine > .nbdist-segment")).to_have_count(2)
        expect(notebook.copy).to_be_hidden()
        notebook.run(2)
        expect(notebook.panel).to_contain_text("session ended")


def test_eight_gpus_in_light_and_dark(eight: Notebook) -> None:
    expect(eight.panel.locator(".nbdist-row")).to_have_count(8)
    expect(eight.panel).to_contain_text("⚠ nearly full: 98 %")
    expect(eight.copy).to_be_hidden()
    eight.run(1)
    assert eight.brightness(eight.panel) > 0.9
    eight.shoot("eight-gpus-light")
    eight.command("apputils:change-theme", {"theme": "JupyterLab Dark"})
    eight.wait_until(lambda: eight.brightness(eight.panel) < 0.2, "a dark ground")
    assert eight.contrast(eight.panel.locator(".nbdist-title")) > 7
    assert eight.contrast(eight.panel.locator(".nbdist-node-facts")) > 4.5
    expect(eight.page.locator("#jupyterlab-splash")).to_have_count(0)
    eight.shoot("eight-gpus-dark")
    eight.command("apputils:change-theme", {"theme": "JupyterLab Light"})
    eight.wait_until(lambda: eight.brightness(eight.panel) > 0.9, "a light ground again")
    expect(eight.page.locator("#jupyterlab-splash")).to_have_count(0)  # which takes the focus


def test_a_rank_is_chosen_by_keys(eight: Notebook) -> None:
    rows = eight.panel.locator(".nbdist-row")
    rows.first.focus()
    eight.page.keyboard.press("ArrowDown")
    eight.page.keyboard.press("ArrowDown")
    expect(rows.nth(2)).to_be_focused()
    eight.page.keyboard.press("Enter")
    details = eight.panel.locator(".nbdist-details")
    expect(details).to_contain_text("⚠ straggler: +")
    expect(rows.nth(2)).to_have_attribute("aria-selected", "true")
    eight.page.keyboard.press("End")
    expect(rows.last).to_be_focused()
    eight.page.keyboard.press("Escape")
    expect(details).to_be_hidden()


def test_buttons_reach_the_kernel_and_pause_holds_at_once(eight: Notebook) -> None:
    button = eight.panel.get_by_role("button", name="Pause")
    button.click()
    expect(eight.panel.locator(".nbdist-live")).to_have_text("‖ paused")
    eight.panel.get_by_role("button", name="Resume").click()
    expect(eight.panel.locator(".nbdist-live")).to_have_text("● live")
    eight.panel.get_by_label("Update interval").select_option("5")
    eight.panel.locator(".nbdist-row").nth(1).click()
    eight.panel.get_by_role("button", name="Memory snapshot of rank 1").click()
    expect(eight.panel.locator(".nbdist-message").last).to_contain_text("%distributed start")


def test_no_figure_moves_another(eight: Notebook) -> None:
    figures = eight.panel.locator(".nbdist-stat")
    places = "figures => figures.map(figure => figure.getBoundingClientRect().x)"
    expect(figures.nth(1)).to_contain_text("rank 2 is late")
    before = figures.evaluate_all(places)
    eight.run(2)
    expect(figures.nth(1)).to_contain_text("no straggler")
    assert figures.evaluate_all(places) == before
    eight.run(3)


def test_256_ranks_are_a_map(lab: Lab, browser: Browser) -> None:
    with Notebook(
        lab, browser, [SHOW.format(count=256), MOVE.format(count=256), "source.show(stuck(gpus(256)))"]
    ) as notebook:
        notebook.run(0)
        expect(notebook.panel.locator(".nbdist-cell")).to_have_count(256)
        worth_a_look = notebook.panel.locator(".nbdist-attention .nbdist-row:visible")
        expect(worth_a_look).to_have_count(4)
        expect(worth_a_look.first).to_contain_text("✕ dead")
        expect(notebook.panel.locator(".nbdist-attention")).to_contain_text("killed by SIGKILL")
        colors = "cells => cells.map(cell => cell.style.background)"
        cells = notebook.panel.locator(".nbdist-cell")
        before = cells.evaluate_all(colors)
        notebook.run(1)
        notebook.wait_until(lambda: cells.evaluate_all(colors) != before, "other colors")
        cells.first.focus()
        notebook.page.keyboard.press("ArrowRight")
        notebook.page.keyboard.press("Enter")
        expect(notebook.panel.locator(".nbdist-details")).to_contain_text("cuda:1")
        notebook.shoot("256-gpus")
        notebook.panel.locator(".nbdist-attention .nbdist-row").first.click()
        expect(notebook.panel.locator(".nbdist-details")).to_contain_text("✕ dead: killed by SIGKILL")
        expect(cells.nth(15)).to_be_focused()
        notebook.run(2)
        expect(notebook.panel.locator(".nbdist-cell[data-state='stuck']")).to_have_count(255)
        expect(notebook.panel.get_by_role("alert")).to_have_text(
            "⚠ 255 ranks are stuck: each waits in all_reduce, cell 3 line 4, for rank 7"
        )


def test_360_pixels_are_enough(eight: Notebook) -> None:
    eight.page.set_viewport_size({"width": 520, "height": 900})
    eight.panel.evaluate("element => { element.style.width = '360px' }")
    wide = eight.panel.evaluate("element => element.scrollWidth > element.clientWidth")
    assert not wide
    for name in ("memory", "utilization", "power", "state"):
        box = eight.panel.locator(f".nbdist-row .nbdist-{name}").first.bounding_box()
        panel = eight.panel.bounding_box()
        assert box and panel and panel["x"] <= box["x"] and box["x"] + box["width"] <= panel["x"] + 360
    eight.shoot("360-pixels")
    eight.panel.evaluate("element => { element.style.width = '' }")
    eight.page.set_viewport_size({"width": 1100, "height": 900})


def test_nobody_looks_after_the_last_page_has_gone(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, [SHOW.format(count=8), "assert source.watched", "source.watched"]) as notebook:
        notebook.run(0)
        notebook.save()
        notebook.reload()
        expect(notebook.panel.locator(".nbdist-row")).to_have_count(8)
        notebook.run(1)
        notebook.clear(0)
        expect(notebook.panel).to_have_count(0)
        wait_until(lambda: notebook.result(2) == "False", "the kernel to hear of it")


def test_a_kernel_that_was_restarted_is_reported(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, [SHOW.format(count=1024)]) as notebook:
        notebook.run(0)
        cells = notebook.panel.locator(".nbdist-cell")
        expect(cells).to_have_count(1024)
        map_box, last = notebook.panel.locator(".nbdist-map").bounding_box(), cells.last.bounding_box()
        assert map_box and last and last["y"] + last["height"] <= map_box["y"] + map_box["height"]  # nothing scrolls
        notebook.shoot("1024-gpus")
        notebook.restart_kernel()
        expect(notebook.panel.locator(".nbdist-live")).to_have_text("■ kernel restarted")
        expect(notebook.panel).to_contain_text("The kernel was restarted: run the cell again.")
        expect(notebook.panel.get_by_role("button", name="Pause")).to_be_disabled()


def test_a_saved_notebook_shows_the_last_values_without_its_kernel(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, [SHOW.format(count=8), "source.show(gpus(4))"]) as notebook:
        notebook.run(0)
        notebook.run(1)
        expect(notebook.panel.locator(".nbdist-row")).to_have_count(4)
        notebook.save()
        notebook.end_kernel()
        notebook.panel.get_by_role("button", name="Pause").click()
        expect(notebook.panel).to_contain_text("The kernel behind this panel has ended: run the cell again.")
        notebook.open()  # with a new kernel, which knows nothing of the panel
        expect(notebook.copy).to_be_visible()
        expect(notebook.copy).to_contain_text("4 ranks")
        error = notebook.page.get_by_text("model not found")
        expect(error).to_be_attached()
        expect(error).to_be_hidden()
        expect(notebook.panel).to_have_count(0)
        notebook.shoot("saved-without-kernel")
