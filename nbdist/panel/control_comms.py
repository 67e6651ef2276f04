"""Comms that a page opens over the kernel's control channel, which the kernel hears at once, whatever it runs.

The channel for comms waits for the cell that runs, or needs a front end and a kernel that both know subshells. And each
message there fires the events "pre_execute" and "post_execute", upon which matplotlib shows the figures of a cell that
is still drawing them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdist import shells

Hearer = Callable[[Any], None]  # takes what a page sends; None: the page has closed its line


class ControlLine:
    """The kernel's end of such a comm. What is sent is the answer to no message, whichever thread sends it.

    Args:
        kernel: The kernel.
        name: The comm's id.
    """

    def __init__(self, kernel: Any, name: str) -> None:
        self._kernel = kernel
        self._name = name

    def send(self, data: dict[str, Any]) -> None:
        """Send something that JSON can hold."""
        content = {"comm_id": self._name, "data": data}
        topic = f"comm-{self._name}".encode()
        self._kernel.session.send(self._kernel.iopub_socket, "comm_msg", content, ident=topic)

    def forget(self) -> None:
        """Hear the page no more: it is gone, and could not close its line."""
        _open.pop(self._name, None)


# Takes a new line, and what it was opened with, and greets the page at once: it takes a kernel that has handled the
# opening and sent nothing for one that has nobody to hear it. None: so it is.
Opened = Callable[[ControlLine, Any], Hearer | None]

_targets: dict[str, Opened] = {}
_open: dict[str, Hearer] = {}  # by the comms' ids


def offer(target: str, opened: Opened) -> None:
    """Let pages open lines to this target. They are heard in the thread of the control channel, which must not wait."""
    _targets[target] = opened
    kernel = shells.current().kernel if shells.in_kernel() else None
    handlers = getattr(kernel, "control_handlers", None)  # only ipykernel has them
    if handlers is None or "comm_open" in handlers:
        return

    def on_open(_: object, __: object, message: dict[str, Any]) -> None:
        content = message["content"]
        opened = _targets.get(content.get("target_name"))
        line = ControlLine(kernel, content["comm_id"])
        hearer = None if opened is None else opened(line, content.get("data"))
        if hearer is not None:
            _open[content["comm_id"]] = hearer

    def on_message(_: object, __: object, message: dict[str, Any]) -> None:
        if (hearer := _open.get(message["content"]["comm_id"])) is not None:
            hearer(message["content"].get("data"))

    def on_close(_: object, __: object, message: dict[str, Any]) -> None:
        if (hearer := _open.pop(message["content"]["comm_id"], None)) is not None:
            hearer(None)

    handlers.update(comm_open=on_open, comm_msg=on_message, comm_close=on_close)
