"""The plan as a form in JupyterLab's sidebar. Pictures are kept in build/screenshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Locator, expect

from testbed.lab import LOOP, Lab, Notebook, show_sidebar, start_loop, unfold

pytestmark = pytest.mark.lab

START = "%load_ext nbdist\n%distributed start -n 2"
MODEL = "%%distributed\nimport torch\nmodel = torch.nn.Linear(4, 2)\nbatch = torch.ones(3, 4)"
HELD = """\
%%distributed
import pathlib, time
def held(path):
    while not pathlib.Path(path).exists(): time.sleep(0.05)
    return model"""


@pytest.fixture(scope="module")
def two(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook with two ranks, the plan open in its sidebar."""
    with Notebook(lab, browser, [START, MODEL, LOOP, "", "%distributed plan --reset", HELD]) as notebook:
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        notebook.run(1)
        unfold(sidebar, "Plan")
        expect(form(notebook).get_by_label("strategy", exact=True)).to_have_value("ddp")
        yield notebook


def form(notebook: Notebook) -> Locator:
    return notebook.page.locator(".nbdist-plan-form")


def test_settings_become_a_line_that_is_added_and_run(two: Notebook) -> None:
    plan, page = form(two), two.page
    add = plan.get_by_role("button", name="Add and run the plan")
    expect(add).to_be_disabled()
    plan.get_by_label("strategy", exact=True).select_option("fsdp")
    expect(plan.locator("summary").get_by_text("ddp", exact=True)).to_be_hidden()  # those settings do nothing now
    plan.get_by_text("every strategy").click()
    plan.get_by_label("precision", exact=True).select_option("bf16")
    plan.get_by_label("accumulate").fill("4")
    plan.get_by_text("fsdp and hsdp").click()
    plan.get_by_label("shard by").fill("Block,Head")
    line = "%distributed plan fsdp --precision bf16 --accumulate 4 --shard-by Block,Head"
    expect(plan.locator(".nbdist-start-preview").first).to_contain_text(line)
    expect(plan.locator(".nbdist-start-preview").first).to_contain_text("accumulate: 1 -> 4")
    two.shoot("plan-form")
    two.choose(3)
    add.click()
    expect(plan.locator(".nbdist-start-preview").first).to_have_text("This is already the plan.")
    assert two.source(3) == line
    expect(page.locator(".jp-Cell").nth(3)).to_contain_text("accumulate: 1 -> 4")
    two.run(4)  # what a cell changes, the form shows
    expect(plan.get_by_label("strategy", exact=True)).to_have_value("ddp")
    expect(plan.get_by_label("accumulate")).to_have_value("1")


def test_what_the_magic_refuses_the_form_refuses_in_its_words(two: Notebook) -> None:
    plan = form(two)
    problem, add = plan.locator(".nbdist-start-problem"), plan.get_by_role("button", name="Add and run the plan")
    plan.get_by_label("accumulate").fill("x y")
    expect(problem).to_have_text("accumulate must be a whole number of 1 or more, not 'x y'")
    expect(add).to_be_disabled()
    plan.get_by_label("accumulate").fill("1")
    expect(problem).to_be_empty()
    plan.locator("summary").get_by_text("ddp", exact=True).click()
    plan.get_by_label("bucket mb").fill("50")
    plan.get_by_label("strategy", exact=True).select_option("fsdp")
    expect(problem).to_contain_text("strategy 'fsdp' excludes bucket_mb")
    expect(plan.get_by_label("bucket mb")).to_be_visible()  # to be set back
    plan.get_by_label("bucket mb").fill("25.0")
    expect(problem).to_be_empty()
    plan.get_by_label("strategy", exact=True).select_option("ddp")
    expect(plan.locator(".nbdist-start-preview").first).to_have_text("This is already the plan.")


def test_memory_is_estimated_for_what_is_entered(two: Notebook) -> None:
    plan = form(two)
    estimate, found = plan.get_by_role("button", name="Estimate memory"), plan.locator(".nbdist-start-preview").last
    expect(estimate).to_be_disabled()
    expect(plan).to_contain_text("define a model and a micro-batch on rank 0")
    plan.get_by_label("Model", exact=True).fill("modell")
    plan.get_by_label("Micro-batch", exact=True).fill("batch")
    estimate.click()
    expect(found).to_contain_text("name 'modell' is not defined")
    plan.get_by_label("Model", exact=True).fill("model")
    estimate.click()
    expect(found).to_contain_text("one rank, ddp")
    expect(found).to_contain_text("fits:")
    plan.get_by_label("strategy", exact=True).select_option("fsdp")
    expect(plan).to_contain_text("The form has changed since this estimate.")
    estimate.click()
    expect(found).to_contain_text("one rank, fsdp")
    two.shoot("plan-estimate")
    plan.get_by_label("strategy", exact=True).select_option("ddp")

    start_loop(two, 2)
    expect(two.page.locator(".nbdist-status")).to_have_text("2 ranks: [0 of 2 done]")
    estimate.click()
    expect(found).to_contain_text("rank 0 is still running")
    two.page.locator(".nbdist-sidebar").get_by_role("button", name="Interrupt now").click()
    expect(two.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")


def test_buttons_act_while_memory_is_estimated(two: Notebook, tmp_path: Path) -> None:
    plan, sidebar = form(two), two.page.locator(".nbdist-sidebar")
    found, go = plan.locator(".nbdist-start-preview").last, tmp_path / "go"
    two.run(5)
    plan.get_by_label("Model", exact=True).fill(f"held({str(go)!r})")
    plan.get_by_label("Micro-batch", exact=True).fill("batch")
    plan.get_by_role("button", name="Estimate memory").click()
    expect(found).to_have_text("…")
    sidebar.get_by_role("button", name="Stacks").click()
    expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("in held")
    go.touch()
    expect(found).to_contain_text("one rank, ddp")
