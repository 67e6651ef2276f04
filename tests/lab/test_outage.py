"""A page whose network is gone for a while: it says so, comes back by itself, and shows what was printed meanwhile."""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Locator, expect

from testbed.kernel import wait_until
from testbed.lab import CURRENT, Lab, Notebook, show_sidebar
from testbed.slow_network import SlowNetwork, slow_network
from tests.lab.browser import jupyterlab

pytestmark = pytest.mark.lab

START = "%load_ext nbdist\n%distributed start -n 2\n%distributed panel --rate 0.25"
COUNT = """\
%%distributed
import pathlib, time
def count():
    line = 0
    while not pathlib.Path({end!r}).exists():
        line += 1
        print("line", line)
        pathlib.Path({here!r} + str(rank)).write_text(str(line))
        time.sleep(0.05)
count()"""

LOGGED = "import nbdist\n[f'{len(text.splitlines())}' for text in nbdist.get_session().logs().values()]"


@contextmanager
def counting(lab: Lab, browser: Browser, folder: Path) -> Iterator[tuple[Notebook, SlowNetwork, Locator]]:
    """Open a notebook over a network of its own, with the sidebar, and two ranks that count; both end with it."""
    count = COUNT.format(here=str(folder / "line-"), end=str(folder / "end"))
    with slow_network(lab.url.removeprefix("http://")) as network:
        away = copy.copy(lab)
        away.url = f"http://{network.address}"
        with Notebook(away, browser, [START, count, LOGGED]) as notebook:
            sidebar = show_sidebar(notebook)
            notebook.run(0)
            notebook.start(1)
            expect(notebook.page.locator(".nbdist-status")).to_have_text(re.compile(r"0 of 2 done"))
            expect(sidebar.locator(".nbdist-row")).to_have_count(2)
            yield notebook, network, sidebar


def counted(folder: Path) -> list[int]:
    return [int((folder / f"line-{rank}").read_text() or 0) for rank in range(2)]


def shown_numbers(notebook: Notebook, rank: int) -> list[int]:
    texts = notebook.page.evaluate(f"{CURRENT}.content.widgets[1].model.outputs.toJSON()")
    shown = "".join(each["text"] for each in texts if each["output_type"] == "stream")
    return [int(line) for line in re.findall(rf"^\[(?:0-1|{rank})\] line (\d+)$", shown, re.MULTILINE)]


def test_a_network_that_was_gone_is_reported_and_what_ranks_printed_meanwhile_is_shown(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    with counting(lab, browser, tmp_path) as (notebook, network, sidebar):
        status = notebook.page.locator(".nbdist-status")
        note = notebook.page.locator(".nbdist-tabs").get_by_role("status")
        expect(note).to_have_text("")
        with network.silent():
            network.cut()
            expect(sidebar).to_contain_text("The Jupyter server cannot be reached. The ranks keep running unless")
            expect(status).to_have_text("Ranks: no connection")
            expect(note).to_have_text("No connection: there may be newer lines")
            expect(sidebar.get_by_role("button", name="Stacks")).to_be_disabled()
            expect(sidebar.locator(".nbdist-panel")).to_contain_text("silent for")
            notebook.shoot("no-connection")
            before = min(counted(tmp_path))
            wait_until(lambda: min(counted(tmp_path)) > before + 40, "the ranks to go on")
        expect(status).to_have_text(re.compile(r"0 of 2 done"))
        expect(note).to_have_text("Reconnected: a line may be missing")
        expect(sidebar).to_contain_text("2 ranks on cpu")
        expect(sidebar.locator(".nbdist-panel")).not_to_contain_text("silent for")
        sidebar.get_by_role("button", name="Stacks").click()  # the page's line to the kernel lives on
        expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("count()")
        (tmp_path / "end").touch()
        expect(status).to_have_text("2 ranks: idle")
        for rank, last in enumerate(counted(tmp_path)):
            numbers = shown_numbers(notebook, rank)
            assert numbers == sorted(set(numbers))
            # Jupyter's server keeps what the kernel says; a message of the moment of its return it may lose.
            assert numbers[-1] == last
            assert set(range(before + 5, before + 20)) <= set(numbers)
        assert notebook.result(2) == f"{[str(last) for last in counted(tmp_path)]}"


def test_a_network_that_drops_everything_is_noticed_though_no_connection_is_closed(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    with counting(lab, browser, tmp_path) as (notebook, network, sidebar):
        status = notebook.page.locator(".nbdist-status")
        note = notebook.page.locator(".nbdist-tabs").get_by_role("status")
        expect(note).to_have_text("")  # their code has come by the network
        with network.silent():
            expect(status).to_have_text("Ranks: no connection")
            expect(sidebar.get_by_role("status").first).to_contain_text("The Jupyter server cannot be reached.")
            expect(note).to_have_text("No connection: there may be newer lines")
        expect(status).to_have_text(re.compile(r"0 of 2 done"))
        expect(note).to_have_text("")  # nothing was lost
        (tmp_path / "end").touch()
        expect(status).to_have_text("2 ranks: idle")
        for rank, last in enumerate(counted(tmp_path)):
            assert shown_numbers(notebook, rank) == list(range(1, last + 1))


def test_a_page_that_has_given_up_connects_again_when_its_server_answers(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    with counting(lab, browser, tmp_path) as (notebook, network, sidebar):
        with network.silent():
            with notebook.giving_up():
                network.cut()
            expect(sidebar).to_contain_text("the page reconnects automatically")
        expect(notebook.page.locator(".nbdist-status")).to_have_text(re.compile(r"0 of 2 done"))
        expect(sidebar).to_contain_text("2 ranks on cpu")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_was_restarted_has_no_kernel_for_the_page_and_the_page_says_so(
    browser: Browser, tmp_path: Path, signum: int
) -> None:
    with jupyterlab(tmp_path) as lab, Notebook(lab, browser, [START, COUNT.format(here="x", end="y")]) as notebook:
        sidebar = show_sidebar(notebook)
        notebook.run(0)
        notebook.start(1)
        expect(notebook.page.locator(".nbdist-status")).to_have_text(re.compile(r"0 of 2 done"))
        note = notebook.page.locator(".nbdist-tabs").get_by_role("status")
        expect(note).to_have_count(1)
        notebook.restart_server(signum)
        expect(sidebar).to_contain_text("This notebook has no running kernel. To start one, reload the page")
        # A server that ends in good order interrupts the cell first, and the page may hear of that in time.
        ends = ["The kernel has ended: a line may be missing", "KeyboardInterrupt: ranks 0-1 interrupted"]
        expect(notebook.page.get_by_text(re.compile("|".join(ends))).first).to_be_visible()
        expect(notebook.page.locator(".nbdist-status")).to_be_hidden()
        expect(sidebar.get_by_role("button", name="Stacks")).to_be_hidden()
        notebook.reload()
        expect(show_sidebar(notebook)).to_contain_text("nbdist is not loaded in this notebook's kernel")
