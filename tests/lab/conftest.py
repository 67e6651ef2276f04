"""One JupyterLab and one browser for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from testbed.kernel import LIMIT
from testbed.lab import Lab
from tests.lab.browser import chromium, jupyterlab

expect.set_options(timeout=1000 * LIMIT)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with jupyterlab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser
