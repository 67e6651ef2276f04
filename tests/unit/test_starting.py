"""What a start shows: decided by the stage that it reports, never by its words."""

from __future__ import annotations

import pytest

from nbdist.client.magics.distributed import show_progress
from nbdist.client.start.starting import StartLine
from nbdist.launch import on_ranks


@pytest.mark.parametrize(
    ("line", "magic", "launch"),
    [
        (StartLine("importing torch", "import"), "importing torch …\n", "nbdist: importing torch\n"),
        (StartLine("ranks are joining their process group", "join"), "", ""),
        (
            StartLine("importing from a network disk is slow"),
            "importing from a network disk is slow\n",
            "nbdist: importing from a network disk is slow\n",
        ),
        (StartLine("ranks join a queue"), "ranks join a queue\n", "nbdist: ranks join a queue\n"),
    ],
)
def test_a_line_is_shown_as_its_stage_says(
    line: StartLine, magic: str, launch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_progress(line)
    assert capsys.readouterr().out == magic
    on_ranks.show_progress(line)
    assert capsys.readouterr().out == launch
