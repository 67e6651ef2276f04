"""One JupyterLab and one browser for the files of tests that a worker runs one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from testbed.kernel import LIMIT
from testbed.lab import PLAIN_HOST, Lab
from tests.lab.browser import chromium, jupyterlab

expect.set_options(timeout=1000 * LIMIT)


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with jupyterlab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium(f"--host-resolver-rules=MAP {PLAIN_HOST} 127.0.0.1") as browser:
        yield browser
