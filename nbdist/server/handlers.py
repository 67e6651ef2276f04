"""What pages ask a Jupyter server of its machine. Whoever may do so with kernels may do it with sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

from nbdist import visits
from nbdist.errors import UsageError
from nbdist.server import machine
from nbdist.wire.pages.machine_messages import NamedSession


class _MachineHandler(APIHandler):
    auth_resource = "kernels"

    @web.authenticated
    @authorized
    async def get(self) -> None:
        found = await asyncio.to_thread(machine.look)
        self.finish(msgspec.json.encode(found))


class _SessionHandler(APIHandler):
    """Does something to one session."""

    auth_resource = "kernels"

    def initialize(self, act: Callable[[str], object]) -> None:
        self._act = act

    @web.authenticated
    @authorized
    async def post(self) -> None:
        try:
            name = msgspec.json.decode(self.request.body, type=NamedSession).name
            await asyncio.to_thread(self._act, name)
        except msgspec.DecodeError as error:
            raise web.HTTPError(400, str(error)) from None
        except UsageError as error:
            raise web.HTTPError(409, reason=str(error)) from None
        self.set_status(204)
        self.finish()


def _stop(name: str) -> None:
    visits.stop([name])


def handlers(base_url: str) -> list[tuple[Any, ...]]:
    """Return the server's routes.

    Args:
        base_url: Of the server.
    """
    return [
        (url_path_join(base_url, "nbdist", "machine"), _MachineHandler),
        (url_path_join(base_url, "nbdist", "stop"), _SessionHandler, {"act": _stop}),
        (url_path_join(base_url, "nbdist", "interrupt"), _SessionHandler, {"act": visits.interrupt}),
    ]
