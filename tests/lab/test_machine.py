"""The sidebar's "This machine": sessions of other notebooks, and GPUs. Pictures are kept in build/screenshots."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Locator, expect

from nbdist.server.machine import PROTOCOL, GpuRow, Holder, Machine
from testbed.lab import Lab, Notebook, show_sidebar

pytestmark = pytest.mark.lab

GIB = 1024**3
LOOP = "%%distributed\nimport time\nwhile True: time.sleep(0.05)"


def machine_of(notebook: Notebook) -> Locator:
    sidebar = show_sidebar(notebook)
    sidebar.get_by_text("This machine").click()
    return sidebar.locator(".nbdist-machine")


def test_another_notebooks_session_is_listed_interrupted_and_attached(lab: Lab, browser: Browser) -> None:
    start = ["%load_ext nbdist\n%distributed start -n 2", LOOP]
    with Notebook(lab, browser, start) as first, Notebook(lab, browser, [""]) as second:
        first.run(0)
        first.start(1)
        session = machine_of(second).get_by_role("listitem").filter(has_text=first.name)
        expect(session).to_contain_text("2 ranks")
        expect(session).to_contain_text("runs cell 2 for")
        second.shoot("machine")
        session.get_by_role("button", name="Interrupt").click()
        first.wait_until(lambda: not first.is_running(1), "the cell to end")
        expect(session).to_contain_text("idle")

        session.get_by_role("button", name="Attach").click()
        second.page.locator(".jp-Dialog").get_by_role("button", name="Take").click()
        expect(second.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")
        assert second.source(0).startswith("%load_ext nbdist\n%distributed attach ")


def test_gpus_show_who_holds_them_and_a_server_without_nbdist_is_named(lab: Lab, browser: Browser) -> None:
    holders = [Holder(11, 60 * GIB, "alice", "python", "58edd547"), Holder(12, 2 * GIB, "bob", "python", "")]
    gpu = GpuRow(0, "NVIDIA H100", 80 * GIB, 62 * GIB, 0.5, holders)
    found = msgspec.json.encode(Machine(PROTOCOL, "0.1.0", "node-a", [], [gpu]))
    with Notebook(lab, browser, ["x = 1"]) as notebook:
        notebook.page.route("**/nbdist/machine*", lambda route: route.fulfill(body=found))
        machine = machine_of(notebook)
        expect(machine).to_contain_text("node-a: no sessions, 1 GPU")
        gpus = machine.get_by_role("list", name="GPUs")
        for words in ("62.0 GiB of 80.0 GiB, 50 % busy", "session 58edd547: 60.0 GiB", "bob, python (pid 12): 2.0 GiB"):
            expect(gpus).to_contain_text(words)
        notebook.command("apputils:change-theme", {"theme": "JupyterLab Dark"})
        sidebar = notebook.page.locator("#nbdist-ranks")
        notebook.wait_until(lambda: notebook.brightness(sidebar) < 0.2, "a dark ground")
        expect(notebook.page.locator("#jupyterlab-splash")).to_have_count(0)
        notebook.shoot("machine-dark")
        notebook.command("apputils:change-theme", {"theme": "JupyterLab Light"})
        notebook.page.unroute("**/nbdist/machine*")
        notebook.page.route("**/nbdist/machine*", lambda route: route.fulfill(status=404))
        expect(machine).to_contain_text("The Jupyter server has not loaded nbdist")
