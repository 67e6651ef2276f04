"""Docstrings of functions begin with a verb in the imperative: "Return ...", not "The ..." or "Returns ..."."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "nbdist"
# fmt: off
NO_VERBS = {
    "A", "All", "Always", "An", "Another", "Any", "Around", "As", "At", "Both", "By", "Bytes", "Each", "Every",
    "Everything", "For", "From", "How", "In", "It", "Its", "Like", "Memory", "Models", "No", "Nobody", "None",
    "Nothing", "Of", "On", "One", "Ranks", "Same", "Seconds", "Some", "Somebody", "Something", "Steps", "Tensors",
    "That", "The", "Their", "These", "They", "This", "Those", "To", "Two", "Until", "Values", "What", "When",
    "Where", "Whether", "Which", "While", "Who", "Whole", "Whose", "Why", "With", "Without",
}
# fmt: on
VERBS_IN_S = {"Address", "Compress", "Discuss", "Express", "Focus", "Guess", "Pass", "Press", "Process"}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function that is not a property, and where it is."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node):
                yield f"{path.relative_to(ROOT.parent)}:{node.lineno} {node.name}", node


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).endswith(("property", ".setter")) for one in node.decorator_list)


def test_the_docstring_of_a_function_begins_with_a_verb() -> None:
    wrong = []
    for place, node in functions():
        text = ast.get_docstring(node)
        if text is None:
            continue
        first = text.split()[0].rstrip(".,:;")
        if not first.isalpha() or not first[0].isupper() or first in NO_VERBS or _is_third_person(first):
            wrong.append(f"{place}: {text.splitlines()[0]}")
    assert not wrong, f"{len(wrong)} begin with another word; write for example 'Return ...':\n" + "\n".join(wrong)


def _is_third_person(word: str) -> bool:
    return word.endswith("s") and word not in VERBS_IN_S
