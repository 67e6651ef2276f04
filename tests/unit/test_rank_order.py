"""What a rank sends on three lanes comes to the notebook in one order."""

from __future__ import annotations

import functools

import pytest

from nbdist.controller.base.rank_order import Rank
from nbdist.wire.base.message import Message
from nbdist.wire.messages.cells import Reply
from nbdist.wire.messages.life import Died
from nbdist.wire.messages.output import END, PLAIN_END, STDERR, STDOUT, Display, Notice, Output

CELL = 7  # a serial number
REPLY = Reply(CELL, 0, "ok", result="1")


class Notebook:
    """What has come to it, and the replies with which cells were over."""

    def __init__(self) -> None:
        self.came: list[Message] = []
        self.over: list[Reply] = []
        self.rank = Rank(0, self.came.append, lambda *_: None, self.over.append, 0)
        self.rank.begin(CELL, 1)

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
    reply = functools.partial(notebook.rank.answer, REPLY)
    output = functools.partial(notebook.rank.print, stdout(b"last", mark=END))
    first, last = (reply, output) if reply_first else (output, reply)
    first()
    assert notebook.over == [] and notebook.rank.serial == CELL
    last()
    assert notebook.over == [REPLY] and notebook.rank.serial == 0
    assert notebook.printed() == [b"last"]


def test_a_plain_end_needs_no_reply(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"", mark=PLAIN_END))
    assert notebook.over == [Reply(CELL, 0, "ok")]


def test_the_end_of_an_earlier_cell_ends_no_later_one(notebook: Notebook) -> None:
    notebook.rank.begin(CELL + 1, 2)
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


def test_output_is_kept_with_its_cell_before_the_notebook_has_it() -> None:
    kept: list[object] = []
    rank = Rank(0, kept.append, lambda *what: kept.append(what), lambda reply: None, 0)
    rank.begin(CELL, 12)
    rank.print(stdout(b"text"))
    assert kept == [(CELL, 12, 0, STDOUT, b"text"), Output(0, STDOUT, b"text")]


def notices(notebook: Notebook) -> list[str]:
    return [message.text for message in notebook.came if isinstance(message, Notice)]


def test_output_waits_no_longer_for_a_display_that_cannot_be_read(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"above", mark=1))
    notebook.rank.miss_display(1, "Expected `str`, got `int`")
    notebook.rank.print(stdout(b"below"))
    assert notebook.printed() == [b"above", b"below"]
    (text,) = notices(notebook)
    assert "rank 0" in text and "Expected `str`, got `int`" in text


def test_output_waits_no_longer_for_a_display_when_a_later_one_has_come(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"above", mark=1))
    notebook.rank.display(display(2))
    notebook.rank.print(stdout(b"below", mark=2))
    assert notebook.printed() == [b"above", b"below", 2]
    assert len(notices(notebook)) == 1


def test_a_payload_with_a_wrong_number_makes_no_other_one_late(notebook: Notebook) -> None:
    notebook.rank.display(display(1 << 40))
    notebook.rank.print(stdout(b"above", mark=1))
    notebook.rank.print(stdout(b"below", mark=PLAIN_END))
    assert notebook.printed() == []
    notebook.rank.display(display(1))
    assert notebook.printed() == [b"above", 1, b"below", 1 << 40] and notices(notebook) == []


def test_a_cell_that_has_ended_waits_a_moment_for_its_displays_and_then_goes_on(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"above", mark=1))
    assert notebook.rank.due is None  # as long as the cell runs
    notebook.rank.print(stdout(b"below", mark=PLAIN_END))
    assert notebook.rank.due is not None and notebook.over == []
    notebook.rank.give_up()
    assert notebook.printed() == [b"above", b"below"] and notebook.over == [Reply(CELL, 0, "ok")]
    assert len(notices(notebook)) == 1 and notebook.rank.due is None


def test_a_display_that_comes_in_that_moment_is_in_its_place(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"above", mark=1))
    notebook.rank.print(stdout(b"below", mark=PLAIN_END))
    notebook.rank.display(display(1))
    assert notebook.printed() == [b"above", 1, b"below"] and notices(notebook) == []
    assert notebook.rank.due is None


def test_a_display_that_comes_even_later_is_shown_all_the_same(notebook: Notebook) -> None:
    notebook.rank.print(stdout(b"above", mark=1))
    notebook.rank.print(stdout(b"below", mark=PLAIN_END))
    notebook.rank.give_up()
    notebook.rank.display(display(1))
    assert notebook.printed() == [b"above", b"below", 1]


def test_many_displays_that_are_missing_are_one_line_for_a_cell(notebook: Notebook) -> None:
    for sequence in range(1, 10):
        notebook.rank.miss_display(sequence, "nonsense")
        notebook.rank.print(stdout(b"", mark=sequence))
    assert len(notices(notebook)) == 1


def test_a_display_that_an_interrupt_kept_from_being_sent_is_not_missed(notebook: Notebook) -> None:
    notebook.rank.display(display(2))  # 1 was never sent, and has no mark
    notebook.rank.print(stdout(b"text", mark=2))
    assert notebook.printed() == [b"text", 2] and notices(notebook) == []
