"""A page whose network is gone for a while: it says so, comes back by itself, and shows what was printed meanwhile."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from testbed.kernel import wait_until
from testbed.lab import CURRENT, Lab, Notebook, show_sidebar
from testbed.slow_network import slow_network

pytestmark = pytest.mark.lab

START = "%load_ext nbdist\n%distributed start -n 2\n%distributed panel --rate 0.25"
COUNT = """\
%%distributed
import pathlib, time
line = 0
while not pathlib.Path({end!r}).exists():
    line += 1
    print("line", line)
    pathlib.Path({here!r} + str(rank)).write_text(str(line))
    time.sleep(0.05)"""

LOGGED = "import nbdist\n[f'{len(text.splitlines())}' for text in nbdist.get_session().logs().values()]"


def test_a_network_that_was_gone_is_reported_and_what_ranks_printed_meanwhile_is_shown(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    here, end = tmp_path / "line-", tmp_path / "end"
    count = COUNT.format(here=str(here), end=str(end))

    def reached() -> int:
        return min(int((tmp_path / f"line-{rank}").read_text() or 0) for rank in range(2))

    with slow_network(lab.url.removeprefix("http://")) as network:
        away = copy.copy(lab)
        away.url = f"http://{network.address}"
        with Notebook(away, browser, [START, count, LOGGED]) as notebook:
            sidebar = show_sidebar(notebook)
            status = notebook.page.locator(".nbdist-status")
            note = notebook.page.locator(".nbdist-tabs").get_by_role("status")
            notebook.run(0)
            notebook.start(1)
            expect(status).to_have_text(re.compile(r"0 of 2 done"))
            expect(sidebar.locator(".nbdist-row")).to_have_count(2)
            expect(note).to_have_text("")
            with network.silent():
                network.cut()
                expect(sidebar).to_contain_text("The connection to the Jupyter server is lost. The ranks go on")
                expect(status).to_have_text("Ranks: no connection")
                expect(note).to_have_text("No connection: there may be newer lines")
                expect(sidebar.get_by_role("button", name="Stacks")).to_be_disabled()
                expect(sidebar.locator(".nbdist-panel")).to_contain_text("silent for")
                notebook.shoot("no-connection")
                before = reached()
                wait_until(lambda: reached() > before + 40, "the ranks to go on")
            expect(status).to_have_text(re.compile(r"0 of 2 done"))
            expect(note).to_have_text("")
            expect(sidebar).to_contain_text("2 ranks on cpu")
            expect(sidebar.locator(".nbdist-panel")).not_to_contain_text("silent for")
            sidebar.get_by_role("button", name="Stacks").click()  # the page's line to the kernel lives on
            expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("time.sleep")
            end.touch()
            expect(status).to_have_text("2 ranks: idle")
            texts = notebook.page.evaluate(f"{CURRENT}.content.widgets[1].model.outputs.toJSON()")
            shown = "".join(each["text"] for each in texts if each["output_type"] == "stream")
            for rank in range(2):
                numbers = [int(line) for line in re.findall(rf"^\[(?:0-1|{rank})\] line (\d+)$", shown, re.MULTILINE)]
                assert numbers == sorted(set(numbers))
                # Jupyter's server keeps what the kernel says; a message of the moment of its return it may lose.
                assert numbers[-1] == int(Path(f"{here}{rank}").read_text())
                assert set(range(before + 5, before + 20)) <= set(numbers)
            assert notebook.result(2) == f"{[Path(f'{here}{rank}').read_text() for rank in range(2)]}"
