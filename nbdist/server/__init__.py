"""nbdist in a Jupyter server: the sessions and GPUs of its machine, for pages whose kernel has no ranks, too.

machine.py   what there is to see
handlers.py  the requests, with the server's own authorization

The server loads it from `etc/jupyter/jupyter_server_config.d/nbdist.json`; without it everything else works.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "nbdist.server"}]


def _load_jupyter_server_extension(app: Any) -> None:
    from nbdist.server.handlers import handlers

    app.web_app.add_handlers(".*$", handlers(app.web_app.settings["base_url"]))
