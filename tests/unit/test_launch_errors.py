"""The error of a launch: nbdist's own, and for code written for torch its ChildFailedError."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from nbdist.client.reports.report import build
from nbdist.errors import LaunchError, RankError, RankFailure
from nbdist.launch.launch_errors import launch_error


def raised(rank: int, when: float, text: str = "why") -> RankFailure:
    return RankFailure(rank, "raised", "ValueError", text, f"\x1b[31mValueError\x1b[0m: {text}", when)


def died(rank: int, when: float, code: int) -> RankFailure:
    return RankFailure(rank, "died", "SIGKILL", "SIGKILL (killed), pid 7", "", when, exit_code=code)


def error_of(*failures: RankFailure) -> LaunchError:
    return launch_error(build(failures, launch=True), "train", {rank: rank for rank in range(3)})


def test_it_is_caught_by_each_of_its_names() -> None:
    for kind in (LaunchError, RankError, ChildFailedError):
        with pytest.raises(kind, match=r"(?m)^rank 1 raised ValueError: first$"):
            raise error_of(raised(0, 2.0, "second"), raised(1, 1.0, "first"))


def test_torch_s_first_failure_is_the_first_cause() -> None:
    rank, failure = error_of(raised(0, 3.0), raised(2, 1.0, "first"), raised(1, 2.0)).get_first_failure()  # type: ignore[attr-defined]
    assert (rank, failure.rank, failure.local_rank) == (2, 2, 2)
    assert failure.message == "ValueError: first"


def test_exit_codes_and_signals_are_told_as_torch_does() -> None:
    failures = error_of(died(0, 1.0, -9), died(1, 2.0, 3), raised(2, 3.0)).failures
    assert [failures[rank].exitcode for rank in (0, 1, 2)] == [-9, 3, 1]  # type: ignore[attr-defined]
    assert [failures[rank].signal_name() for rank in (0, 1, 2)] == ["SIGKILL", "<N/A>", "<N/A>"]  # type: ignore[attr-defined]
    assert failures[0].message == "SIGKILL (killed), pid 7"  # type: ignore[attr-defined]
    assert failures[0].error_file == "<N/A>" and failures[0].timestamp_isoformat()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), ("a message", 1)])
def test_an_exit_has_the_code_that_it_was_given(code: object, exit_code: int) -> None:
    failure = RankFailure(0, "raised", "SystemExit", str(code), "", 1.0, pickled=pickle.dumps(SystemExit(code)))
    assert error_of(failure).failures[0].exitcode == exit_code  # type: ignore[attr-defined]


def test_it_survives_pickling_with_its_name_and_failures() -> None:
    error = error_of(raised(0, 2.0), died(1, 1.0, -9))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.name, copy.report, copy.failures) == ("train", error.report, error.failures)
    assert {ChildFailedError, LaunchError} <= set(type(copy).__mro__)


def test_the_notebook_shows_its_report_not_frames_of_ours() -> None:
    error = error_of(raised(0, 1.0))
    assert error._render_traceback_() == error.report.splitlines()
    assert type(error).__name__ == "LaunchError"


def test_without_torch_it_is_plain_and_does_not_load_it() -> None:
    code = (
        "import pickle, sys\n"
        "from nbdist.errors import RankError, RankFailure\n"
        "from nbdist.launch.launch_errors import launch_error\n"
        "failure = RankFailure(0, 'raised', 'ValueError', 'why', 'traceback', 1.0)\n"
        "error = launch_error(RankError('rank 0 raised', {0: failure}), 'train', {0: 0})\n"
        "copy = pickle.loads(pickle.dumps(error))\n"
        "print(type(copy).__name__, copy.name, copy.failures == error.failures, 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "LaunchError train True False\n"
