"""Sessions of one process: what ends them, what survives in them, and how many there are."""

from __future__ import annotations

from tests.harness import Kernel

FAILING_HANDLER = """
import nbdist, threading
from nbdist.protocol import Watch
session, called = nbdist.get_session(), threading.Event()
def fail(look):
    called.set()
    raise LookupError("in the listening thread")
session.traffic.on_look = fail
session.traffic.send(Watch(0.25))
assert called.wait(20)
session.traffic.send(Watch(0.0))
"""


def test_an_error_in_the_listening_thread_is_shown_and_the_session_goes_on(ranks: Kernel) -> None:
    cell = ranks.start(FAILING_HANDLER)
    cell.wait_late("LookupError: in the listening thread")
    assert cell.finish().status == "ok"
    assert ranks.ok("session.run('1')[1].result").plain == ["'1'"]
