"""A network between two programs that is slow, silent or cut, in user space: a TCP relay on loopback.

A kernel can do that to packets (`tc netem`), where it has that and one is root. This does it to what TCP carries: bytes
are late, slow, held back or lost together with their connection, and never out of order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_PIECE = 1 << 16  # bytes


@dataclass
class SlowNetwork:
    """A way to a port, through which a test sends what it wants to disturb.

    Attributes:
        address: Where to connect instead.
        delay: Seconds that each byte takes, in each direction.
        rate: Bytes per second, in each direction of each connection; None: as many as come.
        passed: How many bytes have come so far, of all connections.
    """

    target: str
    delay: float = 0.0
    rate: float | None = None
    address: str = ""
    passed: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Nothing passes meanwhile; it does afterwards. As of a cable that is out for a while."""
        self._loop.call_soon_threadsafe(self._open.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Reset all connections, as a firewall does that has forgotten them; new ones are let through."""
        self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self) -> asyncio.Server:
        """Listen."""
        self._open.set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            await self._open.wait()
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        except (OSError, asyncio.CancelledError):  # asyncio would report one that is cancelled in the end
            pass
        finally:
            self._writers -= {writer, back}
            writer.transport.abort()
            back.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._send(under_way, writer))
        try:
            while data := await reader.read(_PIECE):
                self.passed += len(data)
                under_way.put_nowait((self._loop.time() + self.delay, data))
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
            under_way.put_nowait((self._loop.time() + self.delay, b""))
            await sender
        finally:
            sender.cancel()

    async def _send(self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._open.wait()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


@contextlib.contextmanager
def slow_network(target: str, *, delay: float = 0.0, rate: float | None = None) -> Iterator[SlowNetwork]:
    """Run a slow way to `host:port`, in a thread."""
    network = SlowNetwork(target, delay, rate)
    loop = network._loop
    thread = threading.Thread(target=loop.run_forever, name="slow-network")
    thread.start()
    server = asyncio.run_coroutine_threadsafe(network.serve(), loop).result(10)
    try:
        yield network
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
