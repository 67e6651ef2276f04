"""What a rank sends on three lanes comes to the notebook in one order."""

from __future__ import annotations

import pytest

from nbdist.controller.rank import Rank
from nbdist.protocol import END, PLAIN_END, STDERR, STDOUT, Died, Display, Message, Notice, Output, Reply

CELL = 7  # a serial number
REPLY = Reply(CELL, 0, "ok", result="1")


class Notebook:
    """What has come to it, and the replies with which cells were over."""

    def __init__(self) -> None:
        self.came: list[Message] = []
        self.over: list[Reply] = []
        self.rank = Rank(0, self.came.append, lambda *_: None, self.over.append)
        self.rank.begin(CELL)

    def printed(self) -> list[bytes | int]:
        """Output by its bytes, displays by their numbers."""
        return [m.data if isinstance(m, Output) else m.sequence for m in self.came if isinstance(m, Output | Display)]


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


def stdout(data: bytes, mark: int | None = None) -> Output:
    return Output(0, STDOUT, data, None if mark is None else (CELL, mark))


def display(sequence: int) -> Display:
    return Display(0, sequence, "display", {}, {})


def test_output_waits_for_the_display_that_belongs_before_it(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"above", mark=1))
    notebook.rank.print(stdout(b"below"))
    assert notebook.printed() == []
    notebook.rank.display(display(1))
    assert notebook.printed() == [b"above", 1, b"below"]


def test_a_display_waits_for_the_output_before_it(notebook: Notebook) -> None:
    notebook.rank.display(display(1))
    assert notebook.printed() == []
    notebook.rank.print(stdout(b"above", mark=1))
    assert notebook.printed() == [b"above", 1]


def test_stderr_waits_for_nothing(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"above", mark=1))
    notebook.rank.print(Output(0, STDERR, b"careful"))
    assert notebook.printed() == [b"careful"]


@pytest.mark.parametrize("reply_first", [True, False])
def test_a_cell_is_over_when_its_reply_and_all_its_output_have_come(notebook: Notebook, reply_first: bool) -> None:
    parts = [lambda: notebook.rank.answer(REPLY), lambda: notebook.rank.print(stdout(b"last", mark=END))]
    first, last = parts if reply_first else reversed(parts)
    first()
    assert notebook.over == [] and notebook.rank.serial == CELL
    last()
    assert notebook.over == [REPLY] and notebook.rank.serial == 0
    assert notebook.printed() == [b"last"]


def test_a_plain_end_needs_no_reply(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"", mark=PLAIN_END))
    assert notebook.over == [Reply(CELL, 0, "ok")]


def test_the_end_of_an_earlier_cell_ends_no_later_one(notebook: Notebook) -> None:
    notebook.rank.begin(CELL + 1)
    notebook.rank.print(stdout(b"", mark=PLAIN_END))
    assert notebook.over == []


def test_a_display_whose_mark_an_interrupt_has_swallowed_is_shown_at_the_end(notebook: Notebook) -> None:
    notebook.rank.display(display(1))
    notebook.rank.answer(REPLY)
    notebook.rank.print(stdout(b"", mark=END))
    assert notebook.printed() == [1] and notebook.over == [REPLY]
    notebook.rank.print(stdout(b"late", mark=1))  # it waits for no second payload
    assert notebook.printed() == [1, b"late"]


def test_the_output_of_a_rank_that_died_waits_for_no_display(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"above", mark=1))
    notebook.rank.print(stdout(b"last words"))
    notebook.rank.die(Died(0, 1, -9, "", CELL, 0.0))
    assert notebook.printed() == [b"above", b"last words"]
    assert notebook.rank.serial == 0 and notebook.over == []


def test_what_the_log_says_comes_before_the_output_that_it_could_not_keep() -> None:
    came: list[Message] = []
    rank = Rank(0, came.append, lambda *_: "the disk is full", lambda reply: None)
    rank.begin(CELL)
    rank.print(stdout(b"text"))
    assert came == [Notice("the disk is full"), Output(0, STDOUT, b"text")]
