"""A machine that has joined and lies, and strangers at the port: what others have stays as it is.

In processes of their own: what the controller reports of each lie is for nobody.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("lies", "end"),
    [
        pytest.param("300", "the session works", id="lies of all kinds change nothing for others"),
        pytest.param("named", "none was believed", id="a node is believed about itself only"),
    ],
)
def test_what_honest_machines_have_stays_as_it_is(lies: str, end: str) -> None:
    command = [sys.executable, "-m", "tests.stress.network_fuzz", lies]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and end in done.stdout, done.stdout + done.stderr[-2000:]
