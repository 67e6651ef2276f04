"""The page on the architecture names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def test_every_file_and_folder_that_it_names_exists() -> None:
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|\.ts|/))`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 50
    assert sorted(name for name in named if not ((ROOT / "nbdist" / name).exists() or (ROOT / name).exists())) == []
