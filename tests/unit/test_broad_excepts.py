"""Who catches every error says why, where it is done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "nbdist"
BROAD = re.compile(r"^\s*except( \(?\*?(Base)?Exception\b[^:]*)?:")


def test_a_broad_except_has_its_reason_beside_it_or_above() -> None:
    bare = []
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = path.read_text().splitlines()
        for above, (number, line) in zip(["", *lines], enumerate(lines, 1), strict=False):
            if BROAD.match(line) and "#" not in line and not above.strip().startswith("#"):
                bare.append(f"{path.relative_to(PACKAGE)}:{number}")
    assert bare == []


@pytest.mark.parametrize("line", ["except:", "  except Exception:", "except BaseException as error:"])
def test_a_broad_except_is_seen(line: str) -> None:
    assert BROAD.match(line)
