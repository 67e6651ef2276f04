"""JupyterLab's picker and the kernel agree on which cells stay in the notebook."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbdist.client.magics import router

PICKER = Path(__file__).resolve().parents[2] / "labextension" / "src" / "lab" / "cell_line.ts"


@pytest.mark.parametrize(("name", "pattern"), [("STAYS_HERE", router.STAYS_HERE), ("AROUND", router.AROUND)])
def test_with_auto_on_the_same_lines_stay_in_the_notebook(name: str, pattern: re.Pattern[str]) -> None:
    found = re.search(rf"^const {name} = /\^\\s\*(.+)/;$", PICKER.read_text(), re.MULTILINE)
    assert found is not None and found[1] == pattern.pattern
