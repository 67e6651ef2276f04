from __future__ import annotations

import pytest

from nbdist.client.output.publisher import Publisher
from nbdist.client.output.screen import Screen


def test_where_lines_can_t_be_replaced_a_remark_is_printed_anew_only_when_it_says_something_new(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen([0], Publisher(1), "key")
    screen.remark("rank 1 waits", "watch")
    screen.remark("for 10 s rank 1 waits", "watch", same=True)
    screen.remark("waited 12 s", "watch")
    assert capsys.readouterr().err == "nbdist: rank 1 waits\nnbdist: waited 12 s\n"
