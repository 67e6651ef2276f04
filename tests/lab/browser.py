"""JupyterLab and its browser for tests: processes that several tests of a file use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest
from playwright.sync_api import Browser

from testbed.kernel import Kernel
from testbed.lab import Lab, browser_without_window
from tests.conftest import _shared
from tests.support.leftovers import MARK


@contextmanager
def chromium(*options: str) -> Iterator[Browser]:
    """A browser without a window; with options of its command line."""
    before = {child.pid for child in psutil.Process().children()}
    # The browser's helpers are nobody's children, and end on their own.
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    with ExitStack() as stack:
        try:
            browser = stack.enter_context(browser_without_window(*options, environment=unmarked))
        except FileNotFoundError as error:
            pytest.skip(str(error))
        driver = next(child for child in psutil.Process().children() if child.pid not in before)
        _shared.append(cast(Kernel, driver))
        yield browser
    _shared.remove(cast(Kernel, driver))


@contextmanager
def jupyterlab(folder: Path, *, extended: bool = True, module: str = "jupyterlab") -> Iterator[Lab]:
    lab = Lab(folder, extended=extended, module=module)
    _shared.append(cast(Kernel, lab))  # the kernels are its children
    yield lab
    lab.close()
    _shared.remove(cast(Kernel, lab))
