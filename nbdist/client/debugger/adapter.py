"""A connection to debugpy on a rank, which speaks the Debug Adapter Protocol.

Lives in the loop of the kernel's control thread. Knows the protocol's envelope; independent of ranks or the notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from nbdist.client.debugger.debug_lines import Writer

DapMessage: TypeAlias = dict[str, Any]  # a request, response or event, as the protocol's specification has it

_LENGTH = re.compile(rb"Content-Length: *(\d+)", re.IGNORECASE)
_ANSWER = 30.0  # seconds for debugpy to answer, on a machine that is busy with ranks


class Adapter:
    """A connection, once it is open.

    Args:
        reader: Its two ends.
        writer: See above.
        on_event: Called with each event.
        on_end: Called when the connection has ended, whoever ended it.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: Writer,
        on_event: Callable[[DapMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._on_event, self._on_end = on_event, on_end
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[DapMessage]] = {}
        self._task = asyncio.ensure_future(self._read())

    def send(self, command: str, arguments: DapMessage) -> asyncio.Future[DapMessage]:
        """Send a request, and return its answer to come: it fails with ConnectionError if the connection ends."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        request = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        content = json.dumps(request).encode()
        self._writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        return answer

    async def ask(self, command: str, arguments: DapMessage) -> DapMessage:
        """Send a request and wait for its answer.

        Raises:
            ConnectionError: The connection has ended.
            TimeoutError: There is no answer.
        """
        return await asyncio.wait_for(self.send(command, arguments), _ANSWER)

    def close(self) -> None:
        """End the connection."""
        self._writer.close()

    async def _read(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while True:
                header = await self._reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(header)
                if length is None:
                    break
                self._handle(json.loads(await self._reader.readexactly(int(length[1]))))
        self._writer.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the debugger's connection to this rank has ended"))
        self._answers.clear()
        self._on_end()

    def _handle(self, message: DapMessage) -> None:
        if message["type"] == "event":
            self._on_event(message)
        elif message["type"] == "response":
            answer = self._answers.pop(message["request_seq"], None)
            if answer is not None and not answer.done():
                answer.set_result(message)
