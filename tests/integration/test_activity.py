"""What a Jupyter server takes for activity: it ends kernels that have had none for long, and only those."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from testbed.jupyter import Server
from testbed.kernel import Kernel, wait_until
from tests.conftest import _shared
from tests.support.server_page import Page

SOON = """\
import nbdist.lab.activity
import nbdist.panel.panel_feed
nbdist.lab.activity.PERIOD = 0.2
nbdist.panel.panel_feed.REST_AFTER = 0.5
%load_ext nbdist"""
SILENT = """\
%%distributed --background
import pathlib, time
while not pathlib.Path({end!r}).exists():
    time.sleep(0.01)"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A page with two ranks. What takes minutes takes less than a second."""
    server = Server(tmp_path)
    _shared.append(cast(Kernel, server))  # its kernel is its child
    page = Page(server)
    page.run(SOON)
    assert "2 ranks ready" in page.run("%distributed start -n 2")
    yield page
    page.close()
    server.close()
    _shared.remove(cast(Kernel, server))


def is_still(page: Page) -> bool:
    """Whether the server sees no activity for five periods, and the page hears nothing."""
    while page.hears(0.01):
        pass
    before = page.last_activity
    return not page.hears(1.0) and page.last_activity == before


def test_ranks_that_print_nothing_are_active_until_their_cell_ends(page: Page, tmp_path: Path) -> None:
    page.run(SILENT.format(end=str(tmp_path / "end")))
    for _ in range(3):
        before = page.last_activity
        wait_until(lambda before=before: page.last_activity != before, "activity")  # type: ignore[misc]
    (tmp_path / "end").touch()
    wait_until(lambda: is_still(page), "none")


def test_a_panel_of_idle_ranks_keeps_no_kernel_alive(page: Page, tmp_path: Path) -> None:
    page.run("%distributed panel --rate 0.25")
    wait_until(lambda: is_still(page), "none")
    page.run(SILENT.format(end=str(tmp_path / "end")))
    before = page.last_activity
    wait_until(lambda: page.last_activity != before, "activity")
    (tmp_path / "end").touch()
    wait_until(lambda: is_still(page), "none")
