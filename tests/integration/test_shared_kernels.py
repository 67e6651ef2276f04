"""A kernel that several tests share, after one of them has failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT = {
    "a loop": "print('going')\nwhile True: pass",
    "a prompt": "print('going')\ninput()",
    "ranks in a loop": """%load_ext nbdist
%distributed start -n 2
get_ipython().run_cell_magic("distributed", "", "print('going', flush=True)\\nwhile True: pass")""",
    "a launch": """import nbdist
def train():
    print("going", flush=True)
    while True: pass
nbdist.notebook_launcher(train, num_processes=2)""",
}
TESTS = """
def test_fails(notebook):
    notebook.start({code!r}, input_allowed=True).wait_for("going")
    assert not "this"

def test_comes_next(notebook):
    assert notebook.value("1 + 1", 5) == 2
"""


@pytest.mark.parametrize("left", LEFT)
def test_what_a_failed_test_has_left_running_ends_before_the_next(left: str, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS.format(code=LEFT[left]))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    own = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest"]
    outcome = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in outcome.stdout, outcome.stdout
