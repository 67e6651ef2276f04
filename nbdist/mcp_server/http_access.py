"""The server over HTTP: on this machine's loopback only, and for those who know the token."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from mcp.server import MCPServer
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl

from nbdist.errors import UsageError

TOKEN_VARIABLE = "NBDIST_MCP_TOKEN"
HOST = "127.0.0.1"
PATH = "/mcp"
_LEAST = 20  # characters of a token
_GRACE = 2  # seconds for open answers at the end


@dataclass(frozen=True)
class HttpToken:
    """The token. source: where the user has put it; "": it was made for this server."""

    text: str
    source: str = ""


def find_token(file: str | None) -> HttpToken:
    """Return the token in a file, else that in NBDIST_MCP_TOKEN, else a new one.

    Raises:
        UsageError: The file can't be read, or by others too, or the token is short.
    """
    if file is not None:
        return _checked(HttpToken(_read(Path(file).expanduser()), f"in {file}"))
    if text := os.environ.pop(TOKEN_VARIABLE, "").strip():  # ranks need not know it
        return _checked(HttpToken(text, f"in {TOKEN_VARIABLE}"))
    return HttpToken(secrets.token_urlsafe(32))


def _read(file: Path) -> str:
    try:
        if file.stat().st_mode & 0o077:
            raise UsageError(f"others can read or change the token in {file}: type `chmod 600 {file}`")
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token can't be read from {file}: {error}") from None


def _checked(token: HttpToken) -> HttpToken:
    if len(token.text) < _LEAST or not token.text.isascii() or any(map(str.isspace, token.text)):
        raise UsageError(
            f"the token {token.source} is too short or has spaces: use at least {_LEAST} characters, as from "
            '`python -c "import secrets; print(secrets.token_urlsafe(32))"`'
        )
    return token


class KnownToken:
    """Lets in who has the token.

    Args:
        token: The token.
    """

    def __init__(self, token: HttpToken) -> None:
        self._token = token.text.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return who it is; None: nobody who may. Takes as long for every token of a length."""
        if not hmac.compare_digest(token.encode(), self._token):
            return None
        return AccessToken(token=token, client_id="agent", scopes=[])


def listen(port: int) -> socket.socket:
    """Return a socket on loopback. `port`: 0 for any.

    Raises:
        UsageError: The port is taken, or not allowed.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen()  # before anybody is told the address
    except (OSError, OverflowError) as error:
        found.close()
        why = getattr(error, "strerror", None) or "ports are from 0 to 65535"
        raise UsageError(f"can't listen on port {port}: {why}. `--http` without a number takes any free one") from None
    return found


def auth_settings(port: int) -> AuthSettings:
    """Return the settings with which a server asks for the token."""
    return AuthSettings(issuer_url=AnyHttpUrl(f"http://{HOST}:{port}"), resource_server_url=None)


async def serve(server: MCPServer, found: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    app = server.streamable_http_app(streamable_http_path=PATH, host=HOST)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE)
    await uvicorn.Server(config).serve(sockets=[found])
