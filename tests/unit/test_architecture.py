"""The pages on the architecture and on its decisions name files that exist, and a newcomer gets through them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "decisions.md"
SUBJECTS = sorted((DOCS / "decisions").glob("*.md"))
DATE = r"20\d\d-\d\d-\d\d"


def missing(names: set[str]) -> list[str]:
    return sorted(name for name in names if not ((ROOT / "nbdist" / name).exists() or (ROOT / name).exists()))


def decisions_of(page: Path) -> list[str]:
    """The paragraphs that begin with a decision in bold."""
    return [text for text in page.read_text(encoding="utf-8").split("\n\n") if text.startswith("**")]


def test_every_file_and_folder_of_the_architecture_exists() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|\.ts|/))`", text))
    assert len(named) > 50
    assert missing(named) == []


@pytest.mark.parametrize("page", [INDEX, *SUBJECTS], ids=lambda page: page.stem)
def test_every_path_on_a_page_of_decisions_exists(page: Path) -> None:
    """A name without a folder may be a user's file, or another package's."""
    assert missing(set(re.findall(r"`((?:[\w.]+/)+(?:[\w.]+\.(?:py|ts|mjs|md))?)`", page.read_text("utf-8")))) == []


@pytest.mark.parametrize("page", [INDEX, *SUBJECTS], ids=lambda page: page.stem)
def test_every_decision_has_a_date(page: Path) -> None:
    decisions = decisions_of(page)
    assert decisions
    assert [text for text in decisions if not re.match(rf"\*\*[^*]+\*\*\s\([^()]*\b{DATE}\b", text)] == []


def test_the_page_of_decisions_leads_to_every_subject_and_stays_short() -> None:
    text = INDEX.read_text(encoding="utf-8")
    assert [page.name for page in SUBJECTS if f"](decisions/{page.name})" not in text] == []
    assert len(text.splitlines()) < 250
