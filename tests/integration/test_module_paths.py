"""How many modules somebody has to read to follow a cell, or a Ctrl-C: no more than today."""

from __future__ import annotations

from testbed.module_paths import modules_passed

# `python -m testbed.module_paths` lists them; make these smaller, not larger. Both pass `wire/alike.py` where replies
# of ranks arrive together.
MOST = {"a cell": 81, "a Ctrl-C": 92}


def test_a_cell_and_a_ctrl_c_pass_no_more_modules_than_before() -> None:
    found = {walk: len(modules) for walk, modules in modules_passed().items()}
    assert {walk: count for walk, count in found.items() if count > MOST[walk]} == {}
    assert min(found.values()) > 20  # else nothing was recorded
