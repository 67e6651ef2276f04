"""Sessions of one process: how many there are, what ends them, and what they survive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.support.roles import alive, await_end

HANG = 30.0
PIDS = "[info.pid for info in {}.ranks]"


@pytest.fixture
def empty(notebook: Kernel) -> Iterator[Kernel]:
    """The module's kernel, without a session before and after."""
    notebook.ok("import gc, nbdist")
    yield notebook
    notebook.ok("for known in nbdist.client.session.session.known_sessions(): known.close()")


def test_a_cell_that_makes_a_session_may_be_run_again(empty: Kernel) -> None:
    assert empty.ok("session = nbdist.Session(2)", HANG).stderr == ""
    for _ in range(2):
        before = empty.value(PIDS.format("session"))
        said = empty.ok("session = nbdist.Session(2)", HANG).stderr
        assert said == (
            "nbdist: the previous session (2 ranks) was stopped; `nbdist.Session(..., replace=False)` keeps it\n"
        )
        assert not any(map(alive, before)) and all(map(alive, empty.value(PIDS.format("session"))))


def test_two_sessions_side_by_side_are_there_for_who_asks_for_them(empty: Kernel) -> None:
    empty.ok("first = nbdist.Session(1)", HANG)
    assert empty.ok("second = nbdist.Session(2, replace=False)", HANG).stderr == ""
    assert empty.value("(len(first.run('1')), len(second.run('1')))") == (1, 2)
    assert empty.value("nbdist.get_session() is second")
    empty.ok("second.close()")
    assert empty.value("nbdist.get_session() is first")
    empty.ok("third, fourth = nbdist.Session(1), nbdist.Session(1, replace=False)", HANG)
    empty.ok("fifth = nbdist.Session(1)", HANG)
    assert empty.value("[each.closed for each in (first, third, fourth, fifth)]") == [True, True, True, False]


def test_a_session_takes_the_place_of_one_that_a_magic_has_started_but_not_the_other_way_round(empty: Kernel) -> None:
    empty.ok("%load_ext nbdist")
    empty.ok("%distributed start -n 1", HANG)
    started = empty.rank_pids()
    assert "the previous session (1 rank) was stopped" in empty.ok("session = nbdist.Session(1)", HANG).stderr
    assert not any(map(alive, started))
    refused = empty.fails("%distributed start -n 2", "UsageError")
    assert "a session with 1 rank is already running" in refused.evalue
    empty.ok("%distributed start -n 1 --replace", HANG)
    assert empty.value("session.closed")


LEFT = """
def pids_of(session): return [info.pid for info in session.ranks]
def leave():
    session = nbdist.Session(1)
    return pids_of(session)
"""


def test_a_session_that_nothing_refers_to_ends(empty: Kernel) -> None:
    empty.ok(LEFT)
    empty.ok("in_a_function = leave()", HANG)
    empty.ok("x = nbdist.Session(1); deleted = pids_of(x); del x", HANG)
    await_end(empty.value("in_a_function + deleted"))


def test_a_cell_in_the_background_keeps_its_session(empty: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.005)\n7"
    empty.ok(f"handle = nbdist.Session(1).run_in_background({code!r})", HANG)
    empty.ok("gc.collect()")
    go.touch()
    assert empty.value("handle.wait(20)[0].result") == "7"


FAILING_OBSERVER = """
import threading
from nbdist.client.ranks import observers
from nbdist.wire.questions.questions import WatchNodes
from tests.support.inside import traffic_of
session, called = nbdist.Session(1), threading.Event()
traffic = traffic_of(session)
class Failing(observers.Observer):
    def node_looked_at(self, traffic, look):
        called.set()
        raise LookupError("in the listening thread")
stop = observers.subscribe(Failing())
traffic.send(WatchNodes(0.25))
assert called.wait(20)
traffic.send(WatchNodes(0.0))
stop()
"""


def test_an_error_in_the_listening_thread_is_shown_and_the_session_goes_on(empty: Kernel) -> None:
    cell = empty.start(FAILING_OBSERVER)
    cell.wait_late("LookupError: in the listening thread")
    assert cell.finish().status == "ok"
    assert empty.value("session.run('1')[0].result") == "1"
