from __future__ import annotations

import pickle

import pytest

from nbdist.client.reports.report import build, from_death, from_reply
from nbdist.errors import RankDied, RankError, RankFailure, RankTimeout
from nbdist.wire.messages.cells import Failure, Reply
from nbdist.wire.messages.life import Died

PEER = "[pair.cc:553] Connection closed by peer [127.0.0.1]:3213"


def lost_peer(rank: int, when: float) -> RankFailure:
    return RankFailure(rank, "raised", "RuntimeError", PEER, "frames", when, lost_peer=True)


def raised(rank: int, when: float, text: str = "why", name: str = "ValueError", line: int = 2) -> RankFailure:
    return RankFailure(rank, "raised", name, text, f"\x1b[36mCell\x1b[39m In[7], line {line}\nframes", when)


def interrupted(rank: int, when: float) -> RankFailure:
    return RankFailure(rank, "interrupted", "KeyboardInterrupt", "", "", when)


def died(rank: int, when: float, code: int = -9, stderr: str = "") -> RankFailure:
    return from_death(Died(rank, 4242, code, stderr, 1, when), ", while it ran cell 7: work()")


def running(rank: int, when: float) -> RankFailure:
    return RankFailure(rank, "running", "RankTimeout", "in cell 7 line 2", "", when)


def test_the_first_failure_in_time_is_the_headline() -> None:
    error = build([raised(0, 2.0, "late"), raised(3, 1.0, "early")])
    assert str(error) == "rank 3 raised ValueError: early"
    assert list(error.failures) == [3, 0] and error.first is error.failures[3]


def test_the_headline_s_traceback_follows_then_the_others() -> None:
    lines = build([raised(0, 1.0), raised(1, 2.0, "other", line=5)], finished=[2, 3]).report.splitlines()
    assert lines[0] == "rank 0 raised ValueError: why"
    assert lines[2] == "frames"
    assert lines[3:] == ["rank 1: ValueError: other (cell 7 line 5)", "ranks 2-3: finished"]


def test_ranks_with_the_same_failure_are_one_line() -> None:
    assert build([raised(rank, rank) for rank in range(4)]).report.splitlines()[-1] == "ranks 1-3: same"


def test_the_same_message_from_another_line_is_not_the_same() -> None:
    last = build([raised(0, 1.0), raised(1, 2.0, line=9)]).report.splitlines()[-1]
    assert last == "rank 1: ValueError: why (cell 7 line 9)"


def test_others_that_agree_with_each_other_share_a_line() -> None:
    error = build([raised(0, 1.0), *(raised(rank, rank + 1, "other") for rank in (1, 2, 4))])
    assert error.report.splitlines()[-1] == "ranks 1-2, 4: ValueError: other (cell 7 line 2)"


def test_what_torch_raises_for_a_failed_peer_comes_after_its_cause_even_if_it_was_earlier() -> None:
    error = build([lost_peer(2, 1.0), raised(0, 5.0, "the cause")])
    assert str(error) == "rank 0 raised ValueError: the cause"
    assert error.report.splitlines()[-1] == f"rank 2: RuntimeError: {PEER}, caused by the failure of rank 0"


def test_an_error_of_the_user_s_that_reads_like_it_may_be_the_cause() -> None:
    assert str(build([raised(2, 1.0, PEER), raised(0, 5.0, "later")])) == f"rank 2 raised ValueError: {PEER}"


def test_without_any_other_cause_a_lost_peer_is_the_failure_itself() -> None:
    error = build([lost_peer(1, 1.0)], finished=[0])
    assert str(error) == f"rank 1 raised RuntimeError: {PEER}"
    assert "follows" not in error.report


def test_ranks_that_were_interrupted_because_of_a_failure_come_last() -> None:
    error = build([interrupted(1, 0.5), interrupted(2, 0.6), raised(0, 1.0)])
    assert str(error) == "rank 0 raised ValueError: why"
    assert error.report.splitlines()[-1] == "ranks 1-2: interrupted, because rank 0 failed"


def test_a_death_is_rank_died_with_its_last_lines_and_what_to_type() -> None:
    error = build([died(1, 1.0, stderr="one\ntwo\n"), interrupted(0, 1.1)])
    assert isinstance(error, RankDied)
    assert "rank 1 died: " in str(error) and "SIGKILL" in str(error) and "pid 4242" in str(error)
    assert "cell 7: work()" in str(error)
    assert "  one\n  two\n" in error.report
    assert "`%distributed heal` replaces it" in error.report and "`%%distributed -r 0`" in error.report


def test_only_the_last_lines_of_stderr_are_shown() -> None:
    report = build([died(0, 1.0, stderr="\n".join(f"line {n}" for n in range(1000)))]).report
    assert "line 999" in report and "line 900" not in report


def test_ranks_that_still_run_are_a_timeout_with_what_to_type() -> None:
    error = build([running(0, 1.0), running(1, 1.0)])
    assert isinstance(error, RankTimeout) and isinstance(error, TimeoutError)
    assert "still running" in str(error) and "%distributed restart" in error.report


def test_long_messages_are_cut_in_lines_and_tracebacks_in_the_middle() -> None:
    text = "x" * 100_000
    failure = RankFailure(0, "raised", "ValueError", text, f"top\n{text}\nbottom", 1.0)
    error = build([failure, raised(1, 2.0, text)])
    lines = error.report.splitlines()
    assert len(lines[0]) < 400 and len(lines[-1]) < 400 and len(error.report) < 25_000
    assert "top" in error.report and "bottom" in error.report and "characters omitted" in error.report
    assert error.failures[0].text == text


def test_of_a_message_with_several_lines_the_first_is_the_headline() -> None:
    assert str(build([raised(0, 1.0, "first\nsecond")])) == "rank 0 raised ValueError: first"
    assert str(build([raised(0, 1.0, "")])) == "rank 0 raised ValueError"


def test_a_reply_without_a_failure_has_none() -> None:
    assert from_reply(Reply(1, 0, "ok")) is None


def test_a_reply_becomes_a_failure_with_its_exception() -> None:
    sent = Failure("KeyError", "'k'", "frames", 1.0, pickle.dumps(KeyError("k")))
    failure = from_reply(Reply(1, 3, "error", sent))
    assert failure is not None and (failure.rank, failure.kind, failure.name) == (3, "raised", "KeyError")
    assert isinstance(failure.exception, KeyError) and failure.exception.args == ("k",)


@pytest.mark.parametrize("pickled", [None, b"nonsense", pickle.dumps("no exception")])
def test_an_exception_that_does_not_unpickle_is_none(pickled: bytes | None) -> None:
    failure = from_reply(Reply(1, 0, "error", Failure("Own", "text", "", 1.0, pickled)))
    assert failure is not None and failure.exception is None and failure.text == "text"


@pytest.mark.parametrize("failures", [[raised(0, 1.0)], [died(0, 1.0)], [running(0, 1.0)]])
def test_the_error_pickles_whole(failures: list[RankFailure]) -> None:
    error = build(failures)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and again.report == error.report and again.failures == error.failures
    assert isinstance(again, RankError)
