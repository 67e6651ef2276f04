"""`nbdist mcp` from the command to the end of the process: what it has started ends with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from nbdist.errors import PackageError

if TYPE_CHECKING:
    from nbdist.mcp_server.session_links import SessionLinks


def serve(*, read_only: bool, port: int | None, token_file: str | None, keep: bool) -> int:
    """Serve agents until the client leaves, or a signal comes.

    Args:
        read_only: Whether only tools are offered that change nothing.
        port: Where to listen for HTTP, 0 for any; None: on stdio.
        token_file: A file with the token for HTTP; None: NBDIST_MCP_TOKEN, else a new one.
        keep: Whether sessions that were started here outlive this process.

    Returns:
        The exit code.

    Raises:
        PackageError: mcp is missing or too old.
        UsageError: The port is taken, or the token is none.
    """
    _check_packages()
    import anyio

    from nbdist.mcp_server import http_access
    from nbdist.mcp_server.agent_tools import make_server
    from nbdist.mcp_server.session_links import SessionLinks

    if port is None:
        if sys.stdin.isatty():
            print("nbdist mcp waits for an agent on standard input; an agent's program starts it", file=sys.stderr)
        links = SessionLinks(keep=keep, read_only=read_only)
        with _Ending(links):
            anyio.run(make_server(links, read_only=read_only).run_stdio_async)
        return 0
    token, found = http_access.find_token(token_file), http_access.listen(port)
    port = found.getsockname()[1]
    links = SessionLinks(keep=keep, read_only=read_only)
    settings, verifier = http_access.auth_settings(port), http_access.KnownToken(token)
    server = make_server(links, read_only=read_only, auth=settings, token_verifier=verifier)
    where = f"the token {token.source}" if token.source else token.text
    print(f"http://{http_access.HOST}:{port}{http_access.PATH}\nAuthorization: Bearer {where}", flush=True)
    with _Ending(links):
        anyio.run(http_access.serve, server, found)
    return 0


def _check_packages() -> None:
    try:
        import uvicorn  # noqa: F401
        from mcp.server import MCPServer  # noqa: F401
    except ImportError:
        raise PackageError("`nbdist mcp` needs the package mcp, 2.3 or newer: `pip install 'nbdist[mcp]'`") from None


class _Ending:
    """Ends what the server has started, when its body ends or SIGTERM comes.

    A thread that reads standard input can't be stopped, so that at a signal the process ends without waiting for it.

    Args:
        links: The sessions.
    """

    def __init__(self, links: SessionLinks) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._heed)

    def __exit__(self, *_: object) -> None:
        self._end()

    def _heed(self, *_: object) -> None:
        threading.Thread(target=self._end_process).start()  # the main thread may hold what this waits for

    def _end_process(self) -> None:
        self._end()
        os._exit(0)

    def _end(self) -> None:
        from nbdist.client.start.connection import close_idle

        with self._lock:
            if not self._over:
                self._over = True
                self._links.close()
                close_idle()
