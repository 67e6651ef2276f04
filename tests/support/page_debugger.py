"""What JupyterLab's debugger does with a kernel: it asks by the control channel, and is told of stops by events."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Iterator
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

from testbed.kernel import LIMIT, Kernel
from tests.support.leftovers import processes_of_this_run


class PageDebugger:
    """The debugger of a page, switched on. `client`: who it says it is."""

    def __init__(self, kernel: Kernel, client: str = "jupyterlab") -> None:
        self._client = BlockingKernelClient()  # not the manager's, whose cells it would take the answers of
        self._client.load_connection_info(kernel.manager.get_connection_info())
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT)
        self._numbers = itertools.count(1)
        self.paths: dict[str, str] = {}
        self._name = client
        self.switch_on()

    def switch_on(self) -> None:
        self.ask("initialize", clientID=self._name, adapterID="python3", pathFormat="path", linesStartAt1=True)
        self.ask("attach")

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, and return the answer."""
        content = {"type": "request", "seq": next(self._numbers), "command": command, "arguments": arguments}
        message = self._client.session.msg("debug_request", content)
        self._client.control_channel.send(message)
        while True:
            reply = self._client.get_control_msg(timeout=LIMIT)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request that must succeed, and return what the answer brings."""
        answer = self.request(command, **arguments)
        assert answer.get("success", True), answer
        return dict(answer.get("body") or {})

    def break_at(self, cell: str, *lines: int) -> None:
        """Set the breakpoints of a cell, as the gutter does."""
        path = self.paths[cell] = self.ask("dumpCell", code=cell)["sourcePath"]
        asked = [{"line": line} for line in lines]
        found = self.ask("setBreakpoints", source={"path": path}, breakpoints=asked, sourceModified=False)
        assert [each["line"] for each in found["breakpoints"]] == list(lines)

    def event(self, kind: str) -> dict[str, Any]:
        """Wait for the next event of a kind, and return its body."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                message = self._client.get_iopub_msg(timeout=1)
                if message["msg_type"] == "debug_event" and message["content"]["event"] == kind:
                    return dict(message["content"].get("body") or {})
        raise AssertionError(f"no event {kind!r}")

    def stops(self, count: int) -> dict[str, int]:
        """Wait until so many ranks are stopped, and return their threads by name."""
        threads: set[int] = set()
        while len(threads) < count:
            threads.add(self.event("stopped")["threadId"])
        names = {each["id"]: each["name"] for each in self.ask("threads")["threads"]}
        return {names[thread]: thread for thread in threads}

    def stack(self, thread: int) -> list[dict[str, Any]]:
        return list(self.ask("stackTrace", threadId=thread)["stackFrames"])

    def variables(self, frame: dict[str, Any]) -> dict[str, str]:
        """The variables of a frame and their values."""
        scopes = self.ask("scopes", frameId=frame["id"])["scopes"]
        found = [self.ask("variables", variablesReference=scope["variablesReference"]) for scope in scopes]
        return {each["name"]: each["value"] for body in found for each in body["variables"]}

    def close(self) -> None:
        self.request("disconnect", restart=False, terminateDebuggee=False)
        self.leave()

    def leave(self) -> None:
        """Ask nothing any more; a debugger that is on stays so."""
        self._client.stop_channels()


def adapters() -> set[int]:
    """The processes that speak for kernels and ranks with a debugger."""
    return {pid for pid, command in processes_of_this_run().items() if "debugpy/adapter" in command}


@contextlib.contextmanager
def page_debugger(kernel: Kernel, client: str = "jupyterlab") -> Iterator[PageDebugger]:
    debugger = PageDebugger(kernel, client)
    try:
        yield debugger
    finally:
        debugger.close()
