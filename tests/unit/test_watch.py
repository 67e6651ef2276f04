"""The watch over a cell, as a state machine: what it asks, says and frees, given what ranks answer at which time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from nbdist.base import limits
from nbdist.controller.cells.watch import Watch
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.questions.question import NoAnswer, Question
from nbdist.wire.questions.stopping import GetPosition, GetProcess, GroupState, Position, ProcessState

WORLD = [0, 1, 2, 3]


def answer(at: float, collective: str = "", line: int = 2, entered: int = 0, **changes: Any) -> Position:
    """What a rank says that is in cell 7: sleeping, or in a collective of all."""
    look = Position(
        running=1,
        at=at,
        position=f"{collective} {line}",
        collective=collective,
        members=RankSpans.of(WORLD if collective else []),
        group="0" if collective else "",
        place=f"cell 7 line {line}",
        line=f"cell 7 line {line}: time.sleep(100)",
        groups={"0": GroupState(RankSpans.of(WORLD), [entered], cut=False)},
    )
    if changes.get("members") is not None:
        changes["members"] = RankSpans.of(changes["members"])
    return replace(look, **changes)


def waiting(at: float, collective: str = "all_reduce", line: int = 4, **changes: Any) -> Position:
    return answer(at, collective, line, 1, **changes)


class Cell:
    """A cell with four ranks that began at 0 s, and what its watch has done."""

    def __init__(self, ranks: Sequence[int] = WORLD, grace: float = 1.0, **options: Any) -> None:
        self.asked: list[tuple[float, list[int]]] = []
        self.said: list[tuple[str, bool, bool]] = []
        self.freed: list[int] = []
        self.stranded: dict[int, str] = {}
        self.now = 0.0
        self.does: dict[int, Any] = {}  # what a rank answers, by time; None: it does not
        self.late: list[int] = []
        self.state = "S"  # of the processes that do not answer
        self.watch = Watch(
            1,
            ranks,
            grace,
            self._ask,
            lambda *line: self.said.append(line),
            self._free,
            0.0,
            strand=self.stranded.__setitem__,
            **options,
        )

    def _ask(self, ranks: Sequence[int], question: Question[Any], handler: Any = None) -> None:
        if isinstance(question, GetProcess):
            for rank in ranks:
                handler(rank, ProcessState(1000 + rank, self.state), self.now)
            return
        assert question == GetPosition(1)
        self.asked.append((self.now, list(ranks)))
        self.late += ranks

    def _free(self, ranks: Sequence[int]) -> None:
        self.freed = list(ranks)

    def run(self, until: float) -> None:
        """Let time pass; ranks answer at once, as far as they do."""
        while self.watch.due <= until:
            self.now = max(self.now, self.watch.due)
            self.watch.tick(self.now)
            self.answer()
        self.now = until

    def answer(self) -> None:
        """Those that have been asked and can answer do so now."""
        for rank in [rank for rank in self.late if self.does[rank] is not None]:
            self.late.remove(rank)
            self.watch.answered(rank, self.does[rank](self.now), self.now)

    @property
    def line(self) -> str:
        return self.said[-1][0] if self.said else ""


def cell_waiting_for_rank_0(**options: Any) -> Cell:
    cell = Cell(**options)
    cell.does = {0: answer, 1: waiting, 2: waiting, 3: waiting}
    return cell


def test_it_asks_nothing_in_the_first_four_seconds_and_rarely_while_all_is_well() -> None:
    cell = Cell()
    cell.does = dict.fromkeys(WORLD, answer)
    cell.run(3.9)
    assert not cell.asked
    cell.run(60)
    assert [at for at, _ in cell.asked] == [4, 9, 14, 19, 24, 29, 34, 39, 44, 49, 54, 59]
    assert not cell.said


def test_after_five_seconds_it_says_who_waits_where_and_where_the_others_are() -> None:
    cell = cell_waiting_for_rank_0()
    cell.run(4.9)
    assert not cell.said
    cell.run(5.0)
    facts = "ranks 1-3 wait in all_reduce, cell 7 line 4; rank 0 is at cell 7 line 2: time.sleep(100)"
    assert cell.said == [(facts, False, True)]
    cell.run(16)
    assert cell.said[1:] == [(f"for 6 s {facts}", True, True), (f"for 11 s {facts}", True, True)]
    assert cell.watch.waits == dict.fromkeys([1, 2, 3], "waits in all_reduce, cell 7 line 4, for rank 0")


def test_where_the_others_get_to_meanwhile_is_no_news() -> None:
    """A terminal, where nothing can be replaced, would fill with it."""
    cell = cell_waiting_for_rank_0()
    cell.does[0] = lambda at: answer(at, line=int(at))
    cell.run(16)
    assert [same for _, same, _ in cell.said] == [False, True, True]
    assert "rank 0 is at cell 7 line 15" in cell.line


def test_a_wait_that_begins_later_is_said_once_it_has_lasted() -> None:
    cell = Cell()
    cell.does = dict.fromkeys(WORLD, answer)
    cell.run(60)
    cell.does |= dict.fromkeys([1, 2, 3], waiting)
    cell.run(68.9)
    assert not cell.said
    cell.run(69)
    assert cell.line.startswith("for 5 s ranks 1-3 wait in all_reduce")


def test_when_the_wait_ends_by_itself_it_says_how_long_it_was() -> None:
    cell = cell_waiting_for_rank_0()
    cell.run(20)
    cell.does = dict.fromkeys(WORLD, lambda at: answer(at, line=6))
    cell.run(25)
    assert cell.said[-1] == ("waited 21 s for rank 0, then went on", False, False)
    assert cell.watch.waits == {}
    cell.run(60)
    assert cell.line == "waited 21 s for rank 0, then went on"


def test_when_the_cell_ends_first_it_says_so_too() -> None:
    cell = cell_waiting_for_rank_0()
    cell.run(10)
    for rank in WORLD:
        cell.watch.ended(rank, False, 12.0)
    assert cell.line == "waited 8 s for rank 0, then went on"


def test_a_rank_that_has_finished_the_cell_is_said_to_have() -> None:
    cell = cell_waiting_for_rank_0()
    cell.does[0] = lambda at: answer(at, running=0)
    cell.watch.ended(0, False, 1.0)
    cell.run(5)
    assert cell.line.endswith("rank 0 has finished the cell")


def test_ranks_of_the_group_that_the_cell_does_not_run_on_are_named() -> None:
    cell = Cell(ranks=[0, 1])
    cell.does = {0: waiting, 1: waiting}
    cell.run(5)
    assert cell.line == "ranks 0-1 wait in all_reduce, cell 7 line 4; ranks 2-3 are not in this cell"


def test_within_a_second_it_is_said_that_ranks_wait_for_some_that_are_not_in_the_cell() -> None:
    cell = Cell(ranks=[0, 1], part=True)
    cell.does = {0: answer, 1: waiting}
    cell.run(0.9)
    assert cell.said == [
        (
            "rank 1 waits in all_reduce, cell 7 line 4; rank 0 is at cell 7 line 2: time.sleep(100); "
            "ranks 2-3 are not in this cell",
            False,
            True,
        )
    ]
    cell.run(12)
    assert [same for _, same, _ in cell.said] == [False, True, True]


def test_a_wait_for_ranks_that_are_in_the_cell_is_said_as_late_as_ever() -> None:
    pair: dict[str, Any] = {"members": [0, 1], "group": "1"}
    cell = Cell(ranks=[0, 1], part=True)
    cell.does = {0: answer, 1: lambda at: waiting(at, **pair)}
    cell.run(4.9)
    assert not cell.said and [at for at, _ in cell.asked] == [0.4, 4.0]
    cell.run(5.0)
    assert cell.line.startswith("rank 1 waits in all_reduce")


def test_so_is_one_for_absent_ranks_that_begins_later() -> None:
    cell = Cell(ranks=[0, 1], part=True)
    cell.does = {0: answer, 1: answer}
    cell.run(2)
    cell.does[1] = waiting
    cell.run(4.9)
    assert not cell.said
    cell.run(5.0)
    assert cell.line.endswith("ranks 2-3 are not in this cell")


def test_a_long_collective_that_all_are_in_is_no_news() -> None:
    cell = Cell()
    cell.does = dict.fromkeys(WORLD, waiting)
    cell.run(60)
    assert not cell.said


def test_nor_is_one_of_a_sub_group_while_the_others_do_something_else() -> None:
    cell = Cell()
    pair: dict[str, Any] = {"members": [0, 1], "group": "1"}
    cell.does = {0: lambda at: waiting(at, **pair), 1: lambda at: waiting(at, **pair), 2: answer, 3: answer}
    cell.run(60)
    assert not cell.said


def test_nor_is_a_long_message_between_two_ranks() -> None:
    cell = Cell(ranks=[0, 1])
    cell.does = {0: lambda at: waiting(at, "send", members=[1]), 1: lambda at: waiting(at, "recv", members=[0])}
    cell.run(60)
    assert not cell.said


def test_a_loop_of_collectives_moves_although_it_is_always_seen_in_the_same_place() -> None:
    cell = cell_waiting_for_rank_0()

    def looping(at: float) -> Position:
        return waiting(at, groups={"0": GroupState(RankSpans.of(WORLD), [int(at * 100)], cut=False)})

    cell.does |= dict.fromkeys([1, 2, 3], looping)
    cell.run(60)
    assert not cell.said


def test_ranks_in_different_collectives_wait_for_each_other_for_ever() -> None:
    cell = Cell()
    cell.does = {0: lambda at: waiting(at, "barrier", 3), 1: waiting, 2: waiting, 3: waiting}
    cell.run(5)
    assert cell.line == (
        "rank 0 waits in barrier, cell 7 line 3; ranks 1-3 wait in all_reduce, cell 7 line 4. "
        "They wait for each other, so none of them can continue"
    )


def test_so_do_ranks_that_all_receive() -> None:
    cell = Cell(ranks=[0, 1])
    cell.does = {0: lambda at: waiting(at, "recv", members=[1]), 1: lambda at: waiting(at, "recv", members=[0])}
    cell.run(5)
    assert cell.line.endswith("none of them can continue")


@pytest.mark.parametrize("busy", [False, True])
def test_a_backward_waits_if_it_is_ahead_of_others_and_does_not_compute(busy: bool) -> None:
    cell = Cell(ranks=[0, 1])
    cell.does = {
        0: answer,
        1: lambda at: waiting(at, "backward", members=[], group="", cpu=at if busy else 0.0),
    }
    cell.run(5)
    assert cell.line.startswith("rank 1 waits in backward") is not busy


def test_so_does_one_that_uses_a_processor_while_a_collective_it_has_started_does_not_end() -> None:
    """CUDA waits in that way, in whatever call: here the record shows the same collective under way in both looks."""
    cell = Cell(ranks=[0, 1])
    spins: dict[str, Any] = {"members": [], "group": "", "unfinished": {"0": [1, 0]}}
    cell.does = {0: answer, 1: lambda at: waiting(at, "a collective", cpu=at, **spins)}
    cell.run(5)
    assert cell.line.startswith("rank 1 waits in a collective")


def test_but_not_one_that_computes_while_its_collectives_come_to_an_end() -> None:
    cell = Cell(ranks=[0, 1])
    cell.does = {
        0: answer,
        1: lambda at: waiting(
            at, "a collective", cpu=at, members=[], group="", unfinished={"0": [int(10 * at) + 1, int(10 * at)]}
        ),
    }
    cell.run(60)
    assert not cell.said


def test_a_rank_that_is_ahead_but_in_no_collective_does_not_wait() -> None:
    """After a broadcast its source is ahead of the others, whatever it does then."""
    cell = Cell(ranks=[0, 1])
    cell.does = {0: lambda at: answer(at, entered=1), 1: answer}
    cell.run(60)
    assert not cell.said


def test_the_making_of_a_group_takes_all_ranks_of_the_cell() -> None:
    cell = Cell(ranks=[0, 1])
    cell.does = {0: answer, 1: lambda at: waiting(at, "new_group", members=None, group="")}
    cell.run(5)
    assert cell.line.startswith("rank 1 waits in new_group")
    cell.does[0] = cell.does[1]
    cell.run(10)
    assert cell.line.endswith("then went on")


def test_a_rank_that_does_not_answer_is_not_waited_for_nor_asked_again() -> None:
    cell = cell_waiting_for_rank_0()
    cell.does[0] = None
    cell.run(7)
    assert cell.line.endswith("rank 0 is in a call that blocks Python")
    assert [ranks for _, ranks in cell.asked] == [[0, 1, 2, 3], [1, 2, 3]]
    cell.does[0] = answer
    cell.answer()
    cell.run(15)
    assert cell.line.endswith("rank 0 is at cell 7 line 2: time.sleep(100)")


def test_a_dead_rank_is_forgotten() -> None:
    cell = cell_waiting_for_rank_0()
    cell.does[0] = None
    cell.run(4.5)
    cell.watch.forget(0)
    cell.run(6)
    assert cell.line == "ranks 1-3 wait in all_reduce, cell 7 line 4; rank 0 has died"
    assert all(0 not in ranks for _, ranks in cell.asked[1:])


def test_a_question_that_a_rank_can_t_answer_does_no_harm() -> None:
    cell = cell_waiting_for_rank_0()
    cell.does[0] = lambda at: NoAnswer("AttributeError: torch has changed")
    cell.run(6)
    assert cell.line.startswith("ranks 1-3 wait in all_reduce")


# --- when a rank has failed


def failed(rank: int, at: float, cell: Cell) -> None:
    """A rank has raised, and from now on runs nothing."""
    cell.does[rank] = lambda at: answer(at, running=0)
    cell.watch.ended(rank, True, at)


def test_ranks_that_wait_for_one_that_has_failed_are_freed_after_the_grace() -> None:
    cell = cell_waiting_for_rank_0(grace=2.0)
    failed(0, 1.0, cell)
    cell.run(2.9)
    assert not cell.freed
    cell.run(3.0)
    assert cell.freed == [1, 2, 3]


def test_so_are_those_that_wait_for_one_that_waits_for_it() -> None:
    cell = Cell()
    cell.does = {
        0: answer,
        1: lambda at: waiting(at, members=[0, 1], group="1"),
        2: lambda at: waiting(at, "recv", members=[1]),
        3: answer,
    }
    failed(0, 1.0, cell)
    cell.run(2.0)
    assert cell.freed == [1, 2]


def test_so_are_those_that_wait_by_spinning() -> None:
    cell = Cell(ranks=[0, 1])
    spins: dict[str, Any] = {"members": [], "group": "", "unfinished": {"0": [1, 0]}}
    cell.does = {0: lambda at: waiting(at, "a collective", cpu=at, **spins), 1: answer}
    failed(1, 0.5, cell)
    cell.run(1.6)
    assert cell.freed == [0]


@pytest.mark.parametrize("late", [0.29, 0.5])
def test_but_not_by_two_looks_at_once_which_a_rank_that_answers_late_takes(late: float) -> None:
    """Its record may be 0.1 s late, so that both show a collective under way that has ended."""
    cell = Cell(ranks=[0, 1])
    spins: dict[str, Any] = {"members": [], "group": "", "unfinished": {"0": [1, 0]}}
    cell.does = {0: None, 1: answer}
    failed(1, 0.5, cell)
    cell.run(1.2)  # the first look
    cell.now += late
    cell.does[0] = lambda at: waiting(at, "a collective", cpu=at, **spins)
    cell.answer()
    cell.run(cell.now + limits.COLLECTIVE_LATE)
    assert not cell.freed
    cell.run(cell.now + 0.1)
    assert cell.freed == [0]


def test_nor_if_the_late_answer_comes_after_the_others_have_been_compared() -> None:
    cell = Cell(ranks=[0, 1])
    spins: dict[str, Any] = {"members": [], "group": "", "unfinished": {"0": [1, 0]}}
    cell.does = {0: None, 1: answer}
    failed(1, 0.5, cell)
    cell.run(2.2)  # the first look, and its end without the late rank
    cell.now = 2.3
    cell.does[0] = lambda at: waiting(at, "a collective", cpu=at, **spins)
    cell.answer()
    cell.run(2.3 + limits.COLLECTIVE_LATE)
    assert not cell.freed
    cell.run(4)
    assert cell.freed == [0]


def test_nor_those_that_compute_ahead_of_one_that_has_failed() -> None:
    cell = Cell(ranks=[0, 1])
    cell.does = {0: lambda at: waiting(at, "a collective", cpu=at, members=[], group=""), 1: answer}
    failed(1, 0.5, cell)
    cell.run(60)
    assert not cell.freed


def test_ranks_that_work_on_are_not() -> None:
    cell = Cell()
    cell.does = dict.fromkeys(WORLD, answer)
    failed(0, 1.0, cell)
    cell.run(30)
    assert not cell.freed


def test_nor_are_those_that_wait_for_one_that_works_on_but_the_wait_is_explained() -> None:
    cell = Cell()
    cell.does = {
        0: answer,
        1: answer,
        2: lambda at: waiting(at, members=[1, 2], group="1"),
        3: answer,
    }
    failed(0, 1.0, cell)
    cell.run(10)
    assert not cell.freed
    assert "rank 2 waits in all_reduce" in cell.line


def launch_that_two_ranks_left(at: float) -> Cell:
    """Rank 3 goes on, wherever it is; rank 2 has finished two seconds after ranks 0 and 1."""
    cell = Cell(launch=True)
    cell.does = {rank: lambda now: answer(now, running=0) for rank in (0, 1, 2)} | {3: answer}
    cell.run(until=at)
    for rank in (0, 1):
        cell.watch.ended(rank, False, at)
    cell.run(until=at + 2)
    cell.watch.ended(2, False, at + 2)
    return cell


@pytest.mark.parametrize("at", [1.0, 3.9, 5.0, 60.0])
def test_a_rank_of_a_launch_that_goes_on_alone_is_named_five_seconds_after_the_first_has_finished(at: float) -> None:
    cell = launch_that_two_ranks_left(at)
    cell.run(until=at + 4.9)
    assert cell.said == []
    cell.run(until=at + 5.1)
    assert cell.said == [("ranks 0-2 finished 5 s ago; rank 3 is at cell 7 line 2: time.sleep(100)", False, True)]


def test_that_line_is_kept_up_to_date_and_ends_with_the_launch() -> None:
    cell = launch_that_two_ranks_left(1.0)
    cell.run(until=20.0)
    assert [same for _, same, _ in cell.said] == [False, True, True]
    cell.watch.ended(3, False, 20.0)
    assert cell.said[-1] == ("waited 19 s for rank 3, then went on", False, False)


def test_nothing_of_it_is_said_of_a_cell_or_once_a_rank_has_failed() -> None:
    cell = Cell()
    cell.does = {rank: answer for rank in WORLD}
    cell.watch.ended(0, False, 1.0)
    cell.run(until=20.0)
    assert cell.said == []
    launch = launch_that_two_ranks_left(1.0)
    launch.watch.ended(2, True, 4.0)
    launch.run(until=20.0)
    assert launch.said == []


def launch_where_rank_3_has_returned(**options: Any) -> Cell:
    """The other ranks wait in a collective that it has not entered."""
    cell = Cell(launch=True, **options)
    cell.does = dict.fromkeys(WORLD, waiting) | {3: lambda at: answer(at, running=0)}
    cell.watch.ended(3, False, 1.0)
    return cell


def test_ranks_of_a_launch_that_wait_for_one_that_has_returned_are_given_up_after_ten_seconds() -> None:
    cell = launch_where_rank_3_has_returned()
    cell.run(until=13.9)
    assert "ranks 0-2 wait in all_reduce" in cell.line and not cell.stranded
    cell.run(until=14.1)
    assert list(cell.stranded) == [0, 1, 2]
    assert cell.stranded[0].startswith("waits in all_reduce, cell 7 line 4, for rank 3, which has returned: ")
    assert not cell.freed


def test_it_counts_from_when_that_rank_returned() -> None:
    cell = cell_waiting_for_rank_0(launch=True)
    cell.run(until=60)
    assert not cell.stranded
    cell.does[0] = lambda at: answer(at, running=0)
    cell.watch.ended(0, False, 60.0)
    cell.run(until=69.9)
    assert not cell.stranded
    cell.run(until=70.1)
    assert list(cell.stranded) == [1, 2, 3]


def test_ranks_of_other_nodes_that_have_returned_are_not_waited_for_either() -> None:
    cell = Cell(ranks=[0, 1], launch=True)
    cell.does = dict.fromkeys([0, 1], waiting)
    cell.run(until=20)
    assert not cell.stranded
    cell.watch.returned([2], 20.0)
    cell.run(until=30.1)
    assert list(cell.stranded) == [0, 1]
    assert cell.stranded[1].startswith("waits in all_reduce, cell 7 line 4, for rank 2, which has returned: ")


def test_the_making_of_a_group_takes_them_too() -> None:
    cell = Cell(ranks=[0, 1], launch=True)
    cell.does = dict.fromkeys([0, 1], lambda at: waiting(at, "init_process_group", members=None, group=""))
    cell.watch.returned([2, 3], 1.0)
    cell.run(until=20)
    assert cell.stranded[0] == (
        "waits in init_process_group, cell 7 line 4, for ranks 2-3, which have returned: "
        "make the same calls on all ranks before the function returns"
    )


def test_a_collective_that_a_rank_has_begun_before_it_returned_goes_on() -> None:
    cell = launch_where_rank_3_has_returned()
    cell.does[3] = lambda at: answer(at, running=0, entered=1)
    cell.run(until=60)
    assert not cell.stranded


def test_nobody_is_given_up_who_waits_for_ranks_that_are_still_at_work() -> None:
    cell = launch_where_rank_3_has_returned()
    cell.does[0] = answer
    cell.does |= dict.fromkeys([1, 2], lambda at: waiting(at, members=[0, 1, 2], group="1"))
    cell.run(until=60)
    assert not cell.stranded


def test_in_a_cell_they_are_where_its_ranks_have_to_meet() -> None:
    cell = cell_waiting_for_rank_0()
    cell.does |= dict.fromkeys([1, 2, 3], lambda at: waiting(at, "save_state", members=None, group="", meeting=True))
    cell.run(until=60)
    assert not cell.stranded
    cell.does[0] = lambda at: answer(at, running=0)
    cell.watch.ended(0, False, 60.0)
    cell.run(until=70.1)
    assert cell.stranded[1] == (
        "waits in save_state, cell 7 line 4, for rank 0, which has finished the cell: "
        "call it on all ranks, not under `if is_main_process()`"
    )


def test_nor_for_a_collective_in_a_cell_whose_ranks_live_on() -> None:
    cell = cell_waiting_for_rank_0()
    cell.does[0] = lambda at: answer(at, running=0)
    cell.watch.ended(0, False, 1.0)
    cell.run(until=60)
    assert not cell.stranded


def test_one_that_is_given_up_is_given_up_once() -> None:
    cell = launch_where_rank_3_has_returned()
    cell.run(until=20)
    cell.stranded.clear()
    cell.run(until=60)
    assert not cell.stranded


def test_while_a_rank_waits_for_the_user_it_says_nothing_and_counts_again_afterwards() -> None:
    cell = cell_waiting_for_rank_0()
    cell.does[0] = lambda at: answer(at, asking=at < 30)
    cell.run(32)
    assert not cell.said and not cell.freed
    cell.run(50)
    assert cell.line.startswith("for 16 s ranks 1-3 wait in all_reduce")


@pytest.mark.parametrize(
    ("rank_3", "told"),
    [
        (
            {"collective": "broadcast"},
            "mismatched collectives: ranks 0-2 wait in all_reduce #412 of group dp (float32[16]), cell 7 line 4; "
            "rank 3 waits in broadcast #412 of group dp (float32[16]), cell 7 line 9. They wait for each other",
        ),
        (
            {"tensors": "float32[8]"},
            "mismatched tensors: ranks 0-2 wait in all_reduce #412 of group dp (float32[16]), cell 7 line 4; "
            "rank 3 waits in all_reduce #412 of group dp (float32[8]), cell 7 line 9. They wait for each other",
        ),
        (
            {"sequence": 411},
            "not at the same collective: ranks 0-2 wait in all_reduce #412 of group dp (float32[16]), cell 7 line 4; "
            "rank 3 waits in all_reduce #411 of group dp (float32[16]), cell 7 line 9. They wait for each other",
        ),
    ],
)
def test_ranks_that_make_different_calls_of_one_group_are_named_with_what_differs(
    rank_3: dict[str, Any], told: str
) -> None:
    cell = Cell()
    call: dict[str, Any] = {"label": "group dp", "sequence": 412, "tensors": "float32[16]"}
    cell.does = dict.fromkeys(WORLD, lambda at: waiting(at, **call))
    cell.does[3] = lambda at: waiting(at, line=9, **call | rank_3)
    cell.run(6)
    assert cell.line.startswith(told)


def test_ranks_that_are_at_the_same_call_wait_for_nobody() -> None:
    cell = Cell()
    cell.does = dict.fromkeys(WORLD, lambda at: waiting(at, label="group dp", sequence=412, tensors="float32[16]"))
    cell.run(30)
    assert not cell.said


@pytest.mark.parametrize(("cpu", "does"), [(0.0, "is at"), (1.0, "is computing at")])
def test_a_straggler_that_computes_is_told_from_one_that_rests(cpu: float, does: str) -> None:
    cell = cell_waiting_for_rank_0()
    cell.does[0] = lambda at: answer(at, cpu=cpu * at)
    cell.run(5)
    assert cell.line.endswith(f"rank 0 {does} cell 7 line 2: time.sleep(100)")


def test_a_stopped_process_is_named_even_if_nobody_waits_for_it() -> None:
    cell = Cell()
    cell.does = dict.fromkeys(WORLD, answer) | {2: None}
    cell.state = "T"
    cell.run(8)
    assert cell.line == "rank 2 is stopped by a signal: `kill -CONT 1002` lets it continue"
    cell.does[2] = answer
    cell.answer()
    cell.run(20)
    assert cell.line.startswith("waited") and cell.line.endswith("for rank 2, then went on")
