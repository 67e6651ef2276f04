"""An agent's side of `nbdist mcp`, by the protocol's own client, in calls that block."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

import httpx2
from anyio.from_thread import start_blocking_portal
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, Implementation, TextContent, Tool

LIMIT = 60.0


class AgentClient:
    """A connection to a server, which it has started, or which listens somewhere.

    Args:
        arguments: Of `nbdist mcp`.
        url: Of a server that listens; "": none, it starts one.
        token: For that server.
        name: The agent's program.
        protocol: "legacy": the handshake of older clients.
        session: Which session it means; None: the only one.
        environment: Variables of the server besides this process's.

    Attributes:
        session: As given.
    """

    def __init__(
        self,
        *arguments: str,
        url: str = "",
        token: str = "",
        name: str = "tester",
        protocol: str = "auto",
        session: str | None = None,
        **environment: str,
    ) -> None:
        self.session = session
        self._stack = contextlib.ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        command = ["-m", "nbdist", "mcp", *arguments]
        server: Any = StdioServerParameters(command=sys.executable, args=command, env={**os.environ, **environment})
        if url:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            http = httpx2.AsyncClient(headers=headers)
            self._stack.enter_context(self._portal.wrap_async_context_manager(http))
            server = streamable_http_client(url, http_client=http)
        client = Client(server, client_info=Implementation(name=name, version="1"), mode=protocol)
        try:
            self._client = self._stack.enter_context(self._portal.wrap_async_context_manager(client))
        except BaseException:
            self._stack.close()
            raise

    def tools(self) -> dict[str, Tool]:
        """What the server offers, by name."""
        return {tool.name: tool for tool in self._portal.call(self._client.list_tools).tools}

    def result(self, tool: str, **arguments: Any) -> CallToolResult:
        """What the server answers."""
        if self.session is not None and tool not in ("sessions", "start", "detach"):
            arguments = {"session": self.session, **arguments}
        return self._portal.call(self._client.call_tool, tool, arguments)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool that must not fail."""
        found = self.result(tool, **arguments)
        assert not found.is_error, text_of(found)
        assert isinstance(found.structured_content, dict)
        return found.structured_content

    def fails(self, tool: str, **arguments: Any) -> str:
        """The error of a tool that must fail."""
        found = self.result(tool, **arguments)
        assert found.is_error, text_of(found)
        return text_of(found)

    def run(self, code: str, **arguments: Any) -> dict[str, Any]:
        """A cell that has ended."""
        return self.finish(self.call("run", code=code, **arguments)["cell"])

    def finish(self, cell: int, limit: float = LIMIT) -> dict[str, Any]:
        """A cell at its end."""
        return self.await_cell(cell, lambda news: news["state"] not in ("queued", "running"), limit)

    def await_cell(self, cell: int, reached: Any, limit: float = LIMIT, **arguments: Any) -> dict[str, Any]:
        """A cell as soon as something is true of it."""
        deadline = time.monotonic() + limit
        while not reached(news := self.call("cell", cell=cell, wait=0.2, **arguments)):
            assert time.monotonic() < deadline, news
        return news

    def close(self) -> None:
        """Leave; a server that was started here ends."""
        self._stack.close()

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def text_of(result: CallToolResult) -> str:
    """What a client reads that knows only text."""
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))
