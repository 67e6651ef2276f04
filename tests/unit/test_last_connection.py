"""When the debugger's adapter is done with a connection: a process with the same arguments and threads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nbdist.client.debugger.last_connection import LastConnection

PORT = str(10_000_000 + os.getpid())  # of no other adapter on this machine: only its arguments are read
ADAPTER = """\
import sys, threading
threads = {}
def serve(end): end.wait()
for line in sys.stdin:
    do, name = line.split()
    if do == "begin":
        end = threading.Event()
        threads[name] = end, threading.Thread(target=serve, args=[end])
        threads[name][1].start()
    else:
        end, thread = threads.pop(name)
        end.set()
        thread.join()
    print(flush=True)
for end, thread in threads.values(): end.set()
"""


class Adapter:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, *threads: str) -> None:
        self._say("begin", *threads)

    def end(self, *threads: str) -> None:
        self._say("end", *threads)

    def _say(self, do: str, *threads: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        for thread in threads:
            print(do, thread, file=self._process.stdin, flush=True)
            self._process.stdout.readline()


@contextmanager
def adapter() -> Iterator[Adapter]:
    command = [sys.executable, "-c", ADAPTER, "--for-server", "1", "--port", PORT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Adapter(process)


def test_a_thread_of_an_earlier_connection_is_not_one_that_serves_the_last() -> None:
    async def look() -> None:
        last = LastConnection()
        process.begin("reader", "handler", "sleeper")
        last.ends(PORT)
        process.end("reader", "handler")
        await last.wait_for_end()
        process.begin("next-reader", "next-handler")
        last.ends(PORT)
        process.end("next-reader", "sleeper")
        waiting = asyncio.create_task(last.wait_for_end())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        process.end("next-handler")
        await waiting

    with adapter() as process:
        asyncio.run(look())
