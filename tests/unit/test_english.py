"""Messages and the pages for newcomers are plain American English: a list of turns that a reader would stumble over."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "nbdist"
DOCS = ROOT.parent / "docs"
PAGES = [DOCS / "architecture.md", DOCS / "decisions.md", *sorted((DOCS / "decisions").glob("*.md"))]
BANNED = {  # what to write instead
    r"\b(?<!there )(?<!there's )is no (?!longer|faster|more)(?=[a-z])": "is not a ...",
    r"\bare no (?=(state|name|number)\b)": "are not ...",
    r"\banew\b": "again",
    r"\bdear\b": "expensive",
    r"\bmend\b": "fix",
    r"\b(stands|stand) (once|twice)\b": "is given twice",
    r"\bknows? (no|nothing)\b": "has no ..., can't handle ...",
    r"\b(tells?|told) (of|more)\b": "report",
    r"\bas (with|in) (?=[a-z_]+[(=.])": "for example",
    r"\btype [a-z_]+=": "pass x=",
    r"\bone word too many\b": "unexpected argument",
    r"\bbrings? up\b": "starts",
    r"\bfor ever\b": "forever",
    r"\bmust be a text\b": "must be a str",
    r"\blet Python (run|answer)\b": "blocks Python",
    r"\band .{0,40}\bwas given\b": "not ...",
    r"\bsay how many\b": "give the number of",
    r"\bas many\b": "the same number of",
    r"\b(is|are|was|were) said\b": "is reported",
    r"\b(colour|behaviour|favour|whilst|amongst)": "American spelling",
}
IN_DOCSTRINGS = [
    turn for turn in BANNED if any(word in turn for word in ("is no", "anew", "dear", "knows", "for ever", "colour"))
]


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Every text in the code that is not a docstring, and where it is."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                found.append((f"{path.relative_to(ROOT.parent)}:{node.lineno}", node.value))
    return found


@pytest.mark.parametrize("pattern", BANNED)
def test_no_message_has_a_turn_that_is_not_plain_english(pattern: str) -> None:
    found = [f"{place}: {text!r}" for place, text in messages() if re.search(pattern, text, re.IGNORECASE)]
    assert not found, f"write {BANNED[pattern]!r} instead:\n" + "\n".join(found)


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Every docstring in the code, in one line, and where it is."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                found.append((f"{path.relative_to(ROOT.parent)}:{node.body[0].lineno}", " ".join(text.split())))
    return found


@pytest.mark.parametrize("pattern", IN_DOCSTRINGS)
def test_no_docstring_has_one_of_these(pattern: str) -> None:
    found = [f"{place}: {text!r}" for place, text in docstrings() if re.search(pattern, text, re.IGNORECASE)]
    assert not found, f"write {BANNED[pattern]!r} instead:\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_on_the_architecture_or_its_decisions_has_one(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    found = [text[max(0, at.start() - 30) : at.end() + 30] for turn in BANNED for at in re.finditer(turn, text, re.I)]
    assert found == []
