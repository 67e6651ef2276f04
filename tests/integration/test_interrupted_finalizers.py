"""What an interrupted cell has left may not be able to end: the next cell begins all the same."""

from __future__ import annotations

from testbed.kernel import Kernel, both

# As a DataLoader's iterator whose queue was interrupted between the acquiring of its lock and the `with` block.
HELD = """%%distributed
import threading, time

class WaitsForALock:
    def __init__(self):
        self.lock = threading.Lock()
        self.lock.acquire()

    def __del__(self):
        self.lock.acquire()

def work():
    held = WaitsForALock()
    print("go")
    time.sleep(60)

work()"""


def test_the_next_cell_begins_although_a_finalizer_waits_forever(own_ranks: Kernel) -> None:
    cell = own_ranks.start(HELD)
    cell.wait_for("go")
    own_ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    assert own_ranks.ok("%%distributed\nprint('next')").lines == both("next")
