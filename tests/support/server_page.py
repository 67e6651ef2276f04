"""A notebook's page on a real Jupyter server, by its websocket, and what the server says of the kernel."""

from __future__ import annotations

import json
import secrets

import websocket

from testbed.jupyter import Server
from testbed.kernel import LIMIT

EXCEEDED = "rate exceeded"


class Page:
    """A notebook's page: its kernel, and all that reaches it over the websocket."""

    def __init__(self, server: Server) -> None:
        notebook = {"path": "x.ipynb", "type": "notebook", "name": "x", "kernel": {"name": "python3"}}
        self._server = server
        self._kernel = server.call("/api/sessions", notebook)["kernel"]["id"]
        url = f"{server.url.replace('http', 'ws')}/api/kernels/{self._kernel}/channels?token={server.token}"
        self._socket = websocket.create_connection(url, timeout=LIMIT)
        self.texts: dict[str, str] = {}  # by cell: stdout, and stderr, where the server complains
        self.errors: dict[str, str] = {}
        self.displays: dict[str, int] = {}
        self._idle: set[str] = set()

    def start(self, code: str) -> str:
        cell = secrets.token_hex(8)
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        header = {"msg_id": cell, "msg_type": "execute_request", "username": "", "session": "page", "version": "5.3"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self.texts[cell] = self.errors[cell] = ""
        self.displays[cell] = 0
        self._socket.send(json.dumps(message))
        return cell

    def finish(self, cell: str) -> str:
        """Until a cell has ended; what it has shown."""
        while cell not in self._idle:
            self.receive()
        return self.texts[cell]

    def run(self, code: str) -> str:
        return self.finish(self.start(code))

    def wait_for(self, cell: str, text: str) -> None:
        while text not in self.texts[cell]:
            self.receive()

    def interrupt(self) -> None:
        self._server.call(f"/api/kernels/{self._kernel}/interrupt", {})

    def receive(self) -> None:
        message = json.loads(self._socket.recv())
        cell, content = message["parent_header"].get("msg_id"), message["content"]
        if message["channel"] != "iopub" or cell not in self.texts:
            return
        if message["msg_type"] == "stream":
            assert EXCEEDED not in content["text"], content["text"]
            self.texts[cell] += content["text"]
        elif message["msg_type"] == "error":
            self.errors[cell] = content["ename"]
        elif message["msg_type"] == "display_data":
            self.displays[cell] += 1
        elif content.get("execution_state") == "idle":
            self._idle.add(cell)

    @property
    def last_activity(self) -> str:
        """When the kernel was active last, as the server says it, and what ends idle kernels goes by."""
        return str(self._server.call(f"/api/kernels/{self._kernel}")["last_activity"])

    def hears(self, seconds: float) -> bool:
        """Whether anything reaches the page within some seconds."""
        self._socket.settimeout(seconds)
        try:
            self._socket.recv()
        except websocket.WebSocketTimeoutException:
            return False
        finally:
            self._socket.settimeout(LIMIT)
        return True

    def close(self) -> None:
        self._socket.close()
