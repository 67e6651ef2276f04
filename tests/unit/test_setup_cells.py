"""What a rank that replaces another runs of cells that were not marked for it."""

from __future__ import annotations

import pytest

from nbdist.client.healing.heal import definitions


def test_imports_functions_and_classes_stay_on_their_lines() -> None:
    code = "import os\nx = os.getpid()\n\n@cache\ndef f(a):\n    # a comment\n    return a\nf(x)\nclass A:\n    b = 1\n"
    assert definitions(code).split("\n") == [
        "import os",
        "",
        "",
        "@cache",
        "def f(a):",
        "    # a comment",
        "    return a",
        "",
        "class A:",
        "    b = 1",
    ]


def test_what_shares_its_line_with_a_definition_is_left_out() -> None:
    assert definitions("import os; os.abort()") == "import os"


def test_two_definitions_on_one_line_both_stay() -> None:
    assert definitions("import os; import sys; sys.exit()") == "import os\nimport sys"


@pytest.mark.parametrize("code", ["x = 1", "%matplotlib inline\n!ls", "%%bash\nimport os", "def f(:", ""])
def test_a_cell_without_definitions_leaves_nothing(code: str) -> None:
    assert definitions(code) == ""


def test_definitions_beside_magics_stay() -> None:
    assert definitions("%matplotlib inline\nimport os\n!ls").split("\n") == ["", "import os"]
