"""A rank's stdout and stderr, as C code and threads use them."""

from __future__ import annotations

import subprocess
import sys

FLUSHES = """
import threading
from nbdist.worker.lanes import streams
done = False
def raise_on():
    while not done:
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
for _ in range(4):
    threading.Thread(target=raise_on).start()
for _ in range(20_000):
    streams.flush_c()
done = True
"""
BUFFERED = """
import ctypes
from nbdist.worker.lanes import streams
ctypes.CDLL(None).printf(b"from C")
streams.flush_c()
import os
os._exit(0)
"""


def test_flushing_does_not_wait_for_a_thread_whose_exception_is_printed() -> None:
    """Python prints it with its own lock held, and flushes C's stderr then."""
    subprocess.run([sys.executable, "-c", FLUSHES], stderr=subprocess.DEVNULL, check=True, timeout=60)


def test_what_c_code_has_buffered_is_written() -> None:
    done = subprocess.run([sys.executable, "-c", BUFFERED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "from C"
