"""The sidebar's "This machine": sessions of other notebooks, and GPUs. Pictures are kept in build/screenshots."""

from __future__ import annotations

import itertools
import shutil

import msgspec
import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Locator, Route, expect

from nbdist.wire.pages.machine_messages import MACHINE_PROTOCOL, GpuRow, Holder, Machine
from testbed.lab import CURRENT, LOOP, Lab, Notebook, show_sidebar, start_loop

pytestmark = pytest.mark.lab

GIB = 1024**3


def opened(notebook: Notebook, path: str) -> None:
    """Bring a notebook to the front of the page, and wait for its kernel."""
    notebook.page.evaluate("path => { jupyterapp.commands.execute('docmanager:open', { path }) }", path)
    there = f"{CURRENT}?.context?.path === path && {CURRENT}.sessionContext.session?.kernel?.connectionStatus"
    notebook.page.wait_for_function(f"path => ({there}) === 'connected'", arg=path)


def machine_of(notebook: Notebook) -> Locator:
    sidebar = show_sidebar(notebook)
    machine = sidebar.locator("details.nbdist-machine")
    machine.evaluate("element => { element.open = true }")  # a click may miss it: what stands above may still grow
    return machine


def test_another_notebooks_session_is_listed_interrupted_and_attached(lab: Lab, browser: Browser) -> None:
    start = ["%load_ext nbdist\n%distributed start -n 2", LOOP]
    with Notebook(lab, browser, start) as first, Notebook(lab, browser, [""]) as second:
        first.run(0)
        start_loop(first, 1)
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


def test_a_notebook_takes_its_own_session_back(lab: Lab, browser: Browser) -> None:
    cells = ["%load_ext nbdist\n%distributed start -n 2 --linger 1m", "%distributed detach"]
    with Notebook(lab, browser, cells) as notebook:
        session = machine_of(notebook).get_by_role("listitem").filter(has_text=notebook.name)
        attach, status = session.get_by_role("button", name="Attach"), notebook.page.locator(".nbdist-status")
        notebook.run(0)
        expect(session).to_contain_text("2 ranks")
        expect(attach).to_have_count(0)

        notebook.run(1)
        expect(session).to_contain_text("its notebook: detached")
        attach.click()
        expect(status).to_have_text("2 ranks: idle")
        expect(attach).to_have_count(0)

        notebook.restart_kernel()
        expect(session).to_contain_text("its notebook: restarted")
        attach.click()
        expect(status).to_have_text("2 ranks: idle")
        expect(attach).to_have_count(0)


def test_attach_adds_one_cell_however_often_it_is_clicked(lab: Lab, browser: Browser) -> None:
    """Also where the list is drawn anew meanwhile: here it always is, as the memory of the ranks grows."""
    memory = itertools.count(GIB, GIB)

    def grown(route: Route) -> None:
        answer = route.fetch()
        found = answer.json()
        sessions = [session | {"memory": next(memory)} for session in found["sessions"]]
        route.fulfill(response=answer, json=found | {"sessions": sessions})

    wait = "import os, time\nwhile not os.path.exists('clicked'): time.sleep(0.05)"
    cells = ["%load_ext nbdist\n%distributed start -n 2 --linger 1m\n%distributed detach", wait]
    with Notebook(lab, browser, cells) as notebook:
        notebook.page.route("**/nbdist/machine*", grown)
        notebook.run(0)
        machine, sidebar = machine_of(notebook), notebook.page.locator(".nbdist-sidebar")
        expect(sidebar).to_contain_text("No ranks are running.")  # the page knows what the cell has to begin with
        session = machine.get_by_role("listitem").filter(has_text=notebook.name)
        attach = session.get_by_role("button", name="Attach")
        notebook.start(1)
        attach.dblclick()
        before = session.inner_text()
        notebook.wait_until(lambda: session.inner_text() != before, "the list to be drawn anew")
        attach.click()
        (lab.folder / "clicked").touch()
        expect(notebook.page.locator(".nbdist-status")).to_have_text("2 ranks: idle")
        sources = notebook.page.evaluate(f"{CURRENT}.content.widgets.map(cell => cell.model.sharedModel.getSource())")
        assert len([source for source in sources if source.startswith("%distributed attach ")]) == 1


def test_a_session_is_offered_to_every_notebook_but_the_one_that_has_it(lab: Lab, browser: Browser) -> None:
    """The notebooks are open in one page, and their files have the same name in two folders."""
    with Notebook(lab, browser, ["%load_ext nbdist\n%distributed start -n 2"]) as notebook:
        folder = lab.folder / "sub"
        folder.mkdir()
        shutil.copy(lab.folder / notebook.name, folder)
        opened(notebook, f"sub/{notebook.name}")
        notebook.run(0)
        session = machine_of(notebook).get_by_role("listitem").filter(has_text=notebook.name)
        attach, status = session.get_by_role("button", name="Attach"), notebook.page.locator(".nbdist-status")
        expect(session).to_contain_text("2 ranks")
        expect(attach).to_have_count(0)

        opened(notebook, notebook.name)
        expect(status).to_be_hidden()
        attach.click()
        notebook.page.locator(".jp-Dialog").get_by_role("button", name="Take").click()
        expect(status).to_have_text("2 ranks: idle")
        expect(attach).to_have_count(0)

        opened(notebook, f"sub/{notebook.name}")
        expect(attach).to_be_visible()
        opened(notebook, notebook.name)
        expect(attach).to_have_count(0)


def test_a_notebook_that_is_renamed_keeps_its_session(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, ["%load_ext nbdist\n%distributed start -n 2", LOOP]) as notebook:
        notebook.run(0)
        session = machine_of(notebook).get_by_role("listitem").filter(has_text=notebook.name)
        expect(session).to_contain_text("2 ranks")
        notebook.page.evaluate(f"{CURRENT}.context.rename('renamed.ipynb')")
        start_loop(notebook, 1)
        expect(session).to_contain_text("runs cell 2 for")  # the list is of after the new name
        expect(session.get_by_role("button", name="Attach")).to_have_count(0)
        session.get_by_role("button", name="Interrupt").click()
        notebook.wait_until(lambda: not notebook.is_running(1), "the cell to end")


def test_a_session_that_is_stopped_from_the_list_did_not_break(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, ["%load_ext nbdist\n%distributed start -n 2"]) as notebook:
        notebook.run(0)
        session = machine_of(notebook).get_by_role("listitem").filter(has_text=notebook.name)
        session.get_by_role("button", name="Stop").click()
        dialog = notebook.page.locator(".jp-Dialog")
        expect(dialog).to_contain_text("The variables of all ranks are lost.")
        dialog.get_by_role("button", name="Stop").click()
        expect(notebook.page.locator(".nbdist-status")).to_have_text("Ranks: stopped")
        expect(session).to_have_count(0)


def test_gpus_show_who_holds_them_and_a_server_without_nbdist_is_named(lab: Lab, browser: Browser) -> None:
    holders = [Holder(11, 60 * GIB, "alice", "python", "58edd547"), Holder(12, 2 * GIB, "bob", "python", "")]
    gpu = GpuRow(0, "NVIDIA H100", 80 * GIB, 62 * GIB, 0.5, holders)
    found = msgspec.json.encode(Machine(MACHINE_PROTOCOL, "0.1.0", "node-a", [], [gpu]))
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
