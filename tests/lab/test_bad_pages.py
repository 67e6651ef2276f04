"""What JupyterLab shows where something is missing, ended, saved by others, or of another version."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import nbformat
import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Route, expect

from testbed.lab import CURRENT, Lab, Notebook, show_sidebar, unfold
from tests.lab.browser import jupyterlab

pytestmark = pytest.mark.lab

START = "%load_ext nbdist\n%distributed start -n 2"
SCRIPT = "<img src=x onerror='window.ran = 1'><script>window.ran = 1</script>"
# As if it were not installed.
MISSING = """\
import sys
class Missing:
    def find_spec(name, *more):
        if name == "nbdist": raise ModuleNotFoundError("No module named 'nbdist'", name="nbdist")
sys.meta_path.insert(0, Missing)"""
# A kernel of another version, as far as a page gets with it: it hears the page and greets.
OTHER = """\
kernel = get_ipython().kernel
greeting = {{"type": "greeting", "protocol": {protocol}, "version": "{version}", "more": 1}}
def greet(stream, identity, message):
    content = {{"comm_id": message["content"]["comm_id"], "data": greeting}}
    kernel.session.send(kernel.iopub_socket, "comm_msg", content)
kernel.control_handlers["comm_open"] = greet
# nbdist"""
# The page of another version, as far as a kernel gets with it.
PAGE = """\
protocol => new Promise(resolve => {{
  const kernel = {kernel};
  kernel.iopubMessage.connect((_, message) => {{
    if (message.content.comm_id === "another") resolve(message.content.data);
  }});
  const {{ username, clientId: session }} = kernel;
  const header = {{ msg_id: "opening", msg_type: "comm_open", username, session, date: "", version: "5.3" }};
  const opening = {{ page: "another", protocol, more: 1 }};
  const content = {{ comm_id: "another", target_name: "nbdist.page", data: opening }};
  const message = {{ header, parent_header: {{}}, metadata: {{}}, content, channel: "control", buffers: [] }};
  kernel.sendControlMessage(message, false);
}})"""


def test_a_server_without_nbdist_is_named_and_all_else_works(
    tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> None:
    with (
        jupyterlab(tmp_path_factory.mktemp("bare"), extended=False) as bare,
        Notebook(bare, browser, [START]) as notebook,
    ):
        sidebar = show_sidebar(notebook)
        unfold(sidebar, "This machine")
        expect(sidebar).to_contain_text("The Jupyter server has not loaded nbdist")
        notebook.run(0)
        expect(sidebar).to_contain_text("2 ranks on cpu")
        expect(notebook.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")


def test_a_kernel_without_nbdist_says_so(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, [MISSING, ""]) as notebook:
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        expect(sidebar).to_contain_text("nbdist is not loaded in this notebook's kernel")
        notebook.choose(1)
        sidebar.get_by_role("button", name="Add and run").first.click()
        expect(notebook.page.locator(".jp-Cell").nth(1)).to_contain_text("ModuleNotFoundError")
        expect(sidebar).to_contain_text("nbdist is not loaded in this notebook's kernel")
        expect(sidebar.locator(".nbdist-sidebar-buttons").first).to_be_hidden()


def test_a_read_only_notebook_is_looked_at_but_not_changed(lab: Lab, browser: Browser) -> None:
    def fixed(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"writable": False})

    context = browser.new_context()
    context.route("**/api/contents/*.ipynb*", fixed)
    with Notebook(lab, context, [START, "%%distributed\nrank"]) as notebook:
        sidebar = show_sidebar(notebook)
        expect(notebook.page.locator(".nbdist-run-on")).to_be_disabled()
        expect(notebook.page.locator(".nbdist-badge-of-cell").first).to_be_disabled()
        expect(sidebar.get_by_role("alert")).to_have_text("This notebook is read-only, so no cell can be added.")
        expect(sidebar.get_by_role("button", name="Add and run").first).to_be_disabled()
        notebook.run(0)
        expect(notebook.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")
        sidebar.get_by_role("button", name="Stacks").click()
        expect(sidebar.locator(".nbdist-sidebar-text")).not_to_be_empty()
        unfold(sidebar, "Plan")
        sidebar.get_by_label("strategy", exact=True).select_option("none")
        expect(sidebar.locator(".nbdist-plan .nbdist-start-preview").first).to_contain_text("%distributed plan none")
        expect(sidebar.get_by_role("button", name="Add and run the plan")).to_be_disabled()
    context.close()


def test_what_an_untrusted_notebook_has_saved_is_shown_as_text_and_runs_nothing(lab: Lab, browser: Browser) -> None:
    def saved(notebook: nbformat.NotebookNode) -> None:
        text = f"[0] {SCRIPT}\n[1] plain\n"
        page = {"text/html": SCRIPT, "text/plain": "[0-1] safe"}
        new: Any = nbformat.v4.new_output
        notebook.cells[0].outputs = [new("stream", name="stdout", text=text), new("display_data", data=page)]

    with Notebook(lab, browser, ["%%distributed\nshow()"], saved) as notebook:
        sidebar = show_sidebar(notebook)
        cell = notebook.page.locator(".jp-Cell").first
        expect(cell.get_by_role("tab")).to_have_text(["all", "0", "1"])
        cell.get_by_role("tab", name="0").click()
        expect(cell.locator(".nbdist-tab-view")).to_contain_text(SCRIPT)
        expect(sidebar).to_contain_text("nbdist is not loaded in this notebook's kernel")
        assert notebook.page.evaluate("window.ran") is None
        assert notebook.page.evaluate(f"{CURRENT}.content.widgets[0].model.executionCount") is None


def test_a_session_that_broke_says_why_and_restarts(lab: Lab, browser: Browser) -> None:
    own = "import psutil\nchildren = psutil.Process().children()\n"
    own += "[each.pid for each in children if 'controller_boot' in ' '.join(each.cmdline())]"
    with Notebook(lab, browser, [START, own, "%%distributed\nrank"]) as notebook:
        sidebar, status = show_sidebar(notebook), notebook.page.locator(".nbdist-status")
        notebook.run(0)
        notebook.run(1)
        output = notebook.page.evaluate(f"{CURRENT}.content.widgets[1].model.outputs.toJSON()[0].data['text/plain']")
        (controller,) = json.loads(output)
        os.kill(controller, signal.SIGKILL)
        expect(status).to_have_text("Ranks: session broke")
        expect(sidebar.locator(".nbdist-sidebar-head")).to_contain_text("controller")
        expect(sidebar.get_by_role("button", name="Stacks")).to_be_disabled()
        notebook.shoot("session-broke")
        sidebar.get_by_role("button", name="Restart").click()
        notebook.page.locator(".jp-Dialog").get_by_role("button", name="Restart").click()
        expect(status).to_have_text("2 ranks: idle")
        notebook.run(2)


@pytest.mark.parametrize(("protocol", "version"), [(99, "9.9"), (1, "0.0.1")])
def test_a_kernel_of_another_version_is_named(lab: Lab, browser: Browser, protocol: int, version: str) -> None:
    with Notebook(lab, browser, [OTHER.format(protocol=protocol, version=version)]) as notebook:
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        expect(sidebar).to_contain_text(f"The kernel runs nbdist {version}, which does not match this page's version.")
        expect(sidebar.get_by_role("button", name="Stop")).to_be_hidden()
        expect(sidebar.get_by_role("button", name="Add and run").first).to_be_hidden()


@pytest.mark.parametrize("protocol", [1, 99])
def test_a_page_of_another_version_learns_which_one_the_kernel_has(lab: Lab, browser: Browser, protocol: int) -> None:
    from nbdist import __version__
    from nbdist.wire.pages.page_messages import PAGE_PROTOCOL

    with Notebook(lab, browser, ["%load_ext nbdist"]) as notebook:
        notebook.run(0)
        script = PAGE.format(kernel=f"{CURRENT}.sessionContext.session.kernel")
        greeting = notebook.page.evaluate(script, protocol)
        assert greeting == {"type": "greeting", "protocol": PAGE_PROTOCOL, "version": __version__}


def test_a_server_of_another_version_is_named(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, ["x = 1"]) as notebook:
        notebook.page.route("**/nbdist/machine*", lambda route: route.fulfill(json={"protocol": 99, "version": "9.9"}))
        sidebar = show_sidebar(notebook)
        unfold(sidebar, "This machine")
        expect(sidebar).to_contain_text("The Jupyter server has another version of nbdist.")
